"""Speeds of peers on the same GPU in the same run: steps of transformers, attention, products.

python -m bench gpu-peers [--json FILE] [--only PART ...] [--model 135m 1b 8b]

``transformers``: a decoding step of its own model with a static cache, captured. ``attention``:
FlashInfer's paged kernels, also over sequences with different numbers of queries, and torch's SDPA
(flash with causal_lower_right, cuDNN). ``products``: cuBLAS at 8 to 288 rows. Only torch is
required; a peer that is not installed is listed and skipped. ``--build`` builds FlashInfer's
kernels ahead on a machine that has nvcc.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.kept import Kept, about
from bench.gpu.timing import Call, matmul_rate, read_rate, time_calls

PAGE_SIZE, DRAFTS = 16, 8
NUM_KEYS = 128 + 32  # as in bench gpu-decode, halfway through 64 tokens after a prompt of 128
ROWS = (8, 32, 64, 72, 128, 288)
PARTS = ("transformers", "attention", "products")
NAMES = ("part", "model", "case", "peer")
COLUMNS = ("part", "model", "case", "peer", "us", "of read", "of matmul", "note")


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a Llama; this module needs only torch, not eecore."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def qkv_size(self) -> int:
        """Features of queries, keys and values together."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes that a pass reads: all layers and the LM head."""
        layer = self.hidden_size * (self.qkv_size + self.num_q_heads * self.head_dim)
        layer += 3 * self.hidden_size * self.intermediate_size
        return (self.num_layers * layer + self.vocab_size * self.hidden_size) * itemsize


SHAPES = {
    "135m": LlamaShape(30, 576, 1536, 9, 3, 64, 49152),
    "1b": LlamaShape(16, 2048, 8192, 32, 8, 64, 128256),
    "8b": LlamaShape(32, 4096, 14336, 32, 8, 128, 128256),
    "tiny": LlamaShape(2, 64, 96, 4, 2, 16, 128),
}


