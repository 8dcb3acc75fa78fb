"""Confidence measures, the exits that they decide, and the rows of an exit step."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor

from eecore.ops.registered import compiled

__all__ = [
    "AcceptMask",
    "AcceptRows",
    "ActiveRows",
    "CosineMeasure",
    "ExitingRows",
    "HeadRows",
    "MlpMeasure",
    "SelectedRows",
    "SoftmaxConfidence",
    "SoftmaxMeasure",
    "accept_mask",
    "compact_rows",
    "exit_confidence_cosine",
    "exit_confidence_mlp",
    "exit_confidence_softmax",
    "exit_rows",
    "place_head",
    "select_rows",
]

_accept_mask = compiled("accept_mask")
# CPU only: on CUDA exited rows are masked, since fewer rows would change a graph's shapes.
_compact_rows = compiled("compact_rows", cpu_only=True)
_exit_confidence_cosine = compiled("exit_confidence_cosine")
_exit_confidence_mlp = compiled("exit_confidence_mlp")
_exit_confidence_softmax = compiled("exit_confidence_softmax")
_exit_rows = compiled("exit_rows")
_place_head = compiled("place_head")
_select_rows = compiled("select_rows", cpu_only=True)


class AcceptMask(NamedTuple):
    """The rows that go on after an exit point."""

    survivors: Tensor
    """int32 [num_seqs]: rows not accepted, ascending, then -1."""
    num_survivors: Tensor
    """int32 [1]"""
    all_accepted: Tensor
    """bool [1]"""


def accept_mask(
    confidence: Tensor,
    thresholds: Tensor,
    layer: int,
    status: Tensor,
    exit_layer: Tensor,
) -> AcceptMask:
    """Update the sticky status of each row: accepted once ``confidence >= threshold``.

    A threshold of 1 or more never accepts, nor does a NaN. Rows accepted for the first time get
    ``layer`` in ``exit_layer``. (Early-exit framework §3.1, Algorithm 1; CALM §3.)

    Args:
        confidence: float32 [num_seqs].
        thresholds: float32 [num_seqs], decayed already; a base threshold of 1 must stay 1.
        layer: how many layers have run, 1..num_layers.
        status: bool [num_seqs], updated in place.
        exit_layer: int32 [num_seqs], updated in place.
    """
    mask = _empty_mask(confidence)
    _accept_mask(confidence, thresholds, layer, status, exit_layer, *mask)
    return mask


def _empty_mask(confidence: Tensor) -> AcceptMask:
    device = confidence.device
    return AcceptMask(
        torch.empty(confidence.numel(), dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.bool, device=device),
    )


class AcceptRows(NamedTuple):
    """The arguments of :func:`accept_mask` after the confidences, for ops that also accept rows.

    On CUDA a few rows are measured and accepted in one launch.
    """

    thresholds: Tensor
    """float32 [num_seqs]"""
    layer: int
    """How many layers have run, 1..num_layers."""
    status: Tensor
    """bool [num_seqs], updated in place."""
    exit_layer: Tensor
    """int32 [num_seqs], updated in place."""


class SoftmaxConfidence(NamedTuple):
    """The results of one pass over the LM head for each row."""

    confidence: Tensor
    """float32 [num_seqs]: the gap of the two largest probabilities."""
    token: Tensor
    """int64 [num_seqs]: the most probable token, the lowest id among equals."""
    logsumexp: Tensor
    """float32 [num_seqs]"""
    top_logit: Tensor
    """float32 [num_seqs]: the largest logit; minus logsumexp it is the token's log-probability."""


