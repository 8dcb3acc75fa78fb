"""A loaded transformers model as one of eecore's, on the same weights: no copy, no file."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tokenizers
import torch
from torch import Tensor

from eecore.config import AnyModelConfig, EngineConfig, ModelConfig, RopeConfig
from eecore.errors import CheckpointError, ModelError
from eecore.files.json_fields import parse_json
from eecore.generation import Model, engine_limits
from eecore.integrations.transformers_modules import check_modules, look
from eecore.models import (
    ChatSettings,
    Checkpoint,
    ModelSource,
    Network,
    Tokenizer,
    adopt,
    find_head,
    model_digest,
)
from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.config_json import model_config
from eecore.models.readers.families import MULTIMODAL
from eecore.models.rope import frequencies
from eecore.models.text.tokenizer_settings import CLEAN_UP, cleans_up
from eecore.values import shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLED = 64
"""Numbers of each weight that are compared to find out whether it has changed."""


class _Watch:
    """Detects changes of a transformers model whose weights were adopted.

    Args:
        model: the model; not kept alive.
    """

    def __init__(
        self, model: PreTrainedModel, config: AnyModelConfig, adopted: adopt.Adopted
    ) -> None:
        self._model = weakref.ref(model)
        self._config, self.adopted = config, adopted
        self._seen = look(model)

    def change(self) -> str | None:
        """The name of the first part that has changed; None where nothing has.

        Raises:
            ModelError: the model has a part that eecore does not support.
        """
        model = self._model()
        if model is None:
            return None
        seen = look(model)
        if seen == self._seen:
            return None
        config, tensors = _read(model)
        if config != self._config:
            return "config"
        moved = self.adopted.moved(tensors)
        if moved is None:
            self._seen = seen
        return moved

    def check(self, network: Network) -> None:
        """Update a network of these weights, or raise an error.

        Raises:
            ModelError: the model has changed in a way that needs another network.
        """
        changed = self.change()
        if changed is not None:
            raise ModelError(
                f"{changed}: expected the model that from_transformers was given, got a change: "
                "call it again"
            )
        self.adopted.refresh(network)


@dataclass(frozen=True)
class _Held:
    """The state that belongs to one transformers model."""

    watch: _Watch
    model: Model
    settings: dict[str, Any]
    """The arguments of :func:`from_transformers`."""


_HELD: weakref.WeakKeyDictionary[torch.nn.Module, _Held] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


@torch.inference_mode(False)  # keeps a model's parameters from becoming inference tensors
@torch.no_grad()
def from_transformers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | Tokenizer | None = None,
    *,
    kv_cache_tokens: int | None = None,
    engine: EngineConfig | None = None,
    prefix_cache: bool = False,
    exits: str | Path | Literal[False] | None = None,
) -> Model:
    """A transformers model as :func:`eecore.load` would return it, on its own weights.

    The model's parameters get the memory of eecore's weights, which hold all layers one after the
    other. The model goes on working, there is no second copy, and what is written into the
    parameters, by training or by merging an adapter, is written into eecore's weights. Each request
    checks the model. Where it has changed in another way, as by ``model.to(...)`` or a new LM head,
    the request raises a ModelError, and this function has to be called again.

    Args:
        model: of a family that :func:`eecore.load` supports, in float32 or bfloat16, on a GPU also
            in float16; adapters merged.
        tokenizer: for prompts and stop strings as text; a fast tokenizer of transformers.
        kv_cache_tokens: as in :func:`eecore.load`.
        engine: batching limits.
        prefix_cache: off by default, since cached keys and values would stay when weights change.
        exits: a draft head; None: the one in ``exits`` in the model's directory, or one that ships
            with eecore for it.

    Raises:
        ModelError: the model is of another kind, is quantised, has weights that are not in memory,
            or has adapters, hooks or other code of its own; nothing has changed then.
    """
    _check_kind(model)
    settings = {
        "tokenizer": tokenizer,
        "kv_cache_tokens": kv_cache_tokens,
        "engine": engine,
        "prefix_cache": prefix_cache,
        "exits": exits,
    }
    owner = type(model).__name__
    config, tensors = _read(model)
    directory = Path(str(getattr(model.config, "_name_or_path", "") or ""))
    known = directory.name != "" and directory.is_dir()
    dtype = str(model.dtype).removeprefix("torch.")
    source = _Source(directory, dtype, None, tensors) if known else None
    text = _tokenizer(tokenizer, owner)
    with _LOCK:
        held = _HELD.get(model)
        before = None if held is None else held.watch.adopted
        adopted = adopt.Adopted(config, tensors, owner, before)
        network = adopted.network(config, source)
        network.draft_head = find_head(network, directory if known else Path(owner), exits)
        limits = engine_limits(
            network, engine, kv_cache_tokens=kv_cache_tokens, prefix_cache=prefix_cache
        )
        watch = _Watch(model, config, adopted)
        network.check_held = watch.check
        made = Model(network, text, limits)
        _HELD[model] = _Held(watch, made, settings)
    return made


def adopted_model(model: PreTrainedModel) -> Model:
    """The result of the last :func:`from_transformers` for a model, or a new one if the model has
    changed.
    """
    with _LOCK:
        held = _HELD.get(model)
        if held is None:
            return from_transformers(model)
        if held.watch.change() is None:
            return held.model
        return from_transformers(model, **held.settings)


def _read(model: PreTrainedModel) -> tuple[AnyModelConfig, dict[str, Tensor]]:
    """The model's present configuration and parameters; a tied parameter under each of its
    names.
    """
    owner = type(model).__name__
    config = model_config(_fields(model.config, owner), _fields(model.generation_config, owner))
    check_modules(model)
    if isinstance(config, ModelConfig):
        module = model.get_submodule("model.rotary_emb")
        kinds = _rope_kinds(config, getattr(model.config, "layer_types", None) or ())
        ropes = [_rope(*each, module) for each in zip(config.ropes, kinds, strict=True)]
        config = replace(config, ropes=tuple(ropes))
    return config, dict(model.named_parameters(remove_duplicate=False))


def _rope_kinds(config: ModelConfig, layer_types: Sequence[str]) -> list[str]:
    """The kind of layers of each rotary embedding, "" where there are no kinds."""
    kinds = dict(zip(config.layer_ropes, layer_types, strict=False))
    return [kinds.get(place, "") for place in range(len(config.ropes))]


def _rope(rope: RopeConfig, kind: str, module: Any) -> RopeConfig:
    """The settings of a module's rotary embedding, for a kind of layers where it has several."""
    of_kind = f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else ""
    given: Tensor = getattr(module, f"{of_kind}inv_freq")
    if given.is_meta or rope.type == "longrope":  # its frequencies change with the text
        return rope
    factor = float(getattr(module, f"{of_kind}attention_scaling"))
    given = given.float().cpu()
    if torch.equal(given, frequencies(rope)) and factor == rope.attention_factor:
        return rope
    return replace(rope, frequencies=tuple(given.tolist()), attention_factor=factor)


