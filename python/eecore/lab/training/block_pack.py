"""A trained head that drafts a block as files: those of a DSpark of ``speculators``, and facts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eecore.heads.block_file import DIGEST_FIELD
from eecore.lab.training.block_run import BlockTrainee
from eecore.lab.training.harness import TrainingRun
from eecore.lab.training.head_pack import Measured, training_facts
from eecore.models import LlamaModel, network_digest

CONFIG_NAME, WEIGHTS_NAME, FACTS_NAME = "config.json", "model.safetensors", "training.json"
LAYOUT_VERSION = "0.9.0"
"""The version of ``speculators`` whose layout the files have."""


def save_block_head(
    out: Path,
    network: LlamaModel,
    trainee: BlockTrainee,
    run: TrainingRun,
    by_tokens: Sequence[tuple[int, float]],
) -> list[float]:
    """Write a head into a directory; arguments and result as for :func:`save_head`."""
    measured = Measured.of(trainee, by_tokens)
    facts = {
        "weights": trainee.data.settings.weights,
        "training": training_facts(trainee, run),
        "agreement": measured.facts,
    }
    tensors = trainee.head.tensors(torch.bfloat16)
    vocabulary, vocab_size = trainee.frozen.vocabulary, network.config.vocab_size
    if len(vocabulary) < vocab_size:
        tensors["lm_head.weight"] = trainee.frozen.head_rows.to(torch.bfloat16)
        tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), vocabulary)
    files = {CONFIG_NAME: _config(network, trainee), FACTS_NAME: facts}
    return measured.write(out, WEIGHTS_NAME, tensors, files)


def _config(network: LlamaModel, trainee: BlockTrainee) -> dict[str, Any]:
    model, sizes = network.config, trainee.head.sizes
    layers = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "tie_word_embeddings": False,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": sizes.block_size}
    return {
        "speculators_model_type": "dspark",
        "speculators_version": LAYOUT_VERSION,
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": [model.architecture]},
        },
        DIGEST_FIELD: network_digest(network),
        "aux_hidden_state_layer_ids": list(trainee.data.settings.taps),
        "mask_token_id": trainee.mask_token,
        "block_size": sizes.block_size,
        "draft_vocab_size": sizes.vocabulary_size,
        "sample_from_anchor": True,
        "markov_rank": sizes.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "torch_dtype": "bfloat16",
    }
