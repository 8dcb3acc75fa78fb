"""exit_rows: what rows leave with, who is passed by afterwards, who is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulated
import reference
from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES
from eecore import ops


class Point:
    """An exit point, with random rows that have come to it or left before."""

    def __init__(
        self,
        num_seqs: int,
        hidden_size: int = 33,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        with_head: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(num_seqs + hidden_size)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator).to(device)

        def states() -> torch.Tensor:
            """Rows with others between them, at addresses that allow no wide accesses."""
            wide = uniform(num_seqs, hidden_size + 3).to(dtype)
            return wide[:, 1 : 1 + hidden_size]

        self.hidden, self.confidence = states(), uniform(num_seqs)
        tokens = (uniform(num_seqs) * 1000).to(torch.int64)
        self.head = ops.SoftmaxConfidence(
            self.confidence, tokens, uniform(num_seqs) + 1, uniform(num_seqs)
        )
        self.accepted = uniform(num_seqs) < 0.5
        self.rows = ops.ExitingRows(
            gone=uniform(num_seqs) < 0.3,
            slot_mapping=(uniform(num_seqs) * 99).to(torch.int64),
            seq_lens=(uniform(num_seqs) * 99).to(torch.int32) + 2,
            hidden=states(),
            confidence=uniform(num_seqs),
            exit_layer=torch.full((num_seqs,), 3, dtype=torch.int32, device=device),
            token=tokens.flip(0) if with_head else None,
            logprob=uniform(num_seqs) if with_head else None,
        )
        if not with_head:
            self.head = None  # type: ignore[assignment]

    def check(self, accepted: torch.Tensor | None) -> None:
        """That the op does what the reference says."""
        arguments = self.hidden, self.confidence, 7, self.rows
        expected = reference.exit_rows(*arguments, accepted, self.head)
        ops.exit_rows(*arguments, accepted=accepted, head=self.head)
        for name, want, got in zip(self.rows._fields, expected, self.rows, strict=True):
            assert (got is want is None) or torch.equal(got, want), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("num_seqs", [0, 1, 7])
def test_matches_the_reference(
    num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    point = Point(num_seqs, hidden_size, dtype, device)
    point.check(point.accepted)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("num_seqs", BATCH_SIZES)
def test_any_batch(num_seqs: int, with_head: bool, device: torch.device) -> None:
    point = Point(num_seqs, 64, device=device, with_head=with_head)
    point.check(point.accepted)
    point.check(None)  # and the rest
    assert point.rows.gone.all()
    point.accepted.fill_(True)
    point.check(point.accepted)  # nobody is left


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("num_seqs", [0, 1, 5])
def test_rows_leave_together(num_seqs: int, flag: bool, device: torch.device) -> None:
    point = Point(num_seqs, device=device)
    before = point.rows.gone.clone()
    point.check(torch.tensor([flag], device=device))
    assert torch.equal(point.rows.gone, before | flag)


def test_whole_rows_in_wide_accesses(device: torch.device) -> None:
    point = Point(3, 128, device=device)
    point.hidden = point.hidden.contiguous()
    point.rows = point.rows._replace(hidden=point.rows.hidden.contiguous())
    point.check(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": torch.zeros(3, dtype=torch.bool)}, r"accepted: expected bool \[num_seqs=4\]"),
        ({"layer": 0}, "layer: expected a positive number .* got 0"),
        ({"head": None}, "token: expected all of token, .* or none, got 2 of them"),
        ({"gone": torch.zeros(4)}, r"gone: expected bool .* got float32 \[4\]"),
        (
            {"hidden": torch.zeros(4, 32)},
            r"final_hidden: .*\[num_seqs=4, hidden_size=33\], got .*32\]",
        ),
        (
            {"hidden": torch.zeros(4, 33, dtype=torch.bfloat16)},
            "final_hidden: expected float32 .* got bfloat16",
        ),
        ({"seq_lens": torch.zeros(4, dtype=torch.int64)}, "seq_lens: expected int32 .* got int64"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    point = Point(4)
    arguments = {"accepted": point.accepted, "layer": 2, "head": point.head}
    rows = point.rows._replace(**{k: v for k, v in change.items() if k in point.rows._fields})
    arguments |= {k: v for k, v in change.items() if k not in point.rows._fields}
    before = [None if t is None else t.clone() for t in rows]
    with pytest.raises(RuntimeError, match=f"exit_rows: {message}"):
        ops.exit_rows(point.hidden, point.confidence, rows=rows, **arguments)
    for old, new in zip(before, rows, strict=True):
        assert (old is new is None) or torch.equal(old, new)


@pytest.mark.parametrize("with_head", [True, False])
def test_opcheck(device: torch.device, with_head: bool) -> None:
    point = Point(6, device=device, with_head=with_head)
    head, rows = point.head, point.rows
    of_head = (head.token, head.top_logit, head.logsumexp) if with_head else (None, None, None)
    torch.library.opcheck(
        torch.ops.eecore.exit_rows.default,
        (
            *(point.hidden, point.confidence, *of_head, point.accepted, 2),
            *(rows.gone, rows.slot_mapping, rows.seq_lens, rows.hidden, rows.confidence),
            *(rows.token, rows.logprob, rows.exit_layer),
        ),
    )
