"""The cost of HTTP: eecore serve and its engine alone, with equal requests and clients.

python -m bench serve                          both models, about a quarter of an hour
python -m bench serve --quick                  a few requests of each, to check that it runs
python -m bench serve --llama-cpp              also llama.cpp's server, on the same file

The server runs in a process of its own, the engine alone in the process of the clients. Both take
turns, round by round, streamed and not streamed. Models: intent on held-out utterances,
SmolLM2-135M-Instruct from its GGUF file on questions. Writes bench/results/serve.json and the table
in bench/results.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.answers import version_of
from bench.harness.command import parser, say
from bench.harness.machine import machine
from bench.harness.prompts import prompts_of
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, Row, table_of
from bench.harness.smollm2 import smollm2_file
from bench.harness.utterances import DATA, utterances
from bench.serving.load import Load, cpu_seconds, load_of, of_engine, of_server
from bench.serving.servers import Server, llama_server, serving
from eecore.exit_text import Policies

ENGINE, SERVER, LLAMA_CPP = "engine alone", "eecore serve", "llama.cpp"
KV_CACHE_TOKENS = 8192
# Packages on which the speed of the server depends.
PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "torch")


@dataclass(frozen=True)
class Case:
    """Clients that send prompts to a model under one policy.

    Args:
        model: the model's name.
        exit: the policy, as the request's field has it.
        clients: the number of clients.
        prompts: texts, each a request.
        max_tokens: tokens of an answer at most.
        ignore_eos: whether each answer has exactly ``max_tokens``.
    """

    model: str
    exit: str
    clients: int
    prompts: list[str]
    max_tokens: int
    ignore_eos: bool

    def bodies(self, streams: bool, **fields: Any) -> list[bytes]:
        """The bodies of the requests."""
        body = {"max_tokens": self.max_tokens, "temperature": 0, **fields}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return [json.dumps({**body, "prompt": prompt}).encode() for prompt in self.prompts]


Answerer = Callable[[Case, bool], Load]
"""All requests of a case once, streamed or not."""


def engine_alone(model: eecore.Model, directory: Path) -> Answerer:
    """Answers with the engine in this process."""
    policies = Policies(directory)

    def turn(case: Case, streams: bool) -> Load:
        assert model.tokenizer is not None
        sampling = eecore.SamplingParams(max_tokens=case.max_tokens, ignore_eos=case.ignore_eos)
        requests = [(model.tokenizer.encode(prompt), sampling) for prompt in case.prompts]

        async def run() -> Load:
            async with model.async_engine() as engine:
                ask = of_engine(engine, policies.of(case.exit), streams)
                return await load_of(ask, case.clients, requests)

        before = time.process_time()
        load = asyncio.run(run())
        return replace(load, cpu=time.process_time() - before)

    return turn


def answers_of(server: Server, **own: Any) -> Answerer:
    """Answers with a server; ``own``: fields of its requests."""

    def turn(case: Case, streams: bool) -> Load:
        fields = own or {"exit": case.exit}
        bodies, before = case.bodies(streams, **fields), cpu_seconds(server.pid)
        load = asyncio.run(load_of(of_server(server.address), case.clients, bodies))
        after = cpu_seconds(server.pid)
        return replace(load, cpu=None if before is None or after is None else after - before)

    return turn


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that ``share`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * share // 100), 1) - 1]


def row_of(case: Case, who: str, streams: bool, loads: list[Load], engine: list[Load]) -> Row:
    """A row of figures: medians over rounds; percentiles and CPU time over all requests."""
    speeds, others = ([load.tokens / load.seconds for load in own] for own in (loads, engine))
    tokens = sum(load.tokens for load in loads)
    cpu = [load.cpu for load in loads if load.cpu is not None]
    firsts = [s for load in loads for s in load.firsts] if streams else []
    gaps = [s for load in loads for s in load.gaps] if streams else []
    return {
        "model": case.model,
        "exit": case.exit,
        "clients": case.clients,
        "who": who,
        "streams": streams,
        "tokens_per_s": statistics.median(speeds),
        "of_engine": statistics.median(a / b for a, b in zip(speeds, others, strict=True)),
        "cpu_us_per_token": 1e6 * sum(cpu) / tokens if cpu else None,
        "first_ms": [1e3 * percentile(firsts, p) for p in (50, 99)] if firsts else None,
        "gap_ms": [1e3 * percentile(gaps, p) for p in (50, 99)] if gaps else None,
    }


def measure(cases: Sequence[Case], answerers: dict[str, Answerer], rounds: int) -> list[Row]:
    """Rows of figures: every answerer on every case, in turns."""
    rows = []
    for case, streams in itertools.product(cases, (True, False)):
        loads: dict[str, list[Load]] = {who: [] for who in answerers}
        warm = replace(case, prompts=case.prompts[: case.clients], max_tokens=4)
        for number in range(rounds + 1):
            for who, answer in answerers.items():
                load = answer(case if number else warm, streams)
                loads[who] += [load] if number else []
        own = [row_of(case, who, streams, loads[who], loads[ENGINE]) for who in answerers]
        rows += own
        speeds = ", ".join(f"{row['who']} {row['tokens_per_s']:.0f}" for row in own)
        say(f"{case.model} {case.exit} x{case.clients} streams={streams}: {speeds} tokens/s")
    return rows


def table(result: Figures) -> str:
    """The table of the server's speed."""
    columns: Columns = (
        ("model, exit, clients", "{model}, {exit}, {clients}"),
        ("", lambda row: f"{row['who']}, {'streamed' if row['streams'] else 'whole'}"),
        ("tokens/s", "{tokens_per_s:.0f}"),
        ("of the engine", lambda r: "" if r["who"] == ENGINE else f"{r['of_engine']:.2f}"),
        ("first token, ms: p50", "{first_ms[0]:.1f}"),
        ("p99", "{first_ms[1]:.1f}"),
        ("between, ms: p50", "{gap_ms[0]:.1f}"),
        ("p99", "{gap_ms[1]:.1f}"),
        ("CPU µs/token", "{cpu_us_per_token:.0f}"),
    )
    left_out = "".join(f" {name} is left out: {why}." for name, why in result["left_out"].items())
    versions = ", ".join(f"{name} {v or 'none'}" for name, v in result["versions"].items())
    about = (
        "The engine alone gets the same prompts from as many tasks, in the process of the "
        "clients; the server has a process of its own. Clients, server and engine share "
        f"{result['cores']} cores of {result['cpu']} ({result['cpu_capability']} kernels, "
        f"{result['threads']} thread(s)), so that clients take from the server's speed; CPU time "
        "is that of the process that answers, the model's work included. Medians of "
        f"{result['rounds']} round(s) in turns; p50 and p99 over all requests, and over all gaps "
        f"between parts of an answer. No prefix cache. {versions}. `{result['command']}`"
    )
    return f"{table_of(columns, result['rows'], text_columns=2)}\n\n{about}{left_out}"


