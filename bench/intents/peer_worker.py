"""transformers and economize with one model, in a process that answers on stdout.

python -m bench.intents.peer_worker DIRECTORY DTYPE THREADS

Once loaded, it prints a line of JSON with versions. It answers each line {"mode": {...}, "prompts":
[[ids], ...], "max_tokens": n} with {"parses": [...]}, one Parse for each prompt, or with {"error":
"..."} if the mode cannot run. It runs with the interpreter of the peers' environment; the caller
imports it for the dataclasses.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from bench.harness.answers import answering, version_of


@dataclass(frozen=True)
class Parse:
    """The tokens that one mode generated for one prompt, and their times."""

    tokens: list[int]
    """New tokens, the model's end token included."""
    seconds: float
    """Seconds from the prompt's tokens to the last new token."""
    first_seconds: float
    """Seconds to the end of the step that gave the first new tokens."""
    first_tokens: int
    """The number of tokens of that step, which may include accepted drafts."""
    drafted: int = 0
    accepted: int = 0
    depth: int | None = None
    """The sum of the exit layers of the new tokens, if the mode reports them."""


@dataclass(frozen=True)
class PeerMode:
    """A mode of a peer.

    Attributes:
        kind: ``transformers`` at full depth, ``assisted`` (transformers' early exit), ``economize``
            (its early-exit drafts) or ``calm`` (economize's confident exit).
        exit_layer: the layer after which drafts exit.
        num_drafts: the maximum draft length of a round.
        threshold: the confidence above which ``calm`` exits.
    """

    kind: str
    exit_layer: int = 0
    num_drafts: int = 0
    threshold: float = 0.0

    @property
    def name(self) -> str:
        """The mode's name in the tables."""
        return {
            "transformers": "transformers `generate`",
            "assisted": f"transformers `assistant_early_exit={self.exit_layer}`, "
            f"{self.num_drafts} drafts",
            "economize": f"economize early exit ({self.exit_layer}, {self.num_drafts})",
            "calm": f"economize CALM (softmax, {self.threshold:g})",
        }[self.kind]


Decode = Callable[[list[int], int], Parse]


class FirstTokens:
    """A streamer for transformers that records the time and number of the first new tokens."""

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
    """A mode of economize by its own loop, which is faster than its ``generate``."""
    import economize
    import torch
    from economize.techniques.dynamic_depth import CalmConfig
    from economize.techniques.early_exit import EarlyExitConfig

    technique: Any
    if mode.kind == "calm":
        technique = CalmConfig(confidence="softmax", threshold=mode.threshold)
        # Check every token: on a CPU this costs nothing, and no token is made after the end.
        decoding = economize.DecodeConfig(cycle_length=1, sync_interval=1)
    else:
        technique = EarlyExitConfig(exit_layer=mode.exit_layer, head="shared")
        decoding = economize.DecodeConfig(cycle_length=mode.num_drafts + 1)
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
    """Load the model, then answer requests until stdin ends."""
    say = answering()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    network.generation_config.pad_token_id = network.generation_config.eos_token_id

    @functools.cache
    def decode_of(mode: PeerMode) -> Decode:
        own = mode.kind in ("transformers", "assisted")
        return (transformers_decode if own else economize_decode)(network, mode)

    say({"versions": {name: version_of(name) for name in ("transformers", "economize")}})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            decode = decode_of(PeerMode(**asked["mode"]))
            parses = [decode(prompt, asked["max_tokens"]) for prompt in asked["prompts"]]
            say({"parses": [asdict(parse) for parse in parses]})
        except Exception as error:  # an error of one peer must not stop the other peers
            say({"error": f"{type(error).__name__}: {error}"[:300]})


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
