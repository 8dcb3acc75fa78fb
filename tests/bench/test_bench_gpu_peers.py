"""The peers of a GPU, run on the CPU with tiny shapes: their results, not their speed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu import peers, static_llama
from bench.gpu.static_llama import (
    EPS,
    SHAPES,
    THETA,
    FlashInferKernels,
    FlashInferWithoutNorms,
    Layer,
    Pass,
    StaticLlama,
    TorchKernels,
    Weights,
    kernels_here,
)
from bench.harness.places import ROOT

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    """transformers' model of the tiny shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_q_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        vocab_size=TINY.vocab_size,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def weights_of(oracle: torch.nn.Module) -> Weights:
    layers = []
    for layer in oracle.model.layers:
        own, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        layers.append(
            Layer(norms[0], qkv, own.o_proj.weight, norms[1], gate_up, mlp.down_proj.weight)
        )
    embedding = oracle.model.embed_tokens.weight
    return Weights(embedding, layers, oracle.model.norm.weight, oracle.lm_head.weight)


def kernels(work: Pass, before: TorchKernels | None = None) -> TorchKernels:
    """The kernels of a pass, with the keys that the pass before it has written."""
    made = TorchKernels(TINY, work, CPU, torch.float32)
    if before is not None:
        for cache, old in zip(made.caches, before.caches, strict=True):
            cache[:, :, : old.shape[2]] = old
    return made


@torch.inference_mode()
def logits_of(oracle: torch.nn.Module, texts: Tensor) -> Tensor:
    found: Tensor = oracle(texts).logits
    return found


@pytest.mark.parametrize("queries", [1, 3, 17])
def test_the_static_model_computes_a_llama(oracle: torch.nn.Module, queries: int) -> None:
    """A prompt, then a step, a verification or a chunk over its keys."""
    weights, batch, prompt = weights_of(oracle), 2, 20
    texts = torch.randint(TINY.vocab_size, (batch, prompt + queries))
    right = logits_of(oracle, texts)
    first = kernels(Pass(batch, prompt, prompt))
    got = StaticLlama(TINY, weights, first, texts[:, :prompt].flatten())()
    torch.testing.assert_close(got, right[:, prompt - 1], rtol=1e-4, atol=1e-4)

    second = kernels(Pass(batch, queries, prompt + queries), first)
    model = StaticLlama(TINY, weights, second, texts[:, prompt:].flatten())
    for _ in range(2):  # it may be run again and again
        got = model()
        if queries == 17:  # a prompt wants the logits of its last token alone
            torch.testing.assert_close(got, right[:, -1], rtol=1e-4, atol=1e-4)
        else:
            expected = right[:, prompt:].flatten(0, 1)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_step_of_transformers_may_be_run_again() -> None:
    step = peers.transformers_step(TINY, 2, 20, CPU, torch.float32)
    first = step()
    assert isinstance(first, Tensor)
    torch.testing.assert_close(step(), first)


def test_each_peer_is_timed_and_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--device", "cpu", "--model", "tiny", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    for case in ("decode, batch 2", "verify 3 tokens, batch 2", "first token of 24"):
        assert f"| model | tiny | {case} | cuBLAS and torch, one graph |" in text
    assert "transformers, static cache, one graph" in text
    assert "| LM head 64 -> 128, 8 rows | cuBLAS |" in text
    assert "prompt B=1 m=24 L=40 | SDPA |" in text


def test_a_peer_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (work, *_) = peers.attention_works(True, CPU, torch.float32)
    right = peers.AttentionInputs.one_by_one
    monkeypatch.setattr(peers.AttentionInputs, "one_by_one", lambda self: right(self) * 1.1)
    row = peers.measured(work, CPU, 1)
    assert "results differ" in row["error"]
    assert "microseconds" not in row


def test_attention_of_ragged_queries_is_that_of_each_sequence() -> None:
    even, ragged, _ = peers.attention_cases(True)
    inputs = peers.AttentionInputs(ragged, CPU, torch.float32)
    assert not inputs.is_even
    assert inputs.peers() == {}  # torch has no call for it
    assert inputs.one_by_one().shape == inputs.q.shape
    same = peers.AttentionInputs(replace(even, queries=(3, 3)), CPU, torch.float32)
    torch.testing.assert_close(same.sdpa(None)(), same.one_by_one(), rtol=1e-4, atol=1e-5)


def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda _: False)
    words = ["--device", "cpu", "--model", "tiny", "--only", "transformers"]
    assert peers.main(words) == 0
    assert "transformers is not installed" in capsys.readouterr().err
    assert peers.main(["--build"]) == 2
    assert "flashinfer is not installed" in capsys.readouterr().err


