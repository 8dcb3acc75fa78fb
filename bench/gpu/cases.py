"""What is timed on a GPU: each op at the shapes of real models, its bytes, and its best peers.

A case makes inputs on demand, so that only one case's tensors are in memory at a time. ``tiny``
shrinks every shape: for tests of the script on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.timing import Call
from eecore import ops
from eecore.models.attention import keys_per_split
from tests.cases import LLAMA_1B, LLAMA_8B, SMOLLM2_135M

EPS = 1e-6
PAGE_SIZE = 16


@dataclass(frozen=True)
class Work:
    """One set of inputs: the op, its peers, and what each gives, to be compared."""

    call: Call
    peers: dict[str, Call] = field(default_factory=dict)
    result: Callable[[], Tensor] | None = None
    peer_result: Callable[[str], Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    op: str
    name: str
    moved_bytes: int
    make: Callable[[], Work]
    of_copy: float | None = None  # target: share of the measured copy bandwidth
    microseconds: float | None = None  # target: at most
    over_peer: float | None = None  # target: times as fast as the best peer
    flops: float | None = None


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


# paged_attention


@dataclass(frozen=True)
class AttentionShape:
    num_seqs: int
    num_queries: int
    seq_len: int
    num_q_heads: int = LLAMA_8B.num_q_heads
    num_kv_heads: int = LLAMA_8B.num_kv_heads
    head_dim: int = LLAMA_8B.head_dim
    causal: bool = True
    num_buckets: int = 0  # of a T5 position bias, on both sides where the call is not causal

    @property
    def name(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        ways = ("" if self.causal else ", not causal") + (", T5 bias" if self.num_buckets else "")
        return f"B={self.num_seqs} m={self.num_queries} L={self.seq_len}, {heads}{ways}"


ATTENTION_SHAPES = (
    AttentionShape(8, 1, 4096),
    AttentionShape(32, 1, 4096),
    AttentionShape(1, 1, 32768),
    AttentionShape(128, 1, 1024),
    AttentionShape(16, 1, 4096, 32, 32),
    AttentionShape(64, 1, 4096, *SMOLLM2_135M.heads),
    AttentionShape(8, 8, 4096),
    AttentionShape(32, 8, 4096),
    AttentionShape(4, 512, 4096),
    # T5-base: its decoder against its own keys and against its encoder's, and its encoder.
    AttentionShape(8, 1, 512, 12, 12, 64, num_buckets=32),
    AttentionShape(64, 1, 512, 12, 12, 64, num_buckets=32),
    AttentionShape(8, 1, 512, 12, 12, 64, causal=False),
    AttentionShape(8, 8, 512, 12, 12, 64, causal=False),
    AttentionShape(8, 512, 512, 12, 12, 64, causal=False, num_buckets=32),
)
TINY_ATTENTION_SHAPES = (
    AttentionShape(2, 1, 40, 4, 2, 64),
    AttentionShape(2, 3, 40, 4, 2, 64),
    AttentionShape(2, 1, 40, 4, 4, 64, num_buckets=32),
    AttentionShape(2, 50, 40, 4, 4, 64, causal=False),
    AttentionShape(2, 40, 40, 4, 4, 64, causal=False, num_buckets=32),
)
MAX_DISTANCE = 128


def attention_mask(shape: AttentionShape, bias: Tensor | None, q: Tensor) -> Tensor | None:
    """What torch adds to the scores, or which it keeps: [num_q_heads or 1, num_queries, seq_len].

    Causality is between the last queries alone: torch's is_causal means another corner.
    """
    positions = torch.arange(shape.num_queries)[:, None] + (shape.seq_len - shape.num_queries)
    relative = torch.arange(shape.seq_len) - positions
    seen = relative <= 0
    if bias is None:
        return seen[None].to(q.device) if shape.causal and shape.num_queries > 1 else None
    # On the CPU: on a GPU logarithms of whole powers are rounded otherwise.
    num_sided = shape.num_buckets if shape.causal else shape.num_buckets // 2
    exact = num_sided // 2
    distance = -relative.clamp(max=0) if shape.causal else relative.abs()
    steps = torch.log(distance.clamp(min=1) / exact) / math.log(MAX_DISTANCE / exact)
    far = (exact + (steps * (num_sided - exact)).long()).clamp(max=num_sided - 1)
    bucket = torch.where(distance < exact, distance, far)
    if not shape.causal:
        bucket += num_sided * (relative > 0)
    added = bias.cpu()[bucket].permute(2, 0, 1)
    return (added.masked_fill(~seen, -math.inf) if shape.causal else added).to(q)


def attention_work(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    fixed_split_size: int | None = None,
) -> Work:
    """With splits as a model asks for them, unless they are given."""
    split = keys_per_split(device) if fixed_split_size is None else fixed_split_size
    pages = -(-shape.seq_len // PAGE_SIZE)
    cache_shape = (pages * shape.num_seqs, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    q_shape = (shape.num_seqs * shape.num_queries, shape.num_q_heads, shape.head_dim)
    q = torch.randn(q_shape, device=device).to(dtype)
    k_cache, v_cache = (torch.randn(cache_shape, device=device).to(dtype) for _ in range(2))
    page_table = torch.randperm(pages * shape.num_seqs, device=device).int()
    page_table = page_table.view(shape.num_seqs, pages)
    seq_lens = torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32, device=device)
    starts = list(itertools.accumulate([shape.num_queries] * shape.num_seqs, initial=0))
    query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    scale = shape.head_dim**-0.5
    bias = torch.randn(shape.num_buckets, shape.num_q_heads, device=device)
    position_bias = bias if shape.num_buckets else None

    def attend() -> Tensor:
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            query_start_loc,
            scale=scale,
            causal=shape.causal,
            position_bias=position_bias,
            max_distance=MAX_DISTANCE,
            bidirectional=not shape.causal,
            fixed_split_size=split,
            out=out,
        )

    def gathered(cache: Tensor) -> Tensor:
        """[num_seqs, num_kv_heads, seq_len, head_dim]"""
        rows = cache[page_table.long()].flatten(1, 2)[:, : shape.seq_len]
        return rows.transpose(1, 2).contiguous()

    k, v = gathered(k_cache), gathered(v_cache)
    by_seq = q.unflatten(0, (shape.num_seqs, shape.num_queries)).transpose(1, 2)
    mask = attention_mask(shape, position_bias, q)

    def sdpa() -> Tensor:
        attention = functional.scaled_dot_product_attention
        return attention(by_seq, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    peers: dict[str, Call] = {"torch SDPA": sdpa}
    results: dict[str, Call] = {"torch SDPA": lambda: sdpa().transpose(1, 2).reshape(q_shape)}
    # The others know no such bias.
    if device.type == "cuda" and dtype != torch.float32 and position_bias is None:
        if is_installed("flashinfer"):
            peers["flashinfer"] = results["flashinfer"] = flashinfer_call(
                shape, q, k_cache, v_cache, page_table, query_start_loc
            )
        if is_installed("flash_attn"):
            peers["flash-attn"] = flash_attention_call(shape, q, k_cache, v_cache, page_table)
            results["flash-attn"] = lambda: peers["flash-attn"]().view(q_shape)  # type: ignore[attr-defined]
    return Work(attend, peers, attend, lambda name: results[name]())  # type: ignore[return-value, arg-type]


def flashinfer_call(
    shape: AttentionShape,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
) -> Call:
    """flashinfer's paged kernels on the same pages, planned outside the timing."""
    import flashinfer

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    num_pages = page_table.shape[1]
    indptr = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=q.device) * num_pages
    last = (shape.seq_len - 1) % PAGE_SIZE + 1
    last_page_len = torch.full((shape.num_seqs,), last, dtype=torch.int32, device=q.device)
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE)
    if shape.num_queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(indptr, page_table.flatten(), last_page_len, *heads, q_data_type=q.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            query_start_loc,
            indptr,
            page_table.flatten(),
            last_page_len,
            *heads,
            causal=shape.causal,
            q_data_type=q.dtype,
        )
    return lambda: wrapper.run(q, (k_cache, v_cache))


