"""exit_rows: rows that are measured, accepted, exit, and stay untouched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from cases import BATCH_SIZES, DTYPES, HIDDEN_SIZES, Tolerance
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare
from tiers import in_all

LAYER = 4
INF = float("inf")


def exit_rows(
    hidden: Tensor,
    layer: int,
    given: ops.ExitingRows,
    active: ops.ActiveRows,
    thresholds: Tensor | None = None,
    confidence: Tensor | None = None,
    head: ops.SoftmaxConfidence | None = None,
    asked: Tensor | None = None,
    decide: bool = True,
    cumulative: bool = False,
) -> tuple[ops.ExitingRows, Tensor, Tensor]:
    """The reference: new rows, slot mapping and lengths, row by row; see eecore.ops.exit_rows."""
    rows = ops.ExitingRows(*(tensor.clone() for tensor in given))
    slot_mapping, seq_lens = active.slot_mapping.clone(), active.seq_lens.clone()
    if confidence is None and head is not None:
        confidence = head.confidence
    if confidence is not None and thresholds is not None:
        measured = range(len(hidden)) if asked is None else asked.tolist()
        for j, i in enumerate(measured):
            r, threshold = int(active.row[i]), float(thresholds[int(active.row[i])])
            if rows.exited[r] or not threshold < float("inf") or (head and rows.accepted[r]):
                continue
            made = confidence[j].clone()
            if cumulative and rows.measured_at[r] > 0:
                made = rows.confidence[r] + (1 - rows.confidence[r]) * made
            rows.confidence[r], rows.measured_at[r] = made, layer
            if head is not None:
                rows.token[r], rows.token_at[r] = head.token[j], layer
                rows.logprob[r] = head.top_logit[j] - head.logsumexp[j]
            if threshold < 1 and float(made) >= threshold:
                rows.accepted[r] = True
    if not decide:
        return rows, slot_mapping, seq_lens
    held_back = bool((given.together & ~given.exited & ~rows.accepted).any())
    for i, r in enumerate(active.row.tolist()):
        accepted = bool(rows.accepted[r]) and not (held_back and given.together[r])
        if given.exited[r] or not (accepted or int(given.exit_after[r]) <= layer):
            continue
        rows.hidden[r], rows.exit_layer[r], rows.exited[r] = hidden[i], layer, True
        if given.fills[r]:
            rows.fill_from[r] = layer
        rows.pending[r] = 2 if given.kind[r] == 2 else int(rows.token_at[r] != layer)
        slot_mapping[i], seq_lens[i] = -1, 1
    rows.all_exited.fill_(bool(rows.exited.all()))
    return rows, slot_mapping, seq_lens


class Point:
    """An exit point after LAYER layers: random rows, some of which have exited or are inactive."""

    def __init__(
        self,
        num_active: int,
        hidden_size: int = 33,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        num_rows: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(num_active + hidden_size)
        num_rows = num_active if num_rows is None else num_rows

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator)

        def whole(below: int, count: int = num_rows) -> torch.Tensor:
            return (uniform(count) * below).to(torch.int32)

        def states(count: int) -> torch.Tensor:
            """Rows with others between them, at addresses that allow no wide accesses."""
            return uniform(count, hidden_size + 3).to(dtype).to(device)[:, 1 : 1 + hidden_size]

        row = torch.randperm(num_rows, generator=generator)[:num_active].sort().values
        self.hidden = states(num_active)
        # Some are 0.5 to the bit, as some thresholds are.
        confidence = torch.where(uniform(num_active) < 0.2, 0.5, uniform(num_active))
        self.head = ops.SoftmaxConfidence(
            *(confidence, (uniform(num_active) * 1000).long()),
            *(uniform(num_active) + 1, uniform(num_active)),
        )
        kinds_of_threshold = torch.tensor([0.0, 0.5, 0.5, 0.7, 1.0, INF])
        self.thresholds = kinds_of_threshold[whole(6).long()].to(device)
        rows = ops.ExitingRows(
            exit_after=torch.where(uniform(num_rows) < 0.3, LAYER, LAYER + 2).int(),
            together=uniform(num_rows) < 0.4,
            fills=uniform(num_rows) < 0.5,
            kind=whole(2) + 1,
            accepted=uniform(num_rows) < 0.3,
            exited=uniform(num_rows) < 0.3,
            exit_layer=whole(4),
            fill_from=whole(4),
            measured_at=whole(4),
            confidence=uniform(num_rows),
            token=(uniform(num_rows) * 1000).long(),
            logprob=-uniform(num_rows),
            token_at=whole(2) + LAYER - 1,
            pending=whole(3),
            hidden=states(num_rows),
            all_exited=torch.zeros(1, dtype=torch.bool),
        )
        active = ops.ActiveRows(
            row=row.int(),
            positions=whole(99, num_active).long(),
            slot_mapping=whole(99, num_active).long(),
            seq_lens=whole(99, num_active) + 2,
            page_table=torch.zeros(num_active, 1, dtype=torch.int32),
            num_active=torch.tensor([num_active], dtype=torch.int32),
        )
        self.head = ops.SoftmaxConfidence(*(tensor.to(device) for tensor in self.head))
        self.rows = ops.ExitingRows(
            *(tensor if tensor.dim() == 2 else tensor.to(device) for tensor in rows)
        )
        self.active = ops.ActiveRows(
            *(None if tensor is None else tensor.to(device) for tensor in active)  # type: ignore[arg-type]
        )

    def check(self, **given: Any) -> None:
        """The op has to do what the reference does."""
        arguments = self.hidden, LAYER, self.rows, self.active
        *expected, slots, lens = _flat(exit_rows(*arguments, **given))
        ops.exit_rows(*arguments, **given)
        for name, want, got in zip(self.rows._fields, expected, self.rows, strict=True):
            assert torch.equal(got, want), name
        assert torch.equal(self.active.slot_mapping, slots)
        assert torch.equal(self.active.seq_lens, lens)


def _flat(result: tuple[ops.ExitingRows, torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    rows, slot_mapping, seq_lens = result
    return [*rows, slot_mapping, seq_lens]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("num_active", [0, 1, 7])
def test_matches_the_reference(
    num_active: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    point = Point(num_active, hidden_size, dtype, device)
    point.check(thresholds=point.thresholds, head=point.head)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("num_active", BATCH_SIZES)
def test_any_batch(num_active: int, with_head: bool, device: torch.device) -> None:
    """Rows are measured without exits, then again with other confidences."""
    point = Point(num_active, 16, device=device)
    given: dict[str, Any] = {"thresholds": point.thresholds}
    given |= {"head": point.head} if with_head else {"confidence": point.head.confidence}
    point.check(**given, decide=False)
    if with_head:
        given["confidence"] = point.head.confidence.flip(0)  # goes before the head's
    point.check(**given)
    point.check()  # no row is measured
    point.rows.exit_after.fill_(LAYER)
    point.check()
    assert point.rows.exited.all()
    assert point.rows.all_exited


@pytest.mark.parametrize("unsure", [None, 1])
def test_rows_exit_together(unsure: int | None, device: torch.device) -> None:
    """One row below its threshold holds back the others, except rows that exit alone."""
    point = Point(4, device=device)
    rows = point.rows
    rows.exited.zero_()
    rows.accepted.zero_()
    rows.exit_after.fill_(LAYER + 1)
    rows.together.copy_(torch.tensor([True, True, False, True], device=device))
    confidence = torch.full((4,), 0.9, device=device)
    if unsure is not None:
        confidence[unsure] = 0.1
    thresholds = torch.full((4,), 0.5, device=device)
    point.check(thresholds=thresholds, confidence=confidence)
    alone = [False, False, True, False]
    assert rows.exited.tolist() == ([True] * 4 if unsure is None else alone)
    assert rows.all_exited.item() is (unsure is None)
    if unsure is not None:  # once it exits, so do the rows that it held back
        point.check(thresholds=thresholds, confidence=confidence.clamp(min=0.5))
        assert rows.all_exited.item()


def test_what_is_measured_adds_up_over_layers(device: torch.device) -> None:
    """Exit probabilities: a row's confidence is that of exiting after any layer so far."""
    point = Point(4, device=device)
    thresholds = torch.tensor([0.7, 0.8, 1.0, INF], device=device)
    before = ops.ExitingRows(*(tensor.clone() for tensor in point.rows))
    before.measured_at.zero_()
    for tensor in (before.exited, before.accepted, before.together):
        tensor.zero_()
    before.exit_after.fill_(9)
    measured = torch.tensor([0.5, 0.5, 0.5, 0.5], device=device)
    for layer, wanted in ((1, 0.5), (2, 0.75)):
        ops.exit_rows(
            *(point.hidden, layer, before, point.active),
            thresholds=thresholds,
            confidence=measured,
            cumulative=True,
        )
        assert before.confidence[:3].tolist() == [wanted] * 3
    assert before.exited.tolist()[:4] == [True, False, False, False]
    assert before.exit_layer[0] == 2
    assert before.measured_at[3] == 0


