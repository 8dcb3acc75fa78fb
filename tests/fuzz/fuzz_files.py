"""Spoilt files of every kind: bytes, JSON fields, headers, and paths that are no file.

What loads must run; where it holds what the file held before, it gives the tokens that it gave.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

import eecore
from eecore.calibration.examples import read_examples
from eecore.calibration.skip_search import SkipSearch
from eecore.calibration_file import Calibration
from eecore.cli.info import model_facts
from eecore.config import EngineConfig
from eecore.errors import EecoreError
from eecore.exits import ConfidentExit, Exit, ExitClassifier, Full
from eecore.models import Tokenizer, convert_gguf, load_model, model_digest
from eecore.models.readers.gguf_checkpoint import TENSOR_NAMES
from mutate import mutated_bytes, mutated_json
from packed_blocks import SCALES, random_blocks
from quantised_models import Quantisation, write_quantised
from tiny_models import write_byte_tokenizer, write_model
from tiny_t5 import write_t5

"""Address space in bytes that a file of some kilobytes may add."""
MAX_MEMORY = 2 << 30
"""Address space in bytes that a file of some kilobytes may add."""
PROMPT = [3, 5, 7, 11]
MAX_TOKENS = 3
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 264,
    "max_position_embeddings": 64,
}
T5_SIZES = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": 264,
}
CHOICES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {},
    "llama3": {},
    "llama_linear_rope": {},
    "llama_biased": {},
    "mistral": {},
    "qwen2_yarn": {},
    "qwen2_windows": {"layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {},
}
QUANTISED = {
    "gptq": Quantisation("gptq"),
    "gptq_v2": Quantisation("gptq_v2", 8, -1, symmetric=False),
    "gptq_order": Quantisation("gptq", scattered=True, others={"v_proj": 8}),
    "awq": Quantisation("awq", symmetric=False),
    "packed": Quantisation("packed", 4, 64, symmetric=False, skipped=("layers.0.mlp.up_proj",)),
    "packed_order": Quantisation("packed", scattered=True),
    "packed_8": Quantisation("packed", 8, whole=True),
    "plain": Quantisation("plain", 8, -1, scale_dtype="float32"),
}
QUANTISED_SIZES = {**SIZES, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
PACKED_SIZES = {
    **QUANTISED_SIZES,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "head_dim": 128,
}
MODELS = [*CHOICES, "shards", "t5", "t5_v1_1", *QUANTISED]


@dataclass
class Workplace:
    """Good files by the names of their kinds, and a folder for spoilt ones."""

    good: Path
    place: Path
    network: Any
    tokenizer: Tokenizer


@cache
def workplace() -> Workplace:
    """The workplace of this process, removed at its end."""
    root = tempfile.TemporaryDirectory(prefix="fuzz-files-")
    good, place = Path(root.name) / "good", Path(root.name) / "place"
    place.mkdir()
    for family, overrides in CHOICES.items():
        write_model(good / family, family, tokenizer=False, **{**SIZES, **overrides})
    write_model(good / "shards", num_shards=2, tokenizer=False, **SIZES)
    for family in ("t5", "t5_v1_1"):
        write_t5(good / family, family, **T5_SIZES)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (good / family / name).unlink()
    source = write_model(good / "llama_wide", tokenizer=False, **QUANTISED_SIZES)
    for name, how in QUANTISED.items():
        write_quantised(source, good / name, how)
    write_model(good / "llama_packed", tokenizer=False, **PACKED_SIZES)
    for directory in good.iterdir():
        ends = {"eos_token_id": [257, 259], "bos_token_id": 256, "decoder_start_token_id": 1}
        (directory / "generation_config.json").write_text(json.dumps(ends))
    write_byte_tokenizer(good)
    tokenizer = Tokenizer.from_directory(good)
    assert tokenizer is not None
    _, network, _ = load_model(good / "llama", "cpu")
    made = Workplace(good, place, network, tokenizer)
    made.root = root  # type: ignore[attr-defined]
    _write_others(made)
    return made


def prepare() -> None:
    """Make good files, and limit the memory."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    for name in MODELS:
        tokens_of(name)
    for kind in KINDS:
        KINDS[kind](None)  # what is right is served
        _clear()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, resource.RLIM_INFINITY))


