"""sample_tokens: the tokens, their figures, their distributions, and the rows that sample."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from cases import SAMPLE_VOCAB_SIZES, Tolerance
from eecore import ops
from random_calls import Arguments, Checked, Maker, assert_close

OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# What a request may ask for.
WAYS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {},
    {"temperature": 0.3},
    {"temperature": 2.5, "repetition_penalty": 1.3},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.5},
    {"top_k": 600},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.99, "temperature": 2.0},
    {"min_p": 0.01},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7, "repetition_penalty": 0.8},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": -2.0, "repetition_penalty": 1.4},
    {"presence_penalty": -1.1, "frequency_penalty": 0.7, "top_k": 9},
)


def sampling_rows(
    ways: list[dict[str, float]],
    seen: Tensor | None = None,
    seed: int = 0,
    **more: Tensor | None,
) -> ops.SamplingRows:
    def each(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([{**OFF, **way}[name] for way in ways], dtype=dtype)

    return ops.SamplingRows(
        temperature=each("temperature"),
        top_k=each("top_k", torch.int32),
        top_p=each("top_p"),
        min_p=each("min_p"),
        repetition_penalty=each("repetition_penalty"),
        seed=torch.arange(len(ways)) * 77 + seed,
        seen=torch.zeros(len(ways), 0, dtype=torch.int64) if seen is None else seen,
        presence_penalty=each("presence_penalty"),
        frequency_penalty=each("frequency_penalty"),
        **more,
    )


def sampled_rows(
    num_outputs: int,
    vocab_size: int = 0,
    num_top: int | None = None,
    *,
    uniform: bool = False,
    num_probs: int = 0,
) -> ops.SampledRows:
    """Outputs filled with values that show where nothing was written."""
    return ops.SampledRows(
        *(torch.full((num_outputs,), -7, dtype=torch.int64),),
        *(torch.full((num_outputs,), -7.0) for _ in range(3)),
        torch.full((num_probs, vocab_size), -7.0) if num_probs else None,
        torch.full((num_outputs, 2), -7.0) if uniform else None,
        None if num_top is None else torch.full((num_outputs, num_top), -7),
        None if num_top is None else torch.full((num_outputs, num_top), -7.0),
    )


def on(device: torch.device, given: Any) -> Any:
    """A NamedTuple, or the tensors among keyword arguments, on a device."""
    if isinstance(given, dict):
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    return type(given)(*(None if t is None else t.to(device) for t in given))


def run(
    logits: Tensor,
    rows: ops.SamplingRows,
    out: ops.SampledRows,
    device: torch.device,
    **arguments: Any,
) -> ops.SampledRows:
    """The outputs of the op, written over a copy of ``out``."""
    written = on(device, ops.SampledRows(*(None if t is None else t.clone() for t in out)))
    ops.sample_tokens(logits.to(device), on(device, rows), written, **on(device, arguments))
    return ops.SampledRows(*(None if t is None else t.cpu() for t in written))


def check(
    logits: Tensor,
    rows: ops.SamplingRows,
    out: ops.SampledRows,
    device: torch.device,
    **arguments: Any,
) -> ops.SampledRows:
    """The op has to do what the reference does; returns what the op wrote."""
    expected = reference.sample_tokens(logits, rows, out, **arguments)
    got = run(logits, rows, out, device, **arguments)
    for name in ("token", "uniform", "top_ids"):
        want, given = getattr(expected, name), getattr(got, name)
        assert (want is given is None) or torch.equal(given, want), name
    for name in ("confidence", "logprob", "logsumexp", "probs", "top_logprobs"):
        want, given = getattr(expected, name), getattr(got, name)
        if want is not None:
            torch.testing.assert_close(
                given, want, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
    if expected.probs is not None and got.probs is not None:
        assert torch.equal(got.probs > 1e-30, expected.probs > 1e-30)
    return got


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + vocab_size)
    return 3 * torch.randn(num_rows, vocab_size, generator=generator)


def random_ids(num_rows: int, count: int, vocab_size: int) -> Tensor:
    """Distinct ids, filled up with -1."""
    ids = torch.full((num_rows, count), -1)
    for row in range(num_rows):
        found = torch.randperm(vocab_size)[: row % (count + 1)]
        ids[row, : found.numel()] = found
    return ids


def bits(allowed: Tensor) -> Tensor:
    """A mask, bool [..., vocab_size], as int32 words."""
    padded = torch.nn.functional.pad(allowed.long(), (0, -allowed.shape[-1] % 32))
    words = (padded.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return words.int()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocab_size", SAMPLE_VOCAB_SIZES)
def test_matches_the_reference(vocab_size: int, masked: bool, device: torch.device) -> None:
    ways = list(WAYS)
    seen = random_ids(len(ways), 6, vocab_size)
    more: dict[str, Tensor] = {}
    if masked:
        allowed = torch.rand(len(ways), 1, vocab_size) < 0.3
        allowed[:, :, vocab_size // 2] = True
        bias_ids = random_ids(len(ways), min(4, vocab_size), vocab_size)
        more = {
            "generated": torch.randint(-1, vocab_size + 1, (len(ways), 7)),
            "bias_ids": bias_ids,
            "bias": 5 * torch.randn(bias_ids.shape),
            "allowed": bits(allowed),
        }
    out = sampled_rows(len(ways), vocab_size, 3, uniform=True, num_probs=len(ways))
    arguments = {"purpose": 1, "positions": torch.arange(len(ways)) * 1000, "as_probability": True}
    rows = sampling_rows(ways, seen, **more)
    got = check(random_logits(len(ways), vocab_size), rows, out, device, **arguments)
    if masked:
        assert allowed[torch.arange(len(ways)), 0, got.token].all()


@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_any_batch(num_rows: int, device: torch.device) -> None:
    """A row gives the same alone and beside others, bit for bit."""
    ways = [WAYS[i % len(WAYS)] for i in range(num_rows)]
    logits, rows = random_logits(num_rows, 97), sampling_rows(ways)
    positions = torch.arange(num_rows)
    out = sampled_rows(num_rows, 97, 2, uniform=True, num_probs=num_rows)
    together = check(logits, rows, out, device, purpose=0, positions=positions)
    for w in range(0, num_rows, 5):
        one = slice(w, w + 1)
        alone = run(
            logits[one],
            ops.SamplingRows(*(None if t is None else t[one] for t in rows)),
            sampled_rows(1, 97, 2, uniform=True, num_probs=1),
            device,
            purpose=0,
            positions=positions[one],
        )
        for a, b in zip(alone, together, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b[one])


def one_way(
    logits: list[float], device: torch.device, position: int = 0, **way: float
) -> ops.SampledRows:
    """The result of one request."""
    out = sampled_rows(1, len(logits), num_probs=1)
    arguments = {"purpose": 0, "positions": torch.tensor([position])}
    return check(torch.tensor([logits]), sampling_rows([way]), out, device, **arguments)


def kept(got: ops.SampledRows) -> list[int]:
    assert got.probs is not None
    return got.probs[0].nonzero().flatten().tolist()


def test_top_p_drops_what_starts_at_its_mass(device: torch.device) -> None:
    """The case of transformers' own test of top-p."""
    probs = torch.tensor([[0.3, 0.1, 0.1, 0.5], [0.15, 0.3, 0.3, 0.25]])
    for row, expected in zip(probs.log().tolist(), ([0, 3], [1, 2, 3]), strict=True):
        assert kept(one_way(row, device, top_p=0.8)) == expected


