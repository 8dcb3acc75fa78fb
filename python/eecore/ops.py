"""The compiled ops: a typed wrapper and a fake kernel per op. The only importer of the modules.

Shapes are given as ``[num_tokens, num_q_heads, head_dim]``. Every op runs on the CPU (float32 and
bfloat16) and, where the CUDA module has it, on CUDA (also float16). An op writes into tensors that
it is given and returns nothing that aliases them; the wrappers allocate outputs that were left out.
A tensor of the wrong shape, dtype, device or stride is a ``RuntimeError`` that names the argument,
what was expected and what came, raised before anything is written. So is memory that is written and
shared with another argument, or with itself. Zero tokens or sequences are legal.

The ops are registered as ``torch.ops.eecore.*`` with their mutations declared, so they work under
``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eecore import _C

if torch.cuda.is_available() and _C.build_info()["cuda"]:
    from eecore import _cuda  # importing it registers the CUDA kernels

__all__ = [
    "BLOCK_FORMATS",
    "AcceptMask",
    "AcceptRows",
    "ActiveRows",
    "CallTrace",
    "CapturedGraph",
    "CrossAttention",
    "DecoderWeights",
    "DraftRound",
    "EndedRound",
    "ExitingRows",
    "HeadRows",
    "Matrix",
    "SampledRows",
    "SamplingRows",
    "SelectedRows",
    "SoftmaxConfidence",
    "SpeculativeAccept",
    "Tape",
    "Verification",
    "accept_mask",
    "accept_round",
    "append_drafts",
    "append_kv",
    "begin_round",
    "begin_verification",
    "build_info",
    "captured_body",
    "compact_rows",
    "decoder_layers",
    "embed_tokens",
    "exit_confidence_cosine",
    "exit_confidence_mlp",
    "exit_confidence_softmax",
    "exit_rows",
    "gather_states",
    "kv_fill",
    "missing_cuda_ops",
    "pack_weight",
    "packed_bytes",
    "paged_attention",
    "place_head",
    "quantise_weight",
    "sample_tokens",
    "select_rows",
    "skinny_gated_linear",
    "skinny_linear",
    "speculative_accept",
    "unpack_weight",
]


OP_NAMES = (
    "accept_mask",
    "accept_round",
    "append_drafts",
    "append_kv",
    "begin_round",
    "begin_verification",
    "compact_rows",
    "decoder_layers",
    "embed_tokens",
    "exit_confidence_cosine",
    "exit_confidence_mlp",
    "exit_confidence_softmax",
    "exit_rows",
    "gather_states",
    "kv_fill",
    "pack_weight",
    "paged_attention",
    "place_head",
    "quantise_weight",
    "sample_tokens",
    "select_rows",
    "skinny_gated_linear",
    "skinny_linear",
    "speculative_accept",
    "unpack_weight",
)

# Ops for the CPU alone: what decoder_layers saves is waking threads between kernels; rows that are
# out are masked on CUDA, where compact_rows and select_rows would change the shapes of a graph;
# CUDA has no packed weights.
CPU_ONLY_OPS = (
    "compact_rows",
    "decoder_layers",
    "pack_weight",
    "quantise_weight",
    "select_rows",
    "unpack_weight",
)


def build_info() -> dict[str, Any]:
    """How this build was made and what it runs with.

    Keys: ``version``, ``compiler``, ``built_with_torch``, ``cuda`` (is ``eecore._cuda`` in the
    build), ``cuda_architectures``, ``cuda_note`` (why it is not), ``cpu_capabilities`` (all that
    this machine can run) and ``cpu_capability`` (the one in use; ``EECORE_CPU_CAPABILITY`` forces
    one).
    """
    info: dict[str, Any] = dict(_C.build_info())
    info["cpu_capabilities"] = _C.cpu_capabilities()
    info["cpu_capability"] = _C.cpu_capability()
    return info


def missing_cuda_ops() -> tuple[str, ...]:
    """Ops that should run on CUDA and cannot here: all of them without a GPU or the CUDA module."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in OP_NAMES if name not in CPU_ONLY_OPS)
    return tuple(name for name in names if not has_kernel(f"eecore::{name}", "CUDA"))


class CapturedGraph:
    """What a CUDA stream is asked to do, captured once and launched many times.

    Unlike ``torch.cuda.graph`` this leaves memory to the caller: what the captured work reads and
    writes must live as long as the graph, and what it allocates should come from a pool of its own
    (``torch.cuda.use_mem_pool``). That goes for the bodies of :func:`captured_body` too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: Any = None

    @contextmanager
    def capture(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Capture what is asked of ``stream``, which is the current one inside.

        Raises:
            RuntimeError: the stream is being captured, or the CUDA runtime refuses.
        """
        graph = _cuda.CapturedGraph(stream.cuda_stream, stream.device_index)
        with torch.cuda.stream(stream):
            yield
        graph.end()
        self._graph = graph

    def launch(self) -> None:
        """Run it behind the work on the current stream; returns at once."""
        stream = torch.cuda.current_stream(self._device)
        self._graph.launch(stream.cuda_stream, stream.device_index)


