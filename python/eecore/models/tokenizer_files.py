"""The files of a tokenizer, read and checked: ``tokenizer.json`` and ``tokenizer_config.json``.

The tokenizers library takes what it is given: some files make it panic when it is used, and some
make a text grow without end. Both are found here.
"""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import tokenizers

from eecore.errors import CheckpointError, ModelNotFoundError
from eecore.models.config_json import read_json

__all__ = ["ChatSettings", "is_panic", "read_chat_settings", "read_tokenizer"]

MOST_BYTES = 512 << 20
"""Of a tokenizer.json; large ones of today have 35 million."""
MOST_TEMPLATE_BYTES = 4 << 20
MOST_GROWTH = 256
"""How many times longer a text may become."""
CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"\\]*)"')
TRIAL = "A trial, 1 + 1\n"
ROLES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)


@dataclass
class ChatSettings:
    """What tokenizer_config.json and the templates beside it say of conversations."""

    special_tokens: dict[str, str] = field(default_factory=dict)
    """Role to token: bos_token, eos_token, ..."""
    templates: dict[str, str] = field(default_factory=dict)
    """By name; that called default is for all that has none of its own."""


def is_panic(error: BaseException) -> bool:
    """Whether the library has panicked, which Python sees as none of its Exceptions."""
    return type(error).__module__ == "pyo3_runtime"


def read_tokenizer(path: Path, vocab_size: int | None = None) -> tokenizers.Tokenizer:
    """A tokenizer.json, for a model of so many token ids if that is known.

    Raises:
        CheckpointError: it is no tokenizer, cannot be used, or has other ids than the model.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CheckpointError(f"{path}: expected at most {MOST_BYTES} bytes, got {size}")
    try:
        content = path.read_bytes()
        _check_charsmaps(path, content)
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: expected a tokenizer, got: {error}") from None
    except BaseException as error:
        if not is_panic(error):
            raise
        raise CheckpointError(f"{path}: expected a tokenizer, got: {error}") from None
    _check_steps(path, backend)
    _check_use(path, backend)
    if vocab_size is not None:
        _check_ids(path, backend, vocab_size)
    return backend


def _check_charsmaps(path: Path, content: bytes) -> None:
    """The trie of a charsmap is as large as it says, for which the library takes memory at once."""
    for found in CHARSMAP.finditer(content):
        try:
            charsmap = base64.b64decode(found[1], validate=True)
        except ValueError:  # the library says so too
            continue
        trie = int.from_bytes(charsmap[:4], "little")
        if 4 + trie > len(charsmap):
            raise CheckpointError(
                f"{path}: precompiled_charsmap: expected a trie of {trie} bytes, "
                f"got {len(charsmap) - 4}"
            )


def _check_steps(path: Path, backend: tokenizers.Tokenizer) -> None:
    """What happens to a text before and after the model's part."""
    for name in ("normalizer", "decoder", "post_processor"):
        state = _state(getattr(backend, name))
        growth = _growth(state)
        if growth > MOST_GROWTH:
            raise CheckpointError(
                f"{path}: {name}: expected a text to grow {MOST_GROWTH} times at most, "
                f"got {growth:.6g}"
            )
        if name == "post_processor":
            for part in _parts(state):
                _check_template(path, part)


def _check_template(path: Path, part: Mapping[str, Any]) -> None:
    known = part.get("special_tokens") or {}
    for piece in (*(part.get("single") or ()), *(part.get("pair") or ())):
        token = piece.get("SpecialToken", {}).get("id")
        if token is not None and token not in known:
            raise CheckpointError(
                f"{path}: post_processor: expected {token!r} among its special_tokens, got none"
            )


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file has it; empty where there is none."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _parts(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A part and those that it is a sequence of."""
    inner = [
        deeper
        for name in ("normalizers", "decoders", "processors")
        for part in state.get(name) or ()
        for deeper in _parts(part)
    ]
    return [state, *inner]


