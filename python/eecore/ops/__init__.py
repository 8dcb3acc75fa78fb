"""The compiled ops: a typed wrapper for each, by families.

Shapes are given as ``[num_tokens, num_q_heads, head_dim]``. Every op runs on the CPU (float32 and
bfloat16) and, where the CUDA module has it, on CUDA (also float16). An op writes into tensors that
it is given and returns nothing that aliases them; the wrappers allocate outputs that were left out.
A tensor of the wrong shape, dtype, device or stride is a ``RuntimeError`` that names the argument,
what was expected and what came, raised before anything is written. So is memory that is written and
shared with another argument, or with itself. Zero tokens or sequences are legal.

The ops are registered as ``torch.ops.eecore.*`` with their mutations declared, so they work under
``torch.compile``.
"""

from eecore.ops.attention import append_kv, kv_fill, paged_attention
from eecore.ops.exits import (
    AcceptMask,
    AcceptRows,
    ActiveRows,
    ExitingRows,
    HeadRows,
    SelectedRows,
    SoftmaxConfidence,
    accept_mask,
    compact_rows,
    exit_confidence_cosine,
    exit_confidence_mlp,
    exit_confidence_softmax,
    exit_rows,
    place_head,
    select_rows,
)
from eecore.ops.graphs import CapturedGraph, captured_body
from eecore.ops.layers import CrossAttention, DecoderWeights, decoder_layers
from eecore.ops.products import embed_tokens, skinny_gated_linear, skinny_linear
from eecore.ops.registered import CPU_ONLY_OPS, OP_NAMES, build_info, missing_cuda_ops
from eecore.ops.rounds import (
    DraftRound,
    EndedRound,
    SpeculativeAccept,
    Verification,
    accept_round,
    append_drafts,
    begin_round,
    begin_verification,
    gather_states,
    speculative_accept,
)
from eecore.ops.sampling import SampledRows, SamplingRows, sample_tokens
from eecore.ops.tape import CallTrace, Tape
from eecore.ops.weights import (
    BLOCK_FORMATS,
    FLOAT_BLOCK_FORMATS,
    Matrix,
    pack_weight,
    packed_bytes,
    quantise_weight,
    unpack_weight,
)

__all__ = [
    "BLOCK_FORMATS",
    "CPU_ONLY_OPS",
    "FLOAT_BLOCK_FORMATS",
    "OP_NAMES",
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
