"""The only lists of shapes: correctness tests and benchmarks draw from here.

Sizes of tests are chosen to be awkward: zero and one rows, page edges, odd vocabularies, ragged
batches. Benchmarks time those of real models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eecore import _C, ops

# float16 is for CUDA kernels: tests of other backends leave it out.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Ops that have a CUDA kernel.
CUDA_OPS = frozenset(ops.OP_NAMES) - frozenset(ops.CPU_ONLY_OPS)


def cpu_capabilities() -> list[str]:
    """The capabilities of this CPU, and the models of others that it runs."""
    names = _C.cpu_capabilities()
    needs = {"avx_vnni_model": "avx512", "amx_model": "avx512_bf16"}
    return names + [model for model, needed in needs.items() if needed in names]


def fits_the_emulator(parameters: Mapping[str, object]) -> bool:
    """Whether a test is small enough for the emulator, by its parameters.

    A thread's step there takes some tens of nanoseconds, a warp's mma some microseconds.
    """
    if parameters.get("inner_size") == 1000:  # a classifier's: one width is enough
        return parameters.get("hidden_size") == 576
    if parameters.get("columns") == (1 << 20) + 33:  # int8 weights
        return False
    if "max_distance" in parameters:  # a position bias: one value at a time is varied
        return parameters["max_distance"] == 128 or parameters.get("num_buckets") == 32
    if isinstance(parameters.get("case"), KvFillCase):
        return parameters["case"].num_tokens != 257
    return parameters.get("num_seqs") != 257 or "hidden_size" not in parameters


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float


# For results computed in float32 and stored in the dtype, against a float64 or float32 oracle.
TOLERANCES = {
    torch.float32: Tolerance(rtol=2e-5, atol=2e-5),
    torch.bfloat16: Tolerance(rtol=1.6e-2, atol=1e-2),
    torch.float16: Tolerance(rtol=2e-3, atol=2e-3),
}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a real model, as its ops see them."""

    num_layers: int
    hidden_size: int
    inner_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int = 64
    vocab_size: int = 0
    is_t5: bool = False

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.num_q_heads, self.num_kv_heads, self.head_dim

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def lm_head(self) -> tuple[int, int]:
        return self.hidden_size, self.vocab_size


SMALL_12_LAYERS = ModelSizes(12, 256, 768, 4, 2)
SMOLLM2_135M = ModelSizes(30, 576, 1536, 9, 3, vocab_size=49152)
LLAMA_1B = ModelSizes(16, 2048, 8192, 32, 8, vocab_size=128256)
LLAMA_3B = ModelSizes(28, 3072, 8192, 24, 8, 128, 128256)
LLAMA_8B = ModelSizes(32, 4096, 14336, 32, 8, 128, 128256)
T5_SMALL = ModelSizes(8, 512, 1024, 6, 6, is_t5=True)  # version 1.1

# The vocabularies of Llama 2, SmolLM2 and Llama 3.
REAL_VOCAB_SIZES = (32000, SMOLLM2_135M.vocab_size, LLAMA_1B.vocab_size)

BATCH_SIZES = (0, 1, 2, 7, 64, 257)

# Hidden sizes of the per-row confidence measures: below, at and beside every vector width.
HIDDEN_SIZES = (1, 7, 16, 33, 64, 576, 4096)

# Hidden layers of the early-exit classifier; None is the linear one.
CLASSIFIER_INNER_SIZES = (None, 1, 5, 64, 1000)

# Drafts of each sequence in a verification: none at all, ragged, one sequence, a full batch.
DRAFT_LENGTHS: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (5,),
    (0, 0, 0),
    (3, 0, 1, 7, 0),
    (4,) * 33,
)

# Vocabularies of verification: one token, odd, past one block of the cumulative sum, past one round
# of its search.
ACCEPT_VOCAB_SIZES = (1, 17, 257, 49153, 140000)