def _growth(state: Mapping[str, Any]) -> float:
    """How many times longer a text can become, in bytes."""
    return float(prod(_own_growth(part) for part in _parts(state)))


def _own_growth(part: Mapping[str, Any]) -> float:
    kind = part.get("type")
    if kind == "Replace":
        content, pattern = part["content"].encode(), part["pattern"].get("String")
        if not pattern:  # a regular expression may match a letter, or nothing
            return 1.0 + len(content)
        return max(1.0, len(content) / len(pattern.encode()))
    if kind == "Precompiled":
        return _precompiled_growth(part.get("precompiled_charsmap") or "")
    if kind == "TemplateProcessing":
        return max(1.0, sum("Sequence" in piece for piece in part["single"]))
    return 1.0


def _precompiled_growth(charsmap: str) -> float:
    """The longest replacement: they follow a trie, whose size comes first, and end with zeros."""
    data = base64.b64decode(charsmap)
    replacements = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, replacements), 1))


def _check_use(path: Path, backend: tokenizers.Tokenizer) -> None:
    """A file that makes the library panic does so with any text."""
    try:
        backend.decode(backend.encode(TRIAL).ids)
    except Exception:  # this text is not one for it, others may be
        return
    except BaseException as error:
        if not is_panic(error):
            raise
        raise CheckpointError(f"{path}: expected a tokenizer, got: {error}") from None


def _check_ids(path: Path, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Tokens that the model does not have: an error where every prompt would hold them."""
    number = backend.get_vocab_size(with_added_tokens=False)
    if number > vocab_size:
        raise CheckpointError(
            f"{path}: expected at most {vocab_size} tokens, those of the model, got {number}"
        )
    always = [token for part in _parts(_state(backend.post_processor)) for token in _around(part)]
    if always and max(always) >= vocab_size:
        raise CheckpointError(
            f"{path}: post_processor: expected token ids below {vocab_size}, got {max(always)}"
        )
    added = {str(token): i for i, token in backend.get_added_tokens_decoder().items()}
    beyond = [name for name, token_id in added.items() if token_id >= vocab_size]
    if beyond:
        warnings.warn(
            f"{path}: {beyond[0]!r}: expected an id below {vocab_size}, got {added[beyond[0]]}: "
            "texts with it cannot be prompts",
            stacklevel=5,
        )


def _around(part: Mapping[str, Any]) -> list[int]:
    """Ids that a post-processor puts around every text."""
    if part.get("type") == "TemplateProcessing":
        tokens = part["special_tokens"]
        names = [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
        return [token for name in names for token in tokens[name]["ids"]]
    return [part[name][1] for name in ("cls", "sep") if name in part]


def read_chat_settings(directory: Path) -> ChatSettings:
    """The special tokens and chat templates of a model directory, as transformers finds them.

    Raises:
        CheckpointError: a file cannot be read, or a template is not text.
    """
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    templates = _listed_templates(path, settings.get("chat_template"))
    whole = directory / "chat_template.jinja"
    if whole.is_file():
        templates["default"] = _template_text(whole)
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _template_text(file)
    return ChatSettings(_special_tokens(settings), templates)


def _listed_templates(path: Path, value: Any) -> dict[str, str]:
    """One template, or a list of objects with a name and a template, or an object of them."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: chat_template: expected a string, or objects with a name and a template, "
            f"got {type(value).__name__}"
        )
    for name, template in value.items():
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(
                f"{path}: chat_template: expected strings as name and template, "
                f"got {type(name).__name__} and {type(template).__name__}"
            )
    return value


def _template_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MOST_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{path}: expected at most {MOST_TEMPLATE_BYTES} bytes, got {size}"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected UTF-8 text, got: {error}") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: {error.strerror or error}") from None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role to token of a tokenizer_config.json; a token may be a string or an object."""
    tokens = {}
    for role in ROLES:
        token = settings.get(role)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[role] = token
    return tokens
