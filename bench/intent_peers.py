"""The peers on one model, in a process of their own, which answers on stdout.

python bench/intent_peers.py DIRECTORY DTYPE THREADS

Once loaded, it prints a line of JSON with versions. Then each line {"mode": {...}, "prompts":
[[ids], ...], "max_tokens": n} is answered by {"parses": [...]}, a Parse each, or by {"error":
"..."} where the mode cannot run. It runs with the interpreter of the peers' environment.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Parse:
    """What one mode made of one utterance, and when."""

    tokens: list[int]
    """New ones, the model's end token included."""
    seconds: float
    """From the prompt's tokens to the last new one."""
    first_seconds: float
    """To the end of the step that gave the first new tokens."""
    first_tokens: int
    """How many these were: drafts may have been accepted with the prompt."""
    drafted: int = 0
    accepted: int = 0
    depth: int | None = None
    """Exit layers summed over the new tokens, where the mode tells."""


@dataclass(frozen=True)
class PeerMode:
    """How a peer decodes.

    Attributes:
        kind: ``full`` (transformers), ``assisted`` (transformers' early exit), of economize
            ``economize`` (early-exit drafts), ``lookup`` (n-grams), ``hybrid`` (these, early-exit
            drafts where there are none) or ``calm`` (its confident exit).
        exit_layer: of the drafts.
        num_drafts: most of them a round.
        threshold: of confidence; drafts stop below it, and ``calm`` exits above it.
    """

    kind: str
    exit_layer: int = 0
    num_drafts: int = 0
    threshold: float | None = None

    @property
    def name(self) -> str:
        """As in the tables."""
        rest = "" if self.threshold is None else f", {self.threshold:g}"
        return {
            "full": "transformers `generate`",
            "assisted": f"transformers `assistant_early_exit={self.exit_layer}`, "
            f"{self.num_drafts} drafts",
            "economize": f"economize early exit ({self.exit_layer}, {self.num_drafts}{rest})",
            "lookup": f"economize lookup ({self.num_drafts})",
            "hybrid": f"economize hybrid ({self.exit_layer}, {self.num_drafts}{rest})",
            "calm": f"economize CALM (softmax{rest})",
        }[self.kind]


Decode = Callable[[list[int], int], Parse]


class FirstTokens:
    """A streamer of transformers that notes when the first new tokens came, and how many."""

    def __init__(self) -> None:
        self.calls = self.count = 0
        self.at = 0.0

    def put(self, tokens: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.at, self.count = time.perf_counter(), tokens.numel()

    def end(self) -> None:
        pass


def transformers_decode(network: Any, mode: PeerMode) -> Decode:
    import torch

    settings = {"assistant_early_exit": mode.exit_layer} if mode.kind == "assisted" else {}

    def decode(prompt: list[int], max_tokens: int) -> Parse:
        network.generation_config.num_assistant_tokens = mode.num_drafts or None
        first = FirstTokens()
        started = time.perf_counter()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                streamer=first,
                **settings,
            )
        tokens = made[0, len(prompt) :].tolist()
        seconds = time.perf_counter() - started
        return Parse(tokens, seconds, first.at - started, first.count)

    return decode


def economize_decode(network: Any, mode: PeerMode) -> Decode:
    """economize's own loop, which is faster than its ``generate``."""
    import economize
    import torch
    from economize.techniques.dynamic_depth import CalmConfig
    from economize.techniques.early_exit import EarlyExitConfig
    from economize.techniques.hybrid import HybridConfig
    from economize.techniques.lookup import LookupConfig

    technique: Any
    if mode.kind == "calm":
        technique = CalmConfig(confidence="softmax", threshold=mode.threshold)
        # A look at every token: on a CPU it costs nothing, and no token is made after the end.
        decoding = economize.DecodeConfig(cycle_length=1, sync_interval=1)
    else:
        if mode.kind == "lookup":
            technique = LookupConfig()
        else:
            technique = EarlyExitConfig(exit_layer=mode.exit_layer, head="shared")
        if mode.kind == "hybrid":
            technique = HybridConfig(fallback=technique)
        decoding = economize.DecodeConfig(
            cycle_length=mode.num_drafts + 1, min_confidence=mode.threshold
        )
    model = economize.apply(network, technique, decoding=decoding)
    end = network.generation_config.eos_token_id

    def decode(prompt: list[int], max_tokens: int) -> Parse:
        times: list[float] = []

        def stops(tokens: torch.Tensor) -> bool:
            if not times:
                times.append(time.perf_counter())
            return int(tokens[-1]) == end

        started = time.perf_counter()
        with torch.inference_mode():
            result = model.decode(torch.tensor(prompt), max_tokens, stop=stops)
        tokens = result.tokens.tolist()
        seconds = time.perf_counter() - started
        drafted, accepted = (sum(pair[i] for pair in result.acceptance) for i in (0, 1))
        return Parse(tokens, seconds, times[0] - started, 1, drafted, accepted)

    return decode


def serve(directory: str, dtype: str, threads: int) -> None:
    """Load the model, then answer until stdin ends."""
    # Libraries print what they like; the answers alone go to the real stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    network.generation_config.pad_token_id = network.generation_config.eos_token_id

    @functools.cache
    def decode_of(mode: PeerMode) -> Decode:
        own = mode.kind in ("full", "assisted")
        return (transformers_decode if own else economize_decode)(network, mode)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    say({"versions": {name: version_of(name) for name in ("transformers", "economize")}})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            decode = decode_of(PeerMode(**asked["mode"]))
            parses = [decode(prompt, asked["max_tokens"]) for prompt in asked["prompts"]]
            say({"parses": [asdict(parse) for parse in parses]})
        except Exception as error:  # whatever a peer raises, the others go on
            say({"error": f"{type(error).__name__}: {error}"[:300]})


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
