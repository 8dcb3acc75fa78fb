"""The files of a tokenizer, read and checked: ``tokenizer.json`` and ``tokenizer_config.json``.

The tokenizers library takes what it is given: some files make it panic when it is used, and some
make a text grow without end. Both are found here.
"""

from __future__ import annotations

import base64
import re
import warnings
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import tokenizers

from eecore.errors import CheckpointError, ModelNotFoundError
from eecore.json_fields import JsonFields, parse_json
from eecore.readable import read_bytes, shown_path

__all__ = ["ChatSettings", "chat_settings", "library_error", "read_chat_settings", "read_tokenizer"]

MAX_BYTES = 512 << 20
"""Bytes of a tokenizer.json; large ones of today have 35 million."""
MAX_TEMPLATE_BYTES = 4 << 20
MAX_GROWTH = 256
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


def library_error(error: BaseException, said: str) -> BaseException:
    """An error of the library as one of ours; what is none of its own as it is.

    Args:
        error: that was caught. A panic is none of Python's Exceptions.
        said: ``tokenizer.json: expected a tokenizer``
    """
    if isinstance(error, Exception) or _is_panic(error):
        return CheckpointError(f"{said}, got: {error}")
    return error


def _is_panic(error: BaseException) -> bool:
    return type(error).__module__ == "pyo3_runtime"


def read_tokenizer(path: Path, vocab_size: int | None = None) -> tokenizers.Tokenizer:
    """A tokenizer.json, for a model of so many token ids if that is known.

    Raises:
        CheckpointError: it is no tokenizer, cannot be used, or has other ids than the model.
    """
    content, where = read_bytes(path, MAX_BYTES, CheckpointError), shown_path(path)
    _check_charsmaps(where, content)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
    except BaseException as error:  # the library raises plain Exception
        raise library_error(error, f"{where}: expected a tokenizer") from None
    for name in ("normalizer", "decoder", "post_processor"):
        _check_step(name, _parts(_step(backend, name, where)))
    _check_use(where, backend)
    if vocab_size is not None:
        _check_ids(where, backend, vocab_size)
    return backend


def _check_charsmaps(where: str, content: bytes) -> None:
    """The trie of a charsmap is as large as it says, for which the library takes memory at once."""
    for found in CHARSMAP.finditer(content):
        try:
            charsmap = base64.b64decode(found[1], validate=True)
        except ValueError:  # the library says so too
            continue
        trie = int.from_bytes(charsmap[:4], "little")
        if 4 + trie > len(charsmap):
            raise CheckpointError(
                f"{where}: precompiled_charsmap: expected a trie of {trie} bytes, "
                f"got {len(charsmap) - 4}"
            )


def _step(backend: tokenizers.Tokenizer, name: str, where: str) -> JsonFields:
    """What happens to a text before or after the model's part, as the file has it; empty where
    nothing does."""
    step = getattr(backend, name)
    value = {} if step is None else parse_json(step.__getstate__(), where, CheckpointError)
    return JsonFields.of(value, where, CheckpointError, f"{name}.")


def _parts(step: JsonFields) -> list[JsonFields]:
    """A step and those that it is a sequence of."""
    inner = [
        deeper
        for name in ("normalizers", "decoders", "processors")
        for part in (step.objects(name) if name in step else ())
        for deeper in _parts(part)
    ]
    return [step, *inner]


def _check_step(name: str, parts: list[JsonFields]) -> None:
    step = parts[0]
    growth = prod(map(_growth, parts))
    if growth > MAX_GROWTH:
        raise CheckpointError(
            f"{step.where}: {name}: expected a text to grow {MAX_GROWTH} times at most, "
            f"got {growth:.6g}"
        )
    if name == "post_processor":
        for part in parts:
            _check_template(part)


def _check_template(part: JsonFields) -> None:
    known = part.inner("special_tokens")
    for name in ("single", "pair"):
        for token in _special_pieces(part, name) if name in part else ():
            if known is None or token not in known:
                raise CheckpointError(
                    f"{part.where}: {part.prefix}{name}: expected {token!r} among its "
                    "special_tokens, got none"
                )


def _special_pieces(part: JsonFields, name: str) -> list[str]:
    """The special tokens that a template puts around texts."""
    pieces = (piece.inner("SpecialToken") for piece in part.objects(name))
    return [token.text("id") for token in pieces if token is not None]


def _growth(part: JsonFields) -> float:
    """How many times longer a text can become, in bytes."""
    kind = part.text("type", None)
    if kind == "Replace":
        content, pattern = part.text("content").encode(), part.inner("pattern")
        found = pattern.text("String", None) if pattern is not None else None
        if not found:  # a regular expression may match a letter, or nothing
            return 1.0 + len(content)
        return max(1.0, len(content) / len(found.encode()))
    if kind == "Precompiled":
        return _precompiled_growth(part.text("precompiled_charsmap", ""))
    if kind == "TemplateProcessing":
        return max(1.0, sum("Sequence" in piece for piece in part.objects("single")))
    return 1.0