@dataclass(frozen=True)
class Timed:
    """A call of a peer, the bytes that it must read, and its operations."""

    call: Call
    num_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Work:
    """A case of one peer, made when it is timed."""

    part: str
    model: str
    case: str
    peer: str
    make: Callable[[], Timed]


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def transformers_works(
    names: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Iterator[Work]:
    """Cases of a decoding step of transformers' model with a static cache."""
    for name in names:
        if name == "8b":
            continue  # adds nothing to 1b, and takes long to make
        for batch in (1,) if name == "tiny" else (1, 32):

            def made(shape: LlamaShape = SHAPES[name], batch: int = batch) -> Timed:
                call = transformers_step(shape, batch, NUM_KEYS, device, dtype)
                return Timed(call, shape.weight_bytes(dtype.itemsize))

            peer = "transformers, static cache, one graph"
            yield Work("transformers", name, f"decode, batch {batch}", peer, made)


def transformers_step(
    shape: LlamaShape, batch: int, num_keys: int, device: torch.device, dtype: torch.dtype
) -> Call:
    """One step of transformers' model at a fixed position: the cache is reset after it."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
    cache = StaticCache(config=config, max_cache_len=num_keys)
    prompt = torch.randint(shape.vocab_size, (batch, num_keys - 1), device=device)
    token = prompt[:, :1].contiguous()
    with torch.inference_mode():
        model(prompt, past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def step() -> Tensor:
        logits: Tensor = model(token, past_key_values=cache, use_cache=True).logits
        for layer in cache.layers:
            layer.cumulative_length.sub_(1)
        return logits

    return step


@dataclass(frozen=True)
class AttentionCase:
    """Sequences with different numbers of queries, over equally many keys."""

    name: str
    queries: tuple[int, ...]
    num_keys: int
    heads: tuple[int, int, int]


def attention_cases(tiny: bool) -> Iterator[AttentionCase]:
    """Decoding, verification and prompts, at the shapes of 8B and 135M."""
    if tiny:
        heads = (4, 2, 16)
        yield AttentionCase("decode B=2 L=40", (1, 1), 40, heads)
        yield AttentionCase("verify B=3 m=1..3 L=40", (1, 3, 2), 40, heads)
        yield AttentionCase("prompt B=1 m=24 L=40", (24,), 40, heads)
        return
    for heads in ((32, 8, 128), (9, 3, 64)):
        for batch, keys in ((1, 160), (8, 160), (32, 160), (8, 4096), (32, 4096)):
            yield AttentionCase(f"decode B={batch} L={keys}", (1,) * batch, keys, heads)
        for batch, keys in ((8, 4096), (32, 4096)):
            several = tuple(1 + (3 * i) % (DRAFTS + 1) for i in range(batch))
            same = (DRAFTS,) * batch
            yield AttentionCase(f"verify B={batch} m={DRAFTS} L={keys}", same, keys, heads)
            yield AttentionCase(
                f"verify B={batch} m=1..{DRAFTS + 1} L={keys}", several, keys, heads
            )
        for batch, new, keys in ((1, 512, 512), (1, 2048, 2048), (4, 512, 4096)):
            yield AttentionCase(f"prompt B={batch} m={new} L={keys}", (new,) * batch, keys, heads)


class AttentionInputs:
    """The tensors of a case, and each peer's call over them; results are [rows, heads, size]."""

    def __init__(self, case: AttentionCase, device: torch.device, dtype: torch.dtype) -> None:
        self.case, batch = case, len(case.queries)
        num_q_heads, num_kv_heads, size = case.heads
        self.device, self.dtype = device, dtype
        self.q = torch.randn(sum(case.queries), num_q_heads, size, device=device).to(dtype)
        self.pages = -(-case.num_keys // PAGE_SIZE)
        shape = (self.pages * batch, 2, PAGE_SIZE, num_kv_heads, size)
        self.cache = torch.randn(shape, device=device).to(dtype)
        self.order = torch.randperm(self.pages * batch, device=device)
        both = self.cache[self.order].view(batch, self.pages, *shape[1:]).transpose(1, 2)
        self.k, self.v = (
            both[:, i].flatten(1, 2)[:, : case.num_keys].transpose(1, 2).contiguous()
            for i in range(2)
        )

    @property
    def is_even(self) -> bool:
        """Whether all sequences have as many queries."""
        return len(set(self.case.queries)) == 1

    @property
    def moved_bytes(self) -> int:
        """Bytes of all keys and values once, of queries and of results."""
        return self.k.nbytes + self.v.nbytes + 2 * self.q.nbytes

    @property
    def flops(self) -> float:
        """Operations of both products, without the keys that a query does not see."""
        num_q_heads, _, size = self.case.heads
        keys = sum(m * (self.case.num_keys - (m - 1) / 2) for m in self.case.queries)
        return 4.0 * num_q_heads * size * keys

    def sdpa(self, backend: SDPBackend | None) -> Call:
        """torch's SDPA over contiguous keys of equally long sequences."""
        batch, queries = len(self.case.queries), self.case.queries[0]
        q = self.q.view(batch, queries, *self.q.shape[1:]).transpose(1, 2)
        mask = causal_lower_right(queries, self.case.num_keys) if queries > 1 else None

        def attend() -> Tensor:
            found = functional.scaled_dot_product_attention(
                q, self.k, self.v, attn_mask=mask, enable_gqa=True
            )
            return found.transpose(1, 2).reshape(self.q.shape)

        def chosen() -> Tensor:
            with sdpa_kernel(backend):
                return attend()

        return attend if backend is None else chosen

    def one_by_one(self) -> Tensor:
        """The reference result, one sequence at a time in float32."""
        found, first = [], 0
        for i, count in enumerate(self.case.queries):
            q = self.q[first : first + count].float().transpose(0, 1)[None]
            mask = torch.ones(count, self.case.num_keys, dtype=torch.bool, device=self.device)
            mask = mask.tril(self.case.num_keys - count)
            k, v = self.k[i : i + 1].float(), self.v[i : i + 1].float()
            each = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            found.append(each[0].transpose(0, 1))
            first += count
        return torch.cat(found)

    def flashinfer(self, backend: str) -> Call:
        """FlashInfer's paged kernels, planned before the timing."""
        import flashinfer

        def integers(values: Any) -> Tensor:
            return torch.as_tensor(values, device=self.device, dtype=torch.int32)

        case, batch = self.case, len(self.case.queries)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        last = integers([(case.num_keys - 1) % PAGE_SIZE + 1] * batch)
        layout = (integers(range(batch + 1)) * self.pages, self.order.int(), last)
        kinds = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        if set(case.queries) == {1}:
            wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend=backend
            )
            wrapper.plan(*layout, *case.heads, PAGE_SIZE, **kinds)
        else:
            starts = integers(list(itertools.accumulate(case.queries, initial=0)))
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend=backend
            )
            wrapper.plan(starts, *layout, *case.heads, PAGE_SIZE, causal=True, **kinds)
        return lambda: wrapper.run(self.q, self.cache)

    def peers(self) -> dict[str, Callable[[], Call]]:
        """The peers of this case on this device, by name."""
        found: dict[str, Callable[[], Call]] = {}
        on_gpu = self.device.type == "cuda"
        if self.is_even:
            backend = SDPBackend.FLASH_ATTENTION if on_gpu else None
            found["SDPA, flash" if on_gpu else "SDPA"] = lambda: self.sdpa(backend)
            # cuDNN is only measured without a mask.
            if on_gpu and self.case.queries[0] in (1, self.case.num_keys):
                found["SDPA, cuDNN"] = lambda: self.sdpa(SDPBackend.CUDNN_ATTENTION)
        if on_gpu and is_installed("flashinfer"):
            found["FlashInfer"] = lambda: self.flashinfer("fa2")
            if min(self.case.queries) > PAGE_SIZE:  # prompts
                found["FlashInfer, FA3"] = lambda: self.flashinfer("fa3")
        return found


