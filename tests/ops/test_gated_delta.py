"""gated_delta: a recurrence whose uncertain positions leave no trace."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import emulated
from cases import DTYPES, TOLERANCES
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare, looser
from random_pages import starts

TILE = 32
NUM_KEPT = 24
CUTS = ([40], [1] * 40, [7, 1, 9, 23], [2, 38])


class Sizes(NamedTuple):
    """The sizes of one layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    tiled: bool = False

    @property
    def conv_size(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim


SIZES = (
    Sizes(2, 2, 16, 16),
    Sizes(2, 6, 10, 33, 3),
    Sizes(1, 2, 70, 5, 1),
    Sizes(3, 6, 12, 20, tiled=True),
)
WIDE = (Sizes(1, 1, 128, 128), Sizes(1, 2, 256, 100), Sizes(1, 1, 90, 256), Sizes(2, 2, 150, 200))


class Layer(NamedTuple):
    """A layer's weights, its caches for some texts, and the rows of one text."""

    sizes: Sizes
    kept: ops.DeltaState
    weights: ops.DeltaWeights
    qkvz: Tensor
    ba: Tensor

    def __call__(
        self,
        first: int,
        end: int,
        *,
        certain: int | None = None,
        number: int = 2,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Positions ``first..end-1``."""
        return ops.gated_delta(
            self.qkvz[first:end],
            self.ba[first:end],
            self.kept,
            self.numbers([[number, end if certain is None else certain]]),
            self.weights,
            self.numbers([end]),
            self.numbers([0, end - first]),
            slot_mapping=slots,
            tiled_heads=self.sizes.tiled,
        )

    def fill(self, first: int, end: int, *, exit_layer: int = 3, layer: int = 4) -> None:
        ops.gated_delta_fill(
            self.qkvz[first:end],
            self.ba[first:end],
            self.kept,
            self.numbers([[2, end]]),
            self.weights,
            self.numbers([end]),
            self.numbers([0, end - first]),
            self.numbers([exit_layer] * (end - first)),
            layer,
            tiled_heads=self.sizes.tiled,
        )

    def numbers(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.ba.device)

    def run(self, cut: list[int], **options: Any) -> Tensor:
        """The text in parts."""
        ends = list(itertools.accumulate(cut))
        return torch.cat([self(end - n, end, **options) for n, end in zip(cut, ends, strict=True)])


def new_kept(sizes: Sizes, num_states: int, num_kept: int, dtype: torch.dtype) -> ops.DeltaState:
    """Caches that hold nothing of use."""
    tiles, row = -(-sizes.value_dim // TILE), sizes.conv_size + 2 * sizes.value_heads
    return ops.DeltaState(
        torch.full((num_states, sizes.value_heads, tiles, sizes.key_dim, TILE), torch.nan),
        torch.full((num_states, num_kept, row), torch.nan).to(dtype),
        torch.full((num_states, sizes.key_heads), 77, dtype=torch.int32),
    )


def layer_of(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, *, count: int = 40, seed: int = 0
) -> Layer:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(device)

    kept = new_kept(sizes, 3, NUM_KEPT, dtype)
    return Layer(
        sizes,
        ops.DeltaState(*(each.to(device) for each in kept)),
        ops.DeltaWeights(
            normal(sizes.taps, sizes.conv_size, scale=0.5).to(dtype),
            normal(sizes.value_heads),
            normal(sizes.value_heads),
            (1 + normal(sizes.value_dim, scale=0.1)).to(dtype),
        ),
        normal(count, sizes.conv_size + sizes.value_size).to(dtype),
        normal(count, 2 * sizes.value_heads).to(dtype),
    )


def gated_delta(
    sizes: Sizes, weights: ops.DeltaWeights, qkvz: Tensor, ba: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """All positions of a text in float64: the outputs, and S after each position, [count,
    value_heads, key_dim, value_dim]."""
    qkvz, ba = qkvz.double(), ba.double()
    taps, log_rate, dt_bias, norm = (each.double() for each in weights)
    heads, group = sizes.value_heads, sizes.value_heads // sizes.key_heads
    x, z = qkvz.split([sizes.conv_size, sizes.value_size], 1)
    padded = torch.cat((x.new_zeros(sizes.taps - 1, sizes.conv_size), x))
    mixed = functional.silu(sum(tap * padded[i : i + len(x)] for i, tap in enumerate(taps)))
    key_size = sizes.key_heads * sizes.key_dim
    of_value = torch.arange(heads)
    key_heads = of_value % sizes.key_heads if sizes.tiled else of_value // group
    q, k, v = mixed.split([key_size, key_size, sizes.value_size], 1)
    q, k = (each.view(len(x), sizes.key_heads, sizes.key_dim)[:, key_heads] for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q = q / sizes.key_dim**0.5
    v, z = (each.view(len(x), heads, sizes.value_dim) for each in (v, z))
    beta = ba[:, :heads].sigmoid()
    decay = (-log_rate.exp() * functional.softplus(ba[:, heads:] + dt_bias)).exp()
    state = x.new_zeros(heads, sizes.key_dim, sizes.value_dim)
    outs, states = [x.new_zeros(0, heads, sizes.value_dim)], []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state
        known = (state * k[t, :, :, None]).sum(1)
        state = state + k[t, :, :, None] * (beta[t, :, None] * (v[t] - known))[:, None]
        read = (state * q[t, :, :, None]).sum(1)
        normed = read / (read.square().mean(-1, keepdim=True) + eps).sqrt()
        outs.append((normed * norm * functional.silu(z[t]))[None])
        states.append(state)
    return torch.cat(outs).flatten(1), torch.stack(states) if states else state[None][:0]


def in_tiles(state: Tensor) -> Tensor:
    """S as the op keeps it."""
    padded = functional.pad(state, (0, -state.shape[-1] % TILE))
    return padded.unflatten(-1, (-1, TILE)).transpose(-2, -3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_the_reference(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    layer = layer_of(sizes, dtype, device)
    got = layer.run([40])
    weights = ops.DeltaWeights(*(each.cpu() for each in layer.weights))
    expected, states = gated_delta(sizes, weights, layer.qkvz.cpu(), layer.ba.cpu())
    tolerance = asdict(TOLERANCES[dtype])
    torch.testing.assert_close(got.cpu(), expected.to(dtype), **tolerance)
    kept = layer.kept.state[1].cpu().double()
    torch.testing.assert_close(kept, in_tiles(states[-1]), rtol=1e-4, atol=1e-5)
    assert layer.kept.applied[1].tolist() == [40] * sizes.key_heads
    assert layer.kept.state[[0, 2]].isnan().all()
    assert layer.kept.rows[[0, 2]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_texts_cut_changes_no_bit(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    expected = layer_of(sizes, dtype, device)
    out = expected.run([40])
    for cut in CUTS[1:]:
        layer = layer_of(sizes, dtype, device)
        assert torch.equal(layer.run(cut), out)
        assert torch.equal(layer.kept.state[1], expected.kept.state[1])
    layer = layer_of(sizes, dtype, device)
    assert torch.equal(layer.run([40], number=0), out)
    assert layer.kept.state.isnan().all()


@pytest.mark.parametrize("sizes", WIDE, ids=str)
def test_heads_as_wide_as_they_may_be(sizes: Sizes, device: torch.device) -> None:
    """A kernel may have other code for them: the reference, and the same bits in parts."""
    layer = layer_of(sizes, torch.float32, device, count=11)
    out = layer.run([11])
    weights = ops.DeltaWeights(*(each.cpu() for each in layer.weights))
    expected, states = gated_delta(sizes, weights, layer.qkvz.cpu(), layer.ba.cpu())
    torch.testing.assert_close(out.cpu(), expected.float(), **asdict(TOLERANCES[torch.float32]))
    kept = layer.kept.state[1].cpu().double()
    torch.testing.assert_close(kept, in_tiles(states[-1]), rtol=1e-4, atol=1e-5)
    parts = layer_of(sizes, torch.float32, device, count=11)
    assert torch.equal(torch.cat((parts(0, 2), parts(2, 11, certain=9))), out)
    assert torch.equal(parts(9, 11), out[9:])
    assert torch.equal(parts.kept.state[1], layer.kept.state[1])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_uncertain_positions_leave_no_trace(sizes: Sizes, device: torch.device) -> None:
    expected = layer_of(sizes, torch.float32, device)
    out = expected.run([40])
    layer = layer_of(sizes, torch.float32, device)
    layer.run([9])
    good = layer.qkvz.clone(), layer.ba.clone()
    for end in (14, 12, 20):  # drafts that are all wrong, after other drafts
        layer.qkvz[9:] *= -2
        layer.ba[9:] += 1
        for step in range(9, end):
            layer(step, step + 1, certain=9)
        layer(9, end, certain=9)
    layer.qkvz.copy_(good[0])
    layer.ba.copy_(good[1])
    assert torch.equal(layer(9, 15, certain=10), out[9:15])
    assert layer.kept.applied[1, 0] == 10
    assert torch.equal(layer(13, 16, certain=14), out[13:16])  # two of five drafts were right
    assert torch.equal(layer(16, 40), out[16:])
    assert torch.equal(layer.kept.state[1], expected.kept.state[1])


@pytest.mark.parametrize("sizes", SIZES[1::2], ids=str)
def test_a_row_without_a_slot_leaves_the_state_alone(sizes: Sizes, device: torch.device) -> None:
    """A row that is masked in a graph says that it is the first of its text."""
    layer = layer_of(sizes, torch.float32, device)
    out = layer.run([40])
    layer.run([9])
    before = [each.nan_to_num() for each in layer.kept]
    slots = torch.tensor([-1], device=device)
    assert torch.equal(layer(0, 1, certain=9, slots=slots), out[:1])
    assert all(map(torch.equal, before, [each.nan_to_num() for each in layer.kept]))
    assert torch.equal(layer(9, 10, slots=slots + 6), out[9:10])


@pytest.mark.parametrize("sizes", SIZES[1::2], ids=str)
def test_a_fill_is_applied_later(sizes: Sizes, device: torch.device) -> None:
    expected = layer_of(sizes, torch.float32, device)
    out = expected.run([40])
    layer = layer_of(sizes, torch.float32, device)
    layer.fill(0, 5)
    assert layer.kept.applied[1].tolist() == [0] * sizes.key_heads
    layer.fill(5, 6)
    layer.fill(6, 7, exit_layer=5)  # left alone, and run by the layer itself
    assert torch.equal(layer(6, 8), out[6:8])
    for position in range(8, 30):
        layer.fill(position, position + 1)
        missing = position + 1 - int(layer.kept.applied[1, 0])
        assert missing <= NUM_KEPT // 4
    assert torch.equal(layer(30, 31), out[30:31])
    layer.fill(31, 39)  # more than may wait
    assert layer.kept.applied[1, 0] == 39
    assert torch.equal(layer(39, 40), out[39:])
    assert torch.equal(layer.kept.state[1], expected.kept.state[1])


def test_texts_do_not_touch_each_other(device: torch.device) -> None:
    """Several texts of one call, in any entries, beside rows without a state."""
    sizes, dtype = SIZES[1], torch.float32
    alone = [layer_of(sizes, dtype, device, seed=seed).run([40]) for seed in (0, 1, 2)]
    layers = [layer_of(sizes, dtype, device, seed=seed) for seed in (0, 1, 2)]
    first, weights = layers[0], layers[0].weights
    alone = [Layer(sizes, each.kept, weights, each.qkvz, each.ba).run([40]) for each in layers]
    kept = layer_of(sizes, dtype, device).kept
    ends = [0, 0, 0]
    for counts in ((3, 0, 8), (1, 5, 1), (1, 1, 1), (12, 2, 0)):
        spans = [range(end, end + n) for end, n in zip(ends, counts, strict=True)]
        ends = [end + n for end, n in zip(ends, counts, strict=True)]
        got = ops.gated_delta(
            torch.cat([e.qkvz[list(s)] for e, s in zip(layers, spans, strict=True)]),
            torch.cat([e.ba[list(s)] for e, s in zip(layers, spans, strict=True)]),
            kept,
            first.numbers([[3, ends[0]], [1, ends[1]], [2, ends[2]]]),
            weights,
            first.numbers(ends),
            starts(list(counts)).to(device),
        )
        wanted = [out[list(span)] for out, span in zip(alone, spans, strict=True)]
        assert torch.equal(got, torch.cat(wanted))


def fuzzed_call(m: Maker) -> Checked:
    dtype, group = m.dtype(), m.size(3, 1)
    key_heads = m.size(3, 1)
    sizes = Sizes(
        key_heads, key_heads * group, m.size(40, 1), m.size(70, 1), m.size(8, 1), m.chance()
    )
    num_states, num_kept, num_seqs = m.size(4, 1), 16 + m.size(20), m.size(4)
    weights = ops.DeltaWeights(
        m.placed((m.normal(sizes.taps, sizes.conv_size) * 0.5).to(dtype)),
        m.placed(m.normal(sizes.value_heads)),
        m.placed(m.normal(sizes.value_heads)),
        m.placed(m.normal(sizes.value_dim).to(dtype)),
    )
    kept = new_kept(sizes, num_states, num_kept, dtype)
    numbers = [int(each) + 1 for each in m.shuffled(num_states)[:num_seqs]]
    numbers += [0] * (num_seqs - len(numbers))
    texts, first_rows, lens, certain = [], [], [], []
    for number in numbers:
        before = m.size(num_kept - 8) if number else m.size(20)
        count, in_state = m.size(12), m.size(before)
        both = before + count
        text = [
            m.normal(both, n).to(dtype)
            for n in (sizes.conv_size + sizes.value_size, 2 * sizes.value_heads)
        ]
        texts.append(text)
        first_rows.append(before)
        lens.append(both)
        certain.append(m.random.randint(in_state, both))
        if number:
            _, states = gated_delta(sizes, weights, text[0][:in_state], text[1][:in_state])
            kept.state[number - 1] = 0.0 if not in_state else in_tiles(states[-1]).float()
            kept.applied[number - 1] = in_state
            row = torch.cat((text[0][:, : sizes.conv_size], text[1]), 1)
            for position in range(max(in_state - sizes.taps, 0), before):
                kept.rows[number - 1, position % num_kept] = row[position]
    counts = [after - before for before, after in zip(first_rows, lens, strict=True)]
    width = sizes.conv_size + sizes.value_size
    qkvz, ba = (
        torch.cat(
            [m.normal(0, n).to(dtype), *(t[i][b:] for t, b in zip(texts, first_rows, strict=True))]
        )
        for i, n in ((0, width), (1, 2 * sizes.value_heads))
    )
    tokens, eps = sum(counts), 1e-6
    fills, slots = m.chance(0.3), None
    owners = numbers  # of the states that the call uses
    if not fills and m.chance(0.5):
        owners = [0 if m.chance(0.3) else number for number in numbers]
        of_texts = torch.tensor([5 if owner else -1 for owner in owners], dtype=torch.int64)
        slots = m.placed(of_texts.repeat_interleave(torch.tensor(counts, dtype=torch.int64)))
    given: Arguments = {
        "qkvz": m.placed(qkvz, 1),
        "ba": m.placed(ba, 1),
        **{name: m.placed(each) for name, each in kept._asdict().items()},
        "states": m.placed(torch.tensor([numbers, certain]).t().reshape(-1, 2).int(), 1),
        **weights._asdict(),
        "seq_lens": m.placed(torch.tensor(lens, dtype=torch.int32)),
        "query_start_loc": m.placed(starts(counts)),
        "slot_mapping": slots,
        "exit_layer": m.placed(m.whole(6, tokens).int()) if fills else None,
        "layer": m.size(5),
        "has_tiled_heads": sizes.tiled,
        "eps": eps,
        "out": None if fills else m.states(tokens, sizes.value_size, dtype),
    }

    def expected(before: Arguments) -> dict[str, Tensor]:
        state, rows, applied = (before[name].clone() for name in kept._fields)
        out = None if fills else before["out"].double().clone()
        row = 0
        for i, (number, count) in enumerate(zip(owners, counts, strict=True)):
            first, rows_of = row, slice(row, row + count)
            row += count
            if not count or (fills and before["exit_layer"][first] > before["layer"]):
                continue
            begins = 0 if number else first_rows[i]
            outs, states = gated_delta(sizes, weights, *(each[begins:] for each in texts[i]))
            if out is not None:
                out[rows_of] = outs[first_rows[i] - begins :]
            if not number:
                continue
            entry, held = number - 1, int(before["applied"][number - 1, 0])
            if not first_rows[i]:
                held, state[entry] = 0, 0.0
            reached = max(certain[i], held)
            if fills and reached - held <= num_kept // 4:
                reached = held
            if reached > held:
                state[entry] = in_tiles(states[reached - 1]).float()
            applied[entry] = reached
            whole = torch.cat((texts[i][0][:, : sizes.conv_size], texts[i][1]), 1)
            for position in range(max(first_rows[i], lens[i] - num_kept), lens[i]):
                rows[entry, position % num_kept] = whole[position]
        found = {"state": state, "rows": rows, "applied": applied}
        return found if out is None else {**found, "out": out}

    return given, compare(expected, looser(dtype))