def exit_confidence_softmax(
    hidden: Tensor,
    norm_weight: Tensor | None,
    lm_head: Tensor,
    eps: float,
    *,
    lm_head_scale: Tensor | None = None,
    lm_head_table: Tensor | None = None,
    multiplier: float = 1.0,
    soft_cap: float = 0.0,
) -> SoftmaxConfidence:
    """Final RMS norm, LM head, top-2 gap, argmax and log-sum-exp; no logits in memory.

    The gap is ``(1 - exp(x2 - m)) / s`` with m and x2 the two largest logits and s the sum of
    ``exp(x - m)``. (Early-exit framework §2.1, softmax response; CALM §3.)

    Args:
        hidden: [num_seqs, hidden_size], the residual stream before the final norm.
        norm_weight: [hidden_size]; None when ``hidden`` is normed already.
        lm_head: [vocab_size, hidden_size], vocab_size >= 2; int8 with ``lm_head_scale``, packed
            bytes with ``lm_head_table``.
        eps: epsilon of the RMS norm.
        lm_head_scale: float32 [vocab_size], see :func:`skinny_linear`.
        lm_head_table: int64 [vocab_size], see :func:`pack_weight`.
        multiplier: factor of the logits.
        soft_cap: c > 0: multiplied logits l become ``c * tanh(l / c)``; 0: no cap.
    """
    out = _empty_head(hidden)
    head = norm_weight, lm_head, lm_head_scale, eps
    _exit_confidence_softmax(hidden, *head, *out, lm_head_table, multiplier, soft_cap)
    return out


def _empty_head(hidden: Tensor) -> SoftmaxConfidence:
    num_seqs, device = hidden.shape[0], hidden.device
    confidence = torch.empty(num_seqs, dtype=torch.float32, device=device)
    token = torch.empty(num_seqs, dtype=torch.int64, device=device)
    return SoftmaxConfidence(
        confidence, token, torch.empty_like(confidence), torch.empty_like(confidence)
    )


class ActiveRows(NamedTuple):
    """The rows of a decoding program that go on, and the input of their next layers.

    A program has num_rows rows. On the CPU active rows move up where rows exit; on CUDA all rows
    stay in place, and exited rows are masked.
    """

    row: Tensor
    """int32 [n]: the program's row of each active row, ascending."""
    positions: Tensor
    """int64 [n]"""
    slot_mapping: Tensor
    """int64 [n]; -1 for masked rows: they write no keys or values."""
    seq_lens: Tensor
    """int32 [n]; 1 for masked rows: their attention costs next to nothing."""
    page_table: Tensor
    """int32 [n, max_pages]"""
    num_active: Tensor
    """int32 [1]: how many of the n rows are active."""
    token_ids: Tensor | None = None
    """int64 [n]"""
    cross_page_table: Tensor | None = None
    """int32 [n, max_cross_pages]"""
    cross_seq_lens: Tensor | None = None
    """int32 [n]"""


class ExitingRows(NamedTuple):
    """All rows of a program with exit points: how they exit, which have exited, and their results.

    The first four tensors are read, the rest are updated in place. A row that is padding counts as
    exited from the start.
    """

    exit_after: Tensor
    """int32 [num_rows]: how many layers run before a row exits, accepted or not."""
    together: Tensor
    """bool [num_rows]: a row exits once all such rows are accepted."""
    fills: Tensor
    """bool [num_rows]: the layers that a row skips are filled."""
    kind: Tensor
    """int32 [num_rows]: how a row's token is made: 1 by the head, 2 from logits."""
    accepted: Tensor
    """bool [num_rows]: accepted rows, which stay accepted."""
    exited: Tensor
    """bool [num_rows]: rows that have exited."""
    exit_layer: Tensor
    """int32 [num_rows]: how many layers had run when a row exited."""
    fill_from: Tensor
    """int32 [num_rows]: the first layer to fill; written for rows that fill."""
    measured_at: Tensor
    """int32 [num_rows]: the layer of ``confidence``."""
    confidence: Tensor
    """float32 [num_rows]: the last one measured, or the cumulative one of all measured."""
    token: Tensor
    """int64 [num_rows]: the head's token at ``token_at``."""
    logprob: Tensor
    """float32 [num_rows]: the log-probability of ``token``."""
    token_at: Tensor
    """int32 [num_rows]: the layer of ``token``."""
    pending: Tensor
    """int32 [num_rows], for exited rows: 2 where the token is made from logits; otherwise 0 where
    ``token`` was made from the row's exit state, else 1."""
    hidden: Tensor
    """[num_rows, hidden_size], contiguous rows: the row's exit state."""
    all_exited: Tensor
    """bool [1]"""


