"""speculative_accept: greedy prefixes, and sampling that has exactly the target's distribution."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

import reference
from cases import ACCEPT_VOCAB_SIZES, DRAFT_LENGTHS
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare


def start_loc(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def to_device(arguments: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def greedy_case(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Drafts of which about three in four agree with the target."""
    generator = torch.Generator().manual_seed(sum(lengths))
    starts = start_loc(lengths)
    targets = torch.randint(0, 1000, (sum(lengths) + len(lengths),), generator=generator)
    last = starts[1:].long() + torch.arange(len(lengths))
    is_draft = torch.ones(targets.numel(), dtype=torch.bool)
    is_draft[last] = False
    drafts = targets[is_draft]
    wrong = torch.rand(drafts.numel(), generator=generator) < 0.25
    return {
        "draft_tokens": drafts + wrong,
        "draft_start_loc": starts,
        "target_tokens": targets,
    }


def sampling_case(lengths: tuple[int, ...], vocab_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Drafts drawn from q, and a target p not far from it."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(lengths) + vocab_size)
    num_drafts = sum(lengths)
    num_rows = num_drafts + len(lengths)
    starts = start_loc(lengths)
    target_logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    is_draft = torch.ones(num_rows, dtype=torch.bool)
    is_draft[starts[1:].long() + torch.arange(len(lengths))] = False
    noise = torch.randn(num_drafts, vocab_size, generator=generator)
    draft_probs = (target_logits[is_draft] + 0.5 * noise).softmax(dim=-1)
    drafts = torch.zeros(0, dtype=torch.int64)
    if num_drafts:
        drafts = torch.multinomial(draft_probs, 1, generator=generator).flatten()
    return {
        "draft_tokens": drafts,
        "draft_start_loc": starts,
        "draft_probs": draft_probs,
        "target_probs": target_logits.softmax(dim=-1),
        "uniform": torch.rand(num_rows, generator=generator),
    }


def assert_matches(arguments: dict[str, Tensor], device: torch.device) -> None:
    num_accepted, next_token = reference.speculative_accept(**arguments)
    got = ops.speculative_accept(**to_device(arguments, device))
    assert got.num_accepted.tolist() == num_accepted
    assert got.next_token.tolist() == next_token


@pytest.mark.parametrize("lengths", DRAFT_LENGTHS)
def test_greedy_matches_the_reference(lengths: tuple[int, ...], device: torch.device) -> None:
    assert_matches(greedy_case(lengths), device)


@pytest.mark.parametrize("vocab_size", ACCEPT_VOCAB_SIZES)
@pytest.mark.parametrize("lengths", DRAFT_LENGTHS)
def test_sampling_matches_the_reference(
    lengths: tuple[int, ...], vocab_size: int, device: torch.device
) -> None:
    if vocab_size > 1000 and sum(lengths) > 20:
        lengths = lengths[:4]
    assert_matches(sampling_case(lengths, vocab_size), device)


@pytest.mark.parametrize("right", [31, 32, 33, 40])
def test_greedy_accepts_more_drafts_than_a_warp_has_lanes(right: int, device: torch.device) -> None:
    targets = torch.arange(41)
    drafts = targets[:40].clone()
    drafts[right:] += 1
    arguments = {
        "draft_tokens": drafts,
        "draft_start_loc": torch.tensor([0, 40], dtype=torch.int32),
        "target_tokens": targets,
    }
    got = ops.speculative_accept(**to_device(arguments, device))
    assert (int(got.num_accepted), int(got.next_token)) == (right, right)


# Distributions (p, q) over a small vocabulary.
DISTRIBUTIONS = {
    "close": ([0.1, 0.2, 0.3, 0.25, 0.15], [0.15, 0.25, 0.2, 0.2, 0.2]),
    "equal": ([0.1, 0.2, 0.3, 0.25, 0.15], [0.1, 0.2, 0.3, 0.25, 0.15]),
    "far": ([0.7, 0.1, 0.1, 0.05, 0.05], [0.02, 0.08, 0.1, 0.3, 0.5]),
    "disjoint": ([0.5, 0.3, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 0.4, 0.6]),
    "target one-hot": ([0.0, 0.0, 1.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]),
    "draft one-hot": ([0.3, 0.1, 0.2, 0.2, 0.2], [0.0, 1.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_first_token_has_the_distribution_of_the_target(
    name: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    num_trials, num_drafts = 20000, 2
    if request.node.callspec.params["device"] == "emulated":
        num_trials = 2000  # a block each
    generator = torch.Generator().manual_seed(17)
    p, q = (torch.tensor(probs) for probs in DISTRIBUTIONS[name])
    drafts = torch.multinomial(q, num_trials * num_drafts, replacement=True, generator=generator)
    arguments = {
        "draft_tokens": drafts,
        "draft_start_loc": start_loc((num_drafts,) * num_trials),
        "draft_probs": q.repeat(num_trials * num_drafts, 1),
        "target_probs": p.repeat(num_trials * (num_drafts + 1), 1),
        "uniform": torch.rand(num_trials * (num_drafts + 1), generator=generator),
    }
    got = ops.speculative_accept(**to_device(arguments, device))
    next_token, num_accepted = got.next_token.cpu(), got.num_accepted.cpu()
    emitted = torch.cat([drafts.view(num_trials, num_drafts), next_token[:, None]], dim=1)
    emitted.scatter_(1, num_accepted.long()[:, None], next_token[:, None])

    def assert_drawn_from_target(tokens: Tensor) -> None:
        counts = torch.bincount(tokens, minlength=p.numel()).double()
        assert (counts[p == 0] == 0).all()
        possible = p > 0
        expected = p.double()[possible] / p.double().sum() * counts.sum()
        if int(possible.sum()) > 1:
            assert chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3

    assert_drawn_from_target(emitted[:, 0])
    # Also positions after accepted drafts: the tokens emitted there are independent of the drafts.
    for position in range(1, num_drafts + 1):
        reached = num_accepted >= position
        if int(reached.sum()) > num_trials // 20:
            assert_drawn_from_target(emitted[reached, position])


def sample_one(
    p: list[float], q: list[float], draft: int, uniform: list[float], device: torch.device
) -> tuple[int, int]:
    """One sequence with one draft; the same p before and after it."""
    got = ops.speculative_accept(
        torch.tensor([draft], device=device),
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        draft_probs=torch.tensor([q], device=device),
        target_probs=torch.tensor([p, p], device=device),
        uniform=torch.tensor(uniform, device=device),
    )
    return int(got.num_accepted), int(got.next_token)


ALMOST_ONE = 1 - 2**-24  # the largest float32 below 1


def test_a_draft_that_q_excludes_is_accepted_where_p_allows_it(device: torch.device) -> None:
    assert sample_one([0.5, 0.5], [1.0, 0.0], 1, [ALMOST_ONE, 0.0], device) == (1, 0)
    assert sample_one([1.0, 0.0], [1.0, 0.0], 1, [0.0, 0.5], device) == (0, 0)


def test_a_draft_that_p_excludes_is_never_accepted(device: torch.device) -> None:
    assert sample_one([0.0, 1.0], [0.5, 0.5], 0, [0.0, 0.5], device) == (0, 1)
    assert sample_one([0.0, 1.0], [0.0, 1.0], 0, [0.0, 0.5], device) == (0, 1)


def test_a_certain_draft_is_always_accepted(device: torch.device) -> None:
    assert sample_one([0.0, 1.0], [0.0, 1.0], 1, [ALMOST_ONE, ALMOST_ONE], device) == (1, 1)


def test_without_a_residual_the_next_token_comes_from_p(device: torch.device) -> None:
    # p < q everywhere: not distributions, but what rounding can make of two equal ones.
    p = [0.2499999, 0.25, 0.5]
    assert sample_one(p, [0.25, 0.25, 0.5], 0, [ALMOST_ONE, 0.3], device) == (0, 1)


@pytest.mark.parametrize("vocab_size", [3, 8, 1000, 140000])
def test_a_token_of_zero_probability_is_never_drawn(vocab_size: int, device: torch.device) -> None:
    # Mass that float32 cannot add up to one, zeros at both ends, the extreme uniforms.
    p = torch.zeros(vocab_size)
    p[1 : vocab_size - 1] = 1.0 / (vocab_size - 2)
    uniform = torch.tensor([0.0, 2**-24, 0.5, ALMOST_ONE])
    got = ops.speculative_accept(
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.zeros(5, dtype=torch.int32, device=device),
        draft_probs=torch.zeros(0, vocab_size, device=device),
        target_probs=p.repeat(4, 1).to(device),
        uniform=uniform.to(device),
    )
    assert (p[got.next_token.cpu()] > 0).all()
    assert int(got.next_token[0]) == 1
    assert int(got.next_token[-1]) == vocab_size - 2


def test_a_row_without_probability_gives_minus_one(device: torch.device) -> None:
    nan = float("nan")
    assert sample_one([nan, nan], [0.5, 0.5], 0, [0.5, 0.5], device) == (0, -1)
    assert sample_one([0.0, 0.0], [0.5, 0.5], 0, [0.5, 0.5], device) == (0, -1)


def fuzzed_call(m: Maker) -> Checked:
    lengths = [m.size(6) for _ in range(m.size(6))]
    drafts, seqs, vocab = sum(lengths), len(lengths), m.size(300, 1)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    greedy = m.chance()
    given = {
        "draft_tokens": m.placed(m.whole(2 if greedy else vocab, drafts)),
        "draft_start_loc": m.placed(starts),
        "target_tokens": m.placed(m.whole(2, drafts + seqs)) if greedy else None,
        "draft_probs": None if greedy else m.placed(m.normal(drafts, vocab).softmax(-1)),
        "target_probs": None if greedy else m.placed(m.normal(drafts + seqs, vocab).softmax(-1)),
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

    return given, compare(oracle)
