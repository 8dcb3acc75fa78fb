"""What HTTP costs: eecore serve beside its engine alone, fed the same requests by as many clients.

python bench/bench_serve.py                          both models, about a quarter of an hour
python bench/bench_serve.py --quick                  a few requests of each: that it runs
python bench/bench_serve.py --llama-cpp              llama.cpp's server beside, on the same file
python bench/bench_serve.py --peer NAME=URL          another server of SmolLM2 beside, at full depth

The server runs in a process of its own; the engine alone in this one, whose other work is that of
the clients. Both take their turns, round by round, streamed and not. Models: intent on held-out
utterances, SmolLM2-135M-Instruct from its GGUF file on questions. Writes bench/results/serve.json
and the table in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

import eecore
from eecore.serving.depth import Policies

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "scripts" / "intents"))

import harness  # noqa: E402
import peers  # noqa: E402
from bench_intents import DATA, utterances  # noqa: E402
from decode_tables import markdown  # noqa: E402
from draft_prompts import prompts_of  # noqa: E402
from get_smollm2 import check, download, find_installed  # noqa: E402
from serve_load import Ask, Connection, Load, cpu_seconds, load_of, of_engine, of_server  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "serve.json"
KV_CACHE_TOKENS = 8192
START_TIMEOUT_S = 120
ENGINE, SERVER = "engine alone", "eecore serve"
# What is said of how fast the server answers.
PACKAGES = ("fastapi", "starlette", "uvicorn", "httptools", "uvloop", "torch")


@dataclass
class Case:
    """So many clients that ask a model for the same prompts under one policy.

    Args:
        model: its name.
        exit: the policy, as requests say it.
        clients: how many ask at once.
        prompts: texts, each a request.
        max_tokens: of each answer.
        ignore_eos: whether an answer has as many at any rate.
    """

    model: str
    exit: str
    clients: int
    prompts: list[str]
    max_tokens: int
    ignore_eos: bool

    def body(self, streams: bool, **fields: Any) -> dict[str, Any]:
        """Of a request, but for the prompt."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0, **fields}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass
class Turns:
    """The rounds of one case by one of those who answer."""

    who: str
    streams: bool
    loads: list[Load] = field(default_factory=list)
    cpu: list[float | None] = field(default_factory=list)
    """Processor seconds of who answers, by round."""

    def speed(self, number: int) -> float:
        return self.loads[number].tokens / self.loads[number].seconds

    def row(self, case: Case, engine: Turns) -> dict[str, Any]:
        """Medians over rounds; percentiles and processor time over all requests."""
        rounds = range(len(self.loads))
        ratios = [self.speed(i) / engine.speed(i) for i in rounds]
        tokens = sum(load.tokens for load in self.loads)
        known = [seconds for seconds in self.cpu if seconds is not None]
        row: dict[str, Any] = {
            "model": case.model,
            "exit": case.exit,
            "clients": case.clients,
            "who": self.who,
            "streams": self.streams,
            "requests": sum(len(load.answers) for load in self.loads),
            "tokens": tokens,
            "tokens_per_s": statistics.median(map(self.speed, rounds)),
            "of_engine": statistics.median(ratios),
            "cpu_us_per_token": 1e6 * sum(known) / tokens if known else None,
        }
        kinds = {"first": [s for load in self.loads for s in load.firsts]}
        kinds["gap"] = [s for load in self.loads for s in load.gaps]
        for kind, seconds in kinds.items():
            shown = seconds if self.streams else []
            row[f"{kind}_ms"] = [1e3 * percentile(shown, p) for p in (50, 99)] if shown else None
        return row


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that as many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * share // 100), 1) - 1]


# Those who answer


@dataclass
class Subject:
    """A model that is measured.

    Args:
        path: of it.
        cases: what is asked of it.
        dtype: in which it runs; None for its own.
        peers: addresses of other servers of it, by name.
    """

    path: Path
    cases: list[Case]
    dtype: str | None = None
    peers: dict[str, str] = field(default_factory=dict)