# Vocabularies to sample from: one token, odd, around a block of logits, past what small blocks of
# threads take.
SAMPLE_VOCAB_SIZES = (1, 7, 64, 320, 1001, 5000)

# Batch sizes around the register blocks of the skinny matrix products.
SKINNY_BATCH_SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9)

# More rows than one pass over a weight multiplies on one backend or another.
LARGE_BATCH_SIZES = (17, 33, 70, 257)

# (in_features, out_features) of skinny linear layers: partial vectors, blocks and tiles, and no
# rows at all; layers of real models.
SKINNY_LINEARS = (
    (1, 1),
    (7, 3),
    (33, 0),
    (33, 17),
    (64, 65),
    (100, 37),
    (272, 75),
    (SMOLLM2_135M.hidden_size, SMOLLM2_135M.kv_size),
    (SMOLLM2_135M.inner_size, SMOLLM2_135M.hidden_size),
    (LLAMA_1B.hidden_size, 129),
)

# (hidden_size, vocab_size): partial vectors, partial tiles, the vocabularies of real models.
LM_HEADS = (
    (64, 2),
    (100, 3),
    (72, 101),
    (576, 257),
    (960, 1024),
    (2048, 515),
    (64, 32003),
    (64, SMOLLM2_135M.vocab_size),
)
LM_HEAD_128K = (64, LLAMA_1B.vocab_size)


@dataclass(frozen=True)
class KvFillCase:
    """Shapes of one kv_fill call."""

    num_tokens: int
    num_layers: int = 3
    hidden_size: int = 64
    num_kv_heads: int = 1
    head_dim: int = 64
    rotary_dim: int = 64
    page_size: int = 16
    bias: bool = False
    k_norm: bool = False
    norms_all_k: bool = False  # all heads at once, where there is a norm
    pre_norm: bool = True
    num_ropes: int = 0  # tables that layers choose from; 0: one for all
    num_loops: int = 1


KV_FILL_CASES = (
    KvFillCase(0),
    KvFillCase(1, page_size=1),
    KvFillCase(2, num_layers=1, hidden_size=72, num_kv_heads=3, page_size=8),
    KvFillCase(4, hidden_size=576, num_kv_heads=3, bias=True),
    KvFillCase(5, hidden_size=100, num_kv_heads=2, head_dim=80, rotary_dim=80, k_norm=True),
    KvFillCase(7, num_kv_heads=4, head_dim=96, rotary_dim=0),
    KvFillCase(8, hidden_size=960, num_kv_heads=2, head_dim=128, rotary_dim=32, k_norm=True),
    KvFillCase(9, num_layers=2, hidden_size=2048, head_dim=256, rotary_dim=256, bias=True),
    KvFillCase(
        17, hidden_size=40, head_dim=10, rotary_dim=6, page_size=128, bias=True, k_norm=True
    ),
    KvFillCase(20, hidden_size=200, num_kv_heads=3, head_dim=80, rotary_dim=48, bias=True),
    KvFillCase(33, hidden_size=72, head_dim=36, rotary_dim=20, k_norm=True),
    KvFillCase(257, num_layers=4, hidden_size=100),
    KvFillCase(5, num_kv_heads=3, head_dim=48, rotary_dim=32, num_ropes=2, pre_norm=False),
    KvFillCase(9, num_kv_heads=2, k_norm=True, norms_all_k=True, bias=True),
    KvFillCase(
        20,
        hidden_size=72,
        num_kv_heads=3,
        head_dim=36,
        rotary_dim=20,
        k_norm=True,
        norms_all_k=True,
        pre_norm=False,
        num_ropes=3,
    ),
    KvFillCase(9, num_layers=2, hidden_size=72, num_kv_heads=2, num_loops=3),
    KvFillCase(4, num_kv_heads=3, k_norm=True, norms_all_k=True, num_loops=4),
)