def one(random: Random) -> bool:
    """Try one spoilt file."""
    kind = random.choice(list(KINDS))
    try:
        KINDS[kind](random)
    except EecoreError as error:
        length = len(str(error))
        if length > 4000:
            raise AssertionError(f"an error of {length} characters") from error
        return False
    finally:
        _clear()
    return True


def _clear() -> None:
    for path in workplace().place.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


# What is right


def _write_others(work: Workplace) -> None:
    """Write a calibration, a search, a classifier and data."""
    shipped = json.loads((eecore.default_model() / "calibration-softmax.json").read_text())
    calibration = shipped | {
        "model_sha256": model_digest(work.good / "llama"),
        "exit_points": [1],
        "grid": shipped["grid"][:3],
        "steps": [*shipped["steps"][:3], shipped["steps"][-1] | {"passed": True}],
    }
    calibration["threshold"] = calibration["steps"][-1]["threshold"]
    (work.good / "calibration.json").write_text(json.dumps(calibration))
    step = {
        "skip_attention": [1],
        "skip_mlp": [0],
        "agreement": 0.5,
        "draft_cost": 0.5,
        "predicted_speedup": 1.1,
        "num_drafts": 3,
    }
    (work.good / "skips.json").write_text(json.dumps([step, step | {"skip_mlp": [1]}]))
    generator = torch.Generator().manual_seed(0)
    hidden = SIZES["hidden_size"]
    classifier = {
        "weight1": torch.randn(4, hidden, generator=generator),
        "bias1": torch.randn(4, generator=generator),
        "weight2": torch.randn(2, 4, generator=generator),
        "bias2": torch.randn(2, generator=generator),
    }
    save_file(classifier, work.good / "classifier.safetensors", {"format": "pt"})
    lines = [{"input": "a b", "target": "c"}, {"input": "ü", "target": "dé"}]
    (work.good / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields, tensors = _gguf_parts(work.good / "llama")
    (work.good / "model.gguf").write_bytes(gguf_bytes(fields, tensors))
    (work.good / "packed.gguf").write_bytes(gguf_bytes(*_packed_parts(work.good / "llama_packed")))


@cache
def tokens_of(name: str) -> tuple[Any, list[int]]:
    """The config of a good model, and its tokens."""
    _, network, _ = load_model(workplace().good / name, "cpu")
    return network, generated(network)


def generated(network: Any, policy: Exit | None = None) -> list[int]:
    """Some tokens of an engine, whose pages have to be free afterwards."""
    limits = EngineConfig(kv_cache_tokens=64, page_size=8, max_num_seqs=1)
    engine = eecore.Engine(network, None, limits)
    prompt = [min(token, network.config.vocab_size - 1) for token in PROMPT]
    sampling = eecore.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    engine.add_request(prompt, exit=policy or Full(), sampling=sampling)
    outputs = [step.output for step in engine.run() if step.output is not None]
    assert engine.pages.num_free == limits.num_pages
    assert len(outputs) == 1
    tokens = outputs[0].token_ids
    assert all(0 <= token < network.config.vocab_size for token in tokens)
    if outputs[0].finish_reason != "error":
        assert len(tokens) == MAX_TOKENS, outputs[0]
    return list(tokens)


# How it is spoilt


def spoilt(random: Random | None, path: Path, *, is_json: bool = False) -> None:
    """Change a file in its place: its JSON, its bytes or its type; nothing without ``random``."""
    if random is None:
        return
    change = random.randrange(12)
    if change == 0:
        _no_file(random, path)
    elif is_json and change < 10:
        text = json.dumps(mutated_json(random, json.loads(path.read_text()), random.randint(1, 2)))
        path.write_text(text)
        if change < 3:
            path.write_bytes(mutated_bytes(random, path.read_bytes(), 1))
    elif not is_json and path.suffix == ".safetensors" and change < 8:
        path.write_bytes(mutated_header(random, path.read_bytes()))
    else:
        path.write_bytes(mutated_bytes(random, path.read_bytes()))


def _no_file(random: Random, path: Path) -> None:
    """Put something else in the place of a file."""
    path.unlink()
    kind = random.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind < 5:
        path.symlink_to((path.name, "/dev/zero", "/dev/null")[kind - 2])


def mutated_header(random: Random, content: bytes) -> bytes:
    """A safetensors file with other fields in its header, and most often a length that fits."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if random.random() < 0.3 and isinstance(header.get("__metadata__"), dict):
        about = header["__metadata__"]
        if "state" in about:
            about["state"] = json.dumps(mutated_json(random, json.loads(about["state"])))
    else:
        header = mutated_json(random, header)
    packed = json.dumps(header).encode()
    length = len(packed) + (random.choice([0, 0, 0, 0, 1, -1, 2**20, 2**62]))
    return max(length, 0).to_bytes(8, "little") + packed + data


def _copied(name: str) -> Path:
    work = workplace()
    source, target = work.good / name, work.place / name
    shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    return target


# GGUF


def _gguf_parts(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's metadata, and its tensors as [sizes, type, offset, bytes in hexadecimal digits]."""
    config = json.loads((directory / "config.json").read_text())
    tokens = [chr(0x100 + index) for index in range(256)] + ["<s>", "</s>", "ab", "abc"]
    fields = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1, 4],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    names = {hf: name for name, hf in TENSOR_NAMES.items()}
    tensors: dict[str, Any] = {}
    offset = 0
    for name, tensor in load_file(directory / "model.safetensors").items():
        *layer, part, kind = _gguf_name(name)
        stored = f"{''.join(layer)}{names[part]}.{kind}"
        tensors[stored] = [list(reversed(tensor.shape)), 0, offset, tensor.numpy().tobytes().hex()]
        offset += -(-tensor.nbytes // 32) * 32
    return fields, tensors


@cache
def _packed_parts(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields and tensors of a file whose matrices use the blocks of all formats."""
    fields, tensors = _gguf_parts(directory)
    formats = itertools.cycle(SCALES)
    offset = 0
    for seed, tensor in enumerate(tensors.values()):
        sizes, _, _, digits = tensor
        if len(sizes) == 2:
            columns, rows = sizes
            format = next(formats)
            blocks = random_blocks(format, rows, columns, columns**-0.5, seed)
            tensor[1], digits = GGMLQuantizationType[format].value, blocks.numpy().tobytes().hex()
        tensor[2:] = [offset, digits]
        offset += -(-len(digits) // 64) * 32
    return fields, tensors


def _gguf_name(name: str) -> list[str]:
    part, _, kind = name.rpartition(".")
    if part.startswith("model.layers."):
        _, _, layer, inner = part.split(".", 3)
        return [f"blk.{layer}.", inner, kind]
    return [part, kind]


def gguf_bytes(fields: Any, tensors: Any) -> bytes:
    """A GGUF file of mutated fields, as far as the format can hold them."""
    fields = fields if isinstance(fields, dict) else {}
    tensors = tensors if isinstance(tensors, dict) else {}
    whole = [(name, t) for name, t in tensors.items() if isinstance(t, list) and len(t) >= 4]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(whole), len(fields))
    content = head + b"".join(_gguf_text(n) + _gguf_value(v) for n, v in fields.items())
    data = b""
    for name, (sizes, kind, offset, digits, *_) in whole:
        sizes = sizes if isinstance(sizes, list) else [sizes]
        numbers = [_gguf_integer(size, 64) for size in sizes]
        content += _gguf_text(name) + struct.pack(f"<I{len(numbers)}Q", len(numbers), *numbers)
        content += struct.pack("<IQ", _gguf_integer(kind, 32), _gguf_integer(offset, 64))
        with contextlib.suppress(ValueError, TypeError):
            raw = bytes.fromhex(digits)
            data += raw + bytes(-len(raw) % 32)
    return content + bytes(-len(content) % 32) + data


def _gguf_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _gguf_integer(value: Any, bits: int) -> int:
    return value % 2**bits if isinstance(value, int) else 0


def _gguf_value(value: Any) -> bytes:
    """A value with its type before it; values that GGUF lacks become text."""
    if isinstance(value, list):
        items = [_gguf_value(item) for item in value]
        kind = items[0][:4] if items else struct.pack("<I", 4)
        same = b"".join(item[4:] for item in items)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + same
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int) and 0 <= value < 2**32:
        return struct.pack("<II", 4, value)
    if isinstance(value, int):
        return struct.pack("<IQ", 10, value % 2**64)
    if isinstance(value, float) and abs(value) < 3e38:
        return struct.pack("<If", 6, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    return struct.pack("<I", 8) + _gguf_text(value if isinstance(value, str) else json.dumps(value))


# Kinds of files


def _model(random: Random | None) -> None:
    name = "llama" if random is None else random.choice(MODELS)
    directory = _copied(name)
    files = sorted(path.name for path in directory.iterdir())
    file = "config.json" if random is None else random.choice(["config.json", *files])
    spoilt(random, directory / file, is_json=file.endswith(".json"))
    if random is not None and random.random() < 0.3:
        model_facts(directory)
    _runs(directory, name)


def _quantised(random: Random | None) -> None:
    """A directory of GPTQ, AWQ or compressed-tensors: its settings, or tensors of its layers."""
    name = "gptq" if random is None else random.choice(list(QUANTISED))
    directory = _copied(name)
    config = directory / "config.json"
    if random is not None and random.random() < 0.4:
        values = json.loads(config.read_text())
        values["quantization_config"] = mutated_json(random, values["quantization_config"])
        config.write_text(json.dumps(values))
    elif random is not None and random.random() < 0.7:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        for _ in range(random.randint(1, 2)):
            _change_a_tensor(random, tensors)
        save_file(tensors, path)
    elif random is not None:
        file = random.choice([config, directory / "model.safetensors"])
        spoilt(random, file, is_json=file == config)
    if random is not None and random.random() < 0.3:
        model_facts(directory)
    _runs(directory, name)


def _change_a_tensor(random: Random, tensors: dict[str, torch.Tensor]) -> None:
    """Remove, rename or alter (size, dtype, numbers) a tensor, most often of a quantised layer."""
    parts = [name for name in tensors if not name.endswith(("weight", "bias"))]
    name = random.choice(parts or list(tensors))
    tensor, change = tensors.pop(name), random.randrange(7)
    dtypes = [torch.int32, torch.int64, torch.int8, torch.float16, torch.bfloat16, torch.float32]
    if change == 1:
        stem, _, part = name.rpartition(".")
        kinds = ["weight", "bias", "qweight", "g_idx", "weight_scale", part + "x"]
        tensors[f"{stem}.{random.choice(kinds)}"] = tensor
    elif change == 2:
        tensors[name] = tensor.to(random.choice(dtypes))
    elif change == 3:
        tensors[name] = tensor.T.contiguous() if tensor.ndim == 2 else tensor[None]
    elif change == 4:
        tensors[name] = (
            tensor[: random.randrange(len(tensor) + 1)].clone() if tensor.ndim else tensor
        )
    elif change == 5:
        number = random.choice([0, -1, 1, 7, 100, 2**31 - 1, -(2**31)])
        tensors[name] = torch.full(tensor.shape, number).to(tensor.dtype)
    elif change == 6:
        flat = tensor.clone().flatten()
        if len(flat):
            flat[random.randrange(len(flat))] = random.choice([0, -1, 3, 64, 100])
        tensors[name] = flat.view_as(tensor)


def _path(random: Random | None) -> None:
    """Load names that no file has, most of which no file can have."""
    if random is None:
        return
    load = random.choice(
        [eecore.load, Calibration.load, SkipSearch.load, ExitClassifier.load, read_examples]
    )
    pieces = ["a", "/", "..", "~", "\0", "\ud800", "\n", "é", "b" * 200, ".", "-x"]
    name = "".join(random.choice(pieces) for _ in range(random.randint(1, 30)))
    directory = workplace().place
    if random.random() < 0.5:
        load(f"~x{name}")
    load(directory / f"x{name}")


def _runs(directory: Path, name: str) -> None:
    """Load and generate; an unchanged model has to give the same tokens."""
    config, network, _ = load_model(directory, "cpu")
    expected, tokens = tokens_of(name)
    got = generated(network)
    if asdict(config) == asdict(expected.config) and _same_weights(network, expected):
        assert got == tokens


def _same_weights(network: Any, other: Any) -> bool:
    leaves = [tree_leaves(asdict(each.weights)) for each in (network, other)]
    return all(
        a is b or (torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b))
        for a, b in zip(*leaves, strict=True)
    )


def _gguf(random: Random | None) -> None:
    work = workplace()
    path = work.place / "model.gguf"
    if random is None or random.random() < 0.5:
        shutil.copyfile(work.good / "model.gguf", path)
        spoilt(random, path)
    else:
        fields, tensors = _gguf_parts(work.good / "llama")
        if random.random() < 0.7:
            fields = mutated_json(random, fields)
        else:
            tensors = mutated_json(random, tensors)
        path.write_bytes(gguf_bytes(fields, tensors))
    converted = convert_gguf(path, work.place / "converted")
    _, network, _ = load_model(converted, "cpu")
    generated(network)


def _packed(random: Random | None) -> None:
    """A GGUF file that runs as it is."""
    work = workplace()
    path = work.place / "packed.gguf"
    shutil.copyfile(work.good / "packed.gguf", path)
    if random is not None and random.random() < 0.7:
        fields, tensors = _packed_parts(work.good / "llama_packed")
        if random.random() < 0.5:
            fields = mutated_json(random, fields)
        else:
            tensors = mutated_json(random, tensors)
        path.write_bytes(gguf_bytes(fields, tensors))
    elif random is not None and random.random() < 0.5:  # what is packed itself
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes(content[:half] + mutated_bytes(random, content[half:]))
    else:
        spoilt(random, path)
    _, network, _ = load_model(path, "cpu")
    if random is None:
        leaves = tree_leaves(asdict(network.weights))
        assert any(torch.is_tensor(leaf) and leaf.dtype == torch.uint8 for leaf in leaves)
    generated(network)


def _calibration(random: Random | None) -> None:
    path = _copied("calibration.json")
    spoilt(random, path, is_json=True)
    calibration = Calibration.load(path)
    calibration.save(workplace().place / "again.json")
    assert Calibration.load(workplace().place / "again.json") == calibration
    generated(workplace().network, ConfidentExit.calibrated(calibration))


def _skips(random: Random | None) -> None:
    path = _copied("skips.json")
    spoilt(random, path, is_json=True)
    search = SkipSearch.load(path)
    assert generated(workplace().network, search.policy()) == tokens_of("llama")[1]


def _classifier(random: Random | None) -> None:
    path = _copied("classifier.safetensors")
    spoilt(random, path)
    classifier = ExitClassifier.load(path)
    generated(workplace().network, ConfidentExit(measure="classifier", classifier=classifier))


def _data(random: Random | None) -> None:
    path = _copied("data.jsonl")
    lines = path.read_text().splitlines()
    if random is None:
        pass
    elif random.random() < 0.6:
        at = random.randrange(len(lines))
        lines[at] = json.dumps(mutated_json(random, json.loads(lines[at])))
        path.write_text("\n".join(lines))
    else:
        path.write_bytes(mutated_bytes(random, path.read_bytes()))
    assert read_examples(path)


KINDS: dict[str, Callable[[Random | None], None]] = {
    "model": _model,
    "more models": _model,
    "gguf": _gguf,
    "packed": _packed,
    "quantised": _quantised,
    "calibration": _calibration,
    "skips": _skips,
    "classifier": _classifier,
    "data": _data,
    "path": _path,
}