class EngineAlone:
    """The engine in this process."""

    def __init__(self, model: eecore.Model, directory: Path) -> None:
        self._model, self._policies = model, Policies(directory)

    def turn(self, case: Case, streams: bool, turns: Turns) -> None:
        """All requests of a case once."""
        tokenizer = self._model.tokenizer
        assert tokenizer is not None
        sampling = eecore.SamplingParams(max_tokens=case.max_tokens, ignore_eos=case.ignore_eos)
        requests = [(tokenizer.encode(prompt), sampling) for prompt in case.prompts]
        policy = self._policies.of(case.exit)

        async def run() -> Load:
            async with self._model.async_engine() as engine:
                return await load_of([of_engine(engine, policy, streams)] * case.clients, requests)

        before = time.process_time()
        turns.loads.append(asyncio.run(run()))
        turns.cpu.append(time.process_time() - before)


class Server:
    """One that listens.

    Args:
        address: http://HOST:PORT.
        pid: of its process, where that is known.
        says_exit: whether it understands the field.
    """

    def __init__(self, address: str, pid: int | None, says_exit: bool) -> None:
        self.address, self.pid, self._says_exit = address, pid, says_exit
        with urlopen(f"{address}/v1/models", timeout=30) as answer:
            self._model = json.load(answer)["data"][0]["id"]

    def turn(self, case: Case, streams: bool, turns: Turns) -> None:
        """All requests of a case once."""
        own = {"exit": case.exit} if self._says_exit else {"cache_prompt": False}  # llama.cpp's
        body = case.body(streams, model=self._model, **own)
        requests = [json.dumps({**body, "prompt": prompt}).encode() for prompt in case.prompts]

        async def run() -> Load:
            connections = [Connection(self.address) for _ in range(case.clients)]
            try:
                clients: list[Ask] = [of_server(connection) for connection in connections]
                return await load_of(clients, requests)
            finally:
                for connection in connections:
                    connection.close()

        before = None if self.pid is None else cpu_seconds(self.pid)
        turns.loads.append(asyncio.run(run()))
        after = None if self.pid is None else cpu_seconds(self.pid)
        turns.cpu.append(None if before is None or after is None else after - before)


@contextmanager
def serving(
    path: Path, dtype: str | None, threads: int, options: Sequence[str] = ("--no-prefix-cache",)
) -> Iterator[Server]:
    """``eecore serve`` in a process of its own; without a prefix cache each round computes its
    prompts.
    """
    command = [sys.executable, "-m", "eecore", "serve", str(path), "--port", "0"]
    command += ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--threads", str(threads), *options]
    with subprocess.Popen(
        command + (["--dtype", dtype] if dtype else []),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"http://[\d.]+:\d+", line):
                    break
            else:
                raise SystemExit(f"eecore serve: expected an address, got:\n{''.join(said)}")
            drain = threading.Thread(target=deque, args=(process.stderr, 0), daemon=True)
            drain.start()
            yield Server(found[0], process.pid, says_exit=True)
        finally:
            process.terminate()


@contextmanager
def llama_server(file: Path, slots: int, threads: int) -> Iterator[str]:
    """llama.cpp's server on a file, as bench/peers.py builds it; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(peers.llama_cpp_program("llama-server")), "-m", str(file), "-t", str(threads)]
    command += ["-tb", str(threads), "-np", str(slots), "-c", str(KV_CACHE_TOKENS)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(START_TIMEOUT_S):
                if process.poll() is not None:
                    raise SystemExit(f"llama-server: expected it to serve, got {process.poll()}")
                with suppress(OSError), urlopen(f"{address}/health", timeout=1):
                    break
                time.sleep(1)
            yield address
        finally:
            process.terminate()


# Measuring


def measure(cases: Sequence[Case], answerers: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Rows of the result: everybody on every case, in turns."""
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
            print(_words(rows[-len(asked) :]), file=sys.stderr, flush=True)
    return rows