class SoftmaxMeasure(NamedTuple):
    """The arguments of :func:`exit_confidence_softmax` after the states."""

    norm_weight: Tensor | None
    lm_head: Tensor
    eps: float
    lm_head_scale: Tensor | None = None
    lm_head_table: Tensor | None = None
    multiplier: float = 1.0
    soft_cap: float = 0.0

    def __call__(self, hidden: Tensor) -> SoftmaxConfidence:
        """Measure states, [num_seqs, hidden_size]."""
        norm_weight, lm_head, eps, scale, table, multiplier, soft_cap = self
        return exit_confidence_softmax(
            hidden,
            norm_weight,
            lm_head,
            eps,
            lm_head_scale=scale,
            lm_head_table=table,
            multiplier=multiplier,
            soft_cap=soft_cap,
        )


class CosineMeasure(NamedTuple):
    """The argument of :func:`exit_confidence_cosine` before the states."""

    previous: Tensor
    """[num_seqs, hidden_size], states after one layer fewer."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Measure states, [num_seqs, hidden_size]."""
        return exit_confidence_cosine(self.previous, hidden)


class MlpMeasure(NamedTuple):
    """The arguments of :func:`exit_confidence_mlp` after the states."""

    weight1: Tensor
    bias1: Tensor | None = None
    weight2: Tensor | None = None
    bias2: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Measure states, [num_seqs, hidden_size]."""
        return exit_confidence_mlp(hidden, *self)


def exit_rows(
    hidden: Tensor,
    layer: int,
    rows: ExitingRows,
    active: ActiveRows,
    *,
    thresholds: Tensor | None = None,
    confidence: Tensor | None = None,
    head: SoftmaxConfidence | None = None,
    asked: Tensor | None = None,
    decide: bool = True,
    measure: SoftmaxMeasure | CosineMeasure | MlpMeasure | None = None,
    condition: int | None = None,
    cumulative: bool = False,
) -> None:
    """Store the confidences measured after a layer, or measure them here, and let rows exit.

    A row that is asked is accepted, once and for all, when its confidence reaches its threshold; a
    threshold of 1 or more never accepts, nor does a NaN. An accepted row exits, as does a row
    that has run ``exit_after`` layers: its results are kept, and later layers skip it. Nothing
    changes for rows that exited before. (Early-exit framework §3.1, Algorithm 1; CALM §3.)

    Args:
        hidden: [n, hidden_size], states of the active rows after ``layer`` layers.
        layer: how many layers have run, 1..num_layers.
        rows: updated in place.
        active: its ``slot_mapping`` and ``seq_lens`` are updated where a row exits.
        thresholds: float32 [num_rows]; infinity: the row is not asked here.
        confidence: float32 [num_asked]; ``head``'s when None. Without both no row is measured.
        head: the head's results for the rows asked. Rows accepted before are not measured again.
        asked: int32 [num_asked], the active rows that were measured, each once; None: all.
        decide: False: only measure.
        measure: measure all active rows first, in place of ``confidence`` and ``head``, with the
            same results. On CUDA a few rows are measured and exit in one launch, and an LM head is
            read only if some row is asked.
        condition: from :func:`captured_condition`: its body runs if a row stays. Only on CUDA, on
            a stream that is captured.
        cumulative: each measured value is the probability that a row exits here if it has not
            exited before; its confidence is the probability that it exits here or before,
            ``1 - prod_i (1 - measured_i)`` over all layers at which it was measured. Not with a
            head.
    """
    if measure is not None and (confidence is not None or head is not None):
        raise ValueError("measure: expected None with a confidence or a head, got both")
    given: dict[str, Tensor | float | None] = {}
    if measure is not None:
        given = measure._asdict()
        if isinstance(measure, SoftmaxMeasure):
            head = _empty_head(hidden)
        else:
            confidence = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    token = top_logit = logsumexp = None
    if head is not None:
        token, top_logit, logsumexp = head.token, head.top_logit, head.logsumexp
        confidence = head.confidence if confidence is None else confidence
    _exit_rows(
        hidden,
        layer,
        confidence,
        token,
        top_logit,
        logsumexp,
        thresholds,
        asked,
        decide,
        *rows,
        active.row,
        active.slot_mapping,
        active.seq_lens,
        **given,
        condition=condition,
        cumulative=cumulative,
    )


class SelectedRows(NamedTuple):
    """Some of the active rows."""

    index: Tensor  # type: ignore[assignment]  # a tuple has methods of these names
    """int32 [n]: the active rows picked, ascending; nothing is written after ``count``."""
    count: Tensor  # type: ignore[assignment]
    """int32 [1]"""
    hidden: Tensor
    """[n, hidden_size], states of these rows; nothing is written after ``count``."""


def select_rows(
    hidden: Tensor,
    *,
    row: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    thresholds: Tensor | None = None,
    accepted: Tensor | None = None,
    index: Tensor | None = None,
    count: Tensor | None = None,
    states: Tensor | None = None,
) -> SelectedRows:
    """Pick the active rows that a part of a program is for, and gather their states.

    Args:
        hidden: [n, hidden_size], states of the active rows.
        row: int32 [n], the program's row of each active row; None: row i is row i.
        kind: int32 [num_rows]; rows of the ``wanted`` kind are picked. None: of any kind.
        wanted: a kind.
        thresholds: float32 [num_rows]; rows with infinity are not picked.
        accepted: bool [num_rows]; accepted rows are not picked.
        index: int32 [n], written; allocated when None.
        count: int32 [1], written; allocated when None.
        states: [n, hidden_size], written, any row stride that keeps rows apart; ``hidden`` itself,
            or apart from it; allocated when None.
    """
    if index is None:
        index = torch.empty(hidden.shape[0], dtype=torch.int32, device=hidden.device)
    if count is None:
        count = torch.empty(1, dtype=torch.int32, device=hidden.device)
    if states is None:
        states = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _select_rows(hidden, row, kind, wanted, thresholds, accepted, index, count, states)
    return SelectedRows(index, count, states)


def compact_rows(done: Tensor, active: ActiveRows, hidden: Tensor | None = None) -> None:
    """Move the active rows that stay up to the places of rows that exit, in the same order.

    Rows after the new ``active.num_active`` are undefined.

    Args:
        done: bool [num_rows], which of the program's rows are done.
        active: updated in place; all n rows are read.
        hidden: [n, hidden_size], contiguous rows, states of the active rows, updated in place.
    """
    _compact_rows(done, *active, hidden)


class HeadRows(NamedTuple):
    """The tokens of a program's rows, updated in place."""

    token: Tensor
    """int64 [num_rows]"""
    confidence: Tensor
    """float32 [num_rows]"""
    logprob: Tensor
    """float32 [num_rows]: the log-probability of ``token``."""