@dataclass(frozen=True)
class AppendKvCase:
    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    rotary_dim: int = 0
    norm: bool = False
    norms_all: bool = False  # all heads of a token at once, where there is a norm
    q_table: bool = False  # queries are rotated by one of their own


APPEND_KV_CASES = (
    AppendKvCase(0, 4, 2, 64, 16, rotary_dim=64),
    AppendKvCase(1, 9, 3, 64, 16, rotary_dim=64),
    AppendKvCase(5, 4, 4, 80, 1, rotary_dim=20),
    AppendKvCase(17, 7, 1, 96, 8, rotary_dim=96, norm=True),
    AppendKvCase(33, 16, 8, 128, 128, rotary_dim=128, norm=True),
    AppendKvCase(9, 8, 1, 256, 16, rotary_dim=64),
    AppendKvCase(6, 4, 2, 72, 16, norm=True),
    AppendKvCase(3, 2, 1, 36, 8, rotary_dim=6, norm=True),
    AppendKvCase(100, 32, 8, 64, 16),
    AppendKvCase(5, 9, 3, 64, 16, rotary_dim=64, q_table=True),
    AppendKvCase(9, 5, 5, 80, 4, rotary_dim=20, norm=True, norms_all=True),
    AppendKvCase(3, 8, 1, 36, 8, rotary_dim=6, norm=True, norms_all=True, q_table=True),
    AppendKvCase(2, 4, 2, 256, 16, norm=True, norms_all=True),
)


@dataclass(frozen=True)
class AttentionCase:
    num_queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool = True
    sliding_window: int = 0
    fixed_split_size: int = 0
    num_buckets: int = 0  # of a position bias; 0: there is none
    max_distance: int = 128
    bidirectional: bool = False
    soft_cap: float = 0.0