def test_peers_and_the_plan_need_no_build() -> None:
    """They run first, so that a failing build costs only what needs it."""
    code = (
        "import sys; sys.modules['eecore._C'] = None; import bench.gpu.run, bench.gpu.peers;"
        "raise SystemExit(bench.gpu.peers.main("
        "['--device', 'cpu', '--model', 'tiny', '--only', 'products', '--rounds', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class FakeFlashInfer:
    """flashinfer's calls, by torch's kernels over contiguous keys."""

    def __init__(self, *, has_norms: bool) -> None:
        self.norm = self.activation = self.rope = self.page = self
        self._has_norms = has_norms
        self.appended: list[Tensor] = []

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not self._has_norms:
            raise RuntimeError("JIT compilation is disabled")
        return functional.rms_norm(x, weight.shape, weight, eps)

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        residual += x
        x.copy_(self.rmsnorm(residual, weight, eps))

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def apply_rope_with_cos_sin_cache_inplace(
        self, positions: Tensor, q: Tensor, k: Tensor, size: int, table: Tensor, is_neox: bool
    ) -> None:
        assert is_neox
        cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)
        for x in (q, k):
            a, b = x.view(len(x), -1, size).chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
            x.copy_(turned.flatten(1))

    def append_paged_kv_cache(
        self,
        k: Tensor,
        v: Tensor,
        sequences: Tensor,
        positions: Tensor,
        cache: Tensor,
        pages: Tensor,
        starts: Tensor,
        last: Tensor,
    ) -> None:
        size = cache.shape[2]
        assert last.tolist() == [int(positions[-1]) % size + 1] * (len(starts) - 1)
        at = pages[starts[sequences].long() + positions.long() // size].long()
        cache[at, 0, positions.long() % size] = k
        cache[at, 1, positions.long() % size] = v

    def BatchDecodeWithPagedKVCacheWrapper(self, *_: object, **options: object) -> Attention:
        assert options == {"use_tensor_cores": True, "backend": "fa2"}
        return Attention()

    def BatchPrefillWithPagedKVCacheWrapper(self, *_: object, **options: object) -> Attention:
        assert options == {"backend": "fa2"}
        return Attention()


class Attention:
    """A wrapper of flashinfer: its plan, and attention over pages, one sequence at a time."""

    def plan(self, *layout: Any, causal: bool = False, **kinds: Any) -> None:
        assert kinds.keys() == {"q_data_type", "kv_data_type"}
        *queries, starts, self._pages, last, num_q_heads, num_kv_heads, _, size = layout
        count = len(starts) - 1
        self._queries = queries[0] if queries else torch.arange(count + 1)
        assert causal is bool(queries)
        self._starts, self._keys = (
            starts,
            [(int(starts[i + 1] - starts[i]) - 1) * size + int(last[i]) for i in range(count)],
        )
        assert num_q_heads % num_kv_heads == 0

    def run(self, q: Tensor, cache: Tensor) -> Tensor:
        found = []
        for i, keys in enumerate(self._keys):
            pages = self._pages[self._starts[i] : self._starts[i + 1]].long()
            k, v = (cache[pages, j].flatten(0, 1)[:keys].transpose(0, 1) for j in range(2))
            own = q[self._queries[i] : self._queries[i + 1]].transpose(0, 1)
            mask = torch.ones(own.shape[1], keys, dtype=torch.bool).tril(keys - own.shape[1])
            each = functional.scaled_dot_product_attention(
                own[None], k[None], v[None], mask, enable_gqa=True
            )
            found.append(each[0].transpose(0, 1))
        return torch.cat(found)


@pytest.mark.parametrize("kernels", [FlashInferKernels, FlashInferWithoutNorms])
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_with_flashinfers_calls_it_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, kernels: type[FlashInferKernels], queries: int
) -> None:
    fake = FakeFlashInfer(has_norms=kernels is FlashInferKernels)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    work = Pass(2, queries, 20)
    weights = Weights.random(TINY, CPU, torch.float32)
    tokens = torch.randint(TINY.vocab_size, (work.rows,))
    paged = kernels(TINY, work, CPU, torch.float32)
    plain = TorchKernels(TINY, work, CPU, torch.float32)
    for pages, cache in zip(paged.caches, plain.caches, strict=True):
        own = pages[paged._pages.long()].view(2, -1, *pages.shape[1:]).transpose(1, 2)
        cache.copy_(own.flatten(2, 3)[:, :, :20].transpose(0, 1))
    got = StaticLlama(TINY, weights, paged, tokens)()
    right = StaticLlama(TINY, weights, plain, tokens)()
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_flashinfer_is_used_as_far_as_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU it is not called; missing parts are named."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert kernels_here(CPU, torch.float32) is TorchKernels
    assert capsys.readouterr().err == ""
    fake_gpu: Any = SimpleNamespace(type="cuda")
    monkeypatch.setattr(static_llama.Weights, "random", lambda *_: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert kernels_here(fake_gpu, torch.float32) is TorchKernels
    assert capsys.readouterr().err.count("cannot be used") == 2
