"""place_head: where the head's tokens go, and what becomes of confidences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reference
from cases import BATCH_SIZES
from eecore import ops


class Placing:
    """What the head gives of some of a program's rows."""

    def __init__(self, num_selected: int, num_rows: int, device: torch.device | None) -> None:
        generator = torch.Generator().manual_seed(num_selected)

        def uniform(count: int) -> torch.Tensor:
            return torch.rand(count, generator=generator).to(device)

        def whole(count: int, below: int) -> torch.Tensor:
            return (uniform(count) * below).int()

        self.head = ops.SoftmaxConfidence(
            *(uniform(num_selected), whole(num_selected, 1000).long()),
            *(uniform(num_selected) + 1, uniform(num_selected)),
        )
        self.out = ops.HeadRows(-uniform(num_rows).long(), uniform(num_rows), -uniform(num_rows))
        index = torch.randperm(num_rows, generator=generator)[:num_selected]
        self.index = index.sort().values.int().to(device)
        self.kind = whole(num_rows, 3)
        self.vocabulary = torch.randperm(1000, generator=generator).to(device)
        self.measured = {"measured_at": whole(num_rows, 3), "exit_layer": whole(num_rows, 3)}

    def check(self, **given: Any) -> None:
        """That the op does what the reference says."""
        expected = reference.place_head(self.head, self.out, **given)
        ops.place_head(self.head, self.out, **given)
        assert torch.equal(self.out.token, expected.token)
        assert torch.equal(self.out.logprob, expected.logprob)
        # An exponential function is right to a few units in the last place.
        tolerance = 1e-6 if given.get("as_probability") else 0.0
        torch.testing.assert_close(
            self.out.confidence, expected.confidence, rtol=tolerance, atol=0.0
        )


@pytest.mark.parametrize("as_probability", [True, False])
@pytest.mark.parametrize("num_selected", BATCH_SIZES)
def test_matches_the_reference(
    num_selected: int, as_probability: bool, device: torch.device
) -> None:
    placing = Placing(num_selected, num_selected + 3, device)
    placing.check(
        index=placing.index,
        kind=placing.kind,
        wanted=1,
        **placing.measured,
        as_probability=as_probability,
    )
    placing.check(index=placing.index, as_probability=as_probability)
    placing.head.token[num_selected // 2 :] = -1
    placing.check(index=placing.index, vocabulary=placing.vocabulary)


@pytest.mark.parametrize("num_selected", [0, 1, 7])
def test_rows_in_their_places(num_selected: int, device: torch.device) -> None:
    """Without an index, of all rows or the first few."""
    placing = Placing(num_selected, num_selected + 2, device)
    placing.check(kind=placing.kind, wanted=2)
    placing.check(**placing.measured)
    placing = Placing(num_selected, num_selected, device)
    placing.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": torch.tensor([0, 1, 4]).int()}, r"index: expected values in \[0, 4\), got 4"),
        ({"index": torch.zeros(3).long()}, "index: expected int32 .* got int64"),
        ({"kind": torch.zeros(3).int()}, r"kind: expected int32 \[num_rows=4\], got int32 \[3\]"),
        ({"wanted": -(1 << 40)}, "wanted: expected a kind of 32 bits"),
        ({"vocabulary": torch.zeros(9).int()}, "vocabulary: expected int64 .* got int32"),
        (
            {"vocabulary": torch.zeros(1).long()},
            r"token: expected values in \[-1, 1\), got",
        ),
        ({"exit_layer": None}, "exit_layer: expected both measured_at and exit_layer, or none"),
        ({"measured_at": None}, "measured_at: expected both measured_at and exit_layer, or none"),
        ({"token": torch.zeros(4).int()}, "out_token: expected int64 .* got int32"),
        ({"logprob": torch.zeros(5)}, r"out_logprob: expected float32 \[num_rows=4\]"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    placing = Placing(3, 4, None)
    out = placing.out._replace(**{k: v for k, v in change.items() if k in ops.HeadRows._fields})
    given = {"index": placing.index, "kind": placing.kind, **placing.measured}
    given |= {k: v for k, v in change.items() if k not in ops.HeadRows._fields}
    before = [tensor.clone() for tensor in out]
    with pytest.raises(RuntimeError, match=f"place_head: {message}"):
        ops.place_head(placing.head, out, **given)
    for old, new in zip(before, out, strict=True):
        assert torch.equal(old, new)


def test_more_rows_than_there_are_places_for() -> None:
    placing = Placing(4, 4, None)
    out = ops.HeadRows(*(tensor[:3] for tensor in placing.out))
    with pytest.raises(RuntimeError, match=r"token: expected at most num_rows=3 rows .* got 4"):
        ops.place_head(placing.head, out)


def test_opcheck(device: torch.device) -> None:
    placing = Placing(4, 6, device)
    torch.library.opcheck(
        torch.ops.eecore.place_head.default,
        (
            *(*placing.head, placing.index, placing.kind, 1),
            *(*placing.measured.values(), True, placing.vocabulary, *placing.out),
        ),
    )
