"""What leaving early saves, against what the bytes of the layers say that it should.

python bench/bench_exits.py             about 6 minutes
python bench/bench_exits.py --quick     a tiny model; writes nothing

Decoding is bound by reading weights, so a token that leaves after E of L layers should cost the
share of the bytes that it reads: E layers, the LM head and, when the skipped layers' keys and
values are filled, their K/V projections. Exits are forced: FixedExit leaves without filling,
ConfidentExit with threshold 0 leaves at its first exit point and fills, and with threshold 1 never
leaves and pays the check. Self-speculation runs with a forced pattern of accepted drafts, whatever
the tokens are, against what its own passes take alone.

All settings of a model run in turns, and ratios are taken within a round. Writes
bench/results/exits.json and a section of bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore.decoding import iteration
from eecore.decoding.batch import RowBuilder
from eecore.decoding.runner import Runner
from eecore.models import KVCache

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import decode_models  # noqa: E402
import decode_tables  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
from decode_engines import LlamaCpp, convert, gguf_file  # noqa: E402
from get_smollm2 import get_smollm2  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "exits.json"
RESULTS_MD = ROOT / "bench" / "RESULTS.md"
MODELS = {
    "random": lambda: decode_models.make_random_llama(ROOT / ".models" / "random-llama-56m"),
    "smollm2": get_smollm2,
}
LOADING = {
    "f32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8"},
}
BATCHES = (1, 8)
NUM_DRAFTS = 7
ACCEPTED = (7, 5, 4, 7, 3, 7, 2, 7)
"""Drafts accepted in the rounds of a cycle: 42 of 56, 75 %."""
SPECULATED_TOKENS = 1 + 2 * (sum(ACCEPTED) + len(ACCEPTED))
"""The first token and two cycles: each round adds what it accepts and one."""


# Forced exits


def exits_of(num_layers: int) -> dict[str, tuple[eecore.Exit, float, bool]]:
    """Name: policy, layers that run, and whether the others are filled."""
    settings: dict[str, tuple[eecore.Exit, float, bool]] = {
        "full": (eecore.Full(), num_layers, False)
    }
    for quarter in (1, 2, 3):
        layer = quarter * num_layers // 4
        confident = eecore.ConfidentExit(0.0, exit_points=(layer,))
        settings[f"fixed {quarter}/4"] = (eecore.FixedExit(layer), layer, False)
        settings[f"filled {quarter}/4"] = (confident, layer, True)
    almost_one = math.nextafter(1.0, 0.0)  # at 1 nothing would be measured
    never = eecore.ConfidentExit(almost_one, exit_points=(num_layers // 2,))
    settings["one check"] = (never, num_layers, False)
    return settings


def ideal_share(model: eecore.Model, layers: float, filled: bool, heads: int = 1) -> float:
    """Bytes read by a step that runs so many layers and heads, over those of a full step."""
    config = model.config
    hidden = config.hidden_size
    layer = hidden * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    head = config.vocab_size * hidden
    fill = (config.num_layers - layers) * 2 * config.kv_size * hidden if filled else 0
    return (layers * layer + heads * head + fill) / (config.num_layers * layer + head)


def step_seconds(model: eecore.Model, policy: eecore.Exit, batch: int, tokens: int) -> float:
    """Time of a decoding step, the first one (the prompt's) left out."""
    prompts = [[3 + row] for row in range(batch)]
    output = eecore.generate(model, prompts, exit=policy, max_tokens=tokens, ignore_eos=True)[0]
    return (output.stats.total_s - output.stats.time_to_first_token_s) / (tokens - 1)


def measure_exits(
    model: eecore.Model, batch: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Each forced exit against full depth and against its share of the bytes."""
    settings = exits_of(model.config.num_layers)
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for policy, _, _ in settings.values():
        step_seconds(model, policy, batch, 4)
    for _ in range(rounds):
        for name, (policy, _, _) in settings.items():
            seconds[name].append(step_seconds(model, policy, batch, tokens))
    rows = []
    for name, (_, layers, filled) in settings.items():
        share = ideal_share(model, layers, filled, heads=2 if name == "one check" else 1)
        pairs = zip(seconds[name], seconds["full"], strict=True)
        measured = statistics.median(mine / full for mine, full in pairs)
        rows.append(
            {
                "batch": batch,
                "exit": name,
                "step_ms_best": round(min(seconds[name]) * 1e3, 3),
                "step_ms_median": round(statistics.median(seconds[name]) * 1e3, 3),
                "share_of_full": round(measured, 4),
                "ideal_share": round(share, 4),
                "to_ideal": round(measured / share, 3),
            }
        )
    return rows


# Self-speculation at a forced acceptance


@contextlib.contextmanager
def forced_acceptance() -> Iterator[None]:
    """Verification accepts as many drafts as the pattern says; it still runs all that it runs."""
    pattern = itertools.cycle(ACCEPTED)
    real = iteration.accept

    def accept(heads: Any, rounds: list[tuple[Any, Any, slice]]) -> list[tuple[int, int]]:
        outcomes = []
        for _, made, at in rounds:
            accepted = min(next(pattern), len(made.tokens))
            outcomes.append((accepted, heads.token[at.start + accepted]))
        return outcomes

    iteration.accept = accept
    try:
        yield
    finally:
        iteration.accept = real


def speculate(model: eecore.Model, exit_layer: int) -> tuple[float, eecore.RequestStats]:
    """Seconds a token behind the first, and what was drafted and accepted."""
    policy = eecore.SelfSpeculative(exit_layer, NUM_DRAFTS)
    with forced_acceptance():
        output = eecore.generate(
            model, [[3]], exit=policy, max_tokens=SPECULATED_TOKENS, ignore_eos=True
        )[0]
    stats = output.stats
    seconds = (stats.total_s - stats.time_to_first_token_s) / (SPECULATED_TOKENS - 1)
    return seconds, stats


class Passes:
    """The passes of a round of self-speculation alone, without what an engine does around them."""

    def __init__(self, model: eecore.Model, exit_layer: int) -> None:
        network = model.network
        num_layers = model.config.num_layers
        kv = KVCache.allocate(model.config, 16, 16, device=network.device, dtype=network.dtype)
        self._runner = Runner(network, kv)
        self._draft = self._rows([0], exit_layer)
        # The last draft's own position has not been run yet: it comes in at the bottom.
        self._verify = self._rows([exit_layer] * NUM_DRAFTS + [0], num_layers)
        self._states = torch.zeros(
            NUM_DRAFTS, model.config.hidden_size, dtype=network.dtype, device=network.device
        )

    def _rows(self, enter: list[int], leave: int) -> Any:
        builder = RowBuilder(16)
        count, first = len(enter), SPECULATED_TOKENS // 2
        builder.add([3] * count, first, list(range(16)), enter=enter, leave=[leave] * count)
        return builder.build()

    @torch.inference_mode()
    def draft(self) -> None:
        """One row through the first layers and the head."""
        self._runner.model.confidence(self._runner.sweep(self._draft).hidden)

    @torch.inference_mode()
    def verify(self) -> None:
        """All rows of a round through the other layers and the head."""
        sweep = self._runner.sweep(self._verify, entering=self._states)
        self._runner.model.confidence(sweep.hidden)

    def round_seconds(self) -> float:
        """All drafts and the verification, by the median of a few of each."""
        return NUM_DRAFTS * median_seconds(self.draft, 20) + median_seconds(self.verify, 10)


def median_seconds(call: Callable[[], None], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_speculation(
    model: eecore.Model, tokens: int, rounds: int, peer: LlamaCpp | None
) -> dict[str, Any]:
    """Tokens/s at the forced acceptance, against its own passes, full depth and llama.cpp."""
    exit_layer = model.config.num_layers // 4
    passes = Passes(model, exit_layer)
    tokens_a_round = 1 + sum(ACCEPTED) / len(ACCEPTED)
    speculate(model, exit_layer)
    passes.round_seconds()
    times: dict[str, list[float]] = {name: [] for name in ("own", "predicted", "full", "peer")}
    for _ in range(rounds):
        seconds, stats = speculate(model, exit_layer)
        times["own"].append(seconds)
        times["predicted"].append(passes.round_seconds() / tokens_a_round)
        times["full"].append(step_seconds(model, eecore.Full(), 1, tokens))
        if peer is not None:
            times["peer"].append(peer.seconds(1, tokens) / tokens)

    def median_ratio(name: str) -> float | None:
        pairs = zip(times[name], times["own"], strict=False)
        ratios = [theirs / own for theirs, own in pairs]
        return round(statistics.median(ratios), 3) if ratios else None

    return {
        "exit_layer": exit_layer,
        "num_drafts": NUM_DRAFTS,
        "draft_acceptance": stats.draft_acceptance,
        "tokens_per_s_best": round(1 / min(times["own"]), 2),
        "predicted_tokens_per_s_best": round(1 / min(times["predicted"]), 2),
        "speed_to_predicted": median_ratio("predicted"),
        "speed_to_full": median_ratio("full"),
        "speed_to_llama_cpp_full": median_ratio("peer"),
    }


# Tables


def table(result: dict[str, Any]) -> str:
    """Exits and speculation, with what they were measured on."""
    rows = result["exits"]
    names = [name for name in decode_tables.unique(rows, "exit") if name != "full"]
    lines = []
    for model in decode_tables.unique(rows, "model"):
        for bits in decode_tables.unique(rows, "bits"):
            for batch in decode_tables.unique(rows, "batch"):
                where = {"model": model, "bits": bits, "batch": batch}
                if decode_tables.find(rows, **where) is None:
                    continue
                found = [decode_tables.find(rows, **where, exit=name) for name in names]
                cells = [
                    f"{row['share_of_full']:.2f} ({row['to_ideal']:.2f})"
                    for row in found
                    if row is not None
                ]
                lines.append([model, bits, str(batch), *cells])
    head = ["model", "bits", "batch", *names]
    exits = decode_tables.markdown(head, lines, text_columns=2)
    head = ["model", "bits", "drafts accepted", "tokens/s", "of predicted", "to `Full()`"]
    lines = [
        [
            row["model"],
            row["bits"],
            f"{row['draft_acceptance']:.0%}",
            f"{row['tokens_per_s_best']:.1f}",
            f"{row['speed_to_predicted']:.2f}",
            f"{row['speed_to_full']:.2f}x",
            ""
            if row["speed_to_llama_cpp_full"] is None
            else f"{row['speed_to_llama_cpp_full']:.2f}x",
        ]
        for row in result["speculation"]
    ]
    speculation = decode_tables.markdown([*head, "to llama.cpp"], lines, text_columns=2)
    return "\n\n".join([exits, EXITS_ABOUT, speculation, SPECULATION_ABOUT, about(result)])


EXITS_ABOUT = (
    "Time of a step as a share of that of `Full()`; in brackets, over the share of the bytes that "
    "it reads, so that 1 is ideal. *fixed*: cut after a quarter, half, three quarters of the "
    "layers; *filled*: the same exits with keys and values of the skipped layers filled; *one "
    "check*: full depth with one confidence that accepts nobody, which is one more LM head."
)
SPECULATION_ABOUT = (
    f"`SelfSpeculative(L/4, {NUM_DRAFTS})`, one sequence, with a forced pattern of accepted "
    "drafts; *predicted* from its drafting and verifying passes timed alone; llama.cpp at full "
    "depth in equal bits."
)


def about(result: dict[str, Any]) -> str:
    return (
        f"{result['cpu']}, {result['threads']} thread(s), {result['cpu_capability']} kernels, "
        f"torch {result['torch']}. {harness.describe_ceilings(result['ceilings'])}. Medians of "
        f"{result['rounds']} rounds in turns. `python bench/bench_exits.py`"
    )


def run(directories: list[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """All models in all bits."""
    torch.set_num_threads(arguments.threads)
    ceilings = harness.ceilings()
    exits, speculation = [], []
    made = () if arguments.quick else peers.known().values()
    has_peer = any(peer.name == "llama.cpp" and peer.available for peer in made)
    for directory in directories:
        if has_peer:
            convert(directory, {"llama.cpp"})
        for bits in available_bits():
            print(f"{directory.name} {bits}", file=sys.stderr, flush=True)
            model = eecore.load(directory, device="cpu", kv_cache_tokens=4096, **LOADING[bits])
            what = {"model": directory.name, "bits": bits}
            for batch in BATCHES:
                rows = measure_exits(model, batch, arguments.tokens, arguments.rounds)
                exits += [{**what, **row} for row in rows]
            file = gguf_file(directory, bits)
            peer = LlamaCpp(bits, arguments.threads, file) if has_peer and file.exists() else None
            row = measure_speculation(model, arguments.tokens, arguments.rounds, peer)
            speculation.append({**what, **row})
    return {
        "cpu": harness.cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "torch": torch.__version__,
        "threads": arguments.threads,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "ceilings": ceilings,
        "exits": exits,
        "speculation": speculation,
    }


def available_bits() -> list[str]:
    has_int8 = "weights" in inspect.signature(eecore.load).parameters
    return [bits for bits in LOADING if has_int8 or bits != "int8"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="a tiny model, no files")
    parser.add_argument("--dry-run", action="store_true", help="print the tables, write nothing")
    parser.add_argument("--tables", action="store_true", help="write those of the JSON file again")
    arguments = parser.parse_args()
    if arguments.tables:
        harness.insert(RESULTS_MD, "exits", table(json.loads(RESULTS.read_text())))
        return
    if arguments.quick:
        arguments.tokens, arguments.rounds = 4, 1
        with tempfile.TemporaryDirectory() as scratch:
            tiny = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 256}
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
            model = decode_models.make_random_llama(Path(scratch) / "tiny", **tiny, **heads)
            result = run([model], arguments)
    else:
        result = run([MODELS[name]() for name in arguments.models], arguments)
    print(table(result))
    if not (arguments.quick or arguments.dry_run):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        harness.insert(RESULTS_MD, "exits", table(result))


if __name__ == "__main__":
    main()
