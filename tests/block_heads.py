"""Small random heads that draft a block, in each layout that is read, and what they draft in plain
PyTorch.

The formulas are those of DFlash's and DSpark's own code (z-lab/dflash, deepseek-ai/DeepSpec,
sgl-project/SpecForge, vllm-project/speculators), written down once more; they have been compared
with the packages ``speculators`` 0.9 and ``dflash`` 0.1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.plain_layers import PlainLayer, normed, random_layer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
}
TAPS, BLOCK, MASK, RANK, CUT = (1, 3), 6, 319, 16, 100


def config_of(layout: str) -> dict[str, Any]:
    """The config.json of a head with states after 1 and 3 of 4 layers."""
    own = {"target_layer_ids": [tap - 1 for tap in TAPS], "mask_token_id": MASK}
    markov = {
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    top = {"block_size": BLOCK, "num_target_layers": 4}
    if layout == "z-lab":
        return {**SIZES, **top, "architectures": ["DFlashDraftModel"], "dflash_config": own}
    if layout == "SpecForge DSpark":
        inner = {**own, **markov, "confidence_head_with_markov": False, "projector_type": "dspark"}
        return {**SIZES, **top, "architectures": ["DSparkDraftModel"], "dflash_config": inner}
    if layout == "DeepSpec":
        return {**SIZES, **top, **own, **markov, "architectures": ["Qwen3DSparkModel"]}
    kind = layout.split()[1]
    verifier = {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "transformer_layer_config": SIZES,
        "speculators_config": {"algorithm": kind, "verifier": verifier},
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "draft_vocab_size": CUT,
        **(markov if kind == "dspark" else {}),
    }


def tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a head, float32."""
    draw = torch.Generator().manual_seed(seed)
    own = {**config, **config.get("dflash_config", {})}
    sizes = config.get("transformer_layer_config", config)
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    draft_vocab, rank = config.get("draft_vocab_size", vocab), own.get("markov_rank", 0)
    made: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        made[f"{name}.weight"] = torch.randn(rows, columns, generator=draw) * gain / columns**0.5

    matrix("fc", hidden, len(TAPS) * hidden)
    for name in ("hidden_norm.weight", "norm.weight"):
        made[name] = 1 + 0.2 * torch.randn(hidden, generator=draw)
    for layer in range(sizes["num_hidden_layers"]):
        made |= random_layer(f"layers.{layer}.", sizes, draw)
    if draft_vocab != vocab:
        matrix("lm_head", draft_vocab, hidden, 3.0)
        chosen = torch.randperm(vocab, generator=draw)[:draft_vocab].sort().values
        made["d2t"] = chosen - torch.arange(draft_vocab)
        made["t2d"] = torch.isin(torch.arange(vocab), chosen)
    if rank:
        matrix("markov_head.markov_w1", vocab, rank, 4.0)
        matrix("markov_head.markov_w2", draft_vocab, rank, 2.0)
    if own.get("enable_confidence_head"):
        sees = own["confidence_head_with_markov"]
        matrix("confidence_head.proj", 1, hidden + rank * sees)
        made["confidence_head.proj.bias"] = torch.randn(1, generator=draw)
    return made


def write_block_head(
    directory: Path, layout: str = "z-lab", seed: int = 0, **overrides: Any
) -> Path:
    """Write a random head into a directory, which is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**config_of(layout), **overrides}
    tensors = tensors_of(config, seed)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


class BlockOracle:
    """A head in plain PyTorch.

    Args:
        config: of config.json.
        tensors: of the head.
        embed_tokens: [vocab_size, hidden_size], the model's.
        lm_head: [vocab_size, hidden_size], the model's.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        embed_tokens: Tensor,
        lm_head: Tensor,
    ) -> None:
        self.own = {**config, **config.get("dflash_config", {})}
        self.sizes = config.get("transformer_layer_config", config)
        self.tensors, self.embed_tokens = tensors, embed_tokens
        self.lm_head = tensors.get("lm_head.weight", lm_head)
        usual = config["architectures"][0] in ("Qwen3DSparkModel", "DSparkSpeculator")
        self.from_last = self.own.get("sample_from_anchor", usual)

    def block(self, states: list[Tensor], token: int) -> Tensor:
        """[block_size, hidden_size], normed: the states after the layers for a text.

        Args:
            states: of each tap, [num_tokens - 1, hidden_size] at all positions but the last.
            token: the text's last token.
        """
        tensors, size = self.tensors, self.own["block_size"]
        context = torch.cat(states, 1) @ tensors["fc.weight"].T
        context = normed(context, tensors["hidden_norm.weight"], self.sizes["rms_norm_eps"])
        hidden = self.embed_tokens[[token] + [self.own["mask_token_id"]] * (size - 1)]
        positions = torch.arange(len(context) + size, device=hidden.device)
        for number in range(self.sizes["num_hidden_layers"]):
            layer = PlainLayer(tensors, f"layers.{number}.", self.sizes)
            layer.remember(context, positions[: len(context)])
            hidden = layer(hidden, positions[len(context) :], causal=False)
        return normed(hidden, tensors["norm.weight"], self.sizes["rms_norm_eps"])

    def drafts(self, states: list[Tensor], token: int) -> tuple[list[int], list[float]]:
        """The tokens that it drafts, the model's, and the probability of each, or how likely it is
        to be accepted where the head says so; arguments as for :meth:`block`.
        """
        tensors = self.tensors
        hidden = self.block(states, token)[0 if self.from_last else 1 :]
        logits = hidden @ self.lm_head.T
        before, tokens, scores = token, list[int](), list[float]()
        d2t = tensors.get("d2t")
        for k, state in enumerate(hidden):
            row = torch.empty(0)
            if self.own.get("markov_rank"):
                row = tensors["markov_head.markov_w1.weight"][before]
                logits[k] += tensors["markov_head.markov_w2.weight"] @ row
            best = int(logits[k].argmax())
            score = logits[k].softmax(0)[best]
            if self.own.get("enable_confidence_head"):
                weight = tensors["confidence_head.proj.weight"][0]
                seen = torch.cat((state, row))[: len(weight)]
                score = (weight @ seen + tensors["confidence_head.proj.bias"][0]).sigmoid()
            before = best if d2t is None else best + int(d2t[best])
            tokens.append(before)
            scores.append(float(score))
        return tokens, scores
