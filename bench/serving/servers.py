"""Servers in processes of their own: eecore's and llama.cpp's."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from bench.harness import peers

START_TIMEOUT_S = 120


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(peers.llama_cpp_program("llama-server")), "-m", str(file), "-t", str(threads)]
    command += ["-tb", str(threads), "-np", str(slots), "-c", str(tokens), *options]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    address, quiet = f"http://127.0.0.1:{port}", subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            for _ in range(START_TIMEOUT_S):
                if process.poll() is not None:
                    raise SystemExit(f"llama-server: expected it to serve, got {process.poll()}")
                with suppress(OSError), urlopen(f"{address}/health", timeout=1):
                    break
                time.sleep(1)
            yield Server(address, process.pid)
        finally:
            process.terminate()
