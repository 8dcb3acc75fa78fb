"""The process that forks others ends silently when its parent has gone."""

from __future__ import annotations

import marshal
import select
import socket
import subprocess
import sys

import pytest

from eecore.bounded_process import PROGRAM
from eecore.channel import SIZE_BYTES


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_caller_that_has_gone_is_no_error(has_answered: bool) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        end, module = str(theirs.fileno()), "eecore.template_process"
        server = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, end, module, *sys.path],
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
    start = marshal.dumps(())
    ours.sendall(len(start).to_bytes(SIZE_BYTES, "little") + start)
    if has_answered:
        select.select([ours], [], [], 60)
    ours.close()  # an answer that is there stays unread
    _, error = server.communicate(timeout=60)
    assert (server.returncode, error) == (0, b"")