def place_head(
    head: SoftmaxConfidence | None,
    out: HeadRows,
    *,
    index: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    measured_at: Tensor | None = None,
    exit_layer: Tensor | None = None,
    as_probability: bool = False,
    vocabulary: Tensor | None = None,
    measure: SoftmaxMeasure | None = None,
    hidden: Tensor | None = None,
) -> None:
    """Write the head's results for some rows to their places among all rows.

    Args:
        head: the head's results for the selected rows; None with ``measure``.
        out: updated in place.
        index: int32 [num_selected], the row of each selected one, each once; None: row j is row j.
        kind: int32 [num_rows]; rows that are not of the ``wanted`` kind are left alone.
        wanted: a kind.
        measured_at: int32 [num_rows], with ``exit_layer``: where both are the same layer, the row
            keeps its confidence.
        exit_layer: int32 [num_rows].
        as_probability: the confidence is the token's probability, not the head's.
        vocabulary: int64 [vocab_size], the token of each row of a head that was cut; None: row t is
            token t. A token of -1 stays -1.
        measure: run the head first, on ``hidden``, with the same results. On CUDA that saves a
            launch, and the head is not read if no row is of the ``wanted`` kind.
        hidden: [num_selected, hidden_size], with ``measure``.
    """
    given: dict[str, Tensor | float | None] = {}
    if measure is not None and hidden is not None and head is None:
        given = {"hidden": hidden, **measure._asdict()}
        head = _empty_head(hidden)
    elif measure is not None or hidden is not None or head is None:
        raise ValueError("place_head: expected a head, or measure and hidden, got something else")
    _place_head(
        *(*head, index, kind, wanted, measured_at, exit_layer, as_probability, vocabulary),
        *out,
        **given,
    )


