"""place_head: the places of the head's tokens, and the confidences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from cases import BATCH_SIZES, DTYPES, Tolerance
from eecore import ops
from random_calls import Arguments, Checked, Maker, compare


def place_head(
    head: ops.SoftmaxConfidence,
    given: ops.HeadRows,
    index: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    measured_at: Tensor | None = None,
    exit_layer: Tensor | None = None,
    as_probability: bool = False,
    vocabulary: Tensor | None = None,
) -> ops.HeadRows:
    """The reference: new rows, one by one; see eecore.ops.place_head."""
    out = ops.HeadRows(*(tensor.clone() for tensor in given))
    for j, i in enumerate(range(len(head.token)) if index is None else index.tolist()):
        if kind is not None and int(kind[i]) != wanted:
            continue
        logprob = head.top_logit[j] - head.logsumexp[j]
        token = int(head.token[j])
        if vocabulary is not None and token >= 0:
            token = int(vocabulary[token])
        out.token[i], out.logprob[i] = token, logprob
        if measured_at is None or exit_layer is None or measured_at[i] != exit_layer[i]:
            out.confidence[i] = logprob.exp() if as_probability else head.confidence[j]
    return out


class Placing:
    """The head's results for some of a program's rows."""

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
        """The op has to do what the reference does."""
        expected = place_head(self.head, self.out, **given)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_selected", [0, 1, 4, 5, 33, 70])
def test_rows_of_a_head_that_runs_here_are_placed_like_those_of_one_before(
    num_selected: int, dtype: torch.dtype, device: torch.device
) -> None:
    if not emulated.supports(device, dtype):
        pytest.skip("float16 is for CUDA")
    placing, other = (Placing(num_selected, num_selected + 3, device) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    hidden, norm, weight = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((num_selected, 40), (40,), (1000, 40))
    )
    measure = ops.SoftmaxMeasure(norm, weight, 1e-5)
    for given in (
        {"kind": placing.kind, "wanted": 1, **placing.measured},
        {"vocabulary": placing.vocabulary, "as_probability": True},
    ):
        both: dict[str, Any] = {"index": placing.index, **given}
        ops.place_head(None, placing.out, measure=measure, hidden=hidden, **both)
        ops.place_head(measure(hidden), other.out, **both)
        for got, want in zip(placing.out, other.out, strict=True):
            assert torch.equal(got, want)


def test_a_head_runs_here_or_before() -> None:
    placing = Placing(4, 4, None)
    measure = ops.SoftmaxMeasure(None, torch.ones(9, 8), 1e-5)
    hidden = torch.ones(4, 8)
    given: dict[str, Any]
    for head, given in (
        (None, {}),
        (None, {"measure": measure}),
        (placing.head, {"measure": measure, "hidden": hidden}),
    ):
        with pytest.raises(ValueError, match="place_head: expected a head, or measure and hidden"):
            ops.place_head(head, placing.out, **given)
    for given, message in (
        ({"index": torch.zeros(3).int()}, r"index: expected int32 \[num_selected=4\], got .*3"),
        ({"vocabulary": torch.arange(8)}, r"vocabulary: expected int64 \[vocab_size=9\]"),
        ({"hidden": hidden[:, :7]}, r"lm_head: expected .*hidden_size=7\], got .*\[9, 8\]"),
    ):
        with pytest.raises(RuntimeError, match=f"place_head: {message}"):
            ops.place_head(None, placing.out, **({"measure": measure, "hidden": hidden} | given))


def fuzzed_call(m: Maker) -> Checked:
    selected = m.size(12)
    rows = selected + m.size(4)
    measures = m.chance()
    running, cut = {}, 99
    if m.chance(0.3):
        dtype, size, cut = m.dtype(), m.columns(40), m.size(90, 2)
        weight = m.weight(dtype, cut, size)
        running = {
            "hidden": m.inputs(weight, selected, size, dtype, 3.0),
            "norm_weight": m.maybe(lambda: m.norm_of(weight, dtype, size)),
            "lm_head": weight.weight,
            "eps": 1e-5,
            "lm_head_scale": weight.scale,
            "lm_head_table": weight.table,
        }
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
        "vocabulary": m.maybe(lambda: m.placed(m.shuffled(cut))),
        "out_token": m.placed(m.whole(9, rows)),
        "out_confidence": m.placed(m.uniform(rows)),
        "out_logprob": m.placed(m.uniform(rows)),
        **running,
    }

    def oracle(before: Arguments) -> dict[str, Tensor]:
        names = ("index", "kind", "wanted", "measured_at", "exit_layer", "as_probability")
        names = (*names, "vocabulary")
        outputs = ("out_token", "out_confidence", "out_logprob")
        fields = ("confidence", "token", "logsumexp", "top_logit")
        head = ops.SoftmaxConfidence(*(before[n] for n in fields))
        if running:
            names_of_head = running.keys() - {"hidden"}
            measure = ops.SoftmaxMeasure(**{n: before[n] for n in names_of_head})
            head = measure(before["hidden"])
        new = place_head(
            head,
            ops.HeadRows(*(before[n] for n in outputs)),
            **{n: before[n] for n in names},
        )
        return dict(zip(outputs, new, strict=True)) | head._asdict()

    return given, compare(oracle, Tolerance(1e-5, 1e-6))


# Rounds of self-speculation