def test_thresholds_that_never_accept(device: torch.device) -> None:
    point = Point(4, device=device)
    rows = point.rows
    rows.exited.zero_()
    rows.accepted.zero_()
    rows.confidence.fill_(-1)
    thresholds = torch.tensor([1.0, 0.5, INF, 2.0], device=device)
    confidence = torch.tensor([1.0, float("nan"), 1.0, 3.0], device=device)
    ops.exit_rows(
        point.hidden, LAYER, rows, point.active, thresholds=thresholds, confidence=confidence
    )
    assert not rows.accepted.any()
    assert (rows.measured_at == LAYER).tolist() == [True, True, False, True]
    assert rows.confidence[2] == -1
    assert rows.confidence[[0, 3]].tolist() == [1.0, 3.0]


def measure_of(kind: str, hidden: torch.Tensor) -> Any:
    """The measure of rows: two linear layers, whose work several blocks share on a GPU."""
    size, generator = hidden.shape[1], torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(hidden.device) * size**-0.5

    if kind == "softmax":
        norm = 1 + normal(size).to(hidden.dtype)
        return ops.SoftmaxMeasure(norm, 9 * normal(97, size).to(hidden.dtype), 1e-5)
    if kind == "cosine":
        return ops.CosineMeasure(hidden + (9 * normal(*hidden.shape)).to(hidden.dtype))
    if kind == "linear":
        return ops.MlpMeasure(normal(2, size), normal(2))
    inner = 2**16 // size + 1
    return ops.MlpMeasure(normal(inner, size), normal(inner), normal(2, inner), normal(2))


