"""A byte-level BPE tokenizer, trained on the training split alone.

    python scripts/intents/train_tokenizer.py data/intents

Writes tokenizer.json and tokenizer_config.json beside the data. Digits stay single, so that numbers
are spelled and not looked up. A prompt ends with a token of its own, which the tokenizer adds: it
says that the utterance is over and its parse is wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

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

END, PARSE = "<|end|>", "<|parse|>"


def train_tokenizer(folder: Path, vocab_size: int = 2048) -> Tokenizer:
    """Train on ``train.jsonl`` of a data folder and write the tokenizer there; its id 0 is END."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (END, PARSE)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(folder / "train.jsonl"), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {PARSE}", special_tokens=[(PARSE, tokenizer.token_to_id(PARSE))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def _texts(path: Path) -> Iterator[str]:
    with path.open() as file:
        for line in file:
            record = json.loads(line)
            yield record["input"]
            yield record["target"]


def main(
    folder: Annotated[Path, typer.Argument(help="Made by make_data.py.")],
    vocab_size: Annotated[int, typer.Option(min=300)] = 2048,
) -> None:
    """Train a tokenizer on the training split."""
    print(f"{folder}: {train_tokenizer(folder, vocab_size).get_vocab_size()} tokens")


if __name__ == "__main__":
    typer.run(main)