def test_top_k_keeps_ties_and_top_p_the_lower_ids_of_them(device: torch.device) -> None:
    logits = [1.0, 2.0, 1.0, 0.0, 1.0, 2.0] + [1.0] * 100
    assert kept(one_way(logits, device, top_k=3)) == [0, 1, 2, 4, *range(5, 106)]
    assert kept(one_way(logits, device, top_k=2)) == [1, 5]
    e = torch.tensor(1.0).exp().item()  # weight of the two largest; equal ones have 1
    share = (2 * e + 3.5) / (2 * e + 103 + 1 / e)
    assert kept(one_way(logits, device, top_p=share)) == [0, 1, 2, 4, 5, 6]
    assert kept(one_way([3.0] * 200, device, top_p=0.5)) == list(range(100))


def test_top_p_of_next_to_nothing_keeps_the_first(device: torch.device) -> None:
    for top_p in (0.0, 1e-30):
        assert kept(one_way([0.0, 4.0, 4.0, 1.0], device, top_p=top_p)) == [1]


def test_temperature_zero_is_the_first_largest_logit(device: torch.device) -> None:
    got = one_way([1.0, 4.0, 4.0, -2.0], device, temperature=0.0)
    assert (got.token.item(), kept(got)) == (1, [1])


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e30])
def test_extreme_temperatures(temperature: float, device: torch.device) -> None:
    logits = random_logits(1, 50)[0].tolist()
    got = one_way(logits, device, temperature=temperature)
    assert got.probs is not None
    if temperature < 1:
        assert got.token.item() == torch.tensor(logits).argmax()
        assert got.probs.max() == 1
    else:
        torch.testing.assert_close(got.probs, torch.full((1, 50), 0.02))


