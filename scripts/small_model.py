"""Trains a small Llama or T5 and its tokenizer from scratch on lines of {"input", "target"}.

The recipe of a Llama is LayerSkip's for TOPv2, a task of this kind (§5: p_max = 0.2, e_scale = 1,
C_grad), from random weights, so dropout grows over the run (§4.1.1); that of a T5 is CALM's (§3.2).
See scripts/intents and scripts/calm.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from eecore.lab.training import (
    CalmLoss,
    EarlyExitLoss,
    LastLayerLoss,
    LayerDropout,
    LoopedLoss,
    StartingPoint,
    TokenData,
    TrainingConfig,
    load_starting_point,
    read_data,
    train,
)
from eecore.lab.training.interrupts import stop_on_signals

END = "<|end|>"
# 8.8M parameters with a vocabulary of 2048.
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
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "float32",
}
# T5 v1.1 small's 8 layers on either side and its gated MLP, with the first T5's tied head: 8.7M
# parameters with a vocabulary of 2048.
T5_MODEL: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "feed_forward_proj": "gated-gelu",
    "d_model": 192,
    "d_kv": 64,
    "d_ff": 512,
    "num_heads": 3,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.0,
    "initializer_factor": 1.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Task:
    """A task to learn.

    Attributes:
        ask: the special token between an input and its target.
        context: the maximum number of tokens of an input and its target.
        vocab_size: the tokenizer's vocabulary size.
        start: the other special token, with id 0: it ends a Llama's target, and starts a T5's
            target, which ``ask`` ends.
    """

    ask: str
    context: int
    vocab_size: int
    start: str = END


def train_tokenizer(folder: Path, task: Task, data: Path | None = None) -> Tokenizer:
    """A byte-level BPE tokenizer of ``train.jsonl`` alone, written to ``folder``.

    Numbers are split from words, so that a common number is one token, which is easy to copy.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=task.vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (task.start, task.ask)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts((data or folder) / "train.jsonl"), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {task.ask}", special_tokens=[(task.ask, tokenizer.token_to_id(task.ask))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = task.start if task.start == END else task.ask
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ends,
        # The last message of a conversation.
        "chat_template": "{{ messages[-1]['content'] }}" + task.ask,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def _texts(path: Path) -> Iterator[str]:
    with path.open() as file:
        for line in file:
            record = json.loads(line)
            yield record["input"]
            yield record["target"]


def recipe(
    plain: bool, looped: bool, batch_size: int, learning_rate: float, seed: int, steps: int
) -> TrainingConfig:
    """LayerSkip's for TOPv2, the same without exits and dropout, or Ouro's of loops."""
    loss = LastLayerLoss() if plain else EarlyExitLoss(1.0, "gradual")
    return TrainingConfig(
        loss=LoopedLoss(tilt=2.0) if looped else loss,
        layer_dropout=None if plain or looped else LayerDropout(0.2, "exponential"),
        **_every_recipe(batch_size, learning_rate, seed, steps),
    )


def calm_recipe(batch_size: int, learning_rate: float, seed: int, steps: int) -> TrainingConfig:
    """CALM's recipe: losses of all layers, weighted by depth (§3.2); relative learning rates."""
    return TrainingConfig(
        loss=CalmLoss(),
        layer_dropout=None,
        relative_rate=True,
        weight_decay=0.0,
        beta2=0.98,
        **_every_recipe(batch_size, learning_rate, seed, steps),
    )


def _every_recipe(batch_size: int, learning_rate: float, seed: int, steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "warmup_steps": min(200, steps // 10),
        "seed": seed,
        "checkpoint_seconds": 120.0,
        "evaluate_steps": 500,
    }


def train_small_model(
    model: dict[str, Any],
    tokenizer: Path,
    task: Task,
    data: Path,
    out: Path,
    config: TrainingConfig,
    *,
    resume: bool = False,
) -> None:
    """Train a model on ``train.jsonl``, score every exit on ``valid.jsonl``, write it to ``out``.

    Progress goes to stderr. Ctrl-C saves and exits with 130.

    Args:
        model: the config.json of the model, without what the task gives.
        tokenizer: the folder of its tokenizer, which is trained if it is missing.
        task: the task.
        data: the folder of ``train.jsonl`` and ``valid.jsonl``.
        out: the model directory to make.
        config: the recipe.
        resume: whether to continue the run in ``out``.
    """
    if not (tokenizer / "tokenizer.json").is_file():
        train_tokenizer(tokenizer, task, data)
    with tempfile.TemporaryDirectory() as scratch:
        config_file = Path(scratch) / "config.json"
        config_file.write_text(json.dumps({**model, "vocab_size": task.vocab_size}))
        start = load_starting_point(config_file, tokenizer=tokenizer, seed=config.seed)
    sequences, held_out = (
        read_data(
            [data / f"{split}.jsonl"],
            start.tokenizer,
            context=task.context,
            eos_token_id=start.eos_token_id,
        )
        for split in ("train", "valid")
    )
    train_from(start, sequences, held_out, out, config, resume=resume)


def train_from(
    start: StartingPoint,
    sequences: TokenData,
    held_out: TokenData,
    out: Path,
    config: TrainingConfig,
    *,
    resume: bool = False,
) -> None:
    """Train a model on sequences, score every exit on held-out ones, write it to ``out``.

    Progress goes to stderr. Ctrl-C saves and exits with 130.
    """
    parameters = sum(parameter.numel() for parameter in start.model.parameters())
    print(
        f"{parameters / 1e6:.1f}M parameters, {len(sequences)} sequences of "
        f"{sequences.lengths.float().mean():.1f} tokens, {config.steps} steps of "
        f"{config.batch_size} ({config.steps * config.batch_size / len(sequences):.2f} epochs)",
        file=sys.stderr,
    )
    with stop_on_signals() as stop:
        result = train(
            start.model,
            sequences,
            config,
            out,
            held_out=held_out,
            tokenizer_directory=start.tokenizer_directory,
            resume=resume,
            should_stop=stop,
            shows=True,
        )
    if not result.finished:
        print(f"stopped after step {result.step}; --resume goes on", file=sys.stderr)
        raise typer.Exit(130)