@contextmanager
def captured_body(flag: Tensor, when: bool) -> Iterator[None]:
    """What is captured here is work that a CUDA graph does only if a flag says so by then.

    The current stream must be captured (:class:`CapturedGraph`); inside, another one is current.
    The body may hold kernels, memory copies and further bodies.

    Args:
        flag: bool [1], on the device; kernels before may write it.
        when: the value with which the body runs.

    Raises:
        RuntimeError: the current stream is not captured, or the CUDA runtime refuses.
    """
    stream = torch.cuda.current_stream(flag.device)
    body = _cuda.ConditionalBody(stream.cuda_stream, stream.device_index, flag.data_ptr(), when)
    inside = torch.cuda.ExternalStream(body.stream, flag.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(inside):
        yield
    body.end()


class CallTrace(NamedTuple):
    """A call that a replay made."""

    op: str
    num_tokens: int
    """Rows that it was about; -1 for an op that knows none."""
    num_seqs: int
    begin_layer: int
    """Of ``decoder_layers``, else 0."""
    end_layer: int
    seconds: float


class Tape:
    """What a program calls on the CPU, recorded once and replayed by one call, many times.

    A program calls ops of this module on tensors of its own, which hold whatever they hold by the
    time of the replay: data, how many rows there are, and whether a stretch runs at all. Besides it
    may allocate with ``torch.empty`` and the like, make constants with ``torch.tensor``, and take
    views. All threads are awake from the
    first kernel of a replay to its last. ``len(tape)`` is how many calls were recorded.
    """

    def __init__(self) -> None:
        self._tape = _C.Tape()
        self._kept: dict[int, Tensor] = {}
        self.num_bytes = 0
        """Memory of the tensors that were made while it was recorded and that it keeps."""

    def __len__(self) -> int:
        return len(self._tape)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what this thread calls; nothing runs. An exception leaves an empty tape.

        Shapes, dtypes and strides are checked as ever; values are not, neither now nor at replay.
        Every tensor that an op is given lives as long as the tape.

        Raises:
            RuntimeError: the thread records already, the tape has been recorded, or an op is not
                one of eecore's.
        """
        self._tape.begin()
        try:
            recording = _Recording(self._kept)
            with recording:
                yield
            self._tape.end()
            self.num_bytes = recording.num_bytes
        except BaseException:
            self._tape.cancel()
            self._kept.clear()
            raise

    @contextmanager
    def rows(self, num_tokens: Tensor, num_seqs: Tensor | None = None) -> Iterator[None]:
        """Calls recorded here have as many rows at replay as the counts say by then.

        There are never more than the calls were recorded with; a call without tokens is left out,
        but for :func:`exit_rows` and :func:`select_rows`, which then say that there are none. The
        rows are the first ones of each tensor. Inside another ``rows`` this one counts.

        Args:
            num_tokens: int32 [1]; of ops that know sequences alone these are their sequences.
            num_seqs: int32 [1], where an op knows both, or of :func:`exit_rows` those asked;
                ``num_tokens`` when None.
        """
        counts = (num_tokens, num_tokens if num_seqs is None else num_seqs)
        for name, count in zip(("num_tokens", "num_seqs"), counts, strict=True):
            self._keep(count, name, torch.int32)
        outer = self._tape.read_rows(counts[0].data_ptr(), counts[1].data_ptr())
        try:
            yield
        finally:
            self._tape.read_rows(*outer)

    @contextmanager
    def unless(self, flag: Tensor) -> Iterator[None]:
        """Calls recorded here are left out of a replay where ``flag``, bool [1], is set by then."""
        self._keep(flag, "flag", torch.bool)
        opened = self._tape.open_jump(flag.data_ptr())
        try:
            yield
        finally:
            self._tape.close_jump(opened)

    def replay(self) -> None:
        """Run the calls, without the interpreter's lock; replays of one tape follow one another.

        Raises:
            RuntimeError: this thread, or this tape, records.
        """
        self._tape.replay()

    def trace(self) -> list[CallTrace]:
        """A replay that tells which calls it made, in order, and how long each of them took."""
        return [CallTrace(*call) for call in self._tape.trace()]

    def _keep(self, tensor: Tensor, name: str, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype or tensor.shape != (1,) or tensor.device.type != "cpu":
            raise RuntimeError(
                f"tape: {name}: expected {dtype} [1] on the CPU, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
        self._kept[id(tensor)] = tensor


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets through what a tape can hold, and keeps the tensors that eecore's ops are given."""

    _ALLOCATIONS = frozenset(
        {
            "aten::detach_",  # a part of torch.tensor
            "aten::empty",
            "aten::empty_like",
            "aten::empty_permuted",
            "aten::empty_strided",
            "aten::new_empty",
            "aten::new_empty_strided",
        }
    )

    def __init__(self, kept: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._made: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Of the storages that were made and are kept."""
        storages = [tensor.untyped_storage() for tensor in self._kept.values()]
        made = {s._cdata: s.nbytes() for s in storages if s._cdata in self._made}
        return sum(made.values())

    def _note(self, made: Any) -> Any:
        """Remember where a call's results lie."""
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self._made.add(tensor.untyped_storage()._cdata)
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's question; a yes would import all of its compiler, a second at the first tape."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if func.namespace == "eecore":
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, Tensor):
                    self._keep(tensor, name)
            return self._note(func(*args, **kwargs))
        if name in self._ALLOCATIONS:
            return self._note(func(*args, **kwargs))
        # Inference mode leaves it to a mode to take composite ops apart; some copy.
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.is_view:
            return func(*args, **kwargs)
        raise RuntimeError(f"a program calls eecore's ops alone, got {name}")

    def _keep(self, tensor: Tensor, name: str) -> None:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"a tape runs on the CPU, got {name} of a tensor on {tensor.device}")
        self._kept[id(tensor)] = tensor


def _fake_of(op: str) -> Callable[..., None]:
    """The fake kernel of an op, which only writes into its arguments: there is nothing to do.

    Torch calls it for tensors of whatever devices as soon as one of them is on ``meta``.
    """
    names = [argument.name for argument in getattr(torch.ops.eecore, op).default._schema.arguments]

    def fake(*arguments: Any, **by_name: Any) -> None:
        given = {**dict(zip(names, arguments, strict=False)), **by_name}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        first = next(iter(tensors.values()))
        for name, tensor in tensors.items():
            if tensor.device != first.device:
                raise RuntimeError(
                    f"{op}: {name}: expected a tensor on {first.device}, got one on {tensor.device}"
                )

    return fake


for _name in OP_NAMES:
    torch.library.register_fake(f"eecore::{_name}", _fake_of(_name))

_accept_mask = torch.ops.eecore.accept_mask.default
_accept_round = torch.ops.eecore.accept_round.default
_append_drafts = torch.ops.eecore.append_drafts.default
_append_kv = torch.ops.eecore.append_kv.default
_begin_round = torch.ops.eecore.begin_round.default
_begin_verification = torch.ops.eecore.begin_verification.default
_compact_rows = torch.ops.eecore.compact_rows.default
_decoder_layers = torch.ops.eecore.decoder_layers.default
_embed_tokens = torch.ops.eecore.embed_tokens.default
_exit_confidence_cosine = torch.ops.eecore.exit_confidence_cosine.default
_exit_confidence_mlp = torch.ops.eecore.exit_confidence_mlp.default
_exit_confidence_softmax = torch.ops.eecore.exit_confidence_softmax.default
_exit_rows = torch.ops.eecore.exit_rows.default
_gather_states = torch.ops.eecore.gather_states.default
_kv_fill = torch.ops.eecore.kv_fill.default
_pack_weight = torch.ops.eecore.pack_weight.default
_paged_attention = torch.ops.eecore.paged_attention.default
_place_head = torch.ops.eecore.place_head.default
_quantise_weight = torch.ops.eecore.quantise_weight.default
_sample_tokens = torch.ops.eecore.sample_tokens.default
_select_rows = torch.ops.eecore.select_rows.default
_skinny_gated_linear = torch.ops.eecore.skinny_gated_linear.default
_skinny_linear = torch.ops.eecore.skinny_linear.default
_speculative_accept = torch.ops.eecore.speculative_accept.default
_unpack_weight = torch.ops.eecore.unpack_weight.default


def embed_tokens(
    token_ids: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    table: Tensor | None = None,
    previous: Tensor | None = None,
    sources: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of an embedding table, by tokens that are given or that a step before made.

    Args:
        token_ids: int64 [num_tokens], in [0, vocab_size) where they are looked at.
        weight: [vocab_size, hidden_size], any row stride; int8 with ``scale``; packed bytes with
            ``table``.
        scale: float32 [vocab_size], see :func:`skinny_linear`; the product is rounded to float32,
            then to out's dtype.
        table: int64 [vocab_size], see :func:`pack_weight`; rounded to out's dtype.
        previous: int64 [num_previous], with ``sources``.
        sources: int32 [num_tokens]: the token is ``previous[sources[i]]``; -1: ``token_ids[i]``.
        dtype: of out where it is allocated; weight's when None. With ``table`` out must be given.
        out: [num_tokens, hidden_size], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        shape = (token_ids.shape[0], weight.shape[1])
        out = torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)
    _embed_tokens(token_ids, weight, scale, previous, sources, out, table)
    return out