def test_logits_of_minus_infinity_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((40, 90), -torch.inf)
    logits[:, 7], logits[:, 71] = 0.0, 0.5
    rows = sampling_rows([WAYS[i % len(WAYS)] for i in range(40)], seed=5)
    out = sampled_rows(40, 90, 3, num_probs=40)
    got = check(logits, rows, out, device, purpose=0, positions=torch.arange(40))
    assert set(got.token.tolist()) == {7, 71}
    assert got.top_ids is not None
    assert got.top_ids[0].tolist() == [71, 7, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 99])
def test_nothing_is_drawn_where_the_softmax_is_not_defined(
    at: int, value: float, device: torch.device
) -> None:
    ways = [way for way in WAYS for _ in range(2)]
    logits = random_logits(len(ways), 100)
    logits[::2, at] = value
    out = sampled_rows(len(ways), 100, 2, uniform=True, num_probs=len(ways))
    arguments = {"purpose": 0, "positions": torch.zeros(len(ways), dtype=torch.int64)}
    for as_probability in (True, False):
        got = check(
            logits, sampling_rows(ways), out, device, as_probability=as_probability, **arguments
        )
        assert (got.token[::2] == -1).all()
        assert (got.token[1::2] >= 0).all()
    nothing = check(logits * -torch.inf, sampling_rows(ways), out, device, **arguments)
    assert (nothing.token == -1).all()


