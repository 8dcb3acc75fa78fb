"""The counts of the comparison of trees and chains of drafts. Nothing is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.exits.trees import MAX_ROWS, Count, Path, grown, row_of

LIKELY = torch.tensor([0.5, 0.3, 0.1])


class AnyHead:
    """A head that proposes the next three ids after any token, always as likely."""

    def step(self, states: Tensor, tokens: list[int], _seen: None) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.tensor([[token + 1, token + 2, token + 3] for token in tokens])
        return states, LIKELY.expand(len(tokens), 3), ids


def paths(choices: int) -> list[Path]:
    head: Any = AnyHead()
    (each,) = grown(head, (torch.zeros(1, 4), None), [10], choices)
    return each.paths


def test_a_chain_is_the_first_choice_at_each_depth() -> None:
    assert [path.tokens for path in paths(1)] == [
        tuple(range(11, 11 + count)) for count in range(1, MAX_ROWS + 1)
    ]
    assert [path.likely for path in paths(1)] == [0.5**count for count in range(1, MAX_ROWS + 1)]


def test_a_tree_takes_the_likeliest_path_next() -> None:
    found = paths(3)
    assert [path.tokens for path in found[:4]] == [(11,), (12,), (11, 12), (11, 13)]
    assert sorted((p.likely for p in found), reverse=True) == [p.likely for p in found]
    assert all(path.tokens[:-1] in {p.tokens for p in found} | {()} for path in found)


def test_each_state_is_that_after_the_tokens_of_its_path() -> None:
    class Remembers(AnyHead):
        def step(
            self, states: Tensor, tokens: list[int], _seen: None
        ) -> tuple[Tensor, Tensor, Tensor]:
            states = torch.cat((states[:, 1:], torch.tensor(tokens)[:, None].float()), 1)
            return super().step(states, tokens, None)

    head: Any = Remembers()
    for each in grown(head, (torch.zeros(2, 3), None), [10, 20], 3):
        for path in each.paths:
            expected = torch.tensor([0.0, 0.0, 0.0, each.state[()][-1], *path.tokens])[-3:]
            assert torch.equal(each.state[path.tokens], expected)


def test_what_stands_is_the_longest_path_that_the_answer_takes() -> None:
    count = Count()
    drafts = [Path((1,), 0.9), Path((2,), 0.4), Path((2, 3), 0.3), Path((1, 5), 0.2)]
    count.add(drafts, [2, 3, 4])
    count.add([], [7])
    assert (count.rounds, count.rows, count.accepted, count.steps) == (2, 4, 2, 4)
    assert count.speed(0.1) == pytest.approx(4 / (2 + 0.4 + 0.06 * 4))


def test_each_shape_has_the_threshold_that_is_best_for_it() -> None:
    good, bad = Count(10, 10, 20, 9), Count(10, 50, 20, 9)
    row = row_of("chat", 0.1, {("chain", 0.1): bad, ("chain", 0.5): good, ("tree", 0.1): bad})
    assert row["chain"]["rows"] == 1.0
    assert row["tree"]["rows"] == 5.0
    assert row["chain"]["speed"] > row["tree"]["speed"]