class AcceptMask(NamedTuple):
    """Who goes on after an exit point."""

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
    """What :func:`accept_mask` takes beside the confidences, for ops that go on with it.

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
    """What one pass over the LM head tells of each row."""

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
) -> SoftmaxConfidence:
    """Final RMS norm, LM head, top-2 gap, argmax and log-sum-exp; no logits in memory.

    The gap is ``(1 - exp(x2 - m)) / s`` with m and x2 the two largest logits and s the sum of
    ``exp(x - m)``. (Early-exit framework §2.1, softmax response; CALM §3.)

    Args:
        hidden: [num_seqs, hidden_size], the residual stream before the final norm.
        norm_weight: [hidden_size]; None when ``hidden`` is normed already.
        lm_head: [vocab_size, hidden_size], vocab_size >= 2; int8 with ``lm_head_scale``, packed
            bytes with ``lm_head_table``.
        eps: of the RMS norm.
        lm_head_scale: float32 [vocab_size], see :func:`skinny_linear`.
        lm_head_table: int64 [vocab_size], see :func:`pack_weight`.
    """
    num_seqs, device = hidden.shape[0], hidden.device
    confidence = torch.empty(num_seqs, dtype=torch.float32, device=device)
    token = torch.empty(num_seqs, dtype=torch.int64, device=device)
    logsumexp = torch.empty_like(confidence)
    top_logit = torch.empty_like(confidence)
    _exit_confidence_softmax(
        hidden,
        norm_weight,
        lm_head,
        lm_head_scale,
        eps,
        confidence,
        token,
        logsumexp,
        top_logit,
        lm_head_table,
    )
    return SoftmaxConfidence(confidence, token, logsumexp, top_logit)


class ActiveRows(NamedTuple):
    """The rows of a decoding program that go on, and what their next layers read.

    A program has num_rows rows. On the CPU the active ones move up where others leave; on CUDA all
    of them stay, and those that are out are masked.
    """

    row: Tensor
    """int32 [n]: which of the program's rows each is, ascending."""
    positions: Tensor
    """int64 [n]"""
    slot_mapping: Tensor
    """int64 [n]; -1 for rows that are out: they write no keys or values."""
    seq_lens: Tensor
    """int32 [n]; 1 for rows that are out: their attention costs next to nothing."""
    page_table: Tensor
    """int32 [n, max_pages]"""
    num_active: Tensor
    """int32 [1]: how many of the n there are."""
    token_ids: Tensor | None = None
    """int64 [n]"""
    cross_page_table: Tensor | None = None
    """int32 [n, max_cross_pages]"""
    cross_seq_lens: Tensor | None = None
    """int32 [n]"""


class ExitingRows(NamedTuple):
    """All rows of a program with exit points: how they leave, who has left, and with what.

    The first four tensors are read, the others updated in place. A row that is padding is gone from
    the start.
    """

    leave_after: Tensor
    """int32 [num_rows]: how many layers run before a row leaves, accepted or not."""
    together: Tensor
    """bool [num_rows]: a row leaves once all such rows are accepted."""
    fills: Tensor
    """bool [num_rows]: the layers that a row skips are filled."""
    kind: Tensor
    """int32 [num_rows], how a row's token is made: 1 by the head, 2 from logits."""
    accepted: Tensor
    """bool [num_rows], sticky."""
    gone: Tensor
    """bool [num_rows]: who has left."""
    exit_layer: Tensor
    """int32 [num_rows]: how many layers had run when a row left."""
    fill_from: Tensor
    """int32 [num_rows]: the first layer to fill; written for rows that fill."""
    measured_at: Tensor
    """int32 [num_rows]: the layer of ``confidence``."""
    confidence: Tensor
    """float32 [num_rows], as measured last."""
    token: Tensor
    """int64 [num_rows], the head's at ``token_at``."""
    logprob: Tensor
    """float32 [num_rows], the token's."""
    token_at: Tensor
    """int32 [num_rows]: the layer of ``token``."""
    pending: Tensor
    """int32 [num_rows], of rows that left: 2 where the token is made from logits; of others 0 where
    ``token`` is of the state that the row left with, else 1."""
    hidden: Tensor
    """[num_rows, hidden_size], contiguous rows: the state that a row left with."""
    all_gone: Tensor
    """bool [1]"""


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
) -> None:
    """Take over what was measured after a layer, and let rows leave.

    A row that is asked is accepted, once and for all, when its confidence reaches its threshold; a
    threshold of 1 or more never accepts, nor does a NaN. An accepted row leaves, as does one whose
    layers are up: what it leaves with is kept, and later layers pass it by. Nothing changes for
    rows that had left before. (Early-exit framework §3.1, Algorithm 1; CALM §3.)

    Args:
        hidden: [n, hidden_size] of the active rows, after ``layer`` layers.
        layer: how many layers have run, 1..num_layers.
        rows: updated in place.
        active: of its tensors ``slot_mapping`` and ``seq_lens`` are updated, where a row leaves.
        thresholds: float32 [num_rows]; infinity: the row is not asked here.
        confidence: float32 [num_asked]; ``head``'s when None. Without both nobody is measured.
        head: what the head gives of the rows asked. Rows accepted before are not measured again.
        asked: int32 [num_asked], the active rows that were measured, each once; None: all.
        decide: False leaves it at measuring.
    """
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
    )


class SelectedRows(NamedTuple):
    """Some of the active rows."""

    index: Tensor  # type: ignore[assignment]  # a tuple has methods of these names
    """int32 [n]: the active rows picked, ascending; behind ``count`` nothing is written."""
    count: Tensor  # type: ignore[assignment]
    """int32 [1]"""
    hidden: Tensor
    """[n, hidden_size], their states; behind ``count`` nothing is written."""


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
    """Pick the active rows that a part of a program is for, and put their states side by side.

    Args:
        hidden: [n, hidden_size] of the active rows.
        row: int32 [n], which of the program's rows each is; None: row i is row i.
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


def compact_rows(leaving: Tensor, active: ActiveRows, hidden: Tensor | None = None) -> None:
    """Move the active rows that stay up to where others leave, their order kept.

    Rows behind the new ``active.num_active`` mean nothing.

    Args:
        leaving: bool [num_rows], by the program's rows.
        active: updated in place; all n rows are looked at.
        hidden: [n, hidden_size], contiguous rows, their states, updated in place.
    """
    _compact_rows(leaving, *active, hidden)


class HeadRows(NamedTuple):
    """The tokens of a program's rows, updated in place."""

    token: Tensor
    """int64 [num_rows]"""
    confidence: Tensor
    """float32 [num_rows]"""
    logprob: Tensor
    """float32 [num_rows], the token's."""


def place_head(
    head: SoftmaxConfidence,
    out: HeadRows,
    *,
    index: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    measured_at: Tensor | None = None,
    exit_layer: Tensor | None = None,
    as_probability: bool = False,
    vocabulary: Tensor | None = None,
) -> None:
    """Put what the head gives of some rows to where all rows have theirs.

    Args:
        head: of the rows selected.
        out: updated in place.
        index: int32 [num_selected], which row each is, each once; None: row j is row j.
        kind: int32 [num_rows]; rows that are not of the ``wanted`` kind are left alone.
        wanted: a kind.
        measured_at: int32 [num_rows], with ``exit_layer``: where it is the layer that a row left
            after, the row keeps its confidence.
        exit_layer: int32 [num_rows].
        as_probability: the confidence is the token's probability, not the head's.
        vocabulary: int64 [vocab_size], the token of each row of a head that was cut; None: row t is
            token t. A token of -1 stays what it is.
    """
    _place_head(
        *(*head, index, kind, wanted, measured_at, exit_layer, as_probability, vocabulary), *out
    )


