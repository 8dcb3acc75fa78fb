"""Tiny transformers models, and data to train them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from eecore.lab.training import TokenData, state_path
from eecore.lab.training.data import from_pairs


def make_model(
    family: str = "llama", *, seed: int = 0, num_layers: int = 4, **overrides: Any
) -> Any:
    """A random transformers model of a family, width 16; the same seed, the same."""
    import transformers

    torch.manual_seed(seed)
    if family == "t5":
        config = transformers.T5Config(
            vocab_size=40,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=num_layers,
            num_decoder_layers=num_layers,
            num_heads=2,
            decoder_start_token_id=0,
            **{"dropout_rate": 0.0, **overrides},
        )
        return transformers.T5ForConditionalGeneration(config)
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    names |= {"gemma2": "Gemma2", "granite": "Granite", "olmo2": "Olmo2", "smollm3": "SmolLM3"}
    config = getattr(transformers, f"{names[family]}Config")(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        **{"intermediate_size": 24, **overrides},
    )
    return getattr(transformers, f"{names[family]}ForCausalLM")(config)


def make_pairs() -> TokenData:
    """Forty pairs of tokens 3..39: the target is the input backwards, then token 2."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(40):
        length = int(torch.randint(2, 9, (1,), generator=generator))
        given = torch.randint(3, 40, (length,), generator=generator).tolist()
        made.append((given, [*given[::-1], 2]))
    return from_pairs(made)


def history(out: Path, *, evaluations: bool = False) -> list[dict[str, float]]:
    """The log of a finished run without its times: of steps, or of evaluations."""
    entries = json.loads((state_path(out) / "trainer_state.json").read_text())["log_history"]
    return [
        {name: value for name, value in entry.items() if name != "seconds"}
        for entry in entries
        if ("loss" not in entry) is evaluations and "tokens" in entry
    ]
