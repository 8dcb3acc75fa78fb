"""Random calls of every op, with awkward sizes, strides and places in memory, and their oracles.

Arguments are those of the schemas. Tensors lie anywhere in memory of their own, which holds other
numbers around them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

import reference
from cases import TOLERANCES, Tolerance
from eecore import ops
from packed_blocks import SCALES, SMALL_FORMATS, block_sizes, packed_layers, random_blocks

Arguments = dict[str, Any]
EXACT = Tolerance(0.0, 0.0)
PACKED_LAYERS = tuple(
    f"{name}_table" for name in ("qkv", "o", "gate_up", "down", "cross_q", "cross_o")
)


@dataclass
class Call:
    """A call that has to succeed.

    Attributes:
        arguments: as the schema has them, in its order.
        check: holds the arguments behind the call to those before it.
    """

    op: str
    arguments: Arguments
    check: Callable[[Arguments, Arguments], None] = field(repr=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.arguments.items() if isinstance(t, Tensor)}

    def run(self) -> None:
        run(self.op, self.arguments)


def overload(op: str) -> Any:
    """``torch.ops.eecore.<op>``."""
    return getattr(torch.ops.eecore, op).default


def written(op: str) -> list[str]:
    """The arguments that an op writes."""
    arguments = overload(op)._schema.arguments
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def run(op: str, arguments: Arguments) -> None:
    overload(op)(**arguments)


def random_call(op: str, random: Random) -> Call:
    """A call of an op."""
    made = Maker(random)
    arguments, check = getattr(_Calls, op)(made)
    names = [argument.name for argument in overload(op)._schema.arguments]
    assert set(arguments) <= set(names), set(arguments) - set(names)
    return Call(op, {name: arguments[name] for name in names if name in arguments}, check)


def copied(arguments: Arguments) -> Arguments:
    """The same values in memory of their own."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def assert_close(got: Tensor, want: Tensor, tolerance: Tolerance, name: str) -> None:
    """Equal but for rounding; NaN and infinity at the same places."""
    torch.testing.assert_close(
        got.double() if got.is_floating_point() else got,
        want.double() if got.is_floating_point() else want.to(got.dtype),
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


class Maker:
    """Random values, all from one seed."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self._generator = torch.Generator().manual_seed(random.getrandbits(62))

    def chance(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def size(self, most: int = 20, least: int = 0) -> int:
        """Small ones, those around a power of two, and any."""
        around = 1 << self.random.randrange(max(most, 1).bit_length())
        chosen = self.one_of(least, least + 1, around - 1, around, around + 1, most)
        if self.chance():
            chosen = self.random.randint(least, most)
        return max(least, min(int(chosen), most))

    def dtype(self) -> torch.dtype:
        return torch.float32 if self.chance() else torch.bfloat16

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def whole(self, below: int, *shape: int) -> Tensor:
        return torch.randint(max(below, 1), shape, generator=self._generator)

    def flags(self, *shape: int, share: float = 0.5) -> Tensor:
        return self.placed(self.uniform(*shape) < share)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def maybe(self, make: Callable[[], Any]) -> Any:
        """It, or None."""
        return make() if self.chance() else None

    def placed(self, values: Tensor, contiguous_dims: int = 8) -> Tensor:
        """The values somewhere in other memory; all but the last dimensions may have gaps."""
        gaps = [0] * values.dim()
        for axis in range(1, values.dim() - contiguous_dims + 1):
            gaps[axis] = self.one_of(0, 0, 1, 8)
        shape = [size + gap for size, gap in zip(values.shape, gaps, strict=True)]
        start = self.one_of(0, 0, 1, 5)
        room = math.prod(shape)
        if values.is_floating_point():
            memory = torch.full((start + room + 3,), torch.nan).to(values.dtype)
        else:
            memory = torch.ones(start + room + 3).to(values.dtype)
        place = memory[start : start + room].view(shape)
        place = place[tuple(slice(gap, None) for gap in gaps)]
        return place.copy_(values)

    def states(self, rows: int, size: int, dtype: torch.dtype, deviation: float = 1.0) -> Tensor:
        return self.placed((self.normal(rows, size) * deviation).to(dtype), 1)

    def columns(self, most: int) -> int:
        """The width of a weight, one that blocks fill now and then."""
        return self.one_of(32, 64, 256) if self.chance(0.2) else self.size(most, 1)

    def weight(self, dtype: torch.dtype, *shape: int) -> ops.Matrix:
        """[..., out_features, in_features] in the dtype, int8 with a scale, or in blocks."""
        deviation = shape[-1] ** -0.5
        kind = self.random.random()
        if kind < 0.3:
            scale = (self.uniform(*shape[:-1]) + 0.1) * deviation / 127
            whole = (self.whole(255, *shape) - 127).to(torch.int8)
            return ops.Matrix(self.placed(whole, 1), None, self.placed(scale))
        if kind < 0.6 and shape[-1] % 32 == 0 and all(shape):
            formats = SCALES if shape[-1] % 256 == 0 else SMALL_FORMATS
            layers = [[(self.one_of(*formats), shape[-2])] for _ in range(shape[0])]
            seed = self.random.getrandbits(30)
            if len(shape) == 3:
                return packed_layers(layers, shape[-1], size=deviation, seed=seed)
            made = packed_layers(layers[:1], shape[-1], size=deviation, seed=seed)
            assert made.table is not None
            return made._replace(table=made.table[0])
        return ops.Matrix(self.placed((self.normal(*shape) * deviation).to(dtype), 1))

    def inputs(
        self, matrix: ops.Matrix, rows: int, columns: int, dtype: torch.dtype, size: float = 1.0
    ) -> Tensor:
        """What a matrix is multiplied with.

        A packed product sees float32 in 8 bits. Here rounding them is no matter of the last bit
        before, so that the oracle's are the same.
        """
        if matrix.table is None or dtype != torch.float32:
            return self.states(rows, columns, dtype, size)
        blocks = (self.whole(253, rows, columns) - 126).float().view(rows, columns // 32, 32)
        blocks += 0.8 * self.uniform(*blocks.shape) - 0.4
        largest = self.whole(32, *blocks.shape[:2], 1)
        blocks.scatter_(-1, largest, self._signs(*largest.shape) * 127)
        blocks[self.uniform(*blocks.shape[:2]) < 0.05] = 0
        return self.placed(blocks.view(rows, columns) * (size / 64), 1)

    def norm_of(self, matrix: ops.Matrix, dtype: torch.dtype, *shape: int) -> Tensor:
        """The weight of a norm before a matrix; see :meth:`inputs`."""
        if matrix.table is None or dtype != torch.float32:
            return self.placed((1 + self.normal(*shape) / 8).to(dtype), 1)
        return self.placed((1 + self.normal(1) / 8) * self._signs(*shape), 1)

    def _signs(self, *shape: int) -> Tensor:
        return 1.0 - 2 * self.whole(2, *shape)

    def rotary(self, positions: int, head_dim: int) -> Tensor:
        half = self.size(head_dim // 2)
        angles = self.normal(positions, half) * 10
        return self.placed(torch.cat((angles.cos(), angles.sin()), -1))

    def cache(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """[..., num_pages, page_size, num_kv_heads, head_dim], strides in any order."""
        order = list(range(len(shape) - 1))
        if self.chance():
            self.random.shuffle(order)
        values = torch.full([shape[axis] for axis in order] + [shape[-1]], torch.nan).to(dtype)
        return self.placed(values, 1).movedim(list(range(len(order))), order)

    def caches(self, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of keys and of values, side by side in one memory or in two."""
        if self.chance(0.7):
            return self.cache(*shape, dtype=dtype), self.cache(*shape, dtype=dtype)
        *rest, heads, width = shape
        both = self.cache(*rest, 2 * heads, width, dtype=dtype)
        return both[..., :heads, :], both[..., heads:, :]

    def slots(self, count: int, cache: Tensor) -> Tensor:
        """Distinct ones, and some -1."""
        chosen = self.shuffled(cache.shape[-4] * cache.shape[-3])[:count]
        return self.placed(torch.where(self.uniform(count) < 0.1, -1, chosen))


Checked = tuple[Arguments, Callable[[Arguments, Arguments], None]]


def _compare(
    oracle: Callable[[Arguments], dict[str, Tensor]], tolerance: Tolerance = EXACT
) -> Callable[[Arguments, Arguments], None]:
    """A check against what should be in the arguments that are written."""

    def check(before: Arguments, after: Arguments) -> None:
        for name, want in oracle(before).items():
            assert_close(after[name], want, tolerance, name)

    return check


def _out_of(
    answer: Callable[..., Tensor], *without: str
) -> Callable[[Arguments], dict[str, Tensor]]:
    """The oracle of an op that writes ``out``: a reference that takes its other arguments."""

    def oracle(before: Arguments) -> dict[str, Tensor]:
        taken = before.keys() - {"out", *without}
        return {"out": answer(**{name: before[name] for name in taken})}

    return oracle


def _looser(dtype: torch.dtype, factor: float = 4.0) -> Tolerance:
    tolerance = TOLERANCES[dtype]
    return Tolerance(factor * tolerance.rtol, factor * tolerance.atol)


class _Calls:
    """One function for each op."""

    # Rows that leave

    @staticmethod
    def _acceptance(m: Maker, rows: int) -> Arguments:
        return {
            "thresholds": m.placed(m.one_of(m.uniform(rows), torch.ones(rows))),
            "layer": m.random.randint(1, 40),
            "status": m.flags(rows),
            "exit_layer": m.placed(m.whole(9, rows).int()),
            "survivors": m.placed(m.whole(9, rows).int()),
            "num_survivors": m.placed(torch.full((1,), -3, dtype=torch.int32)),
            "all_accepted": m.flags(1),
        }

    @staticmethod
    def _accepted(before: Arguments, confidence: Tensor) -> dict[str, Tensor]:
        status, exit_layer, survivors = reference.accept_mask(
            confidence, *(before[n] for n in ("thresholds", "layer", "status", "exit_layer"))
        )
        rows = torch.full_like(exit_layer, -1)
        rows[: len(survivors)] = survivors
        return {
            "status": status,
            "exit_layer": exit_layer,
            "survivors": rows,
            "num_survivors": torch.tensor([len(survivors)]),
            "all_accepted": torch.tensor([len(survivors) == 0]),
        }

    @classmethod
    def accept_mask(cls, m: Maker) -> Checked:
        rows = m.size(70)
        given = {"confidence": m.placed(m.uniform(rows)), **cls._acceptance(m, rows)}
        return given, _compare(lambda before: cls._accepted(before, before["confidence"]))

    @classmethod
    def _measured(
        cls, m: Maker, given: Arguments, oracle: Callable[[Arguments], Tensor]
    ) -> Checked:
        rows = len(given["hidden"])
        given["confidence"] = m.placed(m.uniform(rows))
        accepts = m.chance()
        if accepts:
            given |= cls._acceptance(m, rows)

        def check(before: Arguments, after: Arguments) -> None:
            got = after["confidence"]
            assert_close(got, oracle(before), Tolerance(1e-4, 1e-5), "confidence")
            for name, want in cls._accepted(before, got).items() if accepts else ():
                assert_close(after[name], want, EXACT, name)

        return given, check

    @classmethod
    def exit_confidence_cosine(cls, m: Maker) -> Checked:
        rows, size, dtype = m.size(9), m.size(300), m.dtype()
        given = {"previous": m.states(rows, size, dtype), "hidden": m.states(rows, size, dtype)}
        return cls._measured(
            m,
            given,
            lambda before: reference.exit_confidence_cosine(before["previous"], before["hidden"]),
        )

    @classmethod
    def exit_confidence_mlp(cls, m: Maker) -> Checked:
        rows, size = m.size(40), m.size(100, 1)
        deep = m.chance()
        inner = m.size(90, 1) if deep else 2
        given = {
            "hidden": m.states(rows, size, m.dtype()),
            "weight1": m.placed(m.normal(inner, size) * size**-0.5),
            "bias1": m.maybe(lambda: m.placed(m.normal(inner))),
            "weight2": m.placed(m.normal(2, inner) * inner**-0.5) if deep else None,
            "bias2": m.maybe(lambda: m.placed(m.normal(2))) if deep else None,
        }
        names = tuple(given)
        return cls._measured(
            m, given, lambda before: reference.exit_confidence_mlp(*(before[n] for n in names))
        )

    @staticmethod
    def exit_confidence_softmax(m: Maker) -> Checked:
        rows, size, vocab = m.size(40), m.columns(90), m.size(700, 2)
        dtype = m.dtype()
        head = m.weight(dtype, vocab, size)
        given = {
            "hidden": m.inputs(head, rows, size, dtype, 3.0),
            "norm_weight": m.maybe(lambda: m.norm_of(head, dtype, size)),
            "lm_head": head.weight,
            "lm_head_scale": head.scale,
            "eps": 1e-5,
            "confidence": m.placed(m.uniform(rows)),
            "token": m.placed(m.whole(9, rows)),
            "logsumexp": m.maybe(lambda: m.placed(m.uniform(rows))),
            "top_logit": m.maybe(lambda: m.placed(m.uniform(rows))),
            "lm_head_table": head.table,
        }

        def check(before: Arguments, after: Arguments) -> None:
            confidence, logsumexp, logits = reference.exit_confidence_softmax(
                *(before[n] for n in ("hidden", "norm_weight", "lm_head", "eps")),
                lm_head_scale=before["lm_head_scale"],
                lm_head_table=before["lm_head_table"],
            )
            loose = Tolerance(2e-3, 2e-3)
            assert_close(after["confidence"], confidence, loose, "confidence")
            token = after["token"]
            assert ((token >= 0) & (token < vocab)).all()
            chosen = logits.gather(1, token[:, None])[:, 0]
            assert_close(chosen, logits.max(1).values, loose, "token")
            for name, want in (("logsumexp", logsumexp), ("top_logit", logits.max(1).values)):
                if after[name] is not None:
                    assert_close(after[name], want, loose, name)

        return given, check

    @staticmethod
    def exit_rows(m: Maker) -> Checked:
        active, size, dtype = m.size(12), m.size(40), m.dtype()
        rows = active + m.size(4)
        layer = 5
        asked = m.maybe(lambda: m.placed(m.shuffled(active)[: m.size(active)].int()))
        measured = active if asked is None else len(asked)
        has_confidence = m.chance(0.7)
        has_head = has_confidence and m.chance()
        limits = torch.tensor([0.0, 0.5, 0.7, 1.0, math.inf])
        given = {
            "hidden": m.states(active, size, dtype),
            "layer": layer,
            "confidence": m.placed(m.uniform(measured)) if has_confidence else None,
            "token": m.placed(m.whole(99, measured)) if has_head else None,
            "top_logit": m.placed(m.uniform(measured)) if has_head else None,
            "logsumexp": m.placed(m.uniform(measured) + 1) if has_head else None,
            "thresholds": m.placed(limits[m.whole(5, rows)]),
            "asked": asked,
            "decide": m.chance(0.8),
            "leave_after": m.placed(torch.where(m.uniform(rows) < 0.3, layer, layer + 2).int()),
            "together": m.flags(rows, share=0.4),
            "fills": m.flags(rows),
            "kind": m.placed((m.whole(2, rows) + 1).int()),
            "accepted": m.flags(rows, share=0.3),
            "gone": m.flags(rows, share=0.3),
            **{
                name: m.placed(m.whole(4, rows).int())
                for name in ("exit_layer", "fill_from", "measured_at")
            },
            "final_confidence": m.placed(m.uniform(rows)),
            "final_token": m.placed(m.whole(99, rows)),
            "final_logprob": m.placed(-m.uniform(rows)),
            "token_at": m.placed((m.whole(2, rows) + layer - 1).int()),
            "pending": m.placed(m.whole(3, rows).int()),
            "final_hidden": m.states(rows, size, dtype),
            "all_gone": m.flags(1),
            "row": m.placed(m.shuffled(rows)[:active].sort().values.int()),
            "slot_mapping": m.placed(m.whole(99, active)),
            "seq_lens": m.placed(m.whole(99, active).int()),
        }
        names = (
            *("leave_after", "together", "fills", "kind", "accepted", "gone", "exit_layer"),
            *("fill_from", "measured_at", "final_confidence", "final_token", "final_logprob"),
            *("token_at", "pending", "final_hidden", "all_gone"),
        )

        def oracle(before: Arguments) -> dict[str, Tensor]:
            head = None
            if before["token"] is not None:
                fields = (before[n] for n in ("confidence", "token", "logsumexp", "top_logit"))
                head = ops.SoftmaxConfidence(*fields)
            new, slot_mapping, seq_lens = reference.exit_rows(
                before["hidden"],
                before["layer"],
                ops.ExitingRows(*(before[n] for n in names)),
                _active(before),
                *(before["thresholds"], before["confidence"], head, before["asked"]),
                before["decide"],
            )
            changed = dict(zip(names, new, strict=True))
            return {**changed, "slot_mapping": slot_mapping, "seq_lens": seq_lens}

        return given, _compare(oracle, Tolerance(1e-6, 1e-6))

    @staticmethod
    def select_rows(m: Maker) -> Checked:
        active, size, dtype = m.size(20), m.size(40), m.dtype()
        has_row = m.chance()
        rows = active + m.size(4) if has_row else active
        hidden = m.states(active, size, dtype)
        limits = torch.tensor([0.5, 2.0, math.inf])
        given = {
            "hidden": hidden,
            "row": m.placed(m.shuffled(rows)[:active].sort().values.int()) if has_row else None,
            "kind": m.maybe(lambda: m.placed(m.whole(3, rows).int())),
            "wanted": m.one_of(0, 1, 2),
            "thresholds": m.maybe(lambda: m.placed(limits[m.whole(3, rows)])),
            "accepted": m.maybe(lambda: m.flags(rows)),
            "index": m.placed(m.whole(9, active).int()),
            "count": m.placed(m.whole(9, 1).int()),
            "states": hidden if m.chance(0.3) else m.states(active, size, dtype),
        }

        def oracle(before: Arguments) -> dict[str, Tensor]:
            names = ("row", "kind", "wanted", "thresholds", "accepted")
            picked = reference.select_rows(active, **{n: before[n] for n in names})
            index, states = before["index"].clone(), before["states"].clone()
            index[: len(picked)] = picked
            states[: len(picked)] = before["hidden"][picked.long()]
            return {"index": index, "count": torch.tensor([len(picked)]), "states": states}

        return given, _compare(oracle)

    @staticmethod
    def compact_rows(m: Maker) -> Checked:
        active = m.size(20)
        rows = active + m.size(4)
        pages, cross_pages = m.size(6), m.size(4)
        given = {
            "leaving": m.flags(rows, share=m.one_of(0.0, 0.5, 1.0)),
            "row": m.placed(m.shuffled(rows)[:active].sort().values.int()),
            "positions": m.placed(m.whole(99, active)),
            "slot_mapping": m.placed(m.whole(99, active)),
            "seq_lens": m.placed(m.whole(99, active).int()),
            "page_table": m.placed(m.whole(99, active, pages).int(), 1),
            "num_active": m.placed(m.whole(9, 1).int()),
            "token_ids": m.maybe(lambda: m.placed(m.whole(99, active))),
            "cross_page_table": m.maybe(
                lambda: m.placed(m.whole(99, active, cross_pages).int(), 1)
            ),
            "cross_seq_lens": m.maybe(lambda: m.placed(m.whole(99, active).int())),
            "hidden": m.maybe(lambda: m.states(active, m.size(30), m.dtype())),
        }

        def check(before: Arguments, after: Arguments) -> None:
            stay = (~before["leaving"][before["row"].long()]).nonzero().flatten()
            assert after["num_active"].item() == len(stay)
            for name in written("compact_rows"):
                if before[name] is not None and name != "num_active":
                    assert_close(after[name][: len(stay)], before[name][stay], EXACT, name)

        return given, check

    @staticmethod
    def place_head(m: Maker) -> Checked:
        selected = m.size(12)
        rows = selected + m.size(4)
        measures = m.chance()
        given = {
            "confidence": m.placed(m.uniform(selected)),
            "token": m.placed(m.whole(100, selected) - 1),
            "logsumexp": m.placed(m.uniform(selected) + 1),
            "top_logit": m.placed(m.uniform(selected)),
            "index": m.maybe(lambda: m.placed(m.shuffled(rows)[:selected].int())),
            "kind": m.maybe(lambda: m.placed(m.whole(3, rows).int())),
            "wanted": m.one_of(0, 1, 2),
            "measured_at": m.placed(m.whole(3, rows).int()) if measures else None,
            "exit_layer": m.placed(m.whole(3, rows).int()) if measures else None,
            "as_probability": m.chance(),
            "vocabulary": m.maybe(lambda: m.placed(m.shuffled(99))),
            "out_token": m.placed(m.whole(9, rows)),
            "out_confidence": m.placed(m.uniform(rows)),
            "out_logprob": m.placed(m.uniform(rows)),
        }

        def oracle(before: Arguments) -> dict[str, Tensor]:
            names = ("index", "kind", "wanted", "measured_at", "exit_layer", "as_probability")
            names = (*names, "vocabulary")
            outputs = ("out_token", "out_confidence", "out_logprob")
            head = (before[n] for n in ("confidence", "token", "logsumexp", "top_logit"))
            new = reference.place_head(
                ops.SoftmaxConfidence(*head),
                ops.HeadRows(*(before[n] for n in outputs)),
                **{n: before[n] for n in names},
            )
            return dict(zip(outputs, new, strict=True))

        return given, _compare(oracle, Tolerance(1e-5, 1e-6))

    # Rounds of self-speculation

    @staticmethod
    def begin_round(m: Maker) -> Checked:
        rows, steps, page_size, pages = m.size(9), m.size(6), m.size(9, 1), m.size(5, 1)
        room = pages * page_size
        start = m.whole(room, rows)
        most = torch.minimum(m.whole(steps + 3, rows) - 1, room - 1 - start)
        ended, is_given = m.chance(), m.chance()
        num_ended = m.size(5, 1)
        given = {
            "token_ids": m.placed(m.whole(9, rows) - 1),
            "start": m.placed(start),
            "tokens_left": m.placed(m.whole(2 * steps + 2, rows)),
            "max_drafts": m.placed(most),
            "page_table": m.placed(m.whole(50, rows, pages).int(), 1),
            "page_size": page_size,
            "sources": None,
            "next_token": None,
            "next_position": None,
            "next_left": None,
            "drafts": m.placed(m.whole(9, rows, steps)) if is_given else None,
            "num_given": m.placed(m.whole(steps + 3, rows) - 1) if is_given else None,
            **_round(m, rows, steps),
            "row": m.placed(m.whole(9, rows).int()),
            "active_token_ids": m.placed(m.whole(9, rows)),
            "positions": m.placed(m.whole(9, rows)),
            "slot_mapping": m.placed(m.whole(9, rows)),
            "seq_lens": m.placed(m.whole(9, rows).int()),
        }
        if ended:
            # Whoever goes on has room for a draft more than there may be.
            deep = max(room - steps - 4, 1)
            given |= {
                "sources": m.placed(
                    torch.where(most > room - deep - 1, -1, m.whole(num_ended, rows)).int()
                ),
                "next_token": m.placed(m.whole(9, num_ended) - 1),
                "next_position": m.placed(m.whole(deep, num_ended)),
                "next_left": m.placed(m.whole(steps + 2, num_ended)),
            }

        def oracle(before: Arguments) -> dict[str, Tensor]:
            following = None
            if before["sources"] is not None:
                fields = ("next_token", "next_position", "next_left")
                following = ops.EndedRound(*(before[n] for n in fields))
            made, active = reference.begin_round(
                _draft_round(before), _active(before), page_size, following, before["sources"]
            )
            return {**_round_of(made), **_active_of(active), "row": active.row}

        return given, _compare(oracle)

    @staticmethod
    def append_drafts(m: Maker) -> Checked:
        rows, steps, size = m.size(9), m.size(6, 1), m.size(20)
        active = m.size(rows)
        dtype, keeps = m.dtype(), m.chance()
        states = m.normal(rows, steps + 1, size).to(dtype)
        given = {
            "hidden": m.states(active, size, dtype) if keeps else None,
            "token": m.placed(m.whole(9, active) - 1),
            "confidence": m.placed(m.uniform(active)),
            "step": m.random.randrange(steps),
            "thresholds": m.placed(m.uniform(rows) / 2),
            "stop_tokens": m.placed(m.whole(9, rows, m.size(3)) - 1),
            "states": m.placed(states, 1) if keeps else None,
            **_round(m, rows, steps),
            "confidences": m.placed(m.uniform(rows, steps)),
            "row": m.placed(m.shuffled(rows)[:active].sort().values.int()),
            "active_token_ids": m.placed(m.whole(9, active)),
            "positions": m.placed(m.whole(9, active)),
            "slot_mapping": m.placed(m.whole(9, active)),
            "seq_lens": m.placed(m.whole(9, active).int()),
        }
        for name in ("first_position", "left"):
            del given[name]

        def oracle(before: Arguments) -> dict[str, Tensor]:
            made, active = reference.append_drafts(
                *(before[n] for n in ("hidden", "token", "confidence", "step")),
                _draft_round(before),
                _active(before),
            )
            names = ("tokens", "confidences", "num_drafted", "done", "all_done")
            new = {name: getattr(made, name) for name in names}
            if made.states is not None:
                new["states"] = made.states
            return {**new, **_active_of(active)}

        return given, _compare(oracle)

    @staticmethod
    def begin_verification(m: Maker) -> Checked:
        rows, steps = m.size(9), m.size(6)
        given = _drafted(m, rows, steps)
        tokens = rows * (steps + 1) + m.size(3)
        del given["left"]
        given |= {
            name: m.placed(m.whole(9, count).to(dtype))
            for name, count, dtype in (
                ("last_tokens", rows, torch.int64),
                ("last_positions", rows, torch.int64),
                ("last_slots", rows, torch.int64),
                ("last_seq_lens", rows, torch.int32),
                ("token_ids", tokens, torch.int64),
                ("positions", tokens, torch.int64),
                ("slot_mapping", tokens, torch.int64),
                ("sequence", tokens, torch.int32),
                ("seq_lens", rows, torch.int32),
                ("query_start_loc", rows + 1, torch.int32),
                ("num_tokens", 1, torch.int32),
            )
        }

        def oracle(before: Arguments) -> dict[str, Tensor]:
            made = reference.begin_verification(_draft_round(before), tokens)
            return made._asdict()

        return given, _compare(oracle)

    @staticmethod
    def _verified(m: Maker, rows: int, steps: int) -> tuple[Arguments, ops.Verification]:
        """A drafted round and what verifies it."""
        given = _drafted(m, rows, steps)
        return given, reference.begin_verification(
            _draft_round(given), rows * (steps + 1) + m.size(3)
        )

    @classmethod
    def gather_states(cls, m: Maker) -> Checked:
        rows, steps, size, dtype = m.size(9), m.size(6), m.size(40), m.dtype()
        _, verification = cls._verified(m, rows, steps)
        tokens = len(verification.token_ids)
        given = {
            "states": m.placed(m.normal(rows, steps + 1, size).to(dtype), 1),
            "last": m.states(rows, size, dtype),
            "sequence": m.placed(verification.sequence),
            "query_start_loc": m.placed(verification.query_start_loc),
            "num_tokens": m.placed(verification.num_tokens),
            "out": m.states(tokens, size, dtype),
        }

        def oracle(before: Arguments) -> dict[str, Tensor]:
            out = reference.gather_states(before["states"], before["last"], verification)
            count = int(verification.num_tokens)
            return {"out": torch.cat((out[:count], before["out"][count:]))}

        return given, _compare(oracle)

    @classmethod
    def accept_round(cls, m: Maker) -> Checked:
        rows, steps, vocab = m.size(9), m.size(5), m.size(40, 1)
        given, verification = cls._verified(m, rows, steps)
        tokens = len(verification.token_ids)
        given["tokens"].clamp_(max=vocab - 1)
        for name in ("round_slots",):
            del given[name]
        samples = m.chance()
        given |= {
            "query_start_loc": m.placed(verification.query_start_loc),
            "target": m.placed(m.whole(min(vocab, 3), tokens)),
            "next_token": m.placed(m.whole(9, rows)),
            "next_position": m.placed(m.whole(9, rows)),
            "next_left": m.placed(m.whole(9, rows)),
            "num_accepted": m.placed(m.whole(9, rows)),
            "last_row": m.maybe(lambda: m.placed(m.whole(9, rows))),
            "sampled": m.flags(rows) if samples else None,
            "draft_probs": m.placed(m.normal(rows * steps, vocab).softmax(-1)) if samples else None,
            "target_probs": m.placed(m.normal(tokens, vocab).softmax(-1)) if samples else None,
            "uniform": m.placed(m.uniform(tokens, 2)) if samples else None,
        }
        given["tokens"].clamp_(min=0)

        def oracle(before: Arguments) -> dict[str, Tensor]:
            names = ("sampled", "draft_probs", "target_probs", "uniform")
            ended, accepted, last_row = reference.accept_round(
                _draft_round(before),
                verification,
                before["target"],
                **{n: before[n] for n in names},
            )
            new = {**ended._asdict(), "num_accepted": accepted}
            return new if before["last_row"] is None else {**new, "last_row": last_row}

        return given, _compare(oracle)

    @staticmethod
    def speculative_accept(m: Maker) -> Checked:
        lengths = [m.size(6) for _ in range(m.size(6))]
        drafts, seqs, vocab = sum(lengths), len(lengths), m.size(300, 1)
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        greedy = m.chance()
        given = {
            "draft_tokens": m.placed(m.whole(2 if greedy else vocab, drafts)),
            "draft_start_loc": m.placed(starts),
            "target_tokens": m.placed(m.whole(2, drafts + seqs)) if greedy else None,
            "draft_probs": None if greedy else m.placed(m.normal(drafts, vocab).softmax(-1)),
            "target_probs": None
            if greedy
            else m.placed(m.normal(drafts + seqs, vocab).softmax(-1)),
            "uniform": None if greedy else m.placed(m.uniform(drafts + seqs)),
            "num_accepted": m.placed(m.whole(9, seqs).int()),
            "next_token": m.placed(m.whole(9, seqs)),
        }
        names = ("target_tokens", "draft_probs", "target_probs", "uniform")

        def oracle(before: Arguments) -> dict[str, Tensor]:
            accepted, tokens = reference.speculative_accept(
                before["draft_tokens"], before["draft_start_loc"], **{n: before[n] for n in names}
            )
            return {
                "num_accepted": torch.tensor(accepted, dtype=torch.int32),
                "next_token": torch.tensor(tokens, dtype=torch.int64),
            }

        return given, _compare(oracle)

    # Tokens

    @staticmethod
    def embed_tokens(m: Maker) -> Checked:
        tokens, vocab, size, dtype = m.size(20), m.size(60, 1), m.columns(70), m.dtype()
        matrix = m.weight(dtype, vocab, size)
        follows = m.chance()
        previous = m.size(5, 1)
        given = {
            "token_ids": m.placed(m.whole(vocab, tokens)),
            "weight": matrix.weight,
            "scale": matrix.scale,
            "previous": m.placed(m.whole(vocab, previous)) if follows else None,
            "sources": m.placed((m.whole(previous + 1, tokens) - 1).int()) if follows else None,
            "out": m.states(tokens, size, dtype),
            "table": matrix.table,
        }
        names = ("token_ids", "weight", "scale", "previous", "sources", "table")

        def oracle(before: Arguments) -> dict[str, Tensor]:
            given = {n: before[n] for n in names}
            return {"out": reference.embed_tokens(**given, dtype=dtype).view(tokens, size)}

        return given, _compare(oracle)

    @staticmethod
    def sample_tokens(m: Maker) -> Checked:
        requests, vocab = m.size(6, 1), m.size(400, 1)
        outputs = m.size(requests)
        rows = m.size(outputs)
        by_index, by_row, by_round = m.chance(), m.chance(), m.chance()
        step = m.whole(4, outputs)
        request_of = m.shuffled(requests)[:outputs] if by_row else torch.arange(outputs)
        first = m.whole(50, requests)
        width, num_top = m.size(5, 1), m.size(6)
        tops, probs_by_step = m.chance(), 4 if by_round and m.chance() else 0
        num_probs = (requests * probs_by_step if probs_by_step else outputs) + m.size(2)
        biases, num_bias = m.chance(), m.size(min(vocab, 5))
        bias_ids = torch.stack([m.shuffled(vocab)[:num_bias] for _ in range(requests)])
        masks, words = m.size(4, 1) if by_round else 1, -(-vocab // 32)
        given = {
            "logits": m.states(rows, vocab, m.dtype(), 3.0),
            "temperature": m.placed(
                torch.where(m.uniform(requests) < 0.4, 0.0, m.uniform(requests) + 0.3)
            ),
            "top_k": m.placed((m.whole(2, requests) * m.whole(vocab + 2, requests)).int()),
            "top_p": m.placed(torch.where(m.uniform(requests) < 0.5, 1.0, m.uniform(requests))),
            "min_p": m.placed(torch.where(m.uniform(requests) < 0.5, 0.0, m.uniform(requests) / 3)),
            "repetition_penalty": m.placed(
                torch.where(m.uniform(requests) < 0.5, 1.0, m.uniform(requests) + 0.7)
            ),
            "seed": m.placed(m.whole(1 << 62, requests)),
            "seen": m.placed(m.whole(vocab + 5, requests, m.size(5)) - 2),
            "presence_penalty": m.maybe(lambda: m.placed(m.normal(requests))),
            "frequency_penalty": m.maybe(lambda: m.placed(m.normal(requests))),
            "generated": m.maybe(lambda: m.placed(m.whole(vocab + 5, requests, m.size(9)) - 2)),
            "bias_ids": m.placed(bias_ids) if biases else None,
            "bias": m.placed(m.normal(*bias_ids.shape)) if biases else None,
            "allowed": m.maybe(lambda: m.placed(m.whole(1 << 32, requests, masks, words).int())),
            "purpose": m.one_of(0, 1, 3, 2**32 - 1),
            "positions": m.placed(first[request_of] + step),
            "index": m.placed(m.shuffled(outputs)[:rows].int()) if by_index else None,
            "row": m.placed(request_of.int()) if by_row else None,
            "kind": m.maybe(lambda: m.placed(m.whole(2, requests).int())),
            "wanted": 0,
            "round_tokens": m.placed(m.whole(vocab, requests, width + 4)) if by_round else None,
            "first_position": m.placed(first) if by_round else None,
            "as_probability": m.chance(),
            "probs_by_step": probs_by_step,
            "token": m.placed(m.whole(9, outputs)),
            "confidence": m.placed(m.uniform(outputs)),
            "logprob": m.placed(m.uniform(outputs)),
            "logsumexp": m.placed(m.uniform(outputs)),
            "probs": m.maybe(lambda: m.placed(m.uniform(num_probs, vocab))),
            "uniform": m.maybe(lambda: m.placed(m.uniform(outputs, 2))),
            "top_ids": m.placed(m.whole(9, outputs, num_top)) if tops else None,
            "top_logprobs": m.placed(m.uniform(outputs, num_top)) if tops else None,
        }
        return given, _check_samples

    # Weights in blocks

    @staticmethod
    def pack_weight(m: Maker) -> Checked:
        format = m.one_of(*SCALES)
        block = block_sizes(format)[0]
        rows, columns = m.size(40), block * m.size(3, 1)
        blocks = random_blocks(format, rows, columns, seed=m.random.getrandbits(30))
        offset = 64 * m.size(3)
        room = offset + ops.packed_bytes(format, rows, columns) + m.size(70)
        given = {
            "blocks": m.placed(blocks, 1),
            "format": format,
            "offset": offset,
            "packed": m.placed(m.whole(256, room).to(torch.uint8)),
            "table": m.placed(m.whole(9, rows)),
        }

        def check(before: Arguments, after: Arguments) -> None:
            assert torch.equal(before["packed"][:offset], after["packed"][:offset])
            if rows > 0:
                got = ops.unpack_weight(after["packed"], after["table"])
                assert_close(got, reference.pack_weight(before["blocks"], format), EXACT, "packed")

        return given, check

    @staticmethod
    def quantise_weight(m: Maker) -> Checked:
        format = m.one_of(*ops.FLOAT_BLOCK_FORMATS)
        rows, columns, dtype = m.size(20), 32 * m.size(5, 1), m.dtype()
        row_bytes = columns // 32 * block_sizes(format)[1]
        weight = m.normal(rows, columns) * m.one_of(1e-3, 0.05, 1.0, 300.0)
        given = {
            "weight": m.placed(weight.to(dtype), 1),
            "format": format,
            "blocks": m.placed(m.whole(256, rows, row_bytes).to(torch.uint8), 1),
        }

        def check(before: Arguments, after: Arguments) -> None:
            weight = before["weight"]
            if rows > 0:
                got = reference.pack_weight(after["blocks"], format)
                limit = reference.weighted_error(weight, reference.quantise_weight(weight, format))
                error = reference.weighted_error(weight, got)
                floor = 1e-9 * weight.double().abs().amax() ** 3
                # Where two ranges are equally good, rounding picks, and what follows may differ.
                assert (error > 1.01 * limit + floor).sum() <= 1 + error.numel() // 100
                assert (error <= 2 * limit + floor).all()

        return given, check

    @staticmethod
    def unpack_weight(m: Maker) -> Checked:
        format = m.one_of(*SCALES)
        rows, columns = m.size(40, 1), block_sizes(format)[0] * m.size(3, 1)
        blocks = random_blocks(format, rows, columns, seed=m.random.getrandbits(30))
        packed = ops.pack_weight(blocks, format)
        assert packed.table is not None
        some = m.shuffled(rows)[: m.size(rows)]
        given = {
            "packed": m.placed(packed.weight),
            "table": m.placed(packed.table[some]),
            "out": m.placed(m.normal(len(some), columns), 1),
        }

        def oracle(_: Arguments) -> dict[str, Tensor]:
            return {"out": reference.unpack_weight(blocks, format, some)}

        return given, _compare(oracle)

    # Layers

    @staticmethod
    def append_kv(m: Maker) -> Checked:
        tokens, heads, width, dtype = m.size(12), m.size(4), m.size(130, 1), m.dtype()
        cache = (m.size(4, 1), m.size(9, 1), heads, width)
        k_cache, v_cache = m.caches(*cache, dtype=dtype)
        rotates = m.chance()
        given = {
            "q": m.maybe(lambda: m.placed(m.normal(tokens, m.size(5), width).to(dtype), 1)),
            "k": m.placed(m.normal(tokens, heads, width).to(dtype), 1),
            "v": m.placed(m.normal(tokens, heads, width).to(dtype), 1),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "positions": m.placed(m.whole(30, tokens)) if rotates else None,
            "cos_sin": m.rotary(30, width) if rotates else None,
            "q_norm_weight": m.maybe(lambda: m.placed((1 + m.normal(width) / 8).to(dtype))),
            "k_norm_weight": m.maybe(lambda: m.placed((1 + m.normal(width) / 8).to(dtype))),
            "eps": 1e-6,
        }
        tokens = min(tokens, cache[0] * cache[1])
        if m.chance(0.3) and given["q"] is not None:  # of one projection
            heads_of = {name: given[name].shape[1] for name in "qkv"}
            qkv = m.placed(torch.cat([given[name] for name in heads_of], 1), 1)
            given |= dict(zip(heads_of, qkv.split(list(heads_of.values()), 1), strict=True))
        for name in ("q", "k", "v", "positions"):
            given[name] = None if given[name] is None else given[name][:tokens]
        given["slot_mapping"] = m.slots(tokens, k_cache)

        def oracle(before: Arguments) -> dict[str, Tensor]:
            q, k_cache, v_cache = reference.append_kv(**before)
            return {"k_cache": k_cache, "v_cache": v_cache, **({} if q is None else {"q": q})}

        return given, _compare(oracle, _looser(dtype))

    @staticmethod
    def kv_fill(m: Maker) -> Checked:
        layers, heads, width, size = m.size(3), m.size(2, 1), m.size(40, 1), m.columns(70)
        dtype, rotates = m.dtype(), m.chance()
        cache = (layers, m.size(5, 1), m.size(9, 1), heads, width)
        k_cache, v_cache = m.caches(*cache, dtype=dtype)
        tokens = min(m.size(40), cache[1] * cache[2])
        kv = m.weight(dtype, layers, 2 * heads * width, size)
        given = {
            "hidden": m.inputs(kv, tokens, size, dtype, 3.0),
            "exit_layer": m.placed(m.whole(layers + 1, tokens).int()),
            "norm_weight": m.norm_of(kv, dtype, layers, size),
            "kv_weight": kv.weight,
            "kv_bias": m.maybe(lambda: m.placed(m.normal(layers, 2 * heads * width).to(dtype), 1)),
            "kv_scale": kv.scale,
            "kv_table": kv.table,
            "k_norm_weight": m.maybe(
                lambda: m.placed((1 + m.normal(layers, width) / 8).to(dtype), 1)
            ),
            "positions": m.placed(m.whole(30, tokens)) if rotates else None,
            "cos_sin": m.rotary(30, width) if rotates else None,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slot_mapping": m.slots(tokens, k_cache),
            "eps": 1e-5,
        }

        def oracle(before: Arguments) -> dict[str, Tensor]:
            made = dict(before)
            parts = [made.pop(f"kv_{part}") for part in ops.Matrix._fields]
            reference.kv_fill(**made, kv=ops.Matrix(*parts))
            return {name: before[name] for name in ("k_cache", "v_cache")}

        return given, _compare(oracle, _looser(dtype, 8.0))

    @staticmethod
    def skinny_linear(m: Maker) -> Checked:
        tokens, rows, dtype = m.size(40), m.size(70), m.dtype()
        residual = m.maybe(lambda: m.states(tokens, rows, dtype))
        own = residual is None or m.chance()
        given = {
            **_product(m, tokens, rows, dtype, (None, "relu")),
            "residual": residual,
            "out": m.states(tokens, rows, dtype) if own else residual,
        }
        return given, _compare(_out_of(reference.skinny_linear), _looser(dtype, 8.0))

    @staticmethod
    def skinny_gated_linear(m: Maker) -> Checked:
        tokens, inner, dtype = m.size(40), m.size(40), m.dtype()
        given = {
            **_product(m, tokens, 2 * inner, dtype, ("silu", "gelu_tanh")),
            "out": m.states(tokens, inner, dtype),
        }
        return given, _compare(_out_of(reference.skinny_gated_linear), _looser(dtype, 12.0))

    @staticmethod
    def paged_attention(m: Maker) -> Checked:
        dtype, group, heads = m.dtype(), m.size(4, 1), m.size(3, 1)
        width = 8 * m.size(m.one_of(4, 12, 32), 1)
        causal = m.chance(0.7)
        bidirectional = not causal and m.chance()
        most = m.one_of(12, 70, 300)
        lengths = [m.size(most) for _ in range(m.size(4))]
        queries = [m.size(12 if m.chance(0.2) else min(length, 12)) for length in lengths]
        page_size = m.size(17, 1)
        paged = _paged(m, lengths, page_size, (heads, width), dtype)
        buckets = 2 * m.size(20, 2)
        tokens = sum(queries)
        given = {
            "q": m.placed(m.normal(tokens, heads * group, width).to(dtype), 1),
            **paged,
            "seq_lens": m.placed(torch.tensor(lengths, dtype=torch.int32)),
            "query_start_loc": m.placed(_starts(queries)),
            "out": m.placed(m.normal(tokens, heads * group, width).to(dtype), 1),
            "scale": width**-0.5,
            "causal": causal,
            "sliding_window": m.one_of(0, 0, m.size(most), most, 2**31, 2**63 - 1),
            "fixed_split_size": m.one_of(0, 0, m.size(100, 1), 2**31 - 1),
            "position_bias": m.maybe(lambda: m.placed(m.normal(buckets, heads * group))),
            "max_distance": buckets + m.size(200),
            "bidirectional": bidirectional,
            "arrivals": m.maybe(lambda: m.placed(torch.zeros(m.size(40), dtype=torch.int32))),
        }
        oracle = _out_of(reference.paged_attention, "fixed_split_size", "arrivals")
        return given, _compare(oracle, _looser(dtype))

    @staticmethod
    def decoder_layers(m: Maker) -> Checked:
        return _decoder_layers(m)


# Parts of calls


def _product(
    m: Maker, rows: int, out_features: int, dtype: torch.dtype, activations: tuple[str | None, ...]
) -> Arguments:
    """A few rows times a weight, with a norm before it or not."""
    columns = m.columns(200)
    matrix = m.weight(dtype, out_features, columns)
    return {
        "x": m.inputs(matrix, rows, columns, dtype),
        "norm_weight": m.maybe(lambda: m.norm_of(matrix, dtype, columns)),
        "eps": 1e-6,
        "weight": matrix.weight,
        "weight_scale": matrix.scale,
        "weight_table": matrix.table,
        "bias": m.maybe(lambda: m.placed(m.normal(out_features).to(dtype))),
        "activation": m.one_of(*activations),
    }


def _round(m: Maker, rows: int, steps: int) -> Arguments:
    """What the ops of a round write, and read again, before its start."""
    return {
        "first_position": m.placed(m.whole(20, rows)),
        "left": m.placed(m.whole(20, rows)),
        "round_slots": m.placed(m.whole(99, rows, steps + 1)),
        "tokens": m.placed(m.whole(9, rows, steps + 1)),
        "num_drafted": m.placed(m.whole(9, rows)),
        "most": m.placed(m.whole(9, rows)),
        "done": m.flags(rows),
        "all_done": m.flags(1),
    }


def _drafted(m: Maker, rows: int, steps: int) -> Arguments:
    """A round that has ended."""
    most = m.whole(steps + 2, rows) - 1
    given = _round(m, rows, steps)
    given["most"] = m.placed(most)
    given["num_drafted"] = m.placed(torch.minimum(m.whole(steps + 1, rows), most.clamp(min=0)))
    for name in ("done", "all_done"):
        del given[name]
    return given


def _draft_round(arguments: Arguments) -> ops.DraftRound:
    """The round of some arguments, with nothing where they have nothing."""
    return ops.DraftRound(*(arguments.get(name) for name in ops.DraftRound._fields))  # type: ignore[arg-type]


def _round_of(made: ops.DraftRound) -> dict[str, Tensor]:
    names = ("first_position", "left", "round_slots", "tokens", "num_drafted", "most", "done")
    return {name: getattr(made, name) for name in (*names, "all_done")}


def _active(arguments: Arguments) -> ops.ActiveRows:
    """The active rows of some arguments."""
    fields = (arguments.get(name) for name in ops.ActiveRows._fields)
    return ops.ActiveRows(*fields)._replace(token_ids=arguments.get("active_token_ids"))  # type: ignore[arg-type]


def _active_of(active: ops.ActiveRows) -> dict[str, Tensor]:
    assert active.token_ids is not None
    names = ("positions", "slot_mapping", "seq_lens")
    return {"active_token_ids": active.token_ids, **{n: getattr(active, n) for n in names}}


def _starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def _pages(m: Maker, lengths: list[int], page_size: int) -> tuple[int, Tensor]:
    """How many pages there are, and a page table with garbage behind the pages in use."""
    counts = [-(-length // page_size) for length in lengths]
    total, widest = sum(counts) + 2, max(counts, default=0) + m.size(3, 1)
    table = torch.full((len(lengths), widest), 2**31 - 1, dtype=torch.int32)
    free = iter(m.shuffled(total).tolist())
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([next(free) for _ in range(count)], dtype=torch.int32)
    return total, table


def _keys(lengths: list[int], table: Tensor, page_size: int) -> Iterator[tuple[int, int]]:
    """Page and offset of every key."""
    for row, length in zip(table.tolist(), lengths, strict=True):
        for key in range(length):
            yield row[key // page_size], key % page_size


def _fill(m: Maker, cache: Tensor, keys: list[tuple[int, int]]) -> None:
    """Random keys [..., num_pages, page_size, num_kv_heads, head_dim] at pages and offsets."""
    if keys:
        pages, offsets = (torch.tensor(each) for each in zip(*keys, strict=True))
        layers = cache.shape[:-4]
        values = m.normal(*layers, len(keys), *cache.shape[-2:]).to(cache.dtype)
        cache[(..., pages, offsets, slice(None), slice(None))] = values


def _paged(
    m: Maker, lengths: list[int], page_size: int, shape: tuple[int, int], dtype: torch.dtype
) -> Arguments:
    """Caches whose unused slots hold NaN, and their page table."""
    total, table = _pages(m, lengths, page_size)
    caches = m.caches(total, page_size, *shape, dtype=dtype)
    for cache in caches:
        _fill(m, cache, list(_keys(lengths, table, page_size)))
    return {"k_cache": caches[0], "v_cache": caches[1], "page_table": m.placed(table, 1)}


def _check_samples(before: Arguments, after: Arguments) -> None:
    """Tokens are the reference's, or those of a draw or a filter that is off by a rounding."""
    rows = ops.SamplingRows(*(before[name] for name in ops.SamplingRows._fields))
    given = ops.SampledRows(*(before[name] for name in ops.SampledRows._fields))
    rest = {
        name: value
        for name, value in before.items()
        if name not in (*rows._fields, *given._fields, "logits")
    }
    want = reference.sample_tokens(before["logits"], rows, given, **rest)
    doubted = after["token"] != want.token
    for i in doubted.nonzero().flatten().tolist():
        assert _nearly_drawn(before, after, rows, given, rest, i), f"token {i}"
    if doubted.any():
        return
    for name, value in want._asdict().items():
        if value is not None:
            assert_close(after[name], value, Tolerance(2e-4, 2e-5), name)


def _nearly_drawn(
    before: Arguments,
    after: Arguments,
    rows: ops.SamplingRows,
    given: ops.SampledRows,
    rest: Arguments,
    output: int,
) -> bool:
    """Whether the reference gives an output's token with parameters that differ a little."""
    for p, low, warm in itertools.product((-1e-5, 1e-5), (-1e-5, 1e-5), (-1e-5, 1e-5)):
        near = rows._replace(
            top_p=torch.where(rows.top_p < 1, rows.top_p + p, rows.top_p),
            min_p=torch.where(rows.min_p > 0, rows.min_p + low, rows.min_p),
            temperature=rows.temperature * (1 + warm),
        )
        token = reference.sample_tokens(before["logits"], near, given, **rest).token[output]
        if token == after["token"][output]:
            return True
    return False


def _decoder_layers(m: Maker) -> Checked:
    layers, dtype = m.size(3, 1), torch.float32
    heads, group, width = m.size(2, 1), m.size(3, 1), 8 * m.size(4, 1)
    size, inner, page_size = m.columns(40), m.columns(40), m.size(9, 1)
    lengths = [m.size(30, 1) for _ in range(m.size(3))]
    queries = [m.size(min(length, 4), 1) for length in lengths]
    tokens = sum(queries)
    has_cross = m.chance(0.3)
    cross_lens = [m.size(20) for _ in lengths] if has_cross else []
    total, table = _pages(m, [*lengths, *cross_lens], page_size)
    table, cross_table = table[: len(lengths)], table[len(lengths) :]
    k_cache, v_cache = m.caches(layers, total, page_size, heads, width, dtype=dtype)
    slots, positions = [], []
    for row, length, count in zip(table.tolist(), lengths, queries, strict=True):
        for key in range(length - count, length):
            positions.append(key)
            slots.append(row[key // page_size] * page_size + key % page_size)
    for cache in (k_cache, v_cache):
        _fill(m, cache, list(_keys(lengths, table, page_size)))
        _fill(m, cache, list(_keys(cross_lens, cross_table, page_size)))
    q_size, kv_size = group * heads * width, heads * width
    relu = m.chance(0.3)

    def matrix(name: str, rows: int, columns: int) -> Arguments:
        made = m.weight(dtype, layers, rows, columns)
        bias = m.maybe(lambda: m.placed(m.normal(layers, rows)))
        parts = made._replace(bias=bias)._asdict()
        return {f"{name}_{part}": value for part, value in parts.items()}

    def norm(columns: int) -> Tensor:
        return m.placed(1 + m.normal(layers, columns) / 8)

    rotates = m.chance()
    begin = m.random.randint(0, layers)
    hidden = m.states(tokens, size, dtype)
    given = {
        "hidden": hidden,
        "attention_norm": norm(size),
        **matrix("qkv", q_size + 2 * kv_size, size),
        "q_norm": m.maybe(lambda: norm(width)),
        "k_norm": m.maybe(lambda: norm(width)),
        **matrix("o", size, q_size),
        "mlp_norm": norm(size),
        **matrix("gate_up", inner if relu else 2 * inner, size),
        **matrix("down", size, inner),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": m.placed(torch.tensor(slots, dtype=torch.int64)),
        "positions": m.placed(torch.tensor(positions, dtype=torch.int64)) if rotates else None,
        "cos_sin": m.rotary(30, width) if rotates else None,
        "page_table": m.placed(table, 1),
        "seq_lens": m.placed(torch.tensor(lengths, dtype=torch.int32)),
        "query_start_loc": m.placed(_starts(queries)),
        "sliding_window": m.maybe(lambda: m.placed(m.whole(20, layers).int())),
        "skip_attention": m.maybe(lambda: m.flags(layers)),
        "skip_mlp": m.maybe(lambda: m.flags(layers)),
        "out": hidden if m.chance(0.3) else m.states(tokens, size, dtype),
        "begin_layer": begin,
        "end_layer": m.random.randint(begin, layers),
        "scale": width**-0.5,
        "eps": 1e-5,
        "fixed_split_size": m.one_of(0, 16),
        "position_bias": m.maybe(lambda: m.placed(m.normal(8, heads * group))),
        "max_distance": 30,
        "activation": "relu" if relu else m.one_of("silu", "gelu_tanh"),
    }
    if has_cross:
        given |= {
            "cross_norm": norm(size),
            **matrix("cross_q", q_size, size),
            **matrix("cross_o", size, q_size),
            "cross_page_table": m.placed(cross_table, 1),
            "cross_seq_lens": m.placed(torch.tensor(cross_lens, dtype=torch.int32)),
        }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        made = dict(before)
        parts = {
            name: ops.Matrix(*(made.pop(f"{name}_{part}") for part in ops.Matrix._fields))
            for name in ("qkv", "o", "gate_up", "down", *(("cross_q", "cross_o") * has_cross))
        }
        weights = ops.DecoderWeights(
            made.pop("attention_norm"),
            parts["qkv"],
            made.pop("q_norm"),
            made.pop("k_norm"),
            parts["o"],
            made.pop("mlp_norm"),
            parts["gate_up"],
            parts["down"],
        )
        cross = None
        if has_cross:
            names = ("cross_norm", "cross_page_table", "cross_seq_lens")
            norms, pages, lens = (made.pop(name) for name in names)
            cross = ops.CrossAttention(norms, parts["cross_q"], parts["cross_o"], pages, lens)
        for name in ("out", "fixed_split_size"):
            del made[name]
        caches = {name: made[name] for name in ("k_cache", "v_cache")}
        return {"out": reference.decoder_layers(**made, weights=weights, cross=cross), **caches}

    packed = any(value is not None for name, value in given.items() if name in PACKED_LAYERS)
    # A step of 8 bits, taken where the oracle does not, goes through the layers behind it.
    return given, _compare(oracle, Tolerance(0.1, 0.2) if packed else Tolerance(4e-4, 4e-4))