class DraftRound(NamedTuple):
    """A round of self-speculation: up to num_steps drafts of each of a program's rows.

    The tensors below ``stop_tokens`` are what the ops of a round write, and read again.
    """

    token_ids: Tensor
    """int64 [num_rows]: the last token of each row's text."""
    start: Tensor
    """int64 [num_rows], its position."""
    tokens_left: Tensor
    """int64 [num_rows]: how many tokens the text may still have; a round gives one or more."""
    max_drafts: Tensor
    """int64 [num_rows]: drafts that the row has pages for; -1 for padding."""
    page_table: Tensor
    """int32 [num_rows, max_pages], any row stride."""
    thresholds: Tensor
    """float32 [num_rows]: a draft ends with a token whose confidence is below it."""
    stop_tokens: Tensor
    """int64 [num_rows, num_stop_tokens], filled up with -1: a draft ends with one of them."""
    first_position: Tensor
    """int64 [num_rows], of the round's first token, the last of the text."""
    left: Tensor
    """int64 [num_rows], tokens left at the start of the round."""
    round_slots: Tensor
    """int64 [num_rows, num_steps + 1]: cache slots of the round's tokens, -1 for those that a row
    cannot have."""
    tokens: Tensor
    """int64 [num_rows, num_steps + 1]: the round's first token, then the drafts."""
    confidences: Tensor
    """float32 [num_rows, num_steps], of the drafts."""
    num_drafted: Tensor
    """int64 [num_rows]"""
    most: Tensor
    """int64 [num_rows]: how many it may draft; -1 for rows without a round, which are padding and
    those whose text has no tokens left."""
    done: Tensor
    """bool [num_rows]: who drafts no more."""
    all_done: Tensor
    """bool [1]"""
    states: Tensor | None
    """[num_rows, num_steps + 1, hidden_size], contiguous rows: after the drafting layers, for the
    verification. What it has of rows and steps that were not drafted means nothing. None: the
    verification runs all layers."""
    drafts: Tensor | None = None
    """int64 [num_rows, num_steps]: drafts of rows that are given them; with ``num_given``."""
    num_given: Tensor | None = None
    """int64 [num_rows]: how many; such a row drafts none itself, one with -1 does."""


class EndedRound(NamedTuple):
    """Where each row's text goes on behind a round."""

    next_token: Tensor
    """int64 [num_rows]: the token after the accepted ones; -1 where no token has a positive
    probability."""
    next_position: Tensor
    """int64 [num_rows], its position."""
    next_left: Tensor
    """int64 [num_rows]: how many tokens the text may still have."""


class Verification(NamedTuple):
    """What the layers read that verify a round: each row's last token alone, then all, ragged."""

    last_tokens: Tensor
    """int64 [num_rows]: the last token of each round, which the drafting layers have not seen."""
    last_positions: Tensor
    """int64 [num_rows]; 0 without a round."""
    last_slots: Tensor
    """int64 [num_rows]; -1 without a round."""
    last_seq_lens: Tensor
    """int32 [num_rows]; 1 without a round."""
    token_ids: Tensor
    """int64 [max_tokens], max_tokens >= num_rows * (num_steps + 1): the tokens of all rounds, one
    after the other; 0 behind num_tokens."""
    positions: Tensor
    """int64 [max_tokens]; 0 behind num_tokens."""
    slot_mapping: Tensor
    """int64 [max_tokens]; -1 behind num_tokens."""
    sequence: Tensor
    """int32 [max_tokens]: whose token each is; 0 behind num_tokens."""
    seq_lens: Tensor
    """int32 [num_rows]; 0 without a round."""
    query_start_loc: Tensor
    """int32 [num_rows + 1]: row r has the tokens from its entry up to the next."""
    num_tokens: Tensor
    """int32 [1]"""


def begin_round(
    draft_round: DraftRound,
    active: ActiveRows,
    page_size: int,
    *,
    ended: EndedRound | None = None,
    sources: Tensor | None = None,
) -> None:
    """Begin a round: where each row starts, how far it may draft, and where its tokens go.

    A row drafts at most ``max_drafts`` tokens, and one fewer than it has left; of drafts that it is
    given it takes as many. (LayerSkip §4.3.)

    Args:
        draft_round: what is given of it is read, all but the confidences and states written.
        active: all rows of the round, those that draft nothing masked; ``token_ids`` is there. Its
            page tables and ``num_active`` are left alone.
        page_size: slots of a page.
        ended: where the rows of an earlier round go on; with ``sources``.
        sources: int32 [num_rows]: whose place in ``ended`` a row takes up, -1: what is given.
    """
    _begin_round(
        draft_round.token_ids,
        draft_round.start,
        draft_round.tokens_left,
        draft_round.max_drafts,
        draft_round.page_table,
        page_size,
        sources,
        *(ended or (None, None, None)),
        draft_round.drafts,
        draft_round.num_given,
        draft_round.first_position,
        draft_round.left,
        draft_round.round_slots,
        draft_round.tokens,
        draft_round.num_drafted,
        draft_round.most,
        draft_round.done,
        draft_round.all_done,
        active.row,
        active.token_ids,
        active.positions,
        active.slot_mapping,
        active.seq_lens,
    )


def append_drafts(
    hidden: Tensor | None,
    token: Tensor,
    confidence: Tensor,
    step: int,
    draft_round: DraftRound,
    active: ActiveRows,
) -> None:
    """Take over a drafted token of every row that drafts; see who drafts another, and from where.

    Rows that are not active have to be done: ``all_done`` looks at the active ones. A token of -1,
    of a row without probabilities, is kept as it is and embedded as 0. (LayerSkip §4.3.)

    Args:
        hidden: [num_active, hidden_size], after the drafting layers, at the last token so far; None
            where the round keeps no states.
        token: int64 [num_active], the drafts.
        confidence: float32 [num_active], of them; NaN ends a draft.
        step: drafts of the round before this one, 0..num_steps-1.
        draft_round: updated in place.
        active: updated in place; ``token_ids`` is there.
    """
    _append_drafts(
        hidden,
        token,
        confidence,
        step,
        draft_round.thresholds,
        draft_round.stop_tokens,
        draft_round.most,
        draft_round.round_slots,
        active.row,
        draft_round.states,
        draft_round.tokens,
        draft_round.confidences,
        draft_round.num_drafted,
        draft_round.done,
        draft_round.all_done,
        active.token_ids,
        active.positions,
        active.slot_mapping,
        active.seq_lens,
    )


def begin_verification(draft_round: DraftRound, verification: Verification) -> None:
    """Lay out what verifies a round's drafts: the tokens of every row, its first one included.

    (LayerSkip §4.3.)

    Args:
        draft_round: drafted.
        verification: written.
    """
    _begin_verification(
        draft_round.first_position,
        draft_round.round_slots,
        draft_round.tokens,
        draft_round.num_drafted,
        draft_round.most,
        *verification,
    )


