"""A small Llama learns to parse what somebody says to a home, early exits and all.

    python scripts/intents/make_data.py data/intents
    python scripts/intents/train_intents.py data/intents models/intents --minutes 120
    python scripts/intents/train_intents.py data/intents models/intents-plain --minutes 120 --plain

The recipe is LayerSkip's for TOPv2, a task of this kind (§5: p_max = 0.2, e_scale = 1, C_grad),
from random weights, so dropout grows over the run (§4.1.1). ``--plain`` has neither dropout nor the
losses of early exits. Ctrl-C saves; ``--resume`` goes on, with the settings that the run began
with. At the end every exit is scored by exact match: see score_intents.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eecore.cli.train import ProgressLine
from eecore.training import (
    EarlyExitLoss,
    LastLayerLoss,
    LayerDropout,
    TokenData,
    TrainingConfig,
    load_starting_point,
    read_data,
    seconds_per_step,
    state_path,
    stop_on_signals,
    train,
)
from eecore.training.run_state import read_state
from score_intents import write_exact_match
from train_tokenizer import END, train_tokenizer

CONTEXT = 256
# 8.8M parameters.
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "float32",
}


def main(
    data: Annotated[Path, typer.Argument(help="Made by make_data.py.")],
    out: Annotated[Path, typer.Argument(help="The model directory to make.")],
    minutes: Annotated[float | None, typer.Option(min=0.1, help="About how long to train.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of --minutes.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No early exits, no dropout.")] = False,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    learning_rate: Annotated[float, typer.Option()] = 1e-3,
    layers: Annotated[int, typer.Option(min=2)] = MODEL["num_hidden_layers"],
    vocab_size: Annotated[int, typer.Option(min=300)] = 2048,
    evaluated: Annotated[
        int, typer.Option(min=1, help="Utterances of each split for exact match.")
    ] = 200,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run there.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Train, then score every exit."""
    torch.set_num_threads(threads)
    if not (data / "tokenizer.json").is_file():
        train_tokenizer(data, vocab_size)
    with tempfile.TemporaryDirectory() as scratch:
        config_file = Path(scratch) / "config.json"
        settings = {**MODEL, "num_hidden_layers": layers, "vocab_size": vocab_size}
        config_file.write_text(json.dumps(settings))
        start = load_starting_point(config_file, tokenizer=data, seed=seed)
    assert start.tokenizer.token_id(END) == start.eos_token_id
    sequences, held_out = (
        read_data(
            [data / f"{split}.jsonl"],
            start.tokenizer,
            context=CONTEXT,
            eos_token_id=start.eos_token_id,
        )
        for split in ("train", "valid")
    )
    if resume:
        config = read_state(state_path(out)).config
        if plain != isinstance(config.loss, LastLayerLoss):
            raise typer.BadParameter(f"--plain: expected as the run began, got {plain}")
    else:
        config = recipe(plain, batch_size, learning_rate, seed, steps or 1000)
        if steps is None:
            config = for_minutes(minutes or 10.0, start.model, sequences, config)
    parameters = sum(parameter.numel() for parameter in start.model.parameters())
    print(
        f"{parameters / 1e6:.1f}M parameters, {len(sequences)} utterances of "
        f"{sequences.lengths.float().mean():.1f} tokens, {config.steps} steps of "
        f"{config.batch_size} ({config.steps * config.batch_size / len(sequences):.2f} epochs)",
        file=sys.stderr,
    )
    with stop_on_signals() as stop, ProgressLine() as line:
        result = train(
            start.model,
            sequences,
            config,
            out,
            held_out=held_out,
            tokenizer_directory=data,
            resume=resume,
            progress=line.show,
            should_stop=stop,
        )
    if not result.finished:
        print(f"stopped after step {result.step}; --resume goes on", file=sys.stderr)
        raise typer.Exit(130)
    write_exact_match(out, data, evaluated)


def recipe(
    plain: bool, batch_size: int, learning_rate: float, seed: int, steps: int
) -> TrainingConfig:
    """LayerSkip's for TOPv2, or the same without exits and dropout."""
    return TrainingConfig(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=min(200, steps // 10),
        loss=LastLayerLoss() if plain else EarlyExitLoss(1.0, "gradual"),
        layer_dropout=None if plain else LayerDropout(0.2, "exponential"),
        seed=seed,
        checkpoint_seconds=120.0,
        evaluate_steps=500,
    )


def for_minutes(
    minutes: float, model: Any, data: TokenData, config: TrainingConfig
) -> TrainingConfig:
    """The recipe with as many steps as fit."""
    pace = seconds_per_step(model, data, config)
    loss = config.loss
    return recipe(
        isinstance(loss, LastLayerLoss),
        config.batch_size,
        config.learning_rate,
        config.seed,
        max(1, round(60 * minutes / pace)),
    )


if __name__ == "__main__":
    typer.run(main)
