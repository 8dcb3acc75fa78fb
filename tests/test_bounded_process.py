"""Workers end quietly with the process that asks them, and are replaced."""

from __future__ import annotations

import marshal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from eecore.bounded_process import MAX_IDLE, PROGRAM, SIZE_BYTES, NotPrepared, Workers
from tripwire import Interrupt, Tripwire

ONE = ("{{ messages }}", {"messages": "one"}, 100)


@pytest.mark.parametrize("has_answered", [False, True])
def test_an_asking_process_that_has_gone_is_no_error(has_answered: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "eecore.template_process", *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        start = marshal.dumps(())
        worker.stdin.write(len(start).to_bytes(SIZE_BYTES, "little") + start)
        worker.stdin.flush()
        if has_answered:
            assert worker.stdout.read(SIZE_BYTES)
        worker.stdout.close()
        _, error = worker.communicate(timeout=60)
        assert (worker.returncode, error) == (0, b"")


def test_an_interrupt_at_any_line_leaves_workers_that_answer() -> None:
    workers = Workers("eecore.template_process")
    with Tripwire() as wire:
        assert workers.ask(ONE, 1.0, 64 << 20) == ("one", "", False)
    for at in range(1, wire.lines + 1, 4):  # each costs a worker
        with pytest.raises(Interrupt), Tripwire(at):
            workers.ask(ONE, 1.0, 64 << 20)
        assert workers.ask(ONE, 1.0, 64 << 20) == ("one", "", False)


def test_few_workers_are_kept() -> None:
    workers = Workers("eecore.template_process")
    with ThreadPoolExecutor(3 * MAX_IDLE) as threads:
        asked = [threads.submit(workers.ask, ONE, 1.0, 64 << 20) for _ in range(40)]
        assert {each.result() for each in asked} == {("one", "", False)}
    assert 1 <= len(workers._idle) <= MAX_IDLE


def test_a_worker_that_has_ended_is_replaced_and_all_end_with_their_owner() -> None:
    workers = Workers("eecore.template_process")
    assert workers.ask(ONE, 1.0, 64 << 20)
    (first,) = workers._idle
    first._process.kill()
    first._process.wait()
    assert workers.ask(ONE, 1.0, 64 << 20)
    (second,) = workers._idle
    process = second._process
    assert second is not first
    assert process.poll() is None
    del workers, first, second
    assert process.poll() is not None


def test_what_cannot_be_prepared_is_an_error() -> None:
    with pytest.raises(NotPrepared, match="its process ended"):
        Workers("eecore.nothing").ask((), 1.0, 0)