def gather_states(
    states: Tensor, last: Tensor, verification: Verification, out: Tensor | None = None
) -> Tensor:
    """States after the drafting layers for a verification: those kept, and the last tokens'.

    Args:
        states: [num_rows, num_steps + 1, hidden_size], contiguous rows, of a draft round.
        last: [num_rows, hidden_size], any row stride, of the last tokens.
        verification: which rows there are.
        out: [max_tokens, hidden_size], any row stride that keeps rows apart. Rows behind num_tokens
            are zeros on CUDA, where layers compute with them, and left alone on the CPU.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        out = states.new_empty(verification.token_ids.shape[0], states.shape[2])
    _gather_states(
        states,
        last,
        verification.sequence,
        verification.query_start_loc,
        verification.num_tokens,
        out,
    )
    return out


def accept_round(
    draft_round: DraftRound,
    verification: Verification,
    target: Tensor,
    ended: EndedRound,
    num_accepted: Tensor,
    *,
    sampled: Tensor | None = None,
    draft_probs: Tensor | None = None,
    target_probs: Tensor | None = None,
    uniform: Tensor | None = None,
    last_row: Tensor | None = None,
) -> None:
    """Accept the longest valid prefix of each row's drafts, and say where its text goes on.

    Greedy rows accept drafts while they are the target's tokens. Rows that sample accept and draw
    as :func:`speculative_accept` does, but that with all drafts accepted the next token is the
    target's, which is a sample of its distribution already. A row without a round stays where it
    was. (LayerSkip §4.3.2; Leviathan et al. 2023.)

    Args:
        draft_round: drafted.
        verification: of these drafts.
        target: int64 [max_tokens], the full model's token after each ragged row's: the most
            probable one, or for rows that sample one that was drawn.
        ended: written.
        num_accepted: int64 [num_rows], written.
        sampled: bool [num_rows]; None: all rows are greedy. The following come with it.
        draft_probs: float32 [num_rows * num_steps, vocab_size], what each draft was drawn from; of
            greedy rows, and of drafts that there are not, it may be anything.
        target_probs: float32 [max_tokens, vocab_size], the full model's at each ragged row.
        uniform: float32 [max_tokens, 2] in [0, 1): of each ragged row to accept the draft behind
            it, and to draw another token instead. A number that has drawn a token must not come
            back in a later round, so each position has numbers of its own.
        last_row: int64 [num_rows], written: the ragged row whose state gave the next token; 0
            without a round.
    """
    _accept_round(
        draft_round.tokens,
        draft_round.num_drafted,
        draft_round.most,
        draft_round.first_position,
        draft_round.left,
        verification.query_start_loc,
        target,
        *ended,
        num_accepted,
        sampled,
        draft_probs,
        target_probs,
        uniform,
        last_row,
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
    """Cosine of the states of two consecutive layers, per row; 0 for a zero vector.

    (Early-exit framework §2.1, hidden states similarity.)

    Args:
        previous: [num_seqs, hidden_size], after one layer less.
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


def append_kv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Write new keys and values to their cache slots, with head norms and rotary embedding fused.

    ``q``, when given, gets its head norm and rotary embedding in place. ``k`` and ``v`` are read
    only. A slot is ``page * page_size + offset``; slot -1 writes nothing.

    Args:
        q: [num_tokens, num_q_heads, head_dim], any strides with contiguous head_dim; or None.
        k: [num_tokens, num_kv_heads, head_dim], likewise.
        v: [num_tokens, num_kv_heads, head_dim], likewise.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], one layer.
        v_cache: [num_pages, page_size, num_kv_heads, head_dim], one layer.
        slot_mapping: int64 [num_tokens].
        positions: int64 [num_tokens]; None switches the rotary embedding off.
        cos_sin: float32 [max_position, rotary_dim]: rotary_dim/2 cosines, then as many sines; pairs
            (i, i + rotary_dim/2) are rotated.
        q_norm_weight: [head_dim], RMS norm of each query head.
        k_norm_weight: [head_dim], RMS norm of each key head.
        eps: of the head norms.
    """
    _append_kv(
        q,
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        positions,
        cos_sin,
        q_norm_weight,
        k_norm_weight,
        eps,
    )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int = 0,
    fixed_split_size: int = 0,
    position_bias: Tensor | None = None,
    max_distance: int = 128,
    bidirectional: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ragged queries to a paged KV cache.

    Sequence s has queries ``query_start_loc[s]..query_start_loc[s+1]``; they are its last
    positions: query i of n sits at position ``seq_lens[s] - n + i`` and, with ``causal``, sees keys
    up to its own. One query a sequence is decoding, a few are verification, many are a prefill
    chunk. A query that sees no key gives zeros; without ``causal`` a sequence may well have more
    queries than keys. Cache slots and page-table entries that no key uses are never read.

    With ``position_bias`` the score of a query at position p and a key at position j gets the bias
    of the bucket of j - p. Half of a side's buckets hold one distance each, the others ever longer
    stretches, in equal steps of the logarithm up to ``max_distance``; the last one holds whatever
    lies beyond. Keys ahead are at distance 0 or, when ``bidirectional``, have the upper half of the
    buckets. (T5: Raffel et al. 2020 §2.1; the buckets, float32 rounding included, are those of
    T5Attention in transformers.)

    Sums are float32. In bfloat16 on tensor cores, and on CPUs that multiply pairs of it (AVX-512
    BF16), the weights of values are rounded to bfloat16 first; elsewhere they stay float32.

    Args:
        q: [num_tokens, num_q_heads, head_dim], any strides with contiguous head_dim; head_dim is a
            multiple of 8 up to 256.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim].
        v_cache: [num_pages, page_size, num_kv_heads, head_dim].
        page_table: int32 [num_seqs, max_pages_per_seq].
        seq_lens: int32 [num_seqs], keys in the cache, this call's included.
        query_start_loc: int32 [num_seqs + 1], from 0 to num_tokens.
        scale: of the scores, usually head_dim ** -0.5.
        causal: False for cross attention and encoders.
        sliding_window: how many keys a query sees, itself included; 0 for all.
        fixed_split_size: keys per split of a long context; 0 lets the call's shape decide. With a
            fixed size a row's result does not depend, to the bit, on the rest of the batch, on the
            queries that come with it (one when decoding, several when verifying) or, on the CPU, on
            the number of threads.
        position_bias: float32 [num_buckets, num_q_heads], added to the scaled scores; 2 to 128
            buckets, or, when ``bidirectional``, an even number of 4 to 256.
        max_distance: where the last bucket starts; more than half the buckets of a side.
        bidirectional: whether keys ahead of a query have buckets of their own.
        out: [num_tokens, num_q_heads, head_dim]; allocated when None.

    Returns:
        out.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _paged_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        query_start_loc,
        out,
        scale,
        causal,
        sliding_window,
        fixed_split_size,
        position_bias,
        max_distance,
        bidirectional,
    )
    return out


class Matrix(NamedTuple):
    """A linear layer of every layer at once, or of one."""

    weight: Tensor
    """[num_layers, out_features, in_features], any layer and row stride; int8 with a scale. Of one
    layer [out_features, in_features]. With a table uint8 [num_bytes], of all layers."""
    bias: Tensor | None = None
    """[num_layers, out_features]"""
    scale: Tensor | None = None
    """float32 [num_layers, out_features], see :func:`skinny_linear`."""
    table: Tensor | None = None
    """int64 [num_layers, out_features], see :func:`pack_weight`."""

    @property
    def is_quantised(self) -> bool:
        return self.scale is not None or self.table is not None

    def rows(self, rows: slice) -> Matrix:
        """Those of each layer's outputs: a view."""
        bias = None if self.bias is None else self.bias[..., rows]
        if self.table is not None:
            return Matrix(self.weight, bias, None, self.table[..., rows])
        scale = None if self.scale is None else self.scale[..., rows]
        return Matrix(self.weight[..., rows, :], bias, scale)

    def unbind(self) -> list[Matrix]:
        """Layer by layer: views."""
        num_layers = len(self.weight if self.table is None else self.table)
        weights = [self.weight] * num_layers if self.table is not None else self.weight.unbind(0)
        each = (
            [None] * num_layers if part is None else part.unbind(0)
            for part in (self.bias, self.scale, self.table)
        )
        return [Matrix(*parts) for parts in zip(weights, *each, strict=True)]