def flash_attention_call(
    shape: AttentionShape, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor
) -> Call:
    """flash-attn on the same numbers, in pages of its own size where it does not take 16."""
    from flash_attn import flash_attn_with_kvcache

    page_size = 256
    if shape.seq_len % page_size:
        raise ValueError(f"expected lengths in whole pages of {page_size}, got {shape.seq_len}")
    k, v = (
        cache[page_table.long()].flatten(1, 2).unflatten(1, (-1, page_size)).flatten(0, 1)
        for cache in (k_cache, v_cache)
    )
    table = torch.arange(len(k), dtype=torch.int32, device=q.device).view(shape.num_seqs, -1)
    seq_lens = torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32, device=q.device)
    split = q.unflatten(0, (shape.num_seqs, shape.num_queries))
    return lambda: flash_attn_with_kvcache(
        split, k, v, cache_seqlens=seq_lens, block_table=table, causal=shape.causal
    )


def attention_cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    for shape in TINY_ATTENTION_SHAPES if tiny else ATTENTION_SHAPES:
        size = dtype.itemsize
        kv = 2 * shape.num_seqs * shape.seq_len * shape.num_kv_heads * shape.head_dim * size
        rows = 2 * shape.num_seqs * shape.num_queries * shape.num_q_heads * shape.head_dim * size
        decode, verify = shape.num_queries == 1, 1 < shape.num_queries <= 16
        keys = shape.seq_len - ((shape.num_queries - 1) / 2 if shape.causal else 0)
        bias = 4 * shape.num_buckets * shape.num_q_heads
        yield Case(
            "paged_attention",
            shape.name,
            kv + rows + bias,
            lambda shape=shape: attention_work(shape, dtype, device),
            of_copy=(0.88 if decode else 0.80 if verify else None) if kv >= 100e6 else None,
            flops=None if decode else 2 * rows / size * keys,
        )