@overload
def exit_confidence_cosine(previous: Tensor, hidden: Tensor, *, accept: None = None) -> Tensor: ...


@overload
def exit_confidence_cosine(
    previous: Tensor, hidden: Tensor, *, accept: AcceptRows
) -> tuple[Tensor, AcceptMask]: ...


def exit_confidence_cosine(
    previous: Tensor, hidden: Tensor, *, accept: AcceptRows | None = None
) -> Tensor | tuple[Tensor, AcceptMask]:
    """Cosine similarity of the states of two consecutive layers, per row; 0 for a zero vector.

    (Early-exit framework §2.1, hidden states similarity.)

    Args:
        previous: [num_seqs, hidden_size], states after one layer fewer.
        hidden: [num_seqs, hidden_size].
        accept: also accept the rows, as :func:`accept_mask` does.

    Returns:
        float32 [num_seqs]; with ``accept`` that and the mask.
    """
    confidence = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    if accept is None:
        _exit_confidence_cosine(previous, hidden, confidence)
        return confidence
    mask = _empty_mask(confidence)
    _exit_confidence_cosine(previous, hidden, confidence, *accept, *mask)
    return confidence, mask


@overload
def exit_confidence_mlp(
    hidden: Tensor,
    weight1: Tensor,
    bias1: Tensor | None = None,
    weight2: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    accept: None = None,
) -> Tensor: ...


@overload
def exit_confidence_mlp(
    hidden: Tensor,
    weight1: Tensor,
    bias1: Tensor | None = None,
    weight2: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    accept: AcceptRows,
) -> tuple[Tensor, AcceptMask]: ...


def exit_confidence_mlp(
    hidden: Tensor,
    weight1: Tensor,
    bias1: Tensor | None = None,
    weight2: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    accept: AcceptRows | None = None,
) -> Tensor | tuple[Tensor, AcceptMask]:
    """``softmax(M(hidden))[1]`` of an early-exit classifier on the un-normed state.

    With ``weight2`` M has one ReLU hidden layer, without it M is one linear layer. (Early-exit
    framework §2.1, dedicated classifier; CALM §3.)

    Args:
        hidden: [num_seqs, hidden_size].
        weight1: float32 [inner_size, hidden_size]; inner_size is 2 without ``weight2``.
        bias1: float32 [inner_size].
        weight2: float32 [2, inner_size].
        bias2: float32 [2], only with ``weight2``.
        accept: also accept the rows, as :func:`accept_mask` does.

    Returns:
        float32 [num_seqs]; with ``accept`` that and the mask.
    """
    confidence = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    classifier = (hidden, weight1, bias1, weight2, bias2)
    if accept is None:
        _exit_confidence_mlp(*classifier, confidence)
        return confidence
    mask = _empty_mask(confidence)
    _exit_confidence_mlp(*classifier, confidence, *accept, *mask)
    return confidence, mask