MEASURES = ("softmax", "cosine", "linear", "mlp")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_active", [0, 1, 7, 8, 9, 33, *in_all(32, 70)])
@pytest.mark.parametrize("kind", MEASURES)
def test_rows_measured_here_exit_like_rows_measured_before(
    kind: str, num_active: int, dtype: torch.dtype, device: torch.device
) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    point, other = (Point(num_active, 100, dtype, device) for _ in range(2))
    measure = measure_of(kind, point.hidden)
    said = measure(point.hidden)
    before: dict[str, Any] = {"head": said} if kind == "softmax" else {"confidence": said}
    if num_active:  # one row is exactly at its threshold
        confidence = said.confidence if kind == "softmax" else said
        thresholds = torch.where(point.thresholds == 0.5, confidence.median(), point.thresholds)
        point.thresholds.copy_(thresholds)
        other.thresholds.copy_(thresholds)
    for decide in (False, True):
        ops.exit_rows(
            *(point.hidden, LAYER, point.rows, point.active),
            thresholds=point.thresholds,
            measure=measure,
            decide=decide,
        )
        ops.exit_rows(
            *(other.hidden, LAYER, other.rows, other.active),
            **(before | {"thresholds": other.thresholds, "decide": decide}),
        )
        for name, want, got in zip(other.rows._fields, other.rows, point.rows, strict=True):
            assert torch.equal(got, want), name
    assert torch.equal(point.active.slot_mapping, other.active.slot_mapping)
    assert torch.equal(point.active.seq_lens, other.active.seq_lens)
    if num_active >= 32:
        asked = (point.rows.measured_at == LAYER) & (point.thresholds < 1)
        assert set(point.rows.accepted[asked].tolist()) == {False, True}


def test_rows_are_measured_here_or_before() -> None:
    point = Point(4)
    measure = ops.CosineMeasure(point.hidden)
    arguments = point.hidden, LAYER, point.rows, point.active
    given: dict[str, Any]
    for given in ({"head": point.head}, {"confidence": point.head.confidence}):
        with pytest.raises(ValueError, match="measure: expected None with a confidence or a head"):
            ops.exit_rows(*arguments, thresholds=point.thresholds, measure=measure, **given)
    with pytest.raises(RuntimeError, match="of all active rows, to be measured here, got one of"):
        ops.exit_rows(
            *arguments,
            thresholds=point.thresholds,
            asked=torch.zeros(1, dtype=torch.int32),
            measure=measure,
        )


def test_a_condition_is_for_captured_streams(device: torch.device) -> None:
    point = Point(4, device=device)
    arguments = point.hidden, LAYER, point.rows, point.active
    got = "a stream that is not captured" if emulated.is_cuda_kernel(device) else "the CPU"
    with pytest.raises(RuntimeError, match=f"condition: expected None on {got}, got 3"):
        ops.exit_rows(*arguments, condition=3)
    with pytest.raises(RuntimeError, match="condition: expected None with decide=False, got one"):
        ops.exit_rows(*arguments, decide=False, condition=3)
    assert not point.rows.all_exited