def _arguments(fields: Iterable[Tensor | Matrix | None]) -> Iterator[Tensor | None]:
    """As a schema has them: a matrix is its tensors, of which the tables come at the end."""
    for field in fields:
        if isinstance(field, Matrix):
            yield from field[:3]
        else:
            yield field


def _tables(fields: Iterable[Tensor | Matrix | None]) -> list[Tensor | None]:
    """Those of the matrices, in their order."""
    return [field.table for field in fields if isinstance(field, Matrix)]


BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Block formats of GGUF files that :func:`pack_weight` takes."""


FLOAT_BLOCK_FORMATS = ("Q4_1", "Q5_1", "Q8_0")
"""Of these, what :func:`quantise_weight` makes."""


def packed_bytes(format: str, num_rows: int, in_features: int) -> int:
    """How many bytes :func:`pack_weight` fills, a multiple of 64.

    Raises:
        ValueError: an unknown format, or rows that its blocks do not fill.
    """
    return int(_C.packed_bytes(format, num_rows, in_features))


def pack_weight(
    blocks: Tensor,
    format: str,
    *,
    offset: int = 0,
    packed: Tensor | None = None,
    table: Tensor | None = None,
) -> Matrix:
    """A weight in the blocks of a GGUF file, laid out for the products; nothing is rounded.

    What comes back is a :class:`Matrix` without a bias: bytes that 16 rows at a time lie in, and a
    table that says of every row where it lies, in what format, and how wide it is. Rows of a table
    may be taken apart and put together at will, so one weight may hold rows of several formats::

        packed = ops.pack_weight(blocks, "Q4_0")
        y = ops.skinny_linear(x, packed.weight, weight_table=packed.table)

    In products each (normed) row of x is quantised to 8 bits with a scale per 32 columns, at 1/127
    of their largest magnitude. Products within 32 columns (16 of Q6_K) are summed as exact
    integers, those sums in float32 in ascending order of columns. A row that holds NaN or infinity
    gives NaN throughout. On the CPU only.

    Args:
        blocks: uint8 [num_rows, row_bytes], whole blocks, any row stride.
        format: one of :data:`BLOCK_FORMATS`.
        offset: where in ``packed`` the rows go, a multiple of 64.
        packed: uint8 [num_bytes], allocated when left out.
        table: int64 [num_rows], contiguous; allocated when left out.
    """
    num_rows, row_bytes = blocks.shape
    if packed is None:
        in_features = int(_C.block_columns(format, row_bytes))
        packed = blocks.new_empty(offset + packed_bytes(format, num_rows, in_features))
    if table is None:
        table = blocks.new_empty(num_rows, dtype=torch.int64)
    _pack_weight(blocks, format, offset, packed, table)
    return Matrix(packed, None, None, table)


def quantise_weight(weight: Tensor, format: str, *, blocks: Tensor | None = None) -> Tensor:
    """Round a weight to blocks of 4, 5 or 8 bits, as GGUF files have them, for :func:`pack_weight`.

    Of 32 numbers Q4_1 and Q5_1 keep whole numbers, a scale and a minimum, both float16. Several
    ranges of the block are tried, then the scale and minimum that fit the whole numbers best, with
    which they are rounded again; kept is what has the least squared error, each number counting by
    its magnitude plus the root mean square of the 32. Q8_0 has a scale, 1/127 of the largest.
    A block with NaN, infinity or more than float16 can say becomes NaN. On the CPU only.

    Args:
        weight: float32 or bfloat16 [num_rows, in_features], any row stride; in_features a multiple
            of 32.
        format: one of :data:`FLOAT_BLOCK_FORMATS`.
        blocks: uint8 [num_rows, row_bytes], any row stride; allocated when left out.

    Returns:
        ``blocks``.
    """
    if blocks is None:
        num_rows, in_features = weight.shape
        row_bytes = int(_C.row_bytes(format, in_features))
        blocks = weight.new_empty(num_rows, row_bytes, dtype=torch.uint8)
    _quantise_weight(weight, format, blocks)
    return blocks


def unpack_weight(packed: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of a packed weight as the float32 numbers that their format defines, bit for bit.

    Args:
        packed: uint8 [num_bytes], see :func:`pack_weight`.
        table: int64 [num_rows], any rows of one width.
        out: float32 [num_rows, in_features], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        in_features = 32 * (int(table[0]) >> 8 & 0xFFFFFF) if len(table) else 0
        out = torch.empty(len(table), in_features, dtype=torch.float32, device=packed.device)
    _unpack_weight(packed, table, out)
    return out


def kv_fill(
    hidden: Tensor,
    exit_layer: Tensor,
    norm_weight: Tensor,
    kv: Matrix,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_norm_weight: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Fill the KV cache of the layers that each row skipped, all layers in one call.

    For row t and every layer l >= exit_layer[t], layer l's own norm, K/V projection, k-norm and
    rotary are applied to hidden[t] and written to the row's slot of layer l. (Early-exit framework
    §3.2; CALM §3.1.)

    Args:
        hidden: [num_tokens, hidden_size], each row's exit state before any norm.
        exit_layer: int32 [num_tokens], 0..num_layers; num_layers fills nothing.
        norm_weight: [num_layers, hidden_size], the norms before attention.
        kv: [num_layers, 2 * num_kv_heads * head_dim, hidden_size], K rows then V rows; any layer
            and row stride, so a view of a stacked QKV matrix does.
        k_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim].
        v_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim].
        slot_mapping: int64 [num_tokens]; -1 writes nothing.
        k_norm_weight: [num_layers, head_dim].
        positions: int64 [num_tokens]; None switches the rotary embedding off.
        cos_sin: float32 [max_position, rotary_dim], as in :func:`append_kv`.
        eps: of the norms.
    """
    _kv_fill(
        hidden,
        exit_layer,
        norm_weight,
        kv.weight,
        kv.bias,
        kv.scale,
        k_norm_weight,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        eps,
        kv.table,
    )


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    weight_table: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``activation(norm(x) @ weight.T + bias) + residual``: the weight read once for few rows.

    As in a model of x's dtype, the RMS norm (with ``norm_weight`` only), the linear layer with its
    bias and the sum with the residual are each rounded to that dtype. A row's result depends
    neither on the other rows nor on the number of threads.

    With ``weight_scale`` the weight is int8 and row r of it stands for ``weight[r] *
    weight_scale[r]``. Each (normed) row of x is then quantised to 16 bits, at 1/32767 of its
    largest magnitude, and the products are summed as integers; a row that holds NaN or
    infinity gives NaN throughout. With ``weight_table`` the weight is packed: :func:`pack_weight`.

    Args:
        x: [num_tokens, in_features], any row stride.
        weight: [out_features, in_features], any row stride; int8 with ``weight_scale``; uint8
            [num_bytes] with ``weight_table``.
        weight_scale: float32 [out_features].
        weight_table: int64 [out_features].
        norm_weight: [in_features].
        eps: of the RMS norm.
        bias: [out_features].
        activation: None or "relu".
        residual: [num_tokens, out_features], any row stride; ``out`` itself, or apart from it.
        out: [num_tokens, out_features], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        rows = weight if weight_table is None else weight_table
        out = x.new_empty(x.shape[0], rows.shape[0])
    _skinny_linear(
        x,
        norm_weight,
        eps,
        weight,
        weight_scale,
        bias,
        residual,
        out,
        activation,
        weight_table,
    )
    return out


