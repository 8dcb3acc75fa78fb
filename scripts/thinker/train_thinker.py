"""Trains a small Llama that thinks before it answers, and longer than it needs to.

    torchrun --nproc-per-node 2 scripts/thinker/train_thinker.py models/thinker
    python scripts/thinker/package_thinker.py models/thinker

Two processes of one thread share the batches here; one process gives the same up to rounding.
The questions and thoughts are those of bench/quality/chains.py. A part of the thoughts in training
ends early, at a random line, with the right answer all the same: so the model's probability of an
answer says how much of the thought it takes. Every layer learns to be an exit (LayerSkip's loss).
Ctrl-C saves; ``--resume`` continues the run with its original settings.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.quality.chains import Chain, chains, with_slip
from eecore.lab.training import EarlyExitLoss, TokenData, TrainingConfig, load_starting_point
from eecore.lab.training.chats import Piece
from eecore.lab.training.data import from_pieces
from eecore.models import Tokenizer as EecoreTokenizer
from small_model import END, MODEL, train_from

OPENS, CLOSES = "<think>", "</think>"
TURNS = ("<|user|>", "<|assistant|>")
VOCABULARY = 384
CONTEXT = 1024
# Qwen's: digits alone, line ends with the punctuation before them.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{{ message['content'].split('</think>')[-1].lstrip('\\n') if not loop.last"
    " else message['content'] }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HASTY = 0.1
"""The share of thoughts in training with a slip at a random place."""
SLIPS = 0.4
"""The share of questions in training that trip the first attempt; few questions do."""
FORCED = 0.3
"""The share of thoughts in training that end at a random line."""
TOKENIZED = 2000
"""Questions that the tokenizer is trained on."""


def train_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of questions and thoughts, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=[AddedToken(token, special=True) for token in (END, *TURNS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    known = islice(chains(0, "train"), TOKENIZED)
    tokenizer.train_from_iterator((text for chain in known for text in texts(chain)), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in (OPENS, CLOSES)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def texts(chain: Chain) -> list[str]:
    """The question, the thought, the empty line after it, and the answer."""
    thought = "".join(chain.paragraphs(chain.attempts()))
    return [chain.question, thought, "\n\n", chain.reply]


def sequence(chain: Chain, tokenizer: EecoreTokenizer, rng: random.Random) -> list[Piece]:
    """The tokens of a question, a thought and the answer."""
    attempts = with_slip(chain, rng) if rng.random() < HASTY else chain.attempts()
    thought, is_forced = "".join(chain.paragraphs(attempts)), rng.random() < FORCED
    if is_forced:
        ends = [place + 1 for place, letter in enumerate(thought) if letter == "\n"]
        thought = thought[: rng.choice(ends)]
    messages = [{"role": "user", "content": chain.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    parts = (
        (prompt, False),
        (f"{OPENS}\n{thought}", True),
        (f"{CLOSES}\n\n", not is_forced),
        (chain.reply + END, True),
    )
    return [(tokenizer.encode(text, add_special_tokens=False), learnt) for text, learnt in parts]


def questions(split: str, seed: int) -> Iterator[Chain]:
    """Questions of a split, of which many trip the first attempt."""
    rng, all_of = random.Random(f"{seed} {split} slips"), chains(seed, split)
    while True:
        slips = rng.random() < SLIPS
        yield next(chain for chain in all_of if (chain.attempts()[0][-1] != chain.answer) == slips)


def data(split: str, count: int, tokenizer: EecoreTokenizer, seed: int) -> TokenData:
    """The first questions of a split with their thoughts."""
    rng = random.Random(f"{seed} {split} thoughts")
    return from_pieces(
        sequence(chain, tokenizer, rng) for chain in islice(questions(split, seed), count)
    )


def main(
    out: Annotated[Path, typer.Argument(help="The model directory to make.")],
    steps: Annotated[int, typer.Option(min=1)] = 1900,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    learning_rate: Annotated[float, typer.Option()] = 2e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
) -> None:
    """Train the tokenizer and the model."""
    torch.set_num_threads(threads)
    config = TrainingConfig(
        loss=EarlyExitLoss(0.2, "rotational", 4),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=min(200, steps // 10),
        precision="bfloat16",
        seed=seed,
        checkpoint_seconds=120.0,
        evaluate_steps=500,
    )
    model = {**MODEL, "num_hidden_layers": 8, "max_position_embeddings": CONTEXT}
    model["initializer_range"] = MODEL["hidden_size"] ** -0.5
    with tempfile.TemporaryDirectory() as scratch:
        train_tokenizer(Path(scratch))
        config_file = Path(scratch) / "config.json"
        config_file.write_text(json.dumps({**model, "vocab_size": VOCABULARY}))
        start = load_starting_point(config_file, seed=seed)
        sequences, held_out = (
            data(split, count, start.tokenizer, seed)
            for split, count in (("train", steps * batch_size), ("valid", 256))
        )
        train_from(start, sequences, held_out, out, config, resume=resume)


if __name__ == "__main__":
    typer.run(main)
