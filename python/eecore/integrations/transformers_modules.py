"""Checks of the modules of a transformers model as they are now.

Each call makes them, so :func:`look` is cheap; :func:`check_modules` names what eecore does not
support.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as every_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eecore.errors import ModelError
from eecore.values import shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUMBERS = (
    "has_relative_attention_bias",
    "head_dim",
    "inner_dim",
    "is_causal",
    "is_decoder",
    "key_value_proj_dim",
    "max_norm",
    "model_dim",
    "n_heads",
    "num_key_value_groups",
    "relative_attention_max_distance",
    "relative_attention_num_buckets",
    "scaling",
    "sliding_window",
    "variance_epsilon",
)
"""Attributes of modules that their forward passes read, as the config sets them."""
DROPOUTS = ("attention_dropout", "dropout", "p")
"""Attributes of modules that are dropout probabilities in training."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules whose hooks change no output: hooks for hidden states and for gradients of embeddings."""
OWN_CODE = ("transformers.", "torch.", "eecore.")


def look(model: PreTrainedModel) -> list[object]:
    """Everything that a model's answers depend on, except for the numbers in its weights.

    Two looks are equal as long as nothing has changed. The list holds no module, and only the ids
    of tensors: a caller that compares looks keeps the tensors alive.
    """
    seen: list[object] = [repr(vars(model.generation_config))]
    for hooks in _global_hooks():
        seen.append(tuple(hooks))
    names: dict[type, tuple[str, ...]] = {}
    configs: dict[int, Any] = {}
    stack: list[nn.Module | None] = [model]
    met: set[int] = set()
    while stack:
        module = stack.pop()
        if module is None or id(module) in met:
            seen.append(None)
            continue
        met.add(id(module))
        kind, fields = type(module), vars(module)
        if kind not in names:
            names[kind] = tuple(n for n in (*NUMBERS, "attention_scaling") if n in fields)
            seen += (kind.forward, names[kind])
        seen += (kind, len(fields), id(fields.get("forward")))
        for name in names[kind]:
            seen.append(fields.get(name))
        if fields["training"]:
            seen += map(fields.get, DROPOUTS)
        if fields["_forward_pre_hooks"] or fields["_forward_hooks"]:
            seen += (*fields["_forward_pre_hooks"], None, *fields["_forward_hooks"])
        for tensor in fields["_parameters"].values():
            if type(tensor) is nn.Parameter:
                seen += (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            else:
                seen.append(type(tensor))
        for name, tensor in fields["_buffers"].items():
            seen += (name, id(tensor), tensor is None or tensor.is_inference() or tensor._version)
        if "config" in fields:
            configs[id(fields["config"])] = fields["config"]
        if children := fields["_modules"]:
            stack += children.values()
    for config in configs.values():
        seen.append(repr(vars(config)))
    seen.append(_attention(model))
    return seen


def check_modules(model: PreTrainedModel) -> None:
    """Raise an error where the model would not compute what eecore computes.

    The model is compared with what its class makes from its config.

    Raises:
        ModelError: a module is missing or of another kind, as an adapter is, has hooks, a forward
            pass or numbers of its own, or has dropout switched on.
    """
    owner = type(model).__name__
    for hooks in _global_hooks():
        _check_hooks(f"{owner}: hooks of every module", hooks)
    attention = _attention(model)
    code = str(getattr(getattr(attention, "func", attention), "__module__", "transformers."))
    if not code.startswith(OWN_CODE):
        raise ModelError(
            f"{owner}: attn_implementation: expected one of transformers, got {shown(attention)}"
        )
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    for name, expected in made.named_modules():
        where = f"{owner}: {name}" if name else owner
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise ModelError(
                f"{where}: expected {_name(expected)} as the config says, got none"
            ) from None
        _check_kind(where, module, expected)
        _check_forward(where, module)
        _check_fields(where, module, expected)
        # A T5 runs all the blocks that it has.
        if isinstance(module, nn.ModuleList) and model.config.is_encoder_decoder:
            _check_value(f"{where}: length", len(module), len(expected))


def _check_kind(where: str, module: nn.Module, expected: nn.Module) -> None:
    if type(module) is type(expected):
        return
    if type(module).__module__.startswith("peft."):
        raise ModelError(
            f"{where}: expected only weights, got an adapter ({_name(module)}): merge it first, "
            "by merge_and_unload()"
        )
    raise ModelError(f"{where}: expected {_name(expected)}, got {_name(module)}")


def _check_forward(where: str, module: nn.Module) -> None:
    for place in HOOKS:
        _check_hooks(where, vars(module)[place])
    kind = type(module)
    for name, value in vars(module).items():
        own = getattr(kind, name, None)
        if not inspect.isfunction(own) or name.startswith("_"):
            continue
        # compiled, and otherwise the same
        value = getattr(value, "_torchdynamo_orig_callable", value)
        if getattr(value, "__func__", None) is not own:
            raise ModelError(f"{where}: {name}: expected that of {_name(module)}, got another")
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    code = inspect.unwrap(vars(owner)["forward"]).__module__
    if code != owner.__module__ and not code.startswith(OWN_CODE):
        raise ModelError(f"{where}: forward: expected that of {_name(module)}, got one of {code}")


def _check_hooks(where: str, hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        code = getattr(hook, "__module__", None)
        if code not in HARMLESS_HOOKS:
            raise ModelError(
                f"{where}: expected no hooks, which eecore does not call, got {shown(hook)}"
            )


def _check_fields(where: str, module: nn.Module, expected: nn.Module) -> None:
    fields, usual = vars(module), vars(expected)
    for name in NUMBERS:
        if name in usual:
            _check_value(f"{where}: {name}", fields.get(name), usual[name])
    for name in DROPOUTS:
        if module.training and isinstance(fields.get(name), float) and fields[name] > 0:
            raise ModelError(
                f"{where}: {name}: expected 0 in training, or model.eval(), got {fields[name]}"
            )
    for name, tensor in expected._parameters.items():
        mine = module._parameters.get(name)
        got = None if mine is None else type(mine)
        if got is not (None if tensor is None else nn.Parameter):
            kind = "none" if tensor is None else "a torch.nn.Parameter"
            raise ModelError(
                f"{where}.{name}: expected {kind}, got {'none' if got is None else got.__name__}"
            )


def _check_value(where: str, got: object, expected: object) -> None:
    if got != expected:
        raise ModelError(f"{where}: expected {expected} as the config says, got {shown(got)}")


def _global_hooks() -> tuple[dict[int, Any], ...]:
    return every_module._global_forward_pre_hooks, every_module._global_forward_hooks


def _attention(model: PreTrainedModel) -> Any:
    return ALL_ATTENTION_FUNCTIONS.get(str(model.config._attn_implementation))


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"