@dataclass(frozen=True)
class _Source(ModelSource):
    """The directory that a model came from; the weights in memory may have changed since."""

    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    _seen: dict[tuple[int, bytes], str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def sha256(self) -> str:
        """The digest of the weight files, as long as the weights in memory are theirs."""
        version = self._version()
        if version not in self._seen:
            self._seen[version] = self._digest()
        return self._seen[version]

    def _version(self) -> tuple[int, bytes]:
        """The number of writes to the weights that autograd has seen, and a digest of sampled
        numbers.

        Autograd does not see writes through ``.data``, as in merging an adapter.
        """
        tensors = [tensor.detach() for tensor in self.tensors.values()]
        count = sum(t._version for t in tensors if not t.is_inference())
        sample = torch.cat([t.reshape(-1)[:: max(1, t.numel() // SAMPLED)] for t in tensors])
        return count, bytes(sample.view(torch.uint8).cpu().numpy())

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
    if type(model).__name__ in MULTIMODAL:
        raise ModelError(
            f"{type(model).__name__}: expected a model of text alone, which AutoModelForCausalLM "
            "makes of its files, got one that also reads images"
        )
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
    special = {k: v for k, v in given.special_tokens_map.items() if isinstance(v, str)}
    templates = given.chat_template
    if not isinstance(templates, dict):
        templates = {} if templates is None else {"default": templates}
    copy = tokenizers.Tokenizer.from_str(backend.to_str())  # eecore's copy neither pads nor cuts
    copy.encode_special_tokens = given.split_special_tokens  # which the text leaves out
    wanted = (getattr(given, flag, True) for flag in CLEAN_UP)  # older releases clean up all texts
    return Tokenizer(copy, ChatSettings(special, templates, cleans_up(copy, *wanted)), owner)
