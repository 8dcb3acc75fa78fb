"""The memory of a model: what it uses, and no more than there is."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import eecore
from devices import cpu_only
from eecore import EngineConfig, ModelError
from eecore.engine import free_memory
from eecore.errors import EecoreError, OutOfMemoryError
from eecore.models import KVCache
from tiny_gguf import write_gguf
from tiny_models import write_model

MIB = 1 << 20

START = """
import json, resource, sys
import torch
import eecore

torch.set_num_threads(1)


def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()


def virtual():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

"""


def in_a_process(script: str, *arguments: object) -> Any:
    """The JSON that a script prints."""
    command = [sys.executable, "-c", START + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")


UNUSED = ["gguf", "yaml", "jinja2", "huggingface_hub", "transformers", "typer", "rich"]


def test_a_gguf_file_runs_without_optional_packages(tmp_path: Path, tiny_directory: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_directory)
    assert not in_a_process(
        """
model = eecore.load(sys.argv[1], device="cpu", kv_cache_tokens=512)
eecore.generate(model, [1, 2, 3], max_tokens=2)
print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))
""",
        file,
        json.dumps(UNUSED),
    )


@needs_proc
def test_tensors_that_were_read_give_back_the_memory_of_their_file(tmp_path: Path) -> None:
    num_tensors, size = 12, 32 * MIB
    file = tmp_path / "model.safetensors"
    save_file({f"{i}": torch.full((size,), i, dtype=torch.uint8) for i in range(num_tensors)}, file)
    most, values = in_a_process(
        """
from eecore.errors import ModelError
import pathlib
from eecore.files.tensors import TensorFile

before, most, values = resident(), 0, []
with TensorFile(pathlib.Path(sys.argv[1]), ModelError) as file:
    for i in range(int(sys.argv[2])):
        values.append(int(file.tensor(f"{i}").max()))
        most = max(most, resident() - before)
print(json.dumps([most, values]))
""",
        file,
        num_tensors,
    )
    assert values == list(range(num_tensors))
    assert most < 6 * size


@cpu_only
@needs_proc
def test_the_cache_grows_as_it_is_used(tiny_directory: Path) -> None:
    """512 MiB of it, of which requests use 8, then 63, then not more again."""
    cache, small, large, again, streams = in_a_process(
        """
model = eecore.load(sys.argv[1], device="cpu", kv_cache_tokens=131072)
settings = {"max_tokens": 240, "ignore_eos": True, "exit": eecore.FixedExit(1)}


def use(count, chunk=[[1] * 250]):
    before = resident()
    eecore.generate(model, chunk * count, **settings)
    return resident() - before


use(1), use(32)
kv = model.shared_engine().engine.kv
cache = kv.k.nbytes + kv.v.nbytes
# From now on the memory of programs is there.
model._shared.clear()
del kv
small, large, again = use(1), use(32), sum(use(32) for _ in range(3))
before = virtual()
streams = [eecore.stream(model, [[1] * 250], **settings) for _ in range(8)]
for stream in streams:
    next(stream)
    eecore.generate(model, [[2]], max_tokens=2)
print(json.dumps([cache, small, large, again, virtual() - before]))
""",
        tiny_directory,
    )
    assert cache == 512 * MIB
    assert small < 12 * MIB
    # A fixed exit writes the keys and values of its own layers alone: a quarter of them.
    assert large < 40 * MIB
    assert again < 12 * MIB  # of three times: pages are used again
    assert streams < 200 * MIB  # the stack of a worker thread, but no other cache


@cpu_only
@needs_proc
def test_a_default_cache_keeps_to_the_limit_of_the_process(tiny_directory: Path) -> None:
    tokens = in_a_process(
        """
resource.setrlimit(resource.RLIMIT_AS, (virtual() + 400 * 2**20,) * 2)
model = eecore.load(sys.argv[1], device="cpu")
assert len(eecore.generate(model, [[1, 2]], max_tokens=5, ignore_eos=True)[0].token_ids) == 5
print(json.dumps(model.engine_config.kv_cache_tokens))
""",
        tiny_directory,
    )
    assert 256 <= tokens <= 100 * MIB // 4096


def test_a_cache_that_does_not_fit_is_refused_with_its_size(tiny: eecore.Model) -> None:
    for tokens in (2**45, 2**62):
        with pytest.raises(OutOfMemoryError, match=f"fits into the memory of .*, got {tokens} tok"):
            KVCache.allocate(
                tiny.config, tokens // 16, 16, device=torch.device("cpu"), dtype=torch.float32
            )
    with pytest.raises((EecoreError, ValueError), match="kv_cache_tokens: expected"):
        tiny.engine(EngineConfig(kv_cache_tokens=2**45))


def test_a_model_that_does_not_fit_beside_it_still_loads(tmp_path: Path) -> None:
    write_model(tmp_path, max_position_embeddings=64)
    assert eecore.load(tmp_path, device="cpu").engine_config.kv_cache_tokens >= 256
    with pytest.raises(ModelError):
        eecore.load(tmp_path / "nowhere")


# Limits


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8000 KiB available and no limits."""
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_limits(machine: Path) -> None:
    assert free_memory.free_memory() == 8000 * 1024
    (machine / "proc/meminfo").unlink()
    assert free_memory.free_memory() > 0


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process(machine: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write(machine / "proc/self/statm", "100 0 0 0 0 50 0")
    pages = {"RLIMIT_AS": 100, "RLIMIT_DATA": 50}[kind]

    def limit(which: int) -> tuple[int, int]:
        size = 1_000_000 if which == getattr(resource, kind) else resource.RLIM_INFINITY
        return size, resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", limit)
    assert free_memory.free_memory() == 1_000_000 - pages * resource.getpagesize()


@pytest.mark.parametrize("mounted", ["a/b", ""])
def test_a_control_group(machine: Path, mounted: str) -> None:
    """A control group of version 2; in a container its own group may be the root."""
    write(machine / "proc/self/cgroup", "0::/a/b\n")
    group = machine / "cgroup" / mounted
    write(group / "memory.max", "700000\n")
    write(group / "memory.current", "400000\n")
    write(group / "memory.stat", "anon 1\ninactive_file 150000\n")
    assert free_memory.free_memory() == 700_000 - 250_000
    write(group / "memory.max", "max\n")
    assert free_memory.free_memory() == 8000 * 1024


def test_a_group_above_limits_those_below(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/a/b\n")
    for path, most in (("a", 100_000), ("a/b", 900_000)):
        write(machine / "cgroup" / path / "memory.max", str(most))
        write(machine / "cgroup" / path / "memory.current", "90000")
    assert free_memory.free_memory() == 10_000
    write(machine / "cgroup/a/memory.current", "120000")
    assert free_memory.free_memory() == 0


def test_a_control_group_of_version_1(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n")
    write(machine / "cgroup/memory/box/memory.limit_in_bytes", "500000")
    write(machine / "cgroup/memory/box/memory.usage_in_bytes", "300000")
    write(machine / "cgroup/memory/box/memory.stat", "total_inactive_file 100000")
    write(machine / "cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    write(machine / "cgroup/memory/memory.usage_in_bytes", "300000")
    assert free_memory.free_memory() == 300_000