def skinny_gated_linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    weight_table: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """``activation(gate) * up`` of ``gate, up = norm(x) @ weight.T + bias``.

    As in a model of x's dtype, the RMS norm (with ``norm_weight`` only), gate and up,
    activation(gate) and the product are each rounded to that dtype. A row's result depends neither
    on the other rows nor on the number of threads. (Shazeer 2020: SwiGLU and GEGLU.)

    Args:
        x: [num_tokens, in_features], any row stride.
        weight: [2 * inner_size, in_features], any row stride; gate rows, then up rows; int8 with
            ``weight_scale``, uint8 [num_bytes] with ``weight_table``.
        weight_scale: float32 [2 * inner_size], see :func:`skinny_linear`.
        weight_table: int64 [2 * inner_size], see :func:`pack_weight`.
        norm_weight: [in_features].
        eps: of the RMS norm.
        bias: [2 * inner_size].
        activation: "silu", or "gelu_tanh": ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``.
        out: [num_tokens, inner_size], any row stride that keeps rows apart.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        rows = weight if weight_table is None else weight_table
        out = x.new_empty(x.shape[0], rows.shape[0] // 2)
    _skinny_gated_linear(
        x, norm_weight, eps, weight, weight_scale, bias, out, activation, weight_table
    )
    return out


class DecoderWeights(NamedTuple):
    """The weights of a decoder's layers, each of all layers at once."""

    attention_norm: Tensor
    """[num_layers, hidden_size]"""
    qkv: Matrix
    """[num_layers, q_size + 2 * num_kv_heads * head_dim, hidden_size]; rows of the heads of q, then
    of k, then of v."""
    q_norm: Tensor | None
    """[num_layers, head_dim], RMS norm of each query head."""
    k_norm: Tensor | None
    """[num_layers, head_dim], RMS norm of each key head."""
    o: Matrix
    """[num_layers, hidden_size, q_size]"""
    mlp_norm: Tensor
    """[num_layers, hidden_size]"""
    gate_up: Matrix
    """[num_layers, 2 * inner_size, hidden_size]; gate, then up rows. Of an MLP that is not gated
    [num_layers, inner_size, hidden_size]."""
    down: Matrix
    """[num_layers, hidden_size, inner_size]"""

    def unbind(self) -> list[DecoderWeights]:
        """Layer by layer: views."""
        num_layers = len(self.attention_norm)
        each = ([None] * num_layers if f is None else f.unbind() for f in self)
        return [DecoderWeights(*fields) for fields in zip(*each, strict=True)]


class CrossAttention(NamedTuple):
    """Attention of a decoder's layers over the keys and values that an encoder left in the cache.

    They lie in pages of the same caches, and every query sees all of its sequence's.
    """

    norm: Tensor
    """[num_layers, hidden_size]"""
    q: Matrix
    """[num_layers, q_size, hidden_size]"""
    o: Matrix
    """[num_layers, hidden_size, q_size]"""
    page_table: Tensor
    """int32 [num_seqs, max_cross_pages]"""
    seq_lens: Tensor
    """int32 [num_seqs], keys of the encoder; with 0 the attention adds nothing."""


_NO_CROSS_ATTENTION = (None,) * 9
_NO_CROSS_TABLES = (None, None)