ATTENTION_CASES = (
    AttentionCase((), (), 4, 2, 64, 16),
    AttentionCase((0, 0), (5, 0), 4, 2, 64, 16),
    AttentionCase((1,), (1,), 9, 3, 64, 16),
    AttentionCase((1, 1, 1), (63, 64, 65), 4, 4, 64, 16),
    AttentionCase((1, 1, 1, 1), (17, 0, 300, 128), 8, 2, 64, 1),
    AttentionCase((1, 1), (200, 31), 7, 1, 128, 8),
    AttentionCase((1, 1), (129, 127), 8, 1, 80, 128),
    AttentionCase((5, 1, 0, 9), (40, 2, 7, 9), 9, 3, 96, 16),
    AttentionCase((6, 6), (3, 70), 6, 2, 64, 8),
    AttentionCase((8, 3), (133, 90), 4, 4, 256, 16),
    AttentionCase((70, 1, 33), (70, 150, 100), 9, 3, 64, 16),
    AttentionCase((50,), (180,), 8, 1, 128, 16),
    AttentionCase((3, 2), (20, 10), 3, 1, 8, 4),
    AttentionCase((2, 40), (100, 90), 4, 1, 72, 16),
    AttentionCase((1, 4), (600, 200), 6, 2, 64, 16, sliding_window=100),
    AttentionCase((1, 70), (90, 300), 4, 4, 64, 8, sliding_window=1),
    AttentionCase((20,), (50,), 4, 2, 80, 16, sliding_window=7),
    AttentionCase((3, 5, 9), (70, 0, 4), 8, 2, 64, 16, causal=False),
    AttentionCase((3, 5), (70, 90), 4, 2, 64, 16, causal=False, sliding_window=20),
    AttentionCase((1, 3), (700, 250), 9, 3, 64, 16, fixed_split_size=100),
    AttentionCase((30, 1), (300, 500), 4, 2, 128, 16, fixed_split_size=64),
    AttentionCase((1, 3), (700, 250), 4, 2, 64, 8, sliding_window=130, fixed_split_size=32),
    AttentionCase((1,), (5000,), 4, 1, 64, 16),
    AttentionCase((2, 1), (150, 700), 4, 1, 64, 16, fixed_split_size=2**31 - 1),
    # Two teams of warps, of which one has no keys.
    AttentionCase((3,), (23,), 7, 1, 128, 48, sliding_window=1, fixed_split_size=17),
    # Many blocks share the keys, but some sequences have next to none.
    AttentionCase((1, 1, 2), (2500, 0, 10), 2, 1, 64, 3),
    # A group of more heads than a tile has rows; the smallest head; more sequences than lanes.
    AttentionCase((2, 1), (9, 30), 71, 1, 64, 3),
    AttentionCase((1, 3), (20, 5), 2, 2, 8, 16),
    AttentionCase((1, 0, 2) * 15, tuple(range(45)), 2, 1, 80, 3),
    AttentionCase((12, 1), (100, 260), 4, 2, 256, 3, sliding_window=60, fixed_split_size=40),
    # More queries than keys.
    AttentionCase((3, 7, 70, 2), (1, 0, 9, 30), 6, 6, 64, 8, causal=False),
    # Position biases: below, at and far beyond the last bucket; the fewest buckets, and the most.
    AttentionCase((1,), (1,), 6, 6, 64, 16, num_buckets=32),
    AttentionCase((1, 1, 1, 1), (128, 0, 129, 900), 6, 6, 64, 16, num_buckets=32),
    AttentionCase((1, 1), (70, 400), 9, 3, 64, 16, num_buckets=32),
    AttentionCase((70, 1, 33, 5), (70, 150, 300, 3), 8, 2, 64, 8, num_buckets=32),
    AttentionCase((5, 40), (200, 90), 4, 4, 72, 3, num_buckets=2, max_distance=2),
    AttentionCase((2, 3), (700, 250), 6, 2, 64, 16, num_buckets=31, max_distance=100000),
    AttentionCase((1, 30), (600, 400), 4, 2, 128, 16, num_buckets=128, max_distance=65),
    AttentionCase((1, 9), (700, 250), 4, 2, 64, 8, num_buckets=32, fixed_split_size=100),
    AttentionCase((1, 20), (500, 90), 4, 4, 64, 16, num_buckets=32, sliding_window=40),
    AttentionCase((1,), (5000,), 6, 6, 64, 16, num_buckets=32),
    AttentionCase(
        (70, 9, 0, 1), (70, 9, 3, 1), 6, 6, 64, 8, causal=False, num_buckets=32, bidirectional=True
    ),
    AttentionCase(
        (150, 100), (150, 160), 4, 2, 64, 16, causal=False, num_buckets=32, bidirectional=True
    ),
    AttentionCase((20, 1), (9, 400), 4, 2, 80, 3, causal=False, num_buckets=4, bidirectional=True),
    AttentionCase((9,), (40,), 71, 1, 64, 3, causal=False, num_buckets=256, bidirectional=True),
    AttentionCase((9,), (200,), 4, 2, 64, 16, num_buckets=16, bidirectional=True),
    AttentionCase((90,), (90,), 4, 2, 64, 16, causal=False, num_buckets=32, fixed_split_size=40),
    AttentionCase((1, 5, 40), (300, 9, 90), 6, 2, 64, 16, soft_cap=1.5),
    AttentionCase((3,), (200,), 4, 1, 96, 8, sliding_window=30, soft_cap=0.5),
)


@dataclass(frozen=True)
class DecoderLayersCase:
    """Shapes of one decoder_layers call: each sequence's queries are its last positions."""

    num_queries: tuple[int, ...] = (1,)
    seq_lens: tuple[int, ...] = (5,)
    num_layers: int = 3
    hidden_size: int = 64
    inner_size: int = 96
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    page_size: int = 8
    bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int, ...] | None = None
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    begin_layer: int = 0
    end_layer: int = 3
    fixed_split_size: int = 64
    rotary: bool = True
    cross_lens: tuple[int, ...] | None = None
    num_buckets: int = 0  # of a position bias; 0: there is none
    max_distance: int = 128
    activation: str = "silu"
    pre_norm: bool = True
    post_norm: bool = False
    norms_all: bool = False  # all heads of a token at once, where there is a norm of them
    num_ropes: int = 0  # tables that layers choose from; 0: one for all
    residual_multiplier: float = 1.0
    soft_cap: float = 0.0
    causal: bool = True