def test_a_count_is_one_whether_tokens_are_drafts_or_text(device: torch.device) -> None:
    """A round gives the same logits as decoding without drafts."""
    logits = random_logits(1, 50)
    way = {"presence_penalty": 0.3, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    text, drafts = [4, 9, 4], [9, 4, 4, 17, 9]
    whole = sampling_rows(
        [way],
        torch.tensor([sorted({*text, *drafts})]),
        generated=torch.tensor([[*text, *drafts]]),
    )
    part = sampling_rows([way], torch.tensor([[4, 9]]), generated=torch.tensor([text]))
    at = {"purpose": 0, "positions": torch.tensor([12])}
    out = sampled_rows(1, 50, num_probs=1)
    alone = run(logits, whole, out, device, **at)
    inside = run(
        logits,
        part,
        out,
        device,
        **at,
        round_tokens=torch.tensor([[4, *drafts]]),
        first_position=torch.tensor([7]),
    )
    for a, b in zip(alone, inside, strict=True):
        assert (a is b is None) or torch.equal(a, b)


def test_what_is_not_allowed_is_as_if_its_logit_were_minus_infinity(device: torch.device) -> None:
    """NaN is no exception; all figures of a row are those of the allowed tokens."""
    vocab_size = 77
    allowed = torch.rand(len(WAYS), 1, vocab_size) < 0.5
    allowed[:, :, 3] = True
    logits, ways = random_logits(len(WAYS), vocab_size), list(WAYS)
    out = sampled_rows(len(WAYS), vocab_size, 4, num_probs=len(WAYS))
    at = {"purpose": 0, "positions": torch.arange(len(WAYS)), "as_probability": True}
    rows = sampling_rows(ways, random_ids(len(WAYS), 5, vocab_size))
    cut = logits.masked_fill(~allowed[:, 0], -torch.inf)
    expected = check(cut, rows, out, device, **at)
    dirty = logits.masked_fill(~allowed[:, 0], torch.nan)
    got = check(dirty, rows._replace(allowed=bits(allowed)), out, device, **at)
    for a, b in zip(expected, got, strict=True):
        assert (a is b is None) or torch.equal(a, b)


def test_nothing_is_drawn_where_nothing_is_allowed(device: torch.device) -> None:
    none = torch.zeros(len(WAYS), 1, 2, dtype=torch.int32)
    rows = sampling_rows(list(WAYS), allowed=none)
    out = sampled_rows(len(WAYS), 40, 2, num_probs=len(WAYS))
    at = {"purpose": 0, "positions": torch.zeros(len(WAYS), dtype=torch.int64)}
    got = check(random_logits(len(WAYS), 40), rows, out, device, **at)
    assert (got.token == -1).all()


@pytest.mark.parametrize("num_top", [0, 1, 30, 70])
def test_the_most_probable_tokens_of_the_logits_as_they_came(
    num_top: int, device: torch.device
) -> None:
    logits = random_logits(3, 65).round()  # with ties
    rows = sampling_rows([{"temperature": 0.0}, {"top_k": 1}, {"repetition_penalty": 9.0}])
    positions = torch.zeros(3, dtype=torch.int64)
    check(logits, rows, sampled_rows(3, 65, num_top), device, purpose=0, positions=positions)


CHUNK = 2048  # tokens that a block of the CUDA kernels takes at a time
MAX_SLICES = 128  # chunks up to which each has a block of its own


def few_rows(
    logits: Tensor, ways: list[dict[str, float]], device: torch.device, num_top: int = 5
) -> ops.SampledRows:
    """Rows of logits have to give what the reference gives, in each of the ways."""
    rows = sampling_rows(ways, random_ids(len(ways), 6, logits.shape[1]))
    out = sampled_rows(len(ways), logits.shape[1], num_top, num_probs=len(ways))
    return check(logits, rows, out, device, purpose=0, positions=torch.arange(len(ways)) + 3)


@pytest.mark.parametrize("vocab_size", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_any_number_of_slices(vocab_size: int, device: torch.device) -> None:
    ways = [
        {},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": vocab_size - 1, "repetition_penalty": 1.3},
        {"top_p": 0.95, "temperature": 1.4, "min_p": 0.001},
        {"temperature": 0.0, "presence_penalty": 0.5},
    ]
    few_rows(random_logits(len(ways), vocab_size), ways, device)


def test_the_vocabulary_of_a_real_model(device: torch.device) -> None:
    ways = [{}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9, "temperature": 0.8}]
    few_rows(random_logits(len(ways), 128256).bfloat16(), ways, device)


def test_slices_of_several_chunks(device: torch.device) -> None:
    ways = [{"top_k": 400, "top_p": 0.99, "repetition_penalty": 1.2}]
    few_rows(random_logits(1, CHUNK * MAX_SLICES + 1), ways, device)


@pytest.mark.parametrize("share", [1e-9, 2 / 3, 0.999])
def test_equals_stay_by_id_across_slices(share: float, device: torch.device) -> None:
    """Logits that are all the same, and logits equal to the bound's."""
    vocab_size = 3 * CHUNK
    flat = torch.full((1, vocab_size), 2.5)
    got = few_rows(flat, [{"top_p": share}], device)
    assert kept(got) == list(range(max(1, round(share * vocab_size))))
    few_rows(flat, [{"top_p": share, "top_k": 7}], device)
    ahead = flat.clone()
    ahead[0, ::77] += 1.0
    ahead[0, 1::5] -= 0.01
    few_rows(ahead, [{"top_p": share}], device)
    few_rows(ahead, [{"top_p": share, "top_k": 1000}], device)


@pytest.mark.parametrize("spread", [0.03, 40.0])
def test_flat_and_steep_distributions(spread: float, device: torch.device) -> None:
    """One logit is ahead of many whose keys begin with the same digits."""
    vocab_size = 2 * CHUNK + 17
    logits = spread / 3 * random_logits(4, vocab_size)
    logits[:, 99] += 6.0
    ways = [
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.7},
        {"top_k": 300, "top_p": 0.8},
        {"top_k": 3000, "top_p": 0.97, "temperature": 1.3},
    ]
    few_rows(logits, ways, device)
    few_rows(logits.to(torch.bfloat16), ways, device)


def test_positions_seeds_and_purposes_give_other_numbers(device: torch.device) -> None:
    """Large numbers are not cut off."""
    numbers = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, -1]
    logits = torch.zeros(len(numbers), 1000)
    rows = sampling_rows([{}] * len(numbers))
    out = sampled_rows(len(numbers), uniform=True)
    zeros = torch.zeros(len(numbers), dtype=torch.int64)
    tokens, uniforms = [], []
    for positions, seed in ((torch.tensor(numbers), zeros), (zeros, torch.tensor(numbers) + 7)):
        for purpose in (0, 1, 2**32 - 1):
            got = check(
                logits,
                rows._replace(seed=seed),
                out,
                device,
                purpose=purpose,
                positions=positions,
            )
            tokens += got.token.tolist()
            assert got.uniform is not None
            uniforms += got.uniform.flatten().tolist()
    assert len(set(tokens)) > 0.9 * len(tokens)
    assert len(set(uniforms)) == len(uniforms) // 3  # the same for each purpose of the token