def attention_works(tiny: bool, device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """Cases of each peer of each attention; results are compared before they are timed."""
    for case in attention_cases(tiny):
        inputs = AttentionInputs(case, device, dtype)
        model = "/".join(map(str, case.heads[:2])) + f" heads of {case.heads[2]}"
        for peer, make in inputs.peers().items():

            def made(inputs: AttentionInputs = inputs, make: Callable[[], Call] = make) -> Timed:
                call, right = make(), inputs.one_by_one()
                got: Any = call()
                error = float((got.float() - right).norm() / right.norm())
                if not error < 3e-2:
                    raise AssertionError(f"results differ by {error:.1e} of their norm")
                return Timed(call, inputs.moved_bytes, inputs.flops)

            yield Work("attention", model, case.name, peer, made)


def product_works(names: Sequence[str], device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """Cases of torch.mm with each matrix of a layer and with the LM head."""
    for name in names:
        shape = SHAPES[name]
        hidden, inner = shape.hidden_size, shape.intermediate_size
        sizes = {
            "QKV": (hidden, shape.qkv_size),
            "o": (shape.num_q_heads * shape.head_dim, hidden),
            "gate and up": (hidden, 2 * inner),
            "down": (inner, hidden),
            "LM head": (hidden, shape.vocab_size),
        }
        for (what, (k, n)), rows in itertools.product(
            sizes.items(), (8,) if name == "tiny" else ROWS
        ):

            def made(k: int = k, n: int = n, rows: int = rows) -> Timed:
                x = torch.randn(rows, k, device=device).to(dtype)
                # Weights take turns, so that the cache does not hold them.
                several = max(1, (256 << 20) // (k * n * dtype.itemsize))
                count = min(several, 64) if device.type == "cuda" else 1
                turns = itertools.cycle(
                    [torch.randn(n, k, device=device).to(dtype) for _ in range(count)]
                )
                num_bytes = (k * n + rows * (k + n)) * dtype.itemsize
                return Timed(lambda: torch.mm(x, next(turns).t()), num_bytes, 2.0 * rows * k * n)

            yield Work("products", name, f"{what} {k} -> {n}, {rows} rows", "cuBLAS", made)


def works(
    parts: Sequence[str], names: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Iterator[Work]:
    """All cases, the most important first."""
    if "transformers" in parts:
        if is_installed("transformers"):
            yield from transformers_works(names, device, dtype)
        else:
            print("gpu-peers: transformers is not installed: it is left out", file=sys.stderr)
    if "products" in parts:
        yield from product_works(names, device, dtype)
    if "attention" in parts:
        yield from attention_works(list(names) == ["tiny"], device, dtype)


def measured(work: Work, device: torch.device, rounds: int) -> dict[str, Any]:
    """The row of one peer; a failure is recorded with the reason."""
    row = {"part": work.part, "model": work.model, "case": work.case, "peer": work.peer}
    try:
        timed = work.make()
        seconds = time_calls(device, [timed.call], rounds).median
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}
    return row | {
        "microseconds": seconds * 1e6,
        "of read": timed.num_bytes / seconds / read_rate(device),
        "of matmul": timed.flops / seconds / matmul_rate(device),
    }


def table(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        f"{result['device']}, driver {result['driver']}, torch {result['torch']}, commit "
        f"{result['commit']}. Peers alone, captured in CUDA graphs; random weights. "
        "`python -m bench gpu-peers`",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        known = [
            f"{row[name]:.{digits}f}" if name in row else ""
            for name, digits in (("microseconds", 1), ("of read", 2), ("of matmul", 2))
        ]
        cells = [*(row[name] for name in NAMES), *known, row.get("error", "")]
        lines.append(f"| {' | '.join(cells)} |")
    if result["not_run"]:
        lines += ["", f"No time was left for {len(result['not_run'])} cases."]
    return "\n".join(lines)


def build_ahead() -> int:
    """Compile FlashInfer's modules for these shapes; this needs nvcc, but no GPU.

    They are put into the installed package, which looks there before it compiles a module.
    FLASHINFER_CUDA_ARCH_LIST=9.0a sets the architecture.
    """
    if not is_installed("flashinfer"):
        print("gpu-peers: flashinfer is not installed: nothing is built", file=sys.stderr)
        return 2
    from flashinfer.jit import env
    from flashinfer.jit.attention import modules

    kind, index = torch.bfloat16, torch.int32
    makers = {
        "fa2": modules._gen_batch_prefill_primary_module,
        "fa3": modules.gen_batch_prefill_module,
    }
    specs = [
        make(backend, kind, kind, kind, index, size, size, 0, False, False, False)
        for backend, make in makers.items()
        for size in (64, 128)
    ]
    status = 0
    for spec in specs:
        target = env.FLASHINFER_AOT_DIR / spec.name / f"{spec.name}.so"
        try:
            if not target.exists():
                spec.build()
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(spec.jit_library_path, target)
            print(f"{spec.name}: {target.stat().st_size:,} bytes", flush=True)
        except Exception as error:
            status = 1
            lines = [line for line in str(error).splitlines() if "error" in line.lower()]
            print(f"{spec.name}: not built: {' '.join(lines[:2])}", file=sys.stderr, flush=True)
    return status


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench gpu-peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", nargs="+", choices=list(SHAPES), default=["1b", "135m", "8b"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60, help="no case starts after this time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--build", action="store_true", help="FlashInfer's modules, no timing")
    arguments = parser.parse_args(words)
    if arguments.build:
        return build_ahead()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu-peers: expected a GPU, got none", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    begin = time.monotonic()
    kept = Kept(arguments.json, about(device), NAMES, table)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for work in works(arguments.only, arguments.model, device, dtype):
        case = {name: getattr(work, name) for name in NAMES}
        if kept.find(**case) is not None:
            continue
        if time.monotonic() - begin > arguments.seconds:
            kept.skip(", ".join(case.values()))
            continue
        kept.add(measured(work, device, arguments.rounds))
        print(f"{time.monotonic() - begin:6.1f} s  {', '.join(case.values())}", file=sys.stderr)
    return kept.close()