def _precompiled_growth(charsmap: str) -> float:
    """The longest replacement: they follow a trie, whose size comes first, and end with zeros."""
    data = base64.b64decode(charsmap)
    replacements = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, replacements), 1))


def _check_use(where: str, backend: tokenizers.Tokenizer) -> None:
    """A file that makes the library panic does so with any text."""
    try:
        backend.decode(backend.encode(TRIAL).ids)
    except Exception:  # this text is not one for it, others may be
        return
    except BaseException as error:
        raise library_error(error, f"{where}: expected a tokenizer") from None


def _check_ids(where: str, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Tokens that the model does not have: an error where every prompt would hold them."""
    number = backend.get_vocab_size(with_added_tokens=False)
    if number > vocab_size:
        raise CheckpointError(
            f"{where}: expected at most {vocab_size} tokens, those of the model, got {number}"
        )
    parts = _parts(_step(backend, "post_processor", where))
    always = [token for part in parts for token in _around(part)]
    if always and max(always) >= vocab_size:
        raise CheckpointError(
            f"{where}: post_processor: expected token ids below {vocab_size}, got {max(always)}"
        )
    added = {str(token): i for i, token in backend.get_added_tokens_decoder().items()}
    beyond = [name for name, token_id in added.items() if token_id >= vocab_size]
    if beyond:
        warnings.warn(
            f"{where}: {beyond[0]!r}: expected an id below {vocab_size}, got {added[beyond[0]]}: "
            "texts with it cannot be prompts",
            stacklevel=5,
        )


def _around(part: JsonFields) -> list[int]:
    """Ids that a post-processor puts around every text."""
    if part.text("type", None) == "TemplateProcessing":
        known = part.inner("special_tokens")
        used = [known.inner(name) for name in _special_pieces(part, "single")] if known else []
        return [token for special in used if special for token in special.integers("ids")]
    pairs = (part.entries(name) for name in ("cls", "sep"))  # a token and its id
    return [pair.integer("1") for pair in pairs if pair is not None]


def read_chat_settings(directory: Path) -> ChatSettings:
    """The special tokens and chat templates of a model directory, as transformers finds them.

    Raises:
        CheckpointError: a file cannot be read, or a field of it is of another kind.
    """
    path = directory / "tokenizer_config.json"
    fields = JsonFields.read_if_there(path, CheckpointError)
    settings = chat_settings(fields)
    if "added_tokens_decoder" not in fields.names:  # else transformers reads no older file
        older = JsonFields.read_if_there(directory / "special_tokens_map.json", CheckpointError)
        settings.special_tokens |= _special_tokens(older)
    templates = settings.templates
    whole = directory / "chat_template.jinja"
    if whole.is_file():
        templates["default"] = _template_text(whole)
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _template_text(file)
    return settings


def chat_settings(fields: JsonFields) -> ChatSettings:
    """The special tokens and chat templates in the fields of a tokenizer_config.json.

    Raises:
        CheckpointError: a field is of another kind.
    """
    return ChatSettings(_special_tokens(fields), _listed_templates(fields))


def _listed_templates(settings: JsonFields) -> dict[str, str]:
    """One template, or a list of objects with a name and a template, or an object of them."""
    name = "chat_template"
    if settings.has_list(name):
        return {each.text("name"): each.text("template") for each in settings.objects(name)}
    named = settings.inner(name) if settings.has_inner(name) else None
    if named is not None:
        return {each: named.text(each) for each in named.names}
    return {"default": settings.text(name)} if name in settings else {}


def _template_text(path: Path) -> str:
    content = read_bytes(path, MAX_TEMPLATE_BYTES, CheckpointError, ModelNotFoundError)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{shown_path(path)}: expected UTF-8 text, got: {error}") from None


def _special_tokens(settings: JsonFields) -> dict[str, str]:
    """Role to token, roles of the model's own (``image_token``) too; a token may be a string or an
    object."""
    extra = "extra_special_tokens"
    more = settings.inner(extra) if settings.has_inner(extra) else None
    tokens = {}
    for fields in (settings, *([more] if more is not None else [])):
        for role, value in fields.values.items():
            # A flag is another setting: add_bos_token.
            own = role.endswith("_token") and isinstance(value, (str, dict))
            if own or (role in ROLES and role in fields):
                tokens[role] = _token(fields, role)
    return tokens


def _token(fields: JsonFields, role: str) -> str:
    inner = fields.inner(role) if fields.has_inner(role) else None
    token: str = fields.text(role) if inner is None else inner.text("content")
    return token
