"""``eecore info``: what a model directory or GGUF file holds, and how eecore runs it."""

from __future__ import annotations

import json as json_format
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eecore.cli.loading import Debug, ModelPath, check_path, spinner
from eecore.cli.process import says_all
from eecore.config import ModelConfig, usual_of_answers
from eecore.files.builtin import BUILTIN
from eecore.files.hub import fetch_draft_head
from eecore.files.readable import is_file

if TYPE_CHECKING:
    import torch

    from eecore.config import AnyModelConfig
    from eecore.models import Tokenizer


def info(
    model: ModelPath = BUILTIN,
    draft_head: Annotated[
        str | None, typer.Option(help="A draft head to show with it, by path or repository.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read where failures are reported)
) -> int:
    """Show a model's sizes, tokenizer, exit layers, and how this build runs it."""
    directory = check_path(model)
    with spinner(f"reading {model}"):
        facts = model_facts(directory, None if draft_head is None else fetch_draft_head(draft_head))
    if json:
        print(json_format.dumps(facts, ensure_ascii=not says_all(sys.stdout)))
        return 0
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(facts):
        table.add_row(name, value)
    Console(soft_wrap=True, highlight=False, markup=False).print(table)
    return 0


def model_facts(directory: Path, draft_head: Path | None = None) -> dict[str, Any]:
    """All facts, in JSON's types; of the weights, only those that may be tied are compared."""
    from eecore import build_info
    from eecore.models import KVCache
    from eecore.models.source import ModelSource

    config, tokenizer, dtype, shipped, stored = _stored_facts(directory)
    own, answers = dict(config.sampling), None
    if tokenizer is not None and tokenizer.chat_template is not None:
        source = ModelSource(directory, str(dtype).removeprefix("torch."), None)
        answers = usual_of_answers(own, source.is_trained_to_exit)
    return {
        "path": str(directory),
        "config": {**asdict(config), "sampling": own},
        "sampling_of_answers": answers,
        "num_parameters": config.num_parameters,
        "exit_layers": [config.exit_layers[0], config.num_layers],
        "draft_head": _head_facts(directory, draft_head, shipped, config),
        **stored,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes_per_token": KVCache.bytes_per_token(config, dtype),
        "bytes_per_state": KVCache.bytes_per_state(config, dtype),
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


def _head_facts(
    directory: Path, draft_head: Path | None, shipped: Path | None, config: AnyModelConfig
) -> dict[str, Any] | None:
    """Facts on the draft head that is named, stored with the model, or shipped; None without
    one.
    """
    from eecore.heads import names_another, published_facts
    from eecore.models.readers.head_file import CONFIG_NAME, pack_beside, read_head_settings

    pack = draft_head or pack_beside(directory) or shipped
    if draft_head is not None and not is_file(draft_head / CONFIG_NAME):
        facts = published_facts(draft_head, config)
        return {**facts, "for_another": names_another(facts["verifier"], directory)}
    if pack is None:
        return None
    settings = read_head_settings(pack)
    return {
        "path": str(pack),
        "is_shipped": pack == shipped,
        "taps": list(settings.taps),
        "vocabulary_size": settings.vocabulary_size,
        "attended": settings.attended,
        "agreement": list(settings.agreement),
        "weights": settings.weights,
    }


def _stored_facts(
    path: Path,
) -> tuple[AnyModelConfig, Tokenizer | None, torch.dtype, Path | None, dict[str, Any]]:
    """Config, tokenizer, dtype, the shipped draft head, and sizes; of quantised weights also bits
    and bytes per token.
    """
    import torch

    from eecore.models.readers.head_file import stored_pack
    from eecore.models.readers.load import choose_device, choose_dtype, opened
    from eecore.models.readers.stored_weights import memory_of

    with opened(path) as (stored, config):
        device = torch.device("cpu") if stored.own_form else choose_device(None)
        dtype = choose_dtype(None, device, stored.model_dtype(config, device), config)
        tokenizer = stored.tokenizer(config.vocab_size)
        shipped = stored_pack(stored, config) if isinstance(config, ModelConfig) else None
        kinds = {name: stored.kind(name) for name in stored.names}
        facts: dict[str, Any] = {
            "stored_dtypes": sorted(set(kinds.values())),
            "bytes_on_disk": sum(file.stat().st_size for file in stored.paths),
            "device": str(device),
        }
        if not stored.own_form:
            facts["weight_bytes"] = config.num_parameters * dtype.itemsize
            return config, tokenizer, dtype, shipped, facts
        memory = memory_of(stored, config, dtype)
        numbers = {name: math.prod(stored.shape(name)) for name in memory}
    total = sum(size for _, size in memory.values())
    looked_up = 0 if config.tie_word_embeddings else memory["model.embed_tokens.weight"][1]
    again = sum(size for name, (_, size) in memory.items() if name.startswith("model.layers."))
    facts |= {
        "weight_bytes": total,
        "bytes_per_token": total - looked_up + again * (config.num_loops - 1),
        "tensors": {
            name: {
                "type": form if form == kinds[name] else f"{kinds[name]} as {form}",
                "bits": 8 * size / numbers[name],
            }
            for name, (form, size) in memory.items()
        },
    }
    return config, tokenizer, dtype, shipped, facts


def _bits(tensors: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """The type and bits of each matrix, all layers in one row."""
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
    cuda = build["cuda_architectures" if build["cuda"] else "cuda_note"]
    return [
        ("model", facts["path"]),
        ("architecture", config["architecture"]),
        ("parameters", f"{facts['num_parameters']:,}"),
        ("layers", _layers_row(config, facts["exit_layers"]) + encoder),
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
        ("sampling", _sampling(config["sampling"], facts["sampling_of_answers"])),
        ("on disk", f"{_size(facts['bytes_on_disk'])}, {', '.join(facts['stored_dtypes'])}"),
        ("runs as", f"{facts['dtype']} on {facts['device']}"),
        ("weights", _size(facts["weight_bytes"])),
        *_bits(facts.get("tensors", {})),
        *([("read a token", _size(facts["bytes_per_token"]))] if "tensors" in facts else []),
        ("KV cache", f"{_size(facts['kv_bytes_per_token'])} a token"),
        *([("state", f"{_size(facts['bytes_per_state'])} a text")] if config["delta"] else []),
        ("eecore", f"{build['version']}, built with torch {build['built_with_torch']}"),
        ("CPU kernels", f"{build['cpu_capability']} of {', '.join(build['cpu_capabilities'])}"),
        ("CUDA kernels", str(cuda)),
    ]


def _sampling(own: dict[str, float], answers: dict[str, float] | None) -> str:
    """The sampling settings of a request that has none."""
    if answers and not own:
        return f"none of its own: texts greedy, answers {_named(answers)}"
    if own.get("temperature"):
        return _named(own)
    others = _named({name: value for name, value in own.items() if name != "temperature"})
    return ", ".join(filter(None, ("greedy", others)))


def _named(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _head_row(head: dict[str, Any] | None) -> list[tuple[str, str]]:
    if head is None:
        return []
    if "kind" in head:
        taps, size = ", ".join(map(str, head["taps"])), _size(head["bytes_on_disk"])
        said = f"{head['kind']} after layers {taps}; {head['vocabulary_size']} tokens, {size}"
        if head["verifier"]:
            said += f"; for {head['verifier']}"
        return [("draft head", f"{said}, another model" if head["for_another"] else said)]
    agreement = ", ".join(f"{share:.0%}" for share in head["agreement"])
    tokens, count = head["vocabulary_size"], len(head["attended"])
    attends = f", attends to {count} key heads" if count else ""
    place = "ships with eecore" if head["is_shipped"] else "beside it"
    return [("draft head", f"{place}; {tokens} tokens{attends}, drafts right {agreement}")]


def _family_rows(config: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """The text on an encoder, the text on the heads, and the rows on the context."""
    if "ropes" not in config:
        positions = f"{config['num_buckets']} relative positions up to {config['max_distance']}"
        return (
            f" of the decoder, {config['num_encoder_layers']} of the encoder",
            str(config["num_heads"]),
            [("input", f"{config['max_input']} tokens, {positions}")],
        )
    used = [place for place in config["layer_ropes"] if place is not None]
    ropes = [_rope_text(config["ropes"][place]) for place in sorted(set(used))] or ["none"]
    rows = [("context", f"{config['max_position']} tokens, rope {'; '.join(ropes)}")]
    count = len(config["layer_ropes"]) - len(used)
    if count and used:
        rows.append(("without rope", f"{count} layer{'s' if count > 1 else ''}"))
    windows = [window for window in config["layer_windows"] if window]
    if windows:
        some = f" in {len(windows)} layers" if len(windows) < len(config["layer_windows"]) else ""
        rows.append(("sliding window", f"{max(windows)} tokens{some}"))
    return "", f"{config['num_q_heads']} query, {config['num_kv_heads']} key/value", rows


def _layers_row(config: dict[str, Any], exit_layers: list[int]) -> str:
    first, last = exit_layers
    loops = config.get("num_loops", 1)
    if loops == 1:
        return f"{last} (exit layers {first}..{last})"
    gate = ", an exit gate" if config["gate_threshold"] is not None else ""
    return f"{last}: {first} of the stack in {loops} loops, whose ends are the exit layers{gate}"


def _rope_text(rope: dict[str, Any]) -> str:
    """A rotary embedding in words."""
    factor = f" x{rope['factor']:g}" if rope["factor"] != 1 else ""
    scaling = "" if rope["type"] == "default" else f", {rope['type']}{factor}"
    return f"theta {rope['theta']:g}{scaling}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
