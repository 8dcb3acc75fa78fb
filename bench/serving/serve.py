"""The cost of HTTP: eecore serve and its engine alone, with equal requests and clients.

python -m bench serve                          both models, about a quarter of an hour
python -m bench serve --quick                  a few requests of each, to check that it runs
python -m bench serve --llama-cpp              also llama.cpp's server, on the same file
python -m bench serve --peer NAME=URL          also another server of SmolLM2, at full depth

The server runs in a process of its own, the engine alone in the process of the clients. Both take
turns, round by round, streamed and not streamed. Models: intent on held-out utterances,
SmolLM2-135M-Instruct from its GGUF file on questions. Writes bench/results/serve.json and the table
in bench/results.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import eecore
from bench.harness.answers import version_of
from bench.harness.command import parser, say
from bench.harness.machine import machine
from bench.harness.prompts import prompts_of
from bench.harness.results import Figures
from bench.harness.smollm2 import smollm2_file
from bench.harness.utterances import DATA, utterances
from bench.serving.answerers import (
    KV_CACHE_TOKENS,
    Case,
    EngineAlone,
    Server,
    Turns,
    llama_server,
    serving,
)
from bench.serving.tables import ENGINE, SERVE, SERVER
from scripts.get_smollm2 import check

# Packages on which the speed of the server depends.
PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "torch")


@dataclass
class Subject:
    """A model to measure.

    Args:
        path: the model's directory or file.
        cases: the cases to measure.
        dtype: the dtype to run in; None for the model's own.
        peers: addresses of other servers of the model, by name.
    """

    path: Path
    cases: list[Case]
    dtype: str | None = None
    peers: dict[str, str] = field(default_factory=dict)


def measure(cases: Sequence[Case], answerers: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Rows of figures: every answerer on every case, in turns."""
    rows = []
    for case in cases:
        for streams in (True, False):
            asked = {
                who: answerer
                for who, answerer in answerers.items()
                if who in (ENGINE, SERVER) or case.exit == "full"
            }
            all_turns = {who: Turns(who, streams) for who in asked}
            warm = Case(**{**vars(case), "prompts": case.prompts[: case.clients], "max_tokens": 4})
            for who, answerer in asked.items():
                answerer.turn(warm, streams, Turns(who, streams))
            for _ in range(rounds):
                for who, answerer in asked.items():
                    answerer.turn(case, streams, all_turns[who])
            rows += [turns.row(case, all_turns[ENGINE]) for turns in all_turns.values()]
            say(_words(rows[-len(asked) :]))
    return rows


def _words(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    speeds = ", ".join(f"{row['who']} {row['tokens_per_s']:.0f}" for row in rows)
    how = "streamed" if first["streams"] else "whole"
    return f"{first['model']} {first['exit']} x{first['clients']} {how}: {speeds} tokens/s"


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


def subjects(arguments: argparse.Namespace, left_out: dict[str, str]) -> Iterator[Subject]:
    """The models that the arguments name and that are available."""
    if "intent" in arguments.models:  # calibrated in float32
        yield Subject(eecore.default_model(), intent_cases(arguments), "float32")
    if "smollm2" in arguments.models:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(smollm2_file(arguments.file))
                check(file)
            except (RuntimeError, OSError) as error:
                left_out["smollm2-135m-instruct"] = str(error)
                return
            beside = dict(arguments.peer or ())
            if arguments.llama_cpp:
                slots = max(arguments.clients)
                server = llama_server(file, slots, arguments.threads)
                beside["llama.cpp"] = stack.enter_context(server)
            yield Subject(file, smollm2_cases(arguments), peers=beside)


def run(arguments: argparse.Namespace, words: Sequence[str]) -> Figures:
    """All figures."""
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for each in subjects(arguments, left_out):
        path, dtype = each.path, each.dtype
        with serving(path, dtype, arguments.threads) as server:
            model = eecore.load(
                path,
                device="cpu",
                dtype=dtype,
                kv_cache_tokens=KV_CACHE_TOKENS,
                prefix_cache=False,
            )
            answerers: dict[str, Any] = {ENGINE: EngineAlone(model, path), SERVER: server}
            for name, url in each.peers.items():
                answerers[name] = Server(url, None, says_exit=False)
            rows += measure(each.cases, answerers, arguments.rounds)
    return {
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "command": " ".join(("python -m bench serve", *words)),
        "versions": {name: version_of(name) for name in PACKAGES},
        "left_out": left_out,
        "rows": rows,
    }


def peer(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"expected NAME=http://HOST:PORT, got {text!r}")
    return name, url.rstrip("/").removesuffix("/v1")


def main(words: Sequence[str]) -> None:
    made = parser("serve", __doc__, rounds=3, threads=1)
    names = ("intent", "smollm2")
    made.add_argument("--models", nargs="+", choices=names, default=names)
    made.add_argument("--file", type=Path, help="SmolLM2's GGUF file; default: a download")
    made.add_argument("--data", type=Path, default=DATA, help="utterances; created if missing")
    made.add_argument("--utterances", type=int, default=1000)
    made.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="of SmolLM2")
    made.add_argument("--tokens", type=int, default=64, help="tokens of an answer of SmolLM2")
    made.add_argument("--peer", type=peer, action="append", metavar="NAME=URL")
    made.add_argument("--llama-cpp", action="store_true", help="also its server, from .peers")
    made.add_argument("--quick", action="store_true", help="a few short requests, one round")
    arguments = made.parse_args(words)
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    torch.set_num_threads(arguments.threads)
    try:
        result = run(arguments, words)
    except (eecore.EecoreError, OSError) as error:
        raise SystemExit(str(error)) from None
    SERVE.finish(result, arguments)
