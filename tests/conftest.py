"""Backends that op tests run over, and models: small ones, loaded once, and a real one."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
import emulated
import quick
import tiers
from devices import DEVICE, load, share_the_gpu
from eecore import _C
from get_smollm2 import get_smollm2
from reference_decoding import ReferenceModel
from tiny_models import scale_layers, write_model
from tripwire import nothing_done_again

if "PYTEST_XDIST_WORKER" in os.environ:  # side by side: a core for each, and for what it starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

if DEVICE == "cuda" and "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # side by side on one GPU
    share_the_gpu(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


@pytest.fixture
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """The device of each backend in turn: CPU capabilities, emulated CUDA kernels, a GPU."""
    if request.param == "emulated":
        emulated.route(monkeypatch)
        yield torch.device("cpu")
        return
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    capability = request.param.removeprefix("cpu-")
    before = _C.cpu_capability()
    _C.set_cpu_capability(capability)
    yield torch.device("cpu")
    _C.set_cpu_capability(before)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Each test begins with torch's own number of threads."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_fails_inside() -> Iterator[None]:
    """Fail a test whose engine repeats an iteration without a planted fault."""
    with nothing_done_again():
        yield


@pytest.fixture(autouse=True)
def no_races_where_asked() -> Iterator[None]:
    """With EECORE_EMULATED_RACES set, emulated kernels fail at accesses that nothing orders."""
    with emulated.checking_races() if "EECORE_EMULATED_RACES" in os.environ else nullcontext():
        yield


LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="all tests, not only the short suite")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)  # some tests raise it
    config.addinivalue_line("markers", "quick: of those that run in a minute")
    config.addinivalue_line("markers", "long: for make test-all alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under ``-m quick`` files without quick tests are not even read."""
    is_test = config.option.markexpr == "quick" and collection_path.suffix == ".py"
    return True if is_test and not quick.has_quick(collection_path) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for a device run over the backends of this machine."""
    if "device" in metafunc.fixturenames:
        op, everything = tiers.op_of(metafunc.module.__name__), tiers.runs_all(metafunc.config)
        names = tiers.backends(op, metafunc.function.__name__, everything)
        metafunc.parametrize("device", names, indirect=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark the quick tests; when -k and -m have chosen, keep those of the suite that is asked for.

    EECORE_ONE_CASE_IN=N keeps every N-th of what is left.
    """
    quick.mark(items)
    yield
    fitting = [item for item in items if tiers.fits(item)]
    short, config.stash[LEFT_OUT] = tiers.short(fitting)
    kept = fitting if tiers.runs_all(config) else [item for item in fitting if item in short]
    kept = kept[:: int(os.environ.get("EECORE_ONE_CASE_IN", "1"))]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws, and the emulator's orders, depend on no test before it."""
    torch.default_generator.manual_seed(0)  # far cheaper than torch.manual_seed
    if tiers.HAS_CUDA:
        torch.cuda.manual_seed_all(0)
    emulated.begin_again()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the collected tests: the garbage collector does not search them, nor runs as often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker reports the tests that it has left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take one worker's report: all workers collect the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the suite, the tests left out, and the backends that this machine does not have."""
    left_out = config.stash.get(LEFT_OUT, {})
    if not tiers.runs_all(config):
        counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        others = ", ".join(tiers.by_random_calls())
        others = f"{others}: all but random calls" if others else ""
        what = "; ".join(filter(None, (counts, others)))
        if what:
            terminalreporter.write_line(f"short suite, left out: {what} (make test-all has them)")
    if absent := tiers.absent():
        terminalreporter.write_line(f"not on this machine: {', '.join(absent)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The workers of ``-n auto``: two more than the cores that this process may use, since some
    tests wait for a server or another process; at most eight, for memory.
    """
    has_some = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_some else os.cpu_count() or 1
    return min(cores + 2, 8)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct in float32; made on first use and kept."""
    try:
        return get_smollm2()
    except RuntimeError as error:
        pytest.skip(f"no SmolLM2: {error}")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers whose early exits rarely agree with the whole model."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> eecore.Model:
    return load(tiny_directory, kv_cache_tokens=2048)


@pytest.fixture(scope="session")
def reference(tiny_directory: Path) -> ReferenceModel:
    return ReferenceModel(tiny_directory)


@pytest.fixture(scope="session")
def agreeing_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, of which the last three change little: drafts are often accepted."""
    directory = write_model(tmp_path_factory.mktemp("agreeing"), seed=3, num_hidden_layers=5)
    scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})
    return directory


@pytest.fixture(scope="session")
def agreeing(agreeing_directory: Path) -> eecore.Model:
    return load(agreeing_directory, kv_cache_tokens=2048)
