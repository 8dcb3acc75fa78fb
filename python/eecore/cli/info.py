"""``eecore info``: what a model directory or GGUF file holds, and what eecore makes of it."""

from __future__ import annotations

import json as json_format
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eecore.builtin import BUILTIN
from eecore.console.loading import Debug, ModelPath, check_path, spinner
from eecore.console.streams import says_all

if TYPE_CHECKING:
    import torch

    from eecore.config import AnyModelConfig, ModelConfig
    from eecore.models import Tokenizer
    from eecore.models.readers.quantised_layout import Layout

FORMATS = ("float32", "bfloat16", "float16")


def info(
    model: ModelPath = BUILTIN,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read where failures are reported)
) -> int:
    """Show a model's sizes, tokenizer, exit layers and what this build runs it with."""
    directory = check_path(model)
    with spinner(f"reading {model}"):
        facts = model_facts(directory)
    if json:
        print(json_format.dumps(facts, ensure_ascii=not says_all(sys.stdout)))
        return 0
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(facts):
        table.add_row(name, value)
    Console(soft_wrap=True, highlight=False, markup=False).print(table)
    return 0


def model_facts(directory: Path) -> dict[str, Any]:
    """Everything, as JSON can say it; reads headers, no weights."""
    from eecore import build_info
    from eecore.models import KVCache

    read = _file_facts if directory.is_file() else _directory_facts
    config, tokenizer, dtype, stored = read(directory)
    return {
        "path": str(directory),
        "config": asdict(config),
        "num_parameters": config.num_parameters,
        "exit_layers": [1, config.num_layers],
        "draft_head": _head_facts(directory),
        **stored,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes_per_token": KVCache.bytes_per_token(config, dtype),
        "tokenizer": None
        if tokenizer is None
        else {
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.chat_template is not None,
            "eos_tokens": [
                tokenizer.decode([token], skip_special_tokens=False)
                for token in config.eos_token_ids
            ],
        },
        "build": build_info(),
    }


def _head_facts(directory: Path) -> dict[str, Any] | None:
    """Of the draft head beside the model, where there is one."""
    from eecore.models.readers.head_file import pack_beside, read_head_settings

    pack = pack_beside(directory)
    if pack is None:
        return None
    settings = read_head_settings(pack)
    return {
        "path": str(pack),
        "taps": list(settings.taps),
        "vocabulary_size": settings.vocabulary_size,
        "attended": settings.attended,
        "agreement": list(settings.agreement),
        "weights": settings.weights,
    }


def _directory_facts(
    directory: Path,
) -> tuple[AnyModelConfig, Tokenizer | None, torch.dtype, dict[str, Any]]:
    import torch

    from eecore.config import ModelConfig
    from eecore.models import Tokenizer, read_layout
    from eecore.models.readers.checkpoint import Checkpoint
    from eecore.models.readers.config_json import read_model_config
    from eecore.models.readers.load import choose_device, choose_model_dtype

    config = read_model_config(directory)
    tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
    if isinstance(config, ModelConfig) and (layout := read_layout(directory)) is not None:
        own, dtype, quantised = _quantised_facts(directory, config, layout)
        return own, tokenizer, dtype, quantised
    with Checkpoint(directory) as checkpoint:
        stored = sorted({checkpoint.dtype(name) for name in checkpoint.names}, key=str)
        files = {checkpoint.path_of(name) for name in checkpoint.names}
    device = choose_device(None)
    main = getattr(torch, config.dtype) if config.dtype in FORMATS else stored[0]
    dtype = choose_model_dtype(None, device, main, config)
    facts = {
        "stored_dtypes": [str(kind).removeprefix("torch.") for kind in stored],
        "bytes_on_disk": sum(path.stat().st_size for path in files),
        "device": str(device),
        "weight_bytes": config.num_parameters * dtype.itemsize,
    }
    return config, tokenizer, dtype, facts


def _quantised_facts(
    directory: Path, config: ModelConfig, layout: Layout
) -> tuple[ModelConfig, torch.dtype, dict[str, Any]]:
    """Of a directory with quantised layers: what each runs as besides, and what a token reads."""
    import torch

    from eecore.models.readers.checkpoint import Checkpoint, with_stored_tying
    from eecore.models.readers.load import choose_dtype
    from eecore.models.readers.quantised_checkpoint import QuantisedCheckpoint
    from eecore.models.readers.stored_weights import memory_of

    with Checkpoint(directory) as files:
        checkpoint = QuantisedCheckpoint(files, layout, config)
        tied = with_stored_tying(config, checkpoint)
        device = torch.device("cpu")
        dtype = choose_dtype(None, device, checkpoint.model_dtype(tied, device))
        memory = memory_of(checkpoint, tied, dtype)
        kinds = {name: checkpoint.kind(name) for name in checkpoint.names}
        paths = {files.path_of(name) for name in files.names}
        numbers = {name: math.prod(checkpoint.shape(name)) for name in memory}
    total = sum(size for _, size in memory.values())
    looked_up = 0 if tied.tie_word_embeddings else memory["model.embed_tokens.weight"][1]
    facts = {
        "stored_dtypes": sorted(set(kinds.values())),
        "bytes_on_disk": sum(path.stat().st_size for path in paths),
        "device": "cpu",
        "weight_bytes": total,
        "bytes_per_token": total - looked_up,
        "tensors": {
            name: {
                "type": form if form == kinds[name] else f"{kinds[name]} as {form}",
                "bits": 8 * size / numbers[name],
            }
            for name, (form, size) in memory.items()
        },
    }
    return tied, dtype, facts


