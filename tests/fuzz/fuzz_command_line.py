"""Command lines from a grammar of the real options, with values that few would type.

They run in this process, through the same function as the command; streams are of odd kinds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import deserialize

from eecore.cli.app import run
from eecore.cli.process import prepare_streams
from mutate import WILD, mutated_bytes
from tiny_models import write_model

LIMIT_S = 60.0
SHARE = 60
CODES = {0, 1, 2, 3, 4, 130, 141}
PLACES: dict[str, Any] = {}
NUMBERS = [
    "0", "1", "2", "-1", "3", "nan", "inf", "-inf", "1e999", "1e-320", "0.5", "1.5", "-0.5", "",
    " ", "9" * 40, "9" * 5000, "1_0", "0x10", "१", "1,2", "\udcff", "2147483648",
    "9223372036854775808",
]  # fmt: skip
WORDS = [
    "", "a", "hi there", "ü🎉", "\udcff", "\ud800", "\0", "-", "--", "-x", "[bold]", "[/x]", "%s",
    "{}", "a" * 5000, "none", "null", "float32", "bfloat16", "int8", "int4", "cpu", "cuda",
    "cuda:99", "softmax", "state", "rougeL", "textual", "../..", "~", "~daemon/x", "\n", "\x1b[31m",
]  # fmt: skip
LAYERS = ["1", "1,2", "0-3", "3-1", "0-99999999999", "-", ",", "1-", "a", "9", "-1", "1,,2"]
EXITS = [
    "full", "fixed:2", "fixed:0", "fixed:9", "fixed", "fixed:x", "confident", "confident:0.5",
    "confident:nan", "confident:2", "speculative:2,2", "speculative:2,0", "speculative:9,9",
    "speculative:2,99999999999", "draft-verify", "draft-verify:3", "lookup", "lookup:4",
    "lookup:0", "lookup:1,2", "auto", "auto:3", "auto:0", "nothing", "", ":", "fixed:1:2",
]  # fmt: skip
OPTIONS: dict[str, dict[str, str]] = {
    "generate": {
        "--file": "file", "--raw": "", "--system": "word", "--exit": "exit", "--measure": "word",
        "--batch-mode": "word", "--decay-tau": "number", "--exit-points": "layers",
        "--min-exit-layer": "number", "--classifier": "file", "--calibration": "file",
        "--draft-threshold": "number", "--skips": "file", "--skip-attention": "layers",
        "--skip-mlp": "layers", "--temperature": "number", "--top-k": "number",
        "--top-p": "number", "--min-p": "number", "--repetition-penalty": "number",
        "--presence-penalty": "number", "--frequency-penalty": "number",
        "--seed": "number", "--stop": "word", "--ignore-eos": "", "--logprobs": "number",
        "--json": "", "--depth": "", "--stats": "", "--device": "word", "--dtype": "word",
        "--weights": "word", "--threads": "threads", "--kv-cache-tokens": "number", "--debug": "",
    },
    "info": {"--json": "", "--nothing": ""},
    "convert": {"--dtype": "word"},
    "search": {
        "--text": "file", "--out": "out", "--max-skipped": "number", "--dtype": "word",
        "--weights": "word",
    },
    "calibrate": {
        "--data": "file", "--out": "out", "--measure": "word", "--delta": "number",
        "--epsilon": "number", "--loss": "word", "--similarity": "word", "--grid": "number",
        "--decay-tau": "number", "--exit-points": "layers", "--min-exit-layer": "number",
    },
    "exits": {
        "--text": "file", "--exit": "exit", "--measure": "word", "--exit-points": "layers",
        "--html": "out",
    },
    "sweep": {
        "--data": "file", "--exit-layers": "layers", "--num-drafts": "layers", "--out": "out",
    },
    "evaluate layerskip": {
        "--data": "file", "--mode": "exit", "--skips": "file", "--layers": "layers",
        "--metric": "word", "--out": "out",
    },
    "evaluate calm": {
        "--data": "file", "--thresholds": "word", "--calibration": "file", "--classifier": "file",
        "--exit-points": "layers", "--tau": "number", "--batch": "word", "--metric": "word",
    },
    "train": {
        "--data": "file", "--out": "out", "--held-out": "file", "--context": "number",
        "--epochs": "number", "--loss": "word", "--e-scale": "number", "--curriculum": "word",
        "--layer-dropout": "number", "--learning-rate": "number", "--warmup-steps": "number",
        "--weight-decay": "number", "--seed": "number", "--resume": "",
        "--checkpoint-minutes": "number", "--precision": "word", "--lora": "number",
    },
    "train-classifier": {
        "--data": "file", "--out": "out", "--learning-rate": "number", "--context": "number",
        "--seed": "number",
    },
    "train-exits": {
        "--out": "out", "--prompts": "file", "--work": "out", "--taps": "layers",
        "--vocabulary": "number", "--drafts": "number", "--resume": "",
        "--attend": "number", "--seed": "number", "--texts": "file",
        "--minutes": "number", "--learning-rate": "number", "--answer-tokens": "number",
        "--intermediate-size": "number",
    },
}  # fmt: skip
VALID: dict[str, list[str]] = {
    "--measure": ["softmax", "state"], "--batch-mode": ["each", "all"], "--dtype": ["float32"],
    "--weights": ["int8", "int4"], "--device": ["cpu"], "--metric": ["rouge2", "exact"],
    "--loss": ["textual", "risk", "layerskip", "calm", "last"], "--similarity": ["exact"],
    "--batch": ["each", "all", "both"], "--precision": ["float32"], "--grid": ["1,0.5"],
    "--curriculum": ["gradual", "rotational:2", "all"], "--thresholds": ["softmax=0.5"],
    "--delta": ["0.5"], "--epsilon": ["0.5"], "--exit-points": ["1,2"], "--exit-layers": ["1,2"],
    "--num-drafts": ["2"], "--layers": ["1,2", "none"], "--skip-attention": ["1"],
    "--skip-mlp": ["0,1"], "--temperature": ["1"], "--seed": ["1"], "--logprobs": ["2"],
    "--kv-cache-tokens": ["64"], "--max-skipped": ["1"], "--context": ["16"], "--lora": ["2"],
    "--kind": ["block", "recurrent"],
}  # fmt: skip
NEEDED = {"search": ("--text", "--out"), "train": ("--data", "--out")}
NEEDED |= {"train-classifier": ("--data", "--out"), "calibrate": ("--data", "--out")}
NEEDED |= {"train-exits": ("--out",)}
NEEDED |= dict.fromkeys(("sweep", "evaluate layerskip", "evaluate calm"), ("--data",))


def prepare() -> None:
    torch.set_num_threads(1)
    PLACES["folder"] = folder = Path(tempfile.mkdtemp(prefix="eecore-fuzz-"))
    small = {"num_hidden_layers": 3, "intermediate_size": 32, "max_position_embeddings": 128}
    PLACES["model"] = str(write_model(folder / "model", **small))
    PLACES["bare"] = str(write_model(folder / "bare", tokenizer=False, **small))
    os.chdir(folder)


def one(random: Random) -> bool:
    folder: Path = PLACES["folder"]
    (folder / "written").mkdir(exist_ok=True)
    kept = folder / "written" / "kept.json"
    kept.write_text("kept")
    arguments = _arguments(random)
    with _streams(random) as (out, err):
        code = run(arguments)
    said = _text(err)
    assert code in CODES, (code, arguments)
    if "--debug" not in arguments:
        assert "Traceback" not in _text(out) + said, (arguments, said)
        assert "--debug shows where" not in said, (arguments, said)
    hidden = [path.name for path in folder.rglob(".*")]
    assert not hidden, (arguments, hidden)
    assert _is_whole(kept.read_bytes()), arguments
    return code == 0


def _is_whole(content: bytes) -> bool:
    """Whether a file is what it was before, or all that a command writes."""
    if content.startswith(b"<!doctype"):
        return content.rstrip().endswith(b"</html>")
    if content[8:9] == b"{":
        return bool(deserialize(content))
    return content == b"kept" or bool(json.loads(content))


def _arguments(random: Random) -> list[str]:
    if random.random() < 0.03:
        count = random.randrange(3)
        return [random.choice([*WORDS, "--help", "--version", "-h"]) for _ in range(count)]
    often = ["generate", "generate", "exits", "info"]
    command = random.choice(list(OPTIONS) if random.random() < 0.5 else often)
    options, arguments = OPTIONS[command], command.split()
    if command == "convert":
        arguments += [_file(random, ""), str(PLACES["folder"] / "written" / "new" / "deep")]
    elif random.random() < 0.98:
        arguments.append(_model(random))
    if command in ("generate", "exits") and random.random() < 0.9:
        arguments.append(random.choice(WORDS) if random.random() < 0.2 else "hi there")
    for name in NEEDED.get(command, ()):
        if random.random() < 0.98:
            arguments += [name, _value(random, name, options[name])]
    arguments += _bounds(random, command)
    for name in random.sample(list(options), random.choice([0, 1, 1, 2, 3]) % (len(options) + 1)):
        arguments += [name, *([_value(random, name, options[name])] if options[name] else [])]
    if random.random() < 0.03:
        arguments.insert(random.randrange(len(arguments) + 1), random.choice(WORDS))
    return arguments


def _bounds(random: Random, command: str) -> list[str]:
    """Options that keep a command short."""
    odd = random.random() < 0.1
    if command == "train":  # a whole run takes a second
        return ["--steps", random.choice(["0", "-1", "x"]) if random.random() < 0.8 else "1"]
    if command == "train-classifier":
        return ["--steps", random.choice(NUMBERS[:4]) if odd else "1"]
    if command == "train-exits":  # too few answers to learn from
        return ["--tokens", "8", "--vocabulary", "50", "--epochs", "0.1"]
    if command in ("info", "convert"):
        return []
    bounds = ["--max-tokens", random.choice(NUMBERS[:14]) if odd else "2"]
    if command.startswith(("evaluate", "sweep")):
        bounds += ["--rounds", "1", "--limit", "1"]
    return bounds


def _value(random: Random, name: str, kind: str) -> str:
    if random.random() < 0.05:
        return random.choice([*WORDS, *NUMBERS])
    if name in VALID and random.random() < 0.6:
        return random.choice(VALID[name])
    pools = {"number": NUMBERS, "word": WORDS, "layers": LAYERS, "exit": EXITS}
    pools["threads"] = ["1", "1", "0", "-1", "x", "99999999999999999999"]
    pools["out"] = [
        str(PLACES["folder"] / "written" / "kept.json"), "written/new.json", "written/new",
        "nowhere/x", "written", "/dev/full", "written/" + "n" * 300, "written/kept.json/x",
    ]  # fmt: skip
    return _file(random, name) if kind == "file" else random.choice(pools[kind])


def _model(random: Random) -> str:
    if random.random() < 0.9:
        return str(PLACES["model"] if random.random() < 0.9 else PLACES["bare"])
    return random.choice(["intent", "nothing", "owner/name", "written", "/", *WORDS])


PAIRS = '{"input": "a b", "target": "c"}\n' * 2
SKIPS = [{"skip_attention": [1], "skip_mlp": [], "agreement": 0.7, "draft_cost": 0.8,
          "predicted_speedup": 1.1, "num_drafts": 3}]  # fmt: skip
MEANT = {"--data": PAIRS, "--held-out": PAIRS, "--skips": json.dumps(SKIPS)}
LINES: list[str] = [
    "hello\n", PAIRS, '{"text": "some words"}\n', '"text"\n', '{"prompt": "hi"}\n', "[1, 2, 3]\n",
    "[999999]\n", "\ufeffhello\n", "\n\n", "", '{"input": "a"}\n', "[" * 2000, "9" * 5000,
    '{"input": 5, "target": null}\n', "é" * 300, json.dumps(SKIPS),
]  # fmt: skip


def _file(random: Random, name: str) -> str:
    """A file for an option, mostly of the right kind."""
    if random.random() < 0.1:
        return random.choice(["nothing.txt", "written", "/dev/null", "-", "\0", *WORDS])
    path = Path(PLACES["folder"]) / random.choice(["data.jsonl", "data.jsonl", "data.json"])
    content = random.choice(LINES).encode()
    if random.random() < 0.7:
        content = MEANT.get(name, "some text to look at\n").encode()
        path = path.with_suffix(".jsonl" if name in MEANT else ".txt")
    if random.random() < 0.2:
        content = mutated_bytes(random, content)
    elif random.random() < 0.1:
        content = json.dumps(random.choice(WILD)).encode()
    path.write_bytes(content)
    return str(path)


class _Kept(io.BytesIO):
    """A stream whose text can be read after it is closed."""

    def close(self) -> None:
        pass


class _Full(io.RawIOBase):
    """A stream whose device is full, or whose reader has gone."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def writable(self) -> bool:
        return True

    def write(self, _data: Any) -> int:
        raise self._error


@contextlib.contextmanager
def _streams(random: Random) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Standard streams of odd kinds, set up as in a process, and the text written to them."""
    before = sys.stdin, sys.stdout, sys.stderr
    out, err = _Kept(), _Kept()
    encoding = random.choice(["utf-8", "utf-8", "ascii", "latin-1", "utf-16"])
    kinds: list[Callable[[], Any]] = [
        *[lambda: io.TextIOWrapper(out, encoding)] * 8,
        lambda: None,
        lambda: io.TextIOWrapper(io.BufferedWriter(_Full(OSError(28, "No space left")))),
        lambda: io.TextIOWrapper(io.BufferedWriter(_Full(BrokenPipeError(32, "Broken pipe")))),
    ]
    piped = random.choice(LINES).encode()
    sys.stdin = random.choice([None, io.TextIOWrapper(io.BytesIO(piped))])
    sys.stdout = random.choice(kinds)()
    sys.stderr = random.choice([io.TextIOWrapper(err, encoding)] * 8 + [None])
    try:
        prepare_streams()
        yield out, err
        sys.stderr.flush()
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def _text(stream: io.BytesIO) -> str:
    return stream.getvalue().replace(b"\0", b"").decode("latin-1")