def test_philox_gives_the_numbers_of_its_authors() -> None:
    ones = 2**32 - 1
    for key, counter, expected in (
        (0, (0,) * 4, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, (ones,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ):
        words = reference.philox(key, counter)  # type: ignore[arg-type]
        assert " ".join(f"{word:08x}" for word in words) == expected


@pytest.mark.parametrize("way", [way for way in WAYS if way.get("temperature", 1.0)], ids=str)
@pytest.mark.parametrize("vocab_size", [2, 320, 1001])
def test_filters_agree_with_transformers(way: dict[str, float], vocab_size: int) -> None:
    import transformers

    params = {**OFF, **way}
    seen = torch.tensor([[0, 1, vocab_size - 1, 1, 0]])
    warpers = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]),
            transformers.TemperatureLogitsWarper(params["temperature"]),
        ]
    )
    if params["top_k"]:
        warpers.append(transformers.TopKLogitsWarper(int(params["top_k"])))
    if params["top_p"] < 1.0:
        warpers.append(transformers.TopPLogitsWarper(params["top_p"]))
    if params["min_p"] > 0.0:
        warpers.append(transformers.MinPLogitsWarper(params["min_p"]))
    for seed in range(5):
        logits = random_logits(1, vocab_size, seed)
        expected = warpers(seen, logits.clone()).softmax(-1)
        out = sampled_rows(1, vocab_size, num_probs=1)
        zero = torch.zeros(1, dtype=torch.int64)
        ops.sample_tokens(logits, sampling_rows([way], seen), out, purpose=0, positions=zero)
        assert out.probs is not None
        assert torch.equal(out.probs > 0, expected > 0)
        torch.testing.assert_close(out.probs, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("along", ["positions", "seeds"])
@pytest.mark.parametrize("way", [{"temperature": 1.5}, {"top_k": 12, "top_p": 0.9}], ids=str)
def test_tokens_have_the_frequencies_of_the_distribution(way: dict[str, float], along: str) -> None:
    from scipy.stats import chisquare

    count = 6000
    logits = random_logits(1, 30)
    rows = sampling_rows([way])
    out = sampled_rows(1, 30, num_probs=1)
    zero = torch.zeros(1, dtype=torch.int64)
    ops.sample_tokens(logits, rows, out, purpose=0, positions=zero)
    assert out.probs is not None
    drawn = sampled_rows(count)
    many = ops.SamplingRows(
        *(None if t is None else t.expand(count, *t.shape[1:]).contiguous() for t in rows)
    )
    numbers = torch.arange(count)
    if along == "seeds":
        many = many._replace(seed=numbers)
    ops.sample_tokens(
        logits.expand(count, -1),
        many,
        drawn,
        purpose=0,
        positions=numbers if along == "positions" else torch.full((count,), 17),
    )
    counts, probs = torch.bincount(drawn.token, minlength=30).double(), out.probs[0].double()
    likely = probs * count > 5
    assert counts[probs == 0].sum() == 0
    expected = probs[likely] / probs[likely].sum() * counts[likely].sum()
    assert chisquare(counts[likely], expected).pvalue > 1e-3


def test_a_tape_samples_the_rows_that_are_there_by_then() -> None:
    logits, rows, out = random_logits(4, 50), sampling_rows([{}] * 4), sampled_rows(4)
    positions, count = torch.arange(4), torch.zeros(1, dtype=torch.int32)
    index = torch.full((4,), 99, dtype=torch.int32)  # nothing is read while a tape records
    tape = ops.Tape()
    with tape.record(), tape.rows(count):
        ops.sample_tokens(logits, rows, out, purpose=0, positions=positions, index=index)
    assert (out.token == -7).all()
    expected = sampled_rows(4)
    ops.sample_tokens(logits, rows, expected, purpose=0, positions=positions)
    index.copy_(torch.arange(4))
    count.fill_(3)
    tape.replay()
    assert out.token[:3].tolist() == expected.token[:3].tolist()
    assert out.token[3] == -7


def check_samples(before: Arguments, after: Arguments) -> None:
    """Tokens have to be the reference's, up to the rounding of a draw or filter."""
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
        assert nearly_drawn(before, after, rows, given, rest, i), f"token {i}"
    if doubted.any():
        return
    for name, value in want._asdict().items():
        if value is not None:
            assert_close(after[name], value, Tolerance(2e-4, 2e-5), name)


def nearly_drawn(
    before: Arguments,
    after: Arguments,
    rows: ops.SamplingRows,
    given: ops.SampledRows,
    rest: Arguments,
    output: int,
) -> bool:
    """Whether the reference gives an output's token with slightly different parameters."""
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


def fuzzed_call(m: Maker) -> Checked:
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
    return given, check_samples
