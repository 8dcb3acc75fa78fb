"""A loaded model of transformers as one of eecore's, on the same weights: no copy, no file."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tokenizers
import torch
from torch import Tensor

from eecore.config import EngineConfig
from eecore.errors import CheckpointError, ModelError
from eecore.generation import Model, engine_limits
from eecore.json_fields import parse_json
from eecore.models import ModelSource, Tokenizer, adopt, find_head
from eecore.models.checkpoint import Checkpoint
from eecore.models.config_json import ConfigFields, model_config
from eecore.models.source import model_digest
from eecore.values import shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["from_transformers", "model_behind"]

# What adapters call what they are in, or are.
ADAPTERS = ("lora_", "base_layer", "modules_to_save")


class _Held:
    """What belongs to one model of transformers."""

    def __init__(self, adopted: adopt.Adopted, model: Model) -> None:
        self.adopted, self.model = adopted, model


_HELD: weakref.WeakKeyDictionary[torch.nn.Module, _Held] = weakref.WeakKeyDictionary()


def from_transformers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | Tokenizer | None = None,
    *,
    kv_cache_tokens: int | None = None,
    engine: EngineConfig | None = None,
    prefix_cache: bool = False,
    exits: str | Path | Literal[False] | None = None,
) -> Model:
    """A model of transformers, as :func:`eecore.load` would give it, on the weights that it has.

    Its parameters become views of eecore's weights, which hold all layers one behind the other: it
    goes on working, there is no second copy, and what is written into them, by training or by
    merging an adapter, is eecore's at once. Where other tensors are put in their place, as by
    ``model.to(...)``, it has to be called again.

    Args:
        model: of the Llama, Mistral, Qwen2, Qwen3, T5 or mT5 family, in float32 or bfloat16, on a
            GPU in float16 too; adapters merged.
        tokenizer: for prompts and stop strings as text; a fast one of transformers.
        kv_cache_tokens: as in :func:`eecore.load`; so are the next three.
        engine: batching limits.
        prefix_cache: off unless asked for: what was computed before weights changed would stay.
        exits: a draft head; None: one in ``exits`` in the directory that the model came from, or
            one that ships with eecore for it.

    Raises:
        ModelError: the model is of another kind, is quantised or has weights that are not in
            memory; nothing has changed then.
    """
    _check_kind(model)
    owner = type(model).__name__
    tensors = dict(model.named_parameters())
    for name in tensors:
        if any(part in name for part in ADAPTERS):
            raise ModelError(
                f"{owner}: expected weights alone, got an adapter ({name}): merge it first, by "
                "merge_and_unload()"
            )
    config = model_config(_fields(model.config, owner), _fields(model.generation_config, owner))
    directory = Path(str(getattr(model.config, "_name_or_path", "") or ""))
    known = directory.name != "" and directory.is_dir()
    dtype = str(model.dtype).removeprefix("torch.")
    source = _Source(directory, dtype, None, tensors) if known else None
    text = _tokenizer(tokenizer, owner)
    adopted = adopt.adopt(config, tensors, owner, source)
    adopted.network.draft_head = find_head(
        adopted.network, directory if known else Path(owner), exits
    )
    limits = engine_limits(adopted.network, engine, kv_cache_tokens, prefix_cache)
    made = Model(adopted.network, text, limits)
    _HELD[model] = _Held(adopted, made)
    return made


def model_behind(model: PreTrainedModel) -> Model:
    """What :func:`from_transformers` made of a model last, or makes of it now."""
    held = _HELD.get(model)
    if held is None or not held.adopted.is_shared:
        return from_transformers(model)
    return held.model


@dataclass(frozen=True)
class _Source(ModelSource):
    """The directory that a model came from; what is in memory may have changed since."""

    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    _seen: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def sha256(self) -> str:
        """Of the weight files, as long as the weights in memory are theirs."""
        version = sum(tensor._version for tensor in self.tensors.values())
        if version not in self._seen:
            self._seen[version] = self._digest()
        return self._seen[version]

    def _digest(self) -> str:
        with Checkpoint(self.directory) as files:
            for name in set(files.names) & set(self.tensors):
                mine = self.tensors[name].data
                if not torch.equal(files.tensor(name).to(mine.device, mine.dtype), mine):
                    return "changed since they were loaded"
        return model_digest(self.directory)


def _check_kind(model: Any) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "generation_config"):
        raise ModelError(f"model: expected a PreTrainedModel that generates, got {shown(model)}")
    quantised = getattr(model.config, "quantization_config", None)
    if getattr(model, "hf_quantizer", None) is not None or quantised is not None:
        raise ModelError(
            f"{type(model).__name__}: expected weights in floats, got a quantised model: "
            "eecore.load(directory) runs GPTQ, AWQ and compressed-tensors as they are"
        )


def _fields(config: Any, owner: str) -> ConfigFields:
    where = f"{owner}.{'generation_config' if hasattr(config, 'do_sample') else 'config'}"
    values = parse_json(config.to_json_string(use_diff=False), where, CheckpointError)
    if not hasattr(config, "do_sample"):
        values["architectures"] = [owner]
    return ConfigFields.of(values, where, CheckpointError)


def _tokenizer(given: Any, owner: str) -> Tokenizer | None:
    if given is None or isinstance(given, Tokenizer):
        return given
    backend = getattr(given, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"tokenizer: expected a fast one of transformers, got {shown(given)}")
    templates = given.chat_template
    named = dict(templates) if isinstance(templates, dict) else {}
    return Tokenizer(
        tokenizers.Tokenizer.from_str(backend.to_str()),  # ours pads and cuts nothing
        special_tokens={k: v for k, v in given.special_tokens_map.items() if isinstance(v, str)},
        chat_template=named.pop("default", None) if named else templates,
        named_templates=named,
        name=owner,
    )