def decoder_layers(
    hidden: Tensor,
    weights: DecoderWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    begin_layer: int,
    end_layer: int,
    scale: float,
    eps: float = 1e-6,
    sliding_window: Tensor | None = None,
    skip_attention: Tensor | None = None,
    skip_mlp: Tensor | None = None,
    fixed_split_size: int = 0,
    cross: CrossAttention | None = None,
    position_bias: Tensor | None = None,
    max_distance: int = 128,
    activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """A stretch of a decoder's layers, in one call that wakes its threads once.

    Layer by layer, bit for bit as the single ops: :func:`skinny_linear` with the norm to queries,
    keys and values, :func:`append_kv`, :func:`paged_attention`, :func:`skinny_linear` onto the
    residual stream; with ``cross`` :func:`skinny_linear` with its norm to queries,
    :func:`paged_attention` without ``causal``, :func:`skinny_linear` onto the residual stream;
    :func:`skinny_gated_linear` with the norm (:func:`skinny_linear` where the activation is
    "relu"), :func:`skinny_linear` onto the residual stream.

    Args:
        hidden: [num_tokens, hidden_size], the residual stream, any row stride.
        weights: of all layers.
        k_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim]; head_dim is a multiple
            of 8 up to 256.
        v_cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim].
        slot_mapping: int64 [num_tokens]; slot -1 writes nothing.
        positions: int64 [num_tokens]; None switches the rotary embedding off.
        cos_sin: float32 [max_position, rotary_dim], as in :func:`append_kv`.
        page_table: int32 [num_seqs, max_pages_per_seq].
        seq_lens: int32 [num_seqs], keys in the cache, this call's included.
        query_start_loc: int32 [num_seqs + 1], from 0 to num_tokens.
        begin_layer: the first layer that runs.
        end_layer: the layer before which it ends, up to num_layers.
        scale: of the attention scores, usually head_dim ** -0.5.
        eps: of all norms.
        sliding_window: int32 [num_layers], how many keys a query sees, itself included; 0 for all.
        skip_attention: bool [num_layers], layers whose attention, ``cross`` included, is left out:
            they add nothing and write no keys or values.
        skip_mlp: bool [num_layers], layers whose MLP is left out.
        fixed_split_size: keys per split of a long context, as in :func:`paged_attention`. With a
            fixed size a row's result depends neither on the other sequences' rows nor on the
            number of threads.
        cross: of a decoder with an encoder, between self attention and MLP.
        position_bias: float32 [num_buckets, num_q_heads], of the self attention of all layers, as
            in :func:`paged_attention`.
        max_distance: of ``position_bias``.
        activation: "silu" or "gelu_tanh" of a gated MLP, "relu" of one that is not.
        out: [num_tokens, hidden_size], any row stride that keeps rows apart; ``hidden`` itself, or
            apart from it.

    Returns:
        ``out``, allocated when left out.
    """
    if out is None:
        out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _decoder_layers(
        hidden,
        *_arguments(weights),
        k_cache,
        v_cache,
        slot_mapping,
        positions,
        cos_sin,
        page_table,
        seq_lens,
        query_start_loc,
        sliding_window,
        skip_attention,
        skip_mlp,
        out,
        begin_layer,
        end_layer,
        scale,
        eps,
        fixed_split_size,
        *(_NO_CROSS_ATTENTION if cross is None else _arguments(cross)),
        position_bias,
        max_distance,
        activation,
        *_tables(weights),
        *(_NO_CROSS_TABLES if cross is None else _tables(cross)),
    )
    return out


class SamplingRows(NamedTuple):
    """How the requests of a batch choose their tokens.

    The filters and their order are transformers': repetition penalty, temperature, top-k, top-p,
    min-p. What is before them is vLLM's, in its order: allowed tokens, bias, repetition penalty,
    frequency penalty, presence penalty.
    """

    temperature: Tensor
    """float32 [num_requests]; 0: the most probable token, the lowest id among equals."""
    top_k: Tensor
    """int32 [num_requests]: only the k most probable tokens, and what equals the last; 0: off."""
    top_p: Tensor
    """float32 [num_requests]: only the most probable tokens, lower ids first among equals, while
    those before a token have less than this mass (but for a millionth of it, which float32
    probabilities may be off by); the first always stays; 1: off."""
    min_p: Tensor
    """float32 [num_requests]: only tokens of this share of the largest probability; 0: off."""
    repetition_penalty: Tensor
    """float32 [num_requests]: positive logits of seen tokens are divided by it, negative ones
    multiplied, once however often a token was seen (CTRL, Keskar et al. 2019); 1: off."""
    seed: Tensor
    """int64 [num_requests], of the random numbers."""
    seen: Tensor
    """int64 [num_requests, num_seen]: the ids that have been seen, filled up with -1."""
    presence_penalty: Tensor | None = None
    """float32 [num_requests]: subtracted from the logits of generated tokens, once however often a
    token was generated; 0: off."""
    frequency_penalty: Tensor | None = None
    """float32 [num_requests]: subtracted from the logits of generated tokens each time that a token
    was; 0: off."""
    generated: Tensor | None = None
    """int64 [num_requests, num_generated]: ids that have been generated, each as often as it was,
    filled up with -1."""
    bias_ids: Tensor | None = None
    """int64 [num_requests, num_bias]: ids whose logits are biased, none twice, -1 behind them."""
    bias: Tensor | None = None
    """float32 [num_requests, num_bias], added to their logits. With ``bias_ids``."""
    allowed: Tensor | None = None
    """int32 [num_requests, num_masks, ceil(vocab_size / 32)]: token ``id`` can be chosen where bit
    ``id % 32`` of word ``id // 32`` is set, as in llguidance and xgrammar. The logits of the others
    are -infinity in all that is written of a row: confidence, log-probabilities, distributions. A
    row has mask ``positions[w] - first_position[r]`` of its request, 0 without ``first_position``;
    where that is none, all tokens are allowed."""


class SampledRows(NamedTuple):
    """What :func:`sample_tokens` writes of each output row.

    Where the logits of allowed tokens hold NaN, or the largest is not finite, there is no token
    (-1): its numbers are NaN, its distribution zeros.
    """

    token: Tensor
    """int64 [num_outputs]; -1 where no token has a positive probability."""
    confidence: Tensor
    """float32 [num_outputs]: the gap of the two largest probabilities of the softmax of the logits
    as they came, or the chosen token's probability."""
    logprob: Tensor
    """float32 [num_outputs]: of the token, in the log-softmax of the logits as they came."""
    logsumexp: Tensor
    """float32 [num_outputs], of the logits as they came."""
    probs: Tensor | None = None
    """float32 [num_probs, vocab_size]: the distributions that tokens are drawn from, whole rows;
    all on the chosen token at temperature 0."""
    uniform: Tensor | None = None
    """float32 [num_outputs, 2] in [0, 1): random numbers for :func:`accept_round`."""
    top_ids: Tensor | None = None
    """int64 [num_outputs, num_top]: the most probable tokens of the logits as they came, lower ids
    first among equals; -1 behind the vocabulary."""
    top_logprobs: Tensor | None = None
    """float32 [num_outputs, num_top], theirs; -infinity there. With ``top_ids``."""


def sample_tokens(
    logits: Tensor,
    rows: SamplingRows,
    out: SampledRows,
    *,
    purpose: int,
    positions: Tensor,
    index: Tensor | None = None,
    row: Tensor | None = None,
    kind: Tensor | None = None,
    wanted: int = 0,
    round_tokens: Tensor | None = None,
    first_position: Tensor | None = None,
    as_probability: bool = False,
    probs_by_step: int = 0,
) -> None:
    """Choose a token for each row of logits, as its request asks for.

    Row j of the logits writes row ``w = index[j]`` of the outputs for request ``r = row[w]``.
    Tokens are drawn by inversion, in id order and float64. The random numbers are Philox4x32-10's
    (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the seed as key and
    (position of the drawn token, purpose) as counter: a request draws the same numbers alone and in
    any batch, after a preemption, and on every device. A token takes 53 bits of the first two
    words, ``uniform`` 24 bits of each of the first two at purpose 2.

    Args:
        logits: [num_rows, vocab_size], any row stride.
        rows: of the requests.
        out: written in place, but for rows that are passed over.
        purpose: what the token is for, 0..2**32-1 and not 2: tokens drawn at one position for
            different purposes are independent.
        positions: int64 [num_outputs], of the token before the drawn one.
        index: int32 [num_rows], each at most once. None: j.
        row: int32 [num_outputs]. None: w.
        kind: int32 [num_requests]; requests of a kind other than ``wanted`` are passed over.
        wanted: see ``kind``.
        round_tokens: int64 [num_requests, round_width]; of ``round_tokens[r]`` the ids at 1 up to
            ``positions[w] - first_position[r]`` count as seen and generated too.
        first_position: int64 [num_requests], of ``round_tokens[:, 0]``; with it, with
            ``probs_by_step`` and with several masks.
        as_probability: ``out.confidence`` is the token's probability in the distribution that it
            is drawn from (at temperature 0 in the softmax of the logits as they came).
        probs_by_step: where it is above 0, ``out.probs`` has this many rows for each request, and
            a distribution is row ``positions[w] - first_position[r]`` of them; else row w.
    """
    _sample_tokens(
        logits,
        *rows,
        purpose,
        positions,
        index,
        row,
        kind,
        wanted,
        round_tokens,
        first_position,
        as_probability,
        probs_by_step,
        *out,
    )


class SpeculativeAccept(NamedTuple):
    """The outcome of a verification: emit ``drafts[:num_accepted] + [next_token]``."""

    num_accepted: Tensor
    """int32 [num_seqs]"""
    next_token: Tensor
    """int64 [num_seqs]: -1 where the target row has no positive probability, NaN for one."""


def speculative_accept(
    draft_tokens: Tensor,
    draft_start_loc: Tensor,
    *,
    target_tokens: Tensor | None = None,
    draft_probs: Tensor | None = None,
    target_probs: Tensor | None = None,
    uniform: Tensor | None = None,
) -> SpeculativeAccept:
    """Accept the longest valid prefix of each sequence's drafts and give the token after it.

    Greedy (``target_tokens``): drafts are accepted while they equal the target's argmax; the next
    token is the target's at the first difference. Sampling (``draft_probs``, ``target_probs`` and
    ``uniform``): draft x is accepted with probability ``min(1, p(x) / q(x))``; at the first
    rejection the next token is drawn from the normalised positive part of p - q (from p where
    nothing is left of it), after the last acceptance from p. A token of zero probability is never
    drawn. (LayerSkip §4.3.2; Leviathan et al. 2023.)

    Sequence s has drafts ``draft_start_loc[s]..draft_start_loc[s+1]`` and target rows
    ``draft_start_loc[s]+s..draft_start_loc[s+1]+s`` inclusive: one more, for the token after.

    Args:
        draft_tokens: int64 [num_drafts].
        draft_start_loc: int32 [num_seqs + 1].
        target_tokens: int64 [num_drafts + num_seqs].
        draft_probs: float32 [num_drafts, vocab_size].
        target_probs: float32 [num_drafts + num_seqs, vocab_size].
        uniform: float32 [num_drafts + num_seqs] in [0, 1): one per draft, then the sequence's last
            for its next token, laid out like the target rows.
    """
    num_seqs = draft_start_loc.numel() - 1
    num_accepted = torch.empty(max(num_seqs, 0), dtype=torch.int32, device=draft_tokens.device)
    next_token = torch.empty(max(num_seqs, 0), dtype=torch.int64, device=draft_tokens.device)
    _speculative_accept(
        draft_tokens,
        draft_start_loc,
        target_tokens,
        draft_probs,
        target_probs,
        uniform,
        num_accepted,
        next_token,
    )
    return SpeculativeAccept(num_accepted, next_token)