DECODER_LAYERS_CASES = (
    DecoderLayersCase((), ()),
    DecoderLayersCase(begin_layer=2, end_layer=2),
    DecoderLayersCase(),
    DecoderLayersCase(bias=True, qk_norm=True, rotary_dim=32),
    DecoderLayersCase((1,) * 8, (1, 9, 16, 17, 70, 200, 3, 8), hidden_size=72, begin_layer=1),
    DecoderLayersCase((3, 1, 5), (3, 40, 150), num_q_heads=9, num_kv_heads=3, end_layer=2),
    DecoderLayersCase((4, 1), (30, 90), sliding_window=(0, 7, 50), bias=True),
    DecoderLayersCase((1, 2), (20, 9), skip_attention=(0, 1), skip_mlp=(0, 2)),
    DecoderLayersCase((2,), (2,), skip_attention=(0, 1, 2), skip_mlp=(0, 1, 2)),
    DecoderLayersCase((33,), (40,), head_dim=72, rotary_dim=20, qk_norm=True, page_size=1),
    DecoderLayersCase(
        (1, 1), (700, 40), hidden_size=576, inner_size=1536, num_q_heads=9, num_kv_heads=3
    ),
    DecoderLayersCase((1,), (900,), fixed_split_size=0, sliding_window=(0, 300, 0)),
    DecoderLayersCase((1, 3), (9, 20), rotary=False, qk_norm=True),
    DecoderLayersCase((2,), (30,), activation="gelu_tanh", bias=True),
    DecoderLayersCase((3, 1), (40, 9), post_norm=True, num_ropes=2, activation="gelu_tanh"),
    DecoderLayersCase(
        (1, 2), (9, 30), pre_norm=False, post_norm=True, qk_norm=True, norms_all=True
    ),
    DecoderLayersCase((2, 1), (200, 7), residual_multiplier=0.22, num_ropes=3, rotary_dim=32),
    DecoderLayersCase((1, 5), (90, 40), soft_cap=1.5, sliding_window=(0, 7, 50), post_norm=True),
    DecoderLayersCase((1, 4), (9, 30), activation="relu", bias=True),
    DecoderLayersCase((7, 1, 16), (90, 9, 30), causal=False, qk_norm=True),
    DecoderLayersCase((5,), (40,), causal=False, sliding_window=(0, 7, 50)),
    DecoderLayersCase((3, 1), (200, 40), num_buckets=32, max_distance=100),
    DecoderLayersCase((), (), cross_lens=()),
    DecoderLayersCase((1, 5, 2), (3, 40, 150), cross_lens=(70, 0, 3), skip_mlp=(1,)),
    DecoderLayersCase(
        (2, 1), (9, 20), cross_lens=(300, 9), skip_attention=(0,), sliding_window=(5, 0, 7)
    ),
    # T5: the first kind, and the gated kind of version 1.1.
    DecoderLayersCase(
        (1,) * 5,
        (1, 9, 33, 140, 200),
        hidden_size=72,
        num_q_heads=6,
        num_kv_heads=6,
        rotary=False,
        cross_lens=(64, 1, 0, 17, 130),
        num_buckets=32,
        activation="relu",
    ),
    DecoderLayersCase(
        (4, 1),
        (150, 12),
        num_q_heads=6,
        num_kv_heads=6,
        rotary=False,
        cross_lens=(12, 90),
        num_buckets=32,
        activation="gelu_tanh",
        fixed_split_size=0,
    ),
)
