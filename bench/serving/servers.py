"""Servers in processes of their own: eecore's, llama.cpp's and vLLM's."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from bench.harness import peers

START_TIMEOUT_S = 300
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}


class Server(NamedTuple):
    """A server's address, http://HOST:PORT, and the id of its process."""

    address: str
    pid: int


@contextmanager
def serving(path: Path, threads: int, options: Sequence[str]) -> Iterator[Server]:
    """``eecore serve``."""
    command = [sys.executable, "-m", "eecore", "serve", str(path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--threads", str(threads), *options],
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
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            yield Server(found[0], process.pid)
        finally:
            process.terminate()


@contextmanager
def llama_server(
    file: Path, slots: int, threads: int, tokens: int, options: Sequence[str] = ()
) -> Iterator[Server]:
    """llama.cpp's server on a file, with a cache of so many tokens."""
    command = [str(peers.llama_cpp_program("llama-server")), "-m", str(file), "-t", str(threads)]
    command += ["-tb", str(threads), "-np", str(slots), "-c", str(tokens), *options]
    with _peer(command) as server:
        yield server


@contextmanager
def vllm_server(directory: Path, thoughts: str, calls: str) -> Iterator[Server]:
    """vLLM's server in float32, on one thread.

    Args:
        thoughts: its parser of reasoning.
        calls: its parser of tool calls.
    """
    command = [str(peers.python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(directory), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--reasoning-parser", thoughts]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", calls]
    with _peer(command, OMP_NUM_THREADS="1", **VLLM) as server:
        yield server


@contextmanager
def _peer(command: list[str], **environment: str) -> Iterator[Server]:
    """A peer's server on a free port, once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    address, quiet = f"http://127.0.0.1:{port}", subprocess.DEVNULL
    given: dict[str, Any] = {"env": {**os.environ, **environment}, "start_new_session": True}
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, **given) as process:
        try:
            for _ in range(START_TIMEOUT_S):
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]}: expected it to serve, got {process.poll()}")
                with suppress(OSError), urlopen(f"{address}/health", timeout=1):
                    break
                time.sleep(1)
            yield Server(address, process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it began