REPORTS = (
    Report(
        "serve",
        {"serve": table},
        {"rows": ("model", "exit", "clients", "who", "streams")},
        ("command", "left_out"),
    ),
)


def intent_cases(arguments: argparse.Namespace) -> list[Case]:
    """Held-out utterances, under three policies."""
    count = 48 if arguments.quick else arguments.utterances
    prompts = [record["input"] for record in utterances(count, arguments.data)]
    exits = ("full", "speculative:3,6", "calibrated:softmax")
    return [Case("intent", said, 16, prompts, 64, ignore_eos=False) for said in exits]


def smollm2_cases(arguments: argparse.Namespace) -> list[Case]:
    """Questions, by 1, 8 and 32 clients."""
    tokens = 8 if arguments.quick else arguments.tokens
    cases = []
    for clients in arguments.clients:
        count = clients if arguments.quick else max(4, 2 * clients)
        prompts = list(itertools.islice(itertools.cycle(prompts_of("chat", 20)), count))
        cases.append(Case("smollm2-135m-instruct", "full", clients, prompts, tokens, True))
    return cases


def run(arguments: argparse.Namespace, words: Sequence[str]) -> Figures:
    """All figures."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    threads, rounds = arguments.threads, arguments.rounds
    # Without a prefix cache each round computes its prompts again.
    limits = {"kv_cache_tokens": KV_CACHE_TOKENS, "prefix_cache": False}
    options = ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--no-prefix-cache"]

    def measured(
        path: Path, cases: list[Case], dtype: str | None, others: dict[str, Answerer]
    ) -> None:
        given = [*options, *(("--dtype", dtype) if dtype else ())]
        with serving(path, threads, given) as server:
            model = eecore.load(path, device="cpu", dtype=dtype, **limits)
            own = {ENGINE: engine_alone(model, path), SERVER: answers_of(server)}
            rows.extend(measure(cases, {**own, **others}, rounds))

    if "intent" in arguments.models:  # calibrated in float32
        measured(eecore.default_model(), intent_cases(arguments), "float32", {})
    if "smollm2" in arguments.models:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(smollm2_file())
            except (RuntimeError, OSError) as error:
                left_out["smollm2-135m-instruct"] = str(error)
            else:
                others = {}
                if arguments.llama_cpp:
                    given = (file, max(arguments.clients), threads, KV_CACHE_TOKENS)
                    server = stack.enter_context(llama_server(*given))
                    others[LLAMA_CPP] = answers_of(server, cache_prompt=False)
                measured(file, smollm2_cases(arguments), None, others)
    return {
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "rounds": rounds,
        "command": " ".join(("python -m bench serve", *words)),
        "versions": {name: version_of(name) for name in PACKAGES},
        "left_out": left_out,
        "rows": rows,
    }


def main(words: Sequence[str]) -> None:
    made = parser("serve", __doc__, rounds=3, threads=1)
    names = ("intent", "smollm2")
    made.add_argument("--models", nargs="+", choices=names, default=names)
    made.add_argument("--data", type=Path, default=DATA, help="utterances; created if missing")
    made.add_argument("--utterances", type=int, default=1000)
    made.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="of SmolLM2")
    made.add_argument("--tokens", type=int, default=64, help="tokens of an answer of SmolLM2")
    made.add_argument("--llama-cpp", action="store_true", help="also its server, from .peers")
    made.add_argument("--quick", action="store_true", help="a few short requests; writes nothing")
    arguments = made.parse_args(words)
    if arguments.quick:
        arguments.rounds, arguments.dry_run = 1, True
    torch.set_num_threads(arguments.threads)
    try:
        result = run(arguments, words)
    except (eecore.EecoreError, OSError) as error:
        raise SystemExit(str(error)) from None
    REPORTS[0].finish(result, arguments)