# exit_confidence_softmax


def softmax_work(
    num_seqs: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> Work:
    hidden = torch.randn(num_seqs, hidden_size, device=device).to(dtype)
    norm = torch.rand(hidden_size, device=device).to(dtype)
    lm_head = torch.randn(vocab_size, hidden_size, device=device).to(dtype) * hidden_size**-0.5

    def confidence() -> ops.SoftmaxConfidence:
        return ops.exit_confidence_softmax(hidden, norm, lm_head, EPS)

    def logits() -> Tensor:
        return functional.linear(rms_norm(hidden, norm), lm_head)

    def in_torch() -> Tensor:
        top = logits().float().softmax(-1).topk(2, dim=-1).values
        return top[:, 0] - top[:, 1]

    # Gaps of logits that torch rounds to 16 bits differ by more than they are; their sums agree.
    return Work(
        confidence,
        {"torch matmul + topk": in_torch},
        lambda: confidence().logsumexp,
        lambda _: logits().float().logsumexp(-1),
    )


def softmax_cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    real = [model.lm_head for model in (LLAMA_8B, LLAMA_1B, SMOLLM2_135M)]
    heads = [(64, 300)] if tiny else real
    for (hidden_size, vocab_size), num_seqs in itertools.product(heads, (1, 4, 8, 16, 32)):
        aimed_at = (hidden_size, vocab_size) == LLAMA_8B.lm_head and num_seqs <= 16
        yield Case(
            "exit_confidence_softmax",
            f"{vocab_size} x {hidden_size}, B={num_seqs}",
            (vocab_size + num_seqs) * hidden_size * dtype.itemsize,
            lambda b=num_seqs, h=hidden_size, v=vocab_size: softmax_work(b, h, v, dtype, device),
            of_copy=0.88 if aimed_at else None,
        )


# kv_fill


def kv_fill_work(
    num_layers: int,
    num_tokens: int,
    hidden_size: int,
    heads: tuple[int, int],
    exit_layers: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    num_kv_heads, head_dim = heads
    kv_size = 2 * num_kv_heads * head_dim
    hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    norm = torch.rand(num_layers, hidden_size, device=device).to(dtype)
    weight = torch.randn(num_layers, kv_size, hidden_size, device=device).to(dtype)
    weight *= hidden_size**-0.5
    cache_shape = (num_layers, 4 * num_tokens, PAGE_SIZE, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.zeros(cache_shape, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(4 * num_tokens * PAGE_SIZE, device=device)[:num_tokens]
    positions = torch.arange(num_tokens, device=device) + 100
    angles = torch.rand(100 + num_tokens, head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    exit_layer = torch.tensor(exit_layers, dtype=torch.int32, device=device)

    def fill() -> None:
        ops.kv_fill(
            hidden,
            exit_layer,
            norm,
            ops.Matrix(weight),
            k_cache,
            v_cache,
            slots,
            positions=positions,
            cos_sin=cos_sin,
            eps=EPS,
        )

    # A layer at a time: norm, product, rotary and write, with torch's own kernels.
    pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE
    cos, sin = (part[:, None].to(dtype) for part in cos_sin[positions].chunk(2, dim=1))
    k_other, v_other = torch.zeros_like(k_cache), torch.zeros_like(v_cache)

    def layer_by_layer() -> None:
        for layer in range(min(exit_layers), num_layers):
            projected = functional.linear(rms_norm(hidden, norm[layer]), weight[layer])
            k, v = projected.view(num_tokens, 2, num_kv_heads, head_dim).unbind(1)
            a, b = k.chunk(2, dim=-1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
            k_other[layer, pages, offsets] = rotated
            v_other[layer, pages, offsets] = v

    def filled() -> Tensor:
        fill()
        return torch.stack((k_cache, v_cache))[:, max(exit_layers) :, pages, offsets]

    def filled_layer_by_layer(_: str) -> Tensor:
        layer_by_layer()
        return torch.stack((k_other, v_other))[:, max(exit_layers) :, pages, offsets]

    return Work(fill, {"cuBLAS a layer": layer_by_layer}, filled, filled_layer_by_layer)


def kv_fill_cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    real = (16, LLAMA_8B.hidden_size, LLAMA_8B.heads[1:])  # of 32: those behind an exit
    layers, hidden_size, heads = (3, 64, (2, 64)) if tiny else real
    kv_size = 2 * heads[0] * heads[1]
    for num_tokens, ragged in itertools.product((1, 4, 8, 16, 32), (False, True)):
        exits = [i * layers // num_tokens if ragged else 0 for i in range(num_tokens)]
        if ragged and num_tokens == 1:
            continue
        needed = sum(layers - exit_layer for exit_layer in exits)
        weights = (layers - min(exits)) * kv_size * hidden_size
        rows = num_tokens * hidden_size + needed * kv_size
        yield Case(
            "kv_fill",
            f"{layers} layers, {hidden_size} -> {kv_size}, B={num_tokens}"
            + (", exits spread" if ragged else ""),
            (weights + rows) * dtype.itemsize,
            lambda b=num_tokens, exits=exits: kv_fill_work(
                layers, b, hidden_size, heads, exits, dtype, device
            ),
            of_copy=0.75 if num_tokens <= 16 and not ragged else None,
            over_peer=2.0 if num_tokens <= 16 and not ragged else None,
        )


# skinny_linear, skinny_gated_linear


def linear_work(
    num_tokens: int, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device
) -> Work:
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    weight = torch.randn(out_features, in_features, device=device).to(dtype) * in_features**-0.5
    out = torch.empty(num_tokens, out_features, dtype=dtype, device=device)

    def linear() -> Tensor:
        return ops.skinny_linear(x, weight, constant_weight=True, out=out)

    return Work(
        linear,
        {"cuBLAS": lambda: functional.linear(x, weight)},
        linear,
        lambda _: functional.linear(x, weight),
    )


def gated_work(
    num_tokens: int, in_features: int, inner_size: int, dtype: torch.dtype, device: torch.device
) -> Work:
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    norm = torch.rand(in_features, device=device).to(dtype)
    weight = torch.randn(2 * inner_size, in_features, device=device).to(dtype) * in_features**-0.5
    out = torch.empty(num_tokens, inner_size, dtype=dtype, device=device)

    def gated() -> Tensor:
        return ops.skinny_gated_linear(
            x, weight, norm_weight=norm, eps=EPS, constant_weight=True, out=out
        )

    def in_torch() -> Tensor:
        gate, up = functional.linear(rms_norm(x, norm), weight).chunk(2, dim=-1)
        return functional.silu(gate) * up

    return Work(gated, {"cuBLAS + torch": in_torch}, gated, lambda _: in_torch())


def linear_cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    large, small = LLAMA_8B, LLAMA_1B
    real = [
        (large.q_size, large.hidden_size),
        (large.hidden_size, large.qkv_size),
        (large.inner_size, large.hidden_size),
        (small.q_size, small.hidden_size),
    ]
    shapes = [(64, 96)] if tiny else real
    for (k, n), b in itertools.product(shapes, (1, 8, 16)):
        yield Case(
            "skinny_linear",
            f"{k} -> {n}, B={b}",
            (k * n + b * (k + n)) * dtype.itemsize,
            lambda b=b, k=k, n=n: linear_work(b, k, n, dtype, device),
        )
    real = [(model.hidden_size, model.inner_size) for model in (large, small)]
    shapes = [(64, 96)] if tiny else real
    for (k, n), b in itertools.product(shapes, (1, 8, 16)):
        yield Case(
            "skinny_gated_linear",
            f"{k} -> 2 x {n}, B={b}",
            (2 * k * n + b * (k + n)) * dtype.itemsize,
            lambda b=b, k=k, n=n: gated_work(b, k, n, dtype, device),
        )


# Ops of a few kilobytes: their launch is their cost


def cosine_work(num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Work:
    previous, hidden = (torch.randn(num_seqs, hidden_size, device=device).to(dtype) for _ in "ab")

    def cosine() -> Tensor:
        return ops.exit_confidence_cosine(previous, hidden)

    def in_torch() -> Tensor:
        return functional.cosine_similarity(previous.float(), hidden.float())

    return Work(cosine, {"torch": in_torch}, cosine, lambda _: in_torch())


def mlp_work(num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Work:
    hidden = torch.randn(num_seqs, hidden_size, device=device).to(dtype)
    weight, bias = torch.randn(2, hidden_size, device=device) / 64, torch.randn(2, device=device)

    def confidence() -> Tensor:
        return ops.exit_confidence_mlp(hidden, weight, bias)

    def in_torch() -> Tensor:
        return functional.linear(hidden.float(), weight, bias).softmax(-1)[:, 1]

    return Work(confidence, {"torch": in_torch}, confidence, lambda _: in_torch())


def accept_work(num_seqs: int, device: torch.device) -> Work:
    confidence, thresholds = (torch.rand(num_seqs, device=device) for _ in "ab")
    status = torch.zeros(num_seqs, dtype=torch.bool, device=device)
    exit_layer = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    return Work(lambda: ops.accept_mask(confidence, thresholds, 3, status, exit_layer))


def head_rows(num_seqs: int, device: torch.device) -> ops.SoftmaxConfidence:
    """What the head might give of some rows."""
    confidence = torch.rand(num_seqs, device=device)
    token = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    return ops.SoftmaxConfidence(confidence, token, confidence, confidence)


def active_rows(num_seqs: int, device: torch.device) -> ops.ActiveRows:
    """All rows of a program, at their first position."""
    zeros = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    return ops.ActiveRows(
        row=torch.arange(num_seqs, dtype=torch.int32, device=device),
        positions=zeros,
        slot_mapping=zeros.clone(),
        seq_lens=torch.ones(num_seqs, dtype=torch.int32, device=device),
        page_table=torch.zeros(num_seqs, 64, dtype=torch.int32, device=device),
        num_active=torch.full((1,), num_seqs, dtype=torch.int32, device=device),
    )


def exiting_rows(
    num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ops.ExitingRows]:
    """States, and rows that leave as soon as they are sure of anything."""
    hidden = torch.randn(num_seqs, hidden_size, device=device).to(dtype)
    whole = torch.zeros(num_seqs, dtype=torch.int32, device=device)
    no = torch.zeros(num_seqs, dtype=torch.bool, device=device)
    rows = ops.ExitingRows(
        leave_after=whole + 99,
        together=no,
        fills=~no,
        kind=whole + 1,
        accepted=no.clone(),
        gone=no.clone(),
        exit_layer=whole.clone(),
        fill_from=whole.clone(),
        measured_at=whole.clone(),
        confidence=torch.zeros(num_seqs, device=device),
        token=whole.long(),
        logprob=torch.zeros(num_seqs, device=device),
        token_at=whole.clone(),
        pending=whole.clone(),
        hidden=torch.empty_like(hidden),
        all_gone=torch.zeros(1, dtype=torch.bool, device=device),
    )
    return hidden, rows


def exit_work(num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Work:
    """Every row leaves, in every call; what brings them back before is timed with it."""
    hidden, rows = exiting_rows(num_seqs, hidden_size, dtype, device)
    head, active = head_rows(num_seqs, device), active_rows(num_seqs, device)
    thresholds = torch.zeros(num_seqs, device=device)

    def leave() -> None:
        rows.gone.zero_()
        ops.exit_rows(hidden, 3, rows, active, thresholds=thresholds, head=head)

    return Work(leave)


def embed_work(num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Work:
    weight = torch.randn(1000, hidden_size, device=device).to(dtype)
    token_ids = torch.randint(0, 1000, (num_seqs,), device=device)
    return Work(
        lambda: ops.embed_tokens(token_ids, weight),
        {"torch.embedding": lambda: functional.embedding(token_ids, weight)},
        lambda: ops.embed_tokens(token_ids, weight),
        lambda _: functional.embedding(token_ids, weight),
    )


def place_work(num_seqs: int, device: torch.device) -> Work:
    head = head_rows(num_seqs, device)
    out = ops.HeadRows(*(torch.zeros_like(tensor) for tensor in (head.token, *head[2:])))
    index = torch.arange(num_seqs, dtype=torch.int32, device=device)
    return Work(lambda: ops.place_head(head, out, index=index, as_probability=True))


@dataclass(frozen=True)
class Drafting:
    """A round in which every row goes on, up to eight drafts, and what verifies all of them."""

    draft_round: ops.DraftRound
    active: ops.ActiveRows
    verification: ops.Verification
    ended: ops.EndedRound
    hidden: Tensor
    token: Tensor
    confidence: Tensor
    num_accepted: Tensor
    target: Tensor


def drafting_rows(
    num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> Drafting:
    """The memory of a round, begun and drafted; its tokens are all the same."""
    steps, width, max_tokens = 8, 9, 9 * num_rows

    def whole(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, device=device)

    def half(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    draft_round = ops.DraftRound(
        token_ids=whole(num_rows, value=1),
        start=whole(num_rows),
        tokens_left=whole(num_rows, value=100),
        max_drafts=whole(num_rows, value=steps),
        page_table=half(num_rows, 4),
        thresholds=torch.zeros(num_rows, device=device),
        stop_tokens=whole(num_rows, 2, value=-1),
        first_position=whole(num_rows),
        left=whole(num_rows),
        round_slots=whole(num_rows, width),
        tokens=whole(num_rows, width, value=1),
        confidences=torch.zeros(num_rows, steps, device=device),
        num_drafted=whole(num_rows),
        most=whole(num_rows),
        done=torch.zeros(num_rows, dtype=torch.bool, device=device),
        all_done=torch.zeros(1, dtype=torch.bool, device=device),
        states=torch.zeros(num_rows, width, hidden_size, dtype=dtype, device=device),
    )
    active = ops.ActiveRows(
        row=half(num_rows),
        positions=whole(num_rows),
        slot_mapping=whole(num_rows),
        seq_lens=half(num_rows, value=1),
        page_table=half(num_rows, 4),
        num_active=half(1, value=num_rows),
        token_ids=whole(num_rows),
    )
    ops.begin_round(draft_round, active, PAGE_SIZE)
    draft_round.num_drafted.fill_(steps)
    verification = ops.Verification(
        *(whole(num_rows) for _ in range(3)),
        half(num_rows),
        *(whole(max_tokens) for _ in range(3)),
        half(max_tokens),
        half(num_rows),
        half(num_rows + 1),
        half(1),
    )
    ops.begin_verification(draft_round, verification)
    return Drafting(
        draft_round,
        active,
        verification,
        ops.EndedRound(*(whole(num_rows) for _ in range(3))),
        torch.randn(num_rows, hidden_size, device=device).to(dtype),
        whole(num_rows, value=1),
        torch.ones(num_rows, device=device),
        whole(num_rows),
        whole(max_tokens, value=1),
    )


def draft_work(num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Work:
    made = drafting_rows(num_rows, hidden_size, dtype, device)
    given = (made.hidden, made.token, made.confidence)
    return Work(lambda: ops.append_drafts(*given, 0, made.draft_round, made.active))


def gather_work(num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Work:
    made = drafting_rows(num_rows, hidden_size, dtype, device)
    states = made.draft_round.states
    assert states is not None
    out = states.new_empty(9 * num_rows, hidden_size)
    return Work(lambda: ops.gather_states(states, made.hidden, made.verification, out))


def begin_round_work(num_rows: int, device: torch.device) -> Work:
    made = drafting_rows(num_rows, 8, torch.float32, device)
    return Work(lambda: ops.begin_round(made.draft_round, made.active, PAGE_SIZE))


def begin_verification_work(num_rows: int, device: torch.device) -> Work:
    made = drafting_rows(num_rows, 8, torch.float32, device)
    return Work(lambda: ops.begin_verification(made.draft_round, made.verification))


def accept_round_work(num_rows: int, device: torch.device) -> Work:
    made = drafting_rows(num_rows, 8, torch.float32, device)
    given = (made.draft_round, made.verification, made.target, made.ended, made.num_accepted)
    return Work(lambda: ops.accept_round(*given))


def append_work(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Work:
    qkv = torch.randn(num_tokens, 48, 128, device=device).to(dtype)
    q, k, v = qkv.split((32, 8, 8), dim=1)
    k_cache, v_cache = (
        torch.zeros(4 * num_tokens, PAGE_SIZE, 8, 128, dtype=dtype, device=device) for _ in "kv"
    )
    slots = torch.randperm(4 * num_tokens * PAGE_SIZE, device=device)[:num_tokens]
    positions = torch.arange(num_tokens, device=device)
    cos_sin = torch.rand(num_tokens, 128, device=device)
    return Work(
        lambda: ops.append_kv(
            q, k, v, k_cache, v_cache, slots, positions=positions, cos_sin=cos_sin
        )
    )


def speculative_work(num_seqs: int, num_drafts: int, device: torch.device) -> Work:
    drafts = torch.randint(0, 3, (num_seqs * num_drafts,), device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_drafts
    targets = torch.randint(0, 3, (num_seqs * (num_drafts + 1),), device=device)
    return Work(lambda: ops.speculative_accept(drafts, starts, target_tokens=targets))


def sampling_rows(
    num_rows: int, vocab_size: int, device: torch.device, **given: float
) -> tuple[ops.SamplingRows, ops.SampledRows]:
    """Requests that sample, 100 tokens into their text, and what is written of them."""

    def each(name: str, otherwise: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_rows,), given.get(name, otherwise), dtype=dtype, device=device)

    rows = ops.SamplingRows(
        temperature=each("temperature", 1.0),
        top_k=each("top_k", 0, torch.int32),
        top_p=each("top_p", 1.0),
        min_p=each("min_p", 0.0),
        repetition_penalty=each("repetition_penalty", 1.0),
        seed=torch.arange(num_rows, device=device),
        seen=torch.randint(0, vocab_size, (num_rows, 100), device=device),
    )
    numbers = (torch.empty(num_rows, device=device) for _ in range(3))
    return rows, ops.SampledRows(torch.empty_like(rows.seed), *numbers)


def sample_work(
    num_rows: int,
    vocab_size: int,
    given: dict[str, float],
    dtype: torch.dtype,
    device: torch.device,
) -> Work:
    logits = (3 * torch.randn(num_rows, vocab_size, device=device)).to(dtype)
    rows, out = sampling_rows(num_rows, vocab_size, device, **given)
    positions = torch.arange(num_rows, device=device)
    return Work(lambda: ops.sample_tokens(logits, rows, out, purpose=0, positions=positions))


def small_cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    hidden_size = 64 if tiny else 4096
    vocab_size = 1000 if tiny else LLAMA_8B.vocab_size
    for b in (1, 8, 32):
        row = hidden_size * dtype.itemsize
        yield Case(
            "exit_confidence_cosine",
            f"{hidden_size}, B={b}",
            2 * b * row,
            lambda b=b: cosine_work(b, hidden_size, dtype, device),
            microseconds=5,
        )
        yield Case(
            "exit_confidence_mlp",
            f"{hidden_size} -> 2, B={b}",
            b * row + 8 * hidden_size,
            lambda b=b: mlp_work(b, hidden_size, dtype, device),
            microseconds=5,
        )
        yield Case(
            "accept_mask", f"B={b}", 18 * b, lambda b=b: accept_work(b, device), microseconds=5
        )
        yield Case(
            "embed_tokens",
            f"hidden {hidden_size}, B={b}",
            2 * b * row,
            lambda b=b: embed_work(b, hidden_size, dtype, device),
            microseconds=5,
        )
        yield Case(
            "place_head", f"B={b}", 48 * b, lambda b=b: place_work(b, device), microseconds=5
        )
        yield Case(
            "exit_rows",
            f"hidden {hidden_size}, B={b}, and a fill",
            2 * b * row,
            lambda b=b: exit_work(b, hidden_size, dtype, device),
            microseconds=5,
        )
        yield Case(
            "append_drafts",
            f"hidden {hidden_size}, B={b}",
            2 * b * row,
            lambda b=b: draft_work(b, hidden_size, dtype, device),
            microseconds=5,
        )
        yield Case(
            "gather_states",
            f"hidden {hidden_size}, 8 drafts, B={b}",
            2 * 9 * b * row,
            lambda b=b: gather_work(b, hidden_size, dtype, device),
            microseconds=5,
        )
        for op, moved, work in (
            ("begin_round", 9 * 12, begin_round_work),
            ("begin_verification", 9 * 44, begin_verification_work),
            ("accept_round", 9 * 16, accept_round_work),
        ):
            yield Case(
                op,
                f"8 drafts, B={b}",
                b * moved,
                lambda b=b, work=work: work(b, device),
                microseconds=5,
            )
        yield Case(
            "append_kv",
            f"32/8 heads of 128, B={b}",
            b * (2 * 40 + 2 * 8) * 128 * dtype.itemsize,
            lambda b=b: append_work(b, dtype, device),
        )
        yield Case(
            "speculative_accept",
            f"greedy, 8 drafts, B={b}",
            b * 17 * 8,
            lambda b=b: speculative_work(b, 8, device),
        )
        for way, given in {
            "plain": {},
            "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
        }.items():
            yield Case(
                "sample_tokens",
                f"vocabulary {vocab_size}, {way}, B={b}",
                b * vocab_size * dtype.itemsize,
                lambda b=b, given=given: sample_work(b, vocab_size, given, dtype, device),
            )


def cases(dtype: torch.dtype, device: torch.device, tiny: bool) -> Iterator[Case]:
    """Every row of the table, for one dtype."""
    for family in (attention_cases, softmax_cases, kv_fill_cases, linear_cases, small_cases):
        yield from family(dtype, device, tiny)
