"""exit_confidence_softmax: gap, token and log-sum-exp of the LM head, without its logits."""

from __future__ import annotations

import math

import pytest
import torch

import emulated
import reference
from cases import (
    DTYPES,
    LARGE_BATCH_SIZES,
    LM_HEAD_128K,
    LM_HEADS,
    SKINNY_BATCH_SIZES,
    TOLERANCES,
    Tolerance,
)
from coded_calls import coded
from eecore import ops
from random_calls import Arguments, Checked, Maker, assert_close

NAN, INF = float("nan"), float("inf")


def random_case(
    num_seqs: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Logits of a spread of about 2, so that gaps are neither all 0 nor all 1."""
    generator = torch.Generator().manual_seed(num_seqs + vocab_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    case = {
        "hidden": 3 * normal(num_seqs, hidden_size),
        "norm_weight": 1 + 0.1 * normal(hidden_size),
        "lm_head": normal(vocab_size, hidden_size) * (2 / math.sqrt(hidden_size)),
    }
    return {name: tensor.to(dtype).to(device) for name, tensor in case.items()}


def check_against_reference(
    case: dict[str, torch.Tensor], eps: float = 1e-5, norm: bool = True, **numbers: float
) -> None:
    given = case["hidden"], case["norm_weight"] if norm else None, case["lm_head"], eps
    confidence, logsumexp, logits = reference.exit_confidence_softmax(*given, **numbers)
    got = ops.exit_confidence_softmax(*given, **numbers)
    tolerance = TOLERANCES[case["hidden"].dtype]
    close = {"rtol": tolerance.rtol, "atol": tolerance.atol, "check_dtype": False}
    torch.testing.assert_close(got.confidence, confidence, **close)
    torch.testing.assert_close(got.logsumexp, logsumexp, **close)
    torch.testing.assert_close(got.top_logit, logits.amax(-1), **close)
    # The token is the reference's, or one whose logit is as large as rounding can tell.
    chosen = logits.gather(1, got.token[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(-1), **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden_size", "vocab_size"), LM_HEADS)
def test_matches_the_reference(
    hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_against_reference(random_case(3, hidden_size, vocab_size, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("multiplier", "soft_cap"), [(0.3, 0.0), (1.0, 1.5), (2.0, 3.0)])
def test_multiplied_and_capped_logits(
    multiplier: float, soft_cap: float, dtype: torch.dtype, device: torch.device
) -> None:
    numbers = {"multiplier": multiplier, "soft_cap": soft_cap}
    check_against_reference(random_case(3, 72, 323, dtype, device), **numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_seqs", [*SKINNY_BATCH_SIZES, *LARGE_BATCH_SIZES])
def test_any_number_of_rows(num_seqs: int, dtype: torch.dtype, device: torch.device) -> None:
    check_against_reference(random_case(num_seqs, 72, 323, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_vocabulary_of_128256(dtype: torch.dtype) -> None:
    check_against_reference(random_case(1, *LM_HEAD_128K, dtype))


@pytest.mark.parametrize("form", ["floats", "int8", "Q4_0"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("multiplier", "soft_cap"), [(1.0, 0.0), (0.7, 9.0)])
def test_the_token_is_the_largest_of_the_product_in_float32(
    multiplier: float, soft_cap: float, dtype: torch.dtype, form: str, device: torch.device
) -> None:
    """Rounded to bfloat16, several of the largest would be equal, and the lowest id of them win."""
    case = random_case(40, 64, 1027, dtype, device)
    case = {**coded(case, form, "lm_head"), "multiplier": multiplier, "soft_cap": soft_cap}
    case["eps"] = 1e-5
    got = ops.exit_confidence_softmax(**case)
    names = {name: name.replace("lm_head", "weight") for name in case}
    call = {names[name]: value for name, value in case.items() if name != "hidden"}
    sums = ops.skinny_linear(case["hidden"], **call, dtype=torch.float32)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.argmax(-1), got.token)
    if emulated.is_cuda_kernel(device):  # its sums have another order
        torch.testing.assert_close(sums.amax(-1), got.top_logit)
    else:
        assert torch.equal(sums.amax(-1), got.top_logit)


@pytest.mark.parametrize("tokens", [(0, 1), (5, 40), (300, 700), (255, 256), (701, 702)])
def test_the_lowest_id_of_equal_logits_wins_with_gap_zero(
    tokens: tuple[int, int], device: torch.device
) -> None:
    case = random_case(2, 64, 703, device=device)
    case["lm_head"][list(tokens)] = 4 * case["hidden"][0] / case["hidden"][0].norm()
    got = ops.exit_confidence_softmax(**case, eps=1e-5)
    assert got.token[0] == tokens[0]
    assert got.confidence[0] == 0
    assert not got.confidence.signbit().any()


def test_a_nan_in_a_row_stays_there_and_never_accepts(device: torch.device) -> None:
    case = random_case(3, 64, 515, device=device)
    expected = ops.exit_confidence_softmax(**case, eps=1e-5)
    case["hidden"][1, 7] = NAN
    got = ops.exit_confidence_softmax(**case, eps=1e-5)
    for name in ("confidence", "logsumexp", "top_logit"):
        assert getattr(got, name)[1].isnan(), name
    assert 0 <= got.token[1] < 515
    for row in (0, 2):
        for name, value in expected._asdict().items():
            assert torch.equal(getattr(got, name)[row], value[row]), name


def test_a_nan_in_one_logit_is_not_lost(device: torch.device) -> None:
    for token in (0, 31, 300, 514):
        case = random_case(2, 64, 515, device=device)
        case["lm_head"][token, 3] = NAN
        got = ops.exit_confidence_softmax(**case, eps=1e-5)
        assert got.confidence.isnan().all()
        assert ((got.token >= 0) & (got.token < 515)).all()


def test_infinite_logits(device: torch.device) -> None:
    # Logits are 1 * lm_head[:, 0].
    hidden = torch.ones(1, 1, device=device)

    def measure(logits: torch.Tensor) -> ops.SoftmaxConfidence:
        return ops.exit_confidence_softmax(hidden, None, logits[:, None].to(device), 0.0)

    logits = torch.full((600,), -INF)
    logits[[300, 301]] = torch.tensor([1.0, 2.0])
    got = measure(logits)
    gap = torch.tensor([1.0, 2.0]).softmax(0).diff()
    torch.testing.assert_close(got.confidence.cpu(), gap)
    assert got.token.tolist() == [301]

    logits[300] = -INF
    got = measure(logits)
    assert got.confidence.tolist() == [1.0]
    assert (got.token.tolist(), got.top_logit.tolist(), got.logsumexp.tolist()) == ([301], [2], [2])

    # No softmax exists for these.
    got = measure(torch.full((600,), -INF))
    assert got.confidence.isnan().all()
    assert (got.token.tolist(), got.logsumexp.tolist()) == ([0], [-INF])
    got = measure(torch.tensor([0.0, INF, 1.0]))
    assert got.confidence.isnan().all()
    assert (got.token.tolist(), got.logsumexp.tolist()) == ([1], [INF])


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    logits = torch.linspace(-3e4, 3e4, 1000, device=device)[:, None]
    got = ops.exit_confidence_softmax(torch.ones(1, 1, device=device), None, logits, 0.0)
    assert got.confidence.tolist() == [1.0]
    assert got.token.tolist() == [999]
    torch.testing.assert_close(got.logsumexp, torch.tensor([3e4], device=device))


def fuzzed_call(m: Maker) -> Checked:
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
        "multiplier": m.one_of(1.0, 0.3),
        "soft_cap": m.one_of(0.0, 2.0),
    }

    def check(before: Arguments, after: Arguments) -> None:
        confidence, logsumexp, logits = reference.exit_confidence_softmax(
            *(before[n] for n in ("hidden", "norm_weight", "lm_head", "eps")),
            lm_head_scale=before["lm_head_scale"],
            **{name: before[name] for name in ("lm_head_table", "multiplier", "soft_cap")},
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