def fuzzed_call(m: Maker) -> Checked:
    measure = m.one_of("softmax", "cosine", "mlp") if m.chance(0.3) else None
    active, dtype = m.size(12), m.dtype()
    size = m.size(40) if measure is None else m.columns(40)
    rows = active + m.size(4)
    layer = 5
    asked = m.maybe(lambda: m.placed(m.shuffled(active)[: m.size(active)].int()))
    if measure is not None:
        asked = None
    measured = active if asked is None else len(asked)
    has_confidence = measure is not None or m.chance(0.7)
    has_head = has_confidence and (measure == "softmax" or m.chance())
    limits = torch.tensor([0.0, 0.5, 0.7, 1.0, math.inf])
    hidden, measuring = m.states(active, size, dtype), {}
    if measure == "softmax":
        head = m.weight(dtype, m.size(90, 2), size)
        hidden = m.inputs(head, active, size, dtype, 3.0)
        measuring = {
            "norm_weight": m.maybe(lambda: m.norm_of(head, dtype, size)),
            "lm_head": head.weight,
            "eps": 1e-5,
            "lm_head_scale": head.scale,
            "lm_head_table": head.table,
        }
    elif measure == "cosine":
        measuring = {"previous": m.states(active, size, dtype)}
    elif measure == "mlp":
        inner = m.size(20, 1)
        measuring = {
            "weight1": m.placed(m.normal(inner, size)),
            "bias1": m.maybe(lambda: m.placed(m.normal(inner))),
            "weight2": m.placed(m.normal(2, inner)),
            "bias2": m.maybe(lambda: m.placed(m.normal(2))),
        }
    given = {
        "hidden": hidden,
        "layer": layer,
        "confidence": m.placed(m.uniform(measured)) if has_confidence else None,
        "token": m.placed(m.whole(99, measured)) if has_head else None,
        "top_logit": m.placed(m.uniform(measured)) if has_head else None,
        "logsumexp": m.placed(m.uniform(measured) + 1) if has_head else None,
        "thresholds": m.placed(limits[m.whole(5, rows)]),
        "asked": asked,
        "decide": m.chance(0.8),
        "cumulative": has_confidence and not has_head and m.chance(),
        "exit_after": m.placed(torch.where(m.uniform(rows) < 0.3, layer, layer + 2).int()),
        "together": m.flags(rows, share=0.4),
        "fills": m.flags(rows),
        "kind": m.placed((m.whole(2, rows) + 1).int()),
        "accepted": m.flags(rows, share=0.3),
        "exited": m.flags(rows, share=0.3),
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
        "all_exited": m.flags(1),
        "row": m.placed(m.shuffled(rows)[:active].sort().values.int()),
        "slot_mapping": m.placed(m.whole(99, active)),
        "seq_lens": m.placed(m.whole(99, active).int()),
        **measuring,
    }
    names = (
        *("exit_after", "together", "fills", "kind", "accepted", "exited", "exit_layer"),
        *("fill_from", "measured_at", "final_confidence", "final_token", "final_logprob"),
        *("token_at", "pending", "final_hidden", "all_exited"),
    )

    def oracle(before: Arguments) -> dict[str, Tensor]:
        head, confidence = None, before["confidence"]
        fields = ("confidence", "token", "logsumexp", "top_logit")
        if before["token"] is not None:
            head = ops.SoftmaxConfidence(*(before[n] for n in fields))
        # Measured before, by the op itself: on a threshold every bit counts.
        measured_with = {name: before[name] for name in measuring}
        if measure == "softmax":
            head = ops.SoftmaxMeasure(**measured_with)(before["hidden"])
            confidence = head.confidence
        elif measure == "cosine":
            confidence = ops.CosineMeasure(**measured_with)(before["hidden"])
        elif measure == "mlp":
            confidence = ops.MlpMeasure(**measured_with)(before["hidden"])
        new, slot_mapping, seq_lens = exit_rows(
            before["hidden"],
            before["layer"],
            ops.ExitingRows(*(before[n] for n in names)),
            ops.ActiveRows(*map(before.get, ops.ActiveRows._fields)),
            *(before["thresholds"], confidence, head, before["asked"]),
            before["decide"],
            before["cumulative"],
        )
        changed = dict(zip(names, new, strict=True))
        if confidence is not None:
            changed["confidence"] = confidence
        if head is not None:
            changed |= {name: getattr(head, name) for name in fields[1:]}
        return {**changed, "slot_mapping": slot_mapping, "seq_lens": seq_lens}

    return given, compare(oracle, Tolerance(1e-6, 1e-6))
