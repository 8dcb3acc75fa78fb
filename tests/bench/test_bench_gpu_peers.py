"""What others run on a GPU, on the CPU with tiny shapes: that it is right, not how fast."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.gpu import peers
from bench.gpu.static_llama import (
    EPS,
    SHAPES,
    THETA,
    Layer,
    Pass,
    StaticLlama,
    TorchKernels,
    Weights,
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
    """Of a pass, with the keys that one before it has left."""
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
    """They come first: a build that fails costs nothing but what needs it."""
    code = (
        "import sys; sys.modules['eecore._C'] = None; import bench.gpu.run, bench.gpu.peers;"
        "raise SystemExit(bench.gpu.peers.main("
        "['--device', 'cpu', '--model', 'tiny', '--only', 'products', '--rounds', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