def _words(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    speeds = ", ".join(f"{row['who']} {row['tokens_per_s']:.0f}" for row in rows)
    how = "streamed" if first["streams"] else "whole"
    return f"{first['model']} {first['exit']} x{first['clients']} {how}: {speeds} tokens/s"


def intent_cases(arguments: argparse.Namespace) -> list[Case]:
    """Held-out utterances, under three policies."""
    count = 48 if arguments.quick else arguments.utterances
    prompts = [record["input"] for record in utterances(arguments.data, count)]
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


def subjects(
    arguments: argparse.Namespace, scratch: Path, left_out: dict[str, str]
) -> Iterator[Subject]:
    """Those that are asked for and can be had."""
    if "intent" in arguments.models:  # calibrated in float32
        yield Subject(eecore.default_model(), intent_cases(arguments), "float32")
    if "smollm2" in arguments.models:
        try:
            file = arguments.file or find_installed() or download(scratch)
            check(file)
        except (RuntimeError, OSError) as error:
            left_out["smollm2-135m-instruct"] = str(error)
            return
        others = dict(arguments.peer or ())
        if not arguments.llama_cpp:
            yield Subject(file, smollm2_cases(arguments), peers=others)
            return
        with llama_server(file, max(arguments.clients), arguments.threads) as address:
            yield Subject(file, smollm2_cases(arguments), peers={**others, "llama.cpp": address})


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for each in subjects(arguments, Path(scratch), left_out):
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
        "cpu": harness.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "command": " ".join(("python bench/bench_serve.py", *sys.argv[1:])),
        "versions": {name: _version(name) for name in PACKAGES},
        "left_out": left_out,
        "rows": rows,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# The table

HEAD = (
    "model, exit, clients",
    "",
    "tokens/s",
    "of the engine",
    "first token, ms: p50",
    "p99",
    "between, ms: p50",
    "p99",
    "CPU µs/token",
)


def table(result: dict[str, Any]) -> str:
    """From the JSON alone."""
    lines = []
    for row in result["rows"]:
        cpu = row["cpu_us_per_token"]
        how = "streamed" if row["streams"] else "whole"
        lines.append(
            [
                f"{row['model']}, {row['exit']}, {row['clients']}",
                f"{row['who']}, {how}",
                f"{row['tokens_per_s']:.0f}",
                "" if row["who"] == ENGINE else f"{row['of_engine']:.2f}",
                *_milliseconds(row["first_ms"]),
                *_milliseconds(row["gap_ms"]),
                "" if cpu is None else f"{cpu:.0f}",
            ]
        )
    left_out = "".join(f" {name} is left out: {why}." for name, why in result["left_out"].items())
    return f"{markdown(HEAD, lines, text_columns=2)}\n\n{about(result)}{left_out}"


def _milliseconds(found: list[float] | None) -> list[str]:
    return ["", ""] if found is None else [f"{value:.1f}" for value in found]


def about(result: dict[str, Any]) -> str:
    """What was measured, and on what."""
    quick = "A quick run, to see that it runs: its times say nothing. " if result["quick"] else ""
    versions = ", ".join(f"{name} {v or 'none'}" for name, v in result["versions"].items())
    return (
        f"{quick}The engine alone is asked by as many tasks for the same prompts, in the process "
        "of the clients; the server has one of its own. Clients, server and engine share "
        f"{result['cores']} cores of {result['cpu']} ({result['cpu_capability']} kernels, "
        f"{result['threads']} thread(s)), so that clients take from the server's speed; CPU time "
        "is that of the process that answers, the model's work included. Medians of "
        f"{result['rounds']} round(s) in turns; p50 and p99 over all requests, and over all pauses "
        f"between what came of one. No prefix cache. {versions}. `{result['command']}`"
    )


# The command


def peer(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"expected NAME=http://HOST:PORT, got {text!r}")
    return name, url.rstrip("/").removesuffix("/v1")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--models", nargs="+", choices=("intent", "smollm2"), default=None)
    made.add_argument("--file", type=Path, help="SmolLM2's GGUF file, at hand already")
    made.add_argument("--data", type=Path, default=DATA, help="utterances; made where missing")
    made.add_argument("--utterances", type=int, default=1000)
    made.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="of SmolLM2")
    made.add_argument("--tokens", type=int, default=64, help="of an answer of SmolLM2")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--threads", type=int, default=1, help="of the engine and the server")
    made.add_argument("--peer", type=peer, action="append", metavar="NAME=URL")
    made.add_argument("--llama-cpp", action="store_true", help="its server beside, of .peers")
    made.add_argument("--quick", action="store_true", help="a few short requests, one round")
    made.add_argument("--dry-run", action="store_true", help="print the table, write nothing")
    made.add_argument("--tables", action="store_true", help="write that of the JSON file again")
    return made


def main() -> None:
    arguments = parser().parse_args()
    arguments.models = arguments.models or ["intent", "smollm2"]
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    if arguments.tables:
        result = json.loads(RESULTS.read_text())
    else:
        torch.set_num_threads(arguments.threads)
        try:
            result = run(arguments)
        except (eecore.EecoreError, OSError) as error:
            raise SystemExit(str(error)) from None
        print(table(result))
    if arguments.dry_run:
        return
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    harness.insert(ROOT / "bench" / "RESULTS.md", "serve", table(result))


if __name__ == "__main__":
    main()
