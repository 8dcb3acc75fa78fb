"""Backends that op tests run over, and models: small ones, loaded once, and a real one."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import cases
import eecore
import emulated
import quick
from devices import DEVICE, load, share_the_gpu
from eecore import _C, ops
from eecore.engine import intake
from get_smollm2 import get_smollm2
from reference_decoding import ReferenceModel
from tiny_models import scale_layers, write_model
from tripwire import nothing_done_again

if "PYTEST_XDIST_WORKER" in os.environ:  # side by side: a core for each, and for what it starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

if DEVICE == "cuda" and "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # side by side on one GPU
    share_the_gpu(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))

HAS_CUDA = torch.cuda.is_available() and ops.build_info()["cuda"]
CPU_CAPABILITIES: tuple[str, ...] = ("portable",)
if platform.machine() in ("x86_64", "AMD64"):
    CPU_CAPABILITIES += ("avx2", "avx512", "avx512_bf16", "amx", "amx_model")
# What differs with matrix tiles, the machine's or those of a model in software.
TILED = ("skinny_linear", "skinny_gated_linear", "kv_fill", "exit_confidence_softmax")
TILED += ("decoder_layers", "packed_weights", "rows_alone", "tiles")
# What runs on CUDA too: ops, and what is tested across them.
ON_CUDA = cases.CUDA_OPS | {"int8_weights", "packed_weights", "appended_heads", "float8_caches"}
# opcheck is about what torch sees of an op, which is the same in front of all of the CPU's kernels.
ALIKE_AT_THE_BOUNDARY = tuple(f"cpu-{name}" for name in CPU_CAPABILITIES if name != "portable")


def op_of(module_name: str) -> str:
    """The op that a test file is about."""
    return module_name.rpartition(".")[2].removeprefix("test_")


@pytest.fixture(params=[*(f"cpu-{name}" for name in CPU_CAPABILITIES), "emulated", "cuda"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """The device of each backend in turn: every CPU capability, emulated CUDA kernels, CUDA.

    What this machine cannot run is skipped, and counted as skipped.
    """
    if request.param == "emulated":
        emulated.route(monkeypatch)
        yield torch.device("cpu")
        return
    if request.param == "cuda":
        if not HAS_CUDA:
            pytest.skip("no GPU, or a build without eecore._cuda")
        yield torch.device("cuda")
        return
    capability = request.param.removeprefix("cpu-")
    if capability not in cases.cpu_capabilities():
        pytest.skip(f"this CPU does not have {capability}")
    before = _C.cpu_capability()
    _C.set_cpu_capability(capability)
    yield torch.device("cpu")
    _C.set_cpu_capability(before)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Whatever number of threads a test runs with, the next begins with torch's own."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_fails_inside() -> Iterator[None]:
    """A test fails where an engine has to do an iteration again for which it planted no fault."""
    with nothing_done_again():
        yield


@pytest.fixture(autouse=True)
def no_races_where_asked() -> Iterator[None]:
    """With EECORE_EMULATED_RACES set emulated kernels fail where nothing orders their accesses."""
    with emulated.checking_races() if "EECORE_EMULATED_RACES" in os.environ else nullcontext():
        yield


@pytest.fixture(autouse=True)
def full_depth_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that say no policy run at full depth here: what Auto does hangs on the clock."""
    monkeypatch.setattr(intake, "usual_exit", lambda _: "full")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs behind it
        signal.signal(signal.SIGINT, signal.default_int_handler)  # some tests raise it
    config.addinivalue_line("markers", "quick: of those that run in a minute and a half")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under ``-m quick`` files without quick tests are not even read."""
    is_test = config.option.markexpr == "quick" and collection_path.suffix == ".py"
    return True if is_test and not quick.has_quick(collection_path) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark the quick tests; when -k and -m have chosen, see which of theirs fit.

    Backends that an op does not have are left out, and what would take the emulator too long.
    EECORE_REDUCED_CASES leaves the same out on CUDA: for tools that make it slow.
    EECORE_ONE_CASE_IN=N keeps every N-th of what is left.
    """
    quick.mark(items)
    yield
    kept, left_out = [], []
    for item in items:
        parameters = (
            item.callspec.params
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            else {}
        )
        backend = parameters.get("device")
        op = op_of(item.module.__name__) if isinstance(item, pytest.Function) else ""
        if backend == "emulated":
            # opcheck is about torch.ops.eecore.
            fits = "opcheck" not in item.name and cases.fits_the_emulator(parameters)
            (kept if op in ON_CUDA and fits else left_out).append(item)
        elif backend == "cuda":
            fits = "EECORE_REDUCED_CASES" not in os.environ or cases.fits_the_emulator(parameters)
            (kept if op in ON_CUDA and fits else left_out).append(item)
        elif parameters.get("dtype") == torch.float16 or (
            backend in ALIKE_AT_THE_BOUNDARY and "opcheck" in item.name
        ):
            left_out.append(item)
        elif backend in ("cpu-amx", "cpu-amx_model"):
            fits = op in TILED and parameters.get("dtype") in (None, torch.bfloat16)
            (kept if fits else left_out).append(item)
        else:
            kept.append(item)
    stride = int(os.environ.get("EECORE_ONE_CASE_IN", "1"))
    left_out += [item for i, item in enumerate(kept) if i % stride]
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept[::stride]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: a worker for each core that is ours; more than eight would want for memory."""
    has_some = hasattr(os, "sched_getaffinity")
    return min(len(os.sched_getaffinity(0)) if has_some else os.cpu_count() or 1, 8)


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