def _file_facts(
    path: Path,
) -> tuple[AnyModelConfig, Tokenizer | None, torch.dtype, dict[str, Any]]:
    """Of a GGUF file: besides the bits of each tensor, and what a token reads of them."""
    import torch

    from eecore.models.readers.gguf_checkpoint import GGUFCheckpoint
    from eecore.models.readers.load import choose_dtype

    checkpoint = GGUFCheckpoint(path)
    checkpoint.check_kinds()
    config, names = checkpoint.config, checkpoint.names
    sizes = {name: checkpoint.num_bytes(name) for name in names}
    numbers = {name: math.prod(checkpoint.shape(name)) for name in names}
    looked_up = 0 if config.tie_word_embeddings else sizes["model.embed_tokens.weight"]
    device = torch.device("cpu")
    dtype = choose_dtype(None, device, checkpoint.model_dtype(config, device))
    facts = {
        "stored_dtypes": sorted({checkpoint.kind(name) for name in names}),
        "bytes_on_disk": sum(part.stat().st_size for part in checkpoint.file.paths),
        "device": "cpu",
        "weight_bytes": sum(sizes.values()),
        "bytes_per_token": sum(sizes.values()) - looked_up,
        "tensors": {
            name: {"type": checkpoint.kind(name), "bits": 8 * sizes[name] / numbers[name]}
            for name in names
        },
    }
    return config, checkpoint.tokenizer(config.vocab_size), dtype, facts


def _bits(tensors: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Type and bits of the matrices, those of all layers together."""
    kinds: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight").split(".")[-1]
        if "norm" in part or name.endswith(".bias"):
            continue
        text = f"{tensor['type']} ({tensor['bits']:.3g} bits)"
        if text not in kinds.setdefault(part, []):
            kinds[part].append(text)
    return [(f"  {part}", ", ".join(sorted(texts))) for part, texts in kinds.items()]


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    config, tokenizer, build = facts["config"], facts["tokenizer"], facts["build"]
    ends = ", ".join(map(str, config["eos_token_ids"])) or "none"
    text = "none: prompts are token ids"
    if tokenizer is not None:
        chat = "with" if tokenizer["chat_template"] else "without"
        text = f"{tokenizer['vocab_size']} tokens, {chat} a chat template"
        ends += f" ({' '.join(tokenizer['eos_tokens'])})" if tokenizer["eos_tokens"] else ""
    encoder, heads, context = _family_rows(config)
    cuda = ", ".join(map(str, build["cuda_architectures"])) if build["cuda"] else build["cuda_note"]
    return [
        ("model", facts["path"]),
        ("architecture", config["architecture"]),
        ("parameters", f"{facts['num_parameters']:,}"),
        ("layers", f"{config['num_layers']} (exit layers 1..{facts['exit_layers'][1]}){encoder}"),
        *_head_row(facts["draft_head"]),
        ("hidden size", f"{config['hidden_size']}, MLP {config['intermediate_size']}"),
        ("heads", f"{heads}, size {config['head_dim']}"),
        (
            "vocabulary",
            f"{config['vocab_size']}, {'tied' if config['tie_word_embeddings'] else 'own'} LM head",
        ),
        *context,
        ("tokenizer", text),
        ("end tokens", ends),
        ("on disk", f"{_size(facts['bytes_on_disk'])}, {', '.join(facts['stored_dtypes'])}"),
        ("runs as", f"{facts['dtype']} on {facts['device']}"),
        ("weights", _size(facts["weight_bytes"])),
        *_bits(facts.get("tensors", {})),
        *([("read a token", _size(facts["bytes_per_token"]))] if "tensors" in facts else []),
        ("KV cache", f"{_size(facts['kv_bytes_per_token'])} a token"),
        ("eecore", f"{build['version']}, built with torch {build['built_with_torch']}"),
        ("CPU kernels", f"{build['cpu_capability']} of {', '.join(build['cpu_capabilities'])}"),
        ("CUDA kernels", str(cuda)),
    ]


def _head_row(head: dict[str, Any] | None) -> list[tuple[str, str]]:
    if head is None:
        return []
    agreement = ", ".join(f"{share:.0%}" for share in head["agreement"])
    tokens, count = head["vocabulary_size"], len(head["attended"])
    attends = f", attends to {count} key heads" if count else ""
    return [("draft head", f"beside it; {tokens} tokens{attends}, drafts right {agreement}")]


def _family_rows(config: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """What is said of an encoder, of the heads, and of how far a model sees."""
    if "rope" not in config:
        positions = f"{config['num_buckets']} relative positions up to {config['max_distance']}"
        return (
            f" of the decoder, {config['num_encoder_layers']} of the encoder",
            str(config["num_heads"]),
            [("input", f"{config['max_input']} tokens, {positions}")],
        )
    rope, windows = config["rope"], max(config["layer_windows"])
    scaling = "" if rope["type"] == "default" else f", {rope['type']} x{rope['factor']:g}"
    rows = [("context", f"{config['max_position']} tokens, rope theta {rope['theta']:g}{scaling}")]
    if windows:
        rows.append(("sliding window", f"{windows} tokens"))
    return "", f"{config['num_q_heads']} query, {config['num_kv_heads']} key/value", rows


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
