"""The files of a tokenizer, read and checked: ``tokenizer.json`` and those beside it.

The tokenizers library does not check its files: some make it panic when it is used, and some make a
text grow without bound. Both are detected here.
"""

from __future__ import annotations

import base64
import re
import warnings
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import tokenizers

from eecore.errors import CheckpointError, ModelError, ModelNotFoundError
from eecore.files.json_fields import JsonFields, parse_json
from eecore.files.readable import read_bytes, shown_path
from eecore.models.text.tokenizer_settings import CLEAN_UP, cleans_up, roles_of, with_tokens

MAX_BYTES = 512 << 20
"""Bytes of a tokenizer.json, at most; large ones of today have 35 million."""
MAX_TEMPLATE_BYTES = 4 << 20
MAX_GROWTH = 256
"""How many times longer a tokenizer may make a text."""
CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"\\]*)"')
TRIAL = "A trial, 1 + 1\n"


@dataclass
class ChatSettings:
    """Special tokens and chat templates, from tokenizer_config.json and the template files."""

    special_tokens: dict[str, str] = field(default_factory=dict)
    """Role to token: bos_token, eos_token, ..."""
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name; the one named "default" is for all other conversations."""
    cleans_up: bool = False
    """Whether spaces before punctuation are removed from decoded text."""


def library_error(error: BaseException, said: str) -> BaseException:
    """An error or panic of the library as a CheckpointError; any other error unchanged.

    Args:
        error: the caught error; a panic is not an Exception.
        said: the beginning of the message: ``tokenizer.json: expected a tokenizer``
    """
    if isinstance(error, Exception) or _is_panic(error):
        return CheckpointError(f"{said}, got: {error}")
    return error


def _is_panic(error: BaseException) -> bool:
    return type(error).__module__ == "pyo3_runtime"


def read_tokenizer(
    directory: Path, vocab_size: int | None = None
) -> tuple[tokenizers.Tokenizer, ChatSettings]:
    """The tokenizer of a directory, for a model with ``vocab_size`` token ids if known, and its
    special tokens and chat templates, as transformers finds them.

    Raises:
        ModelError: a file cannot be read, is not a tokenizer, cannot be used, has a field of the
            wrong type or has ids that the model does not have.
    """
    path = directory / "tokenizer.json"
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
    fields = JsonFields.read_if_there(directory / "tokenizer_config.json", CheckpointError)
    try:
        backend, roles = with_tokens(directory, fields, content, backend)
    except ModelError:
        raise
    except BaseException as error:
        raise library_error(error, f"{fields.where}: expected settings of tokens") from None
    _check_use(where, backend)
    if vocab_size is not None:
        _check_ids(where, backend, vocab_size)
    templates = _filed_templates(directory) or _listed_templates(fields)
    wanted = (fields.flag(flag, False) for flag in CLEAN_UP)
    return backend, ChatSettings(roles, templates, cleans_up(backend, *wanted))


def _check_charsmaps(where: str, content: bytes) -> None:
    """Raise if a charsmap's trie claims more bytes than it has: the library allocates them."""
    for found in CHARSMAP.finditer(content):
        try:
            charsmap = base64.b64decode(found[1], validate=True)
        except ValueError:  # the library raises an error for it
            continue
        trie = int.from_bytes(charsmap[:4], "little")
        if 4 + trie > len(charsmap):
            raise CheckpointError(
                f"{where}: precompiled_charsmap: expected a trie of {trie} bytes, "
                f"got {len(charsmap) - 4}"
            )


def _step(backend: tokenizers.Tokenizer, name: str, where: str) -> JsonFields:
    """A step before or after the tokenizer's model, as in the file; empty if there is none."""
    step = getattr(backend, name)
    value = {} if step is None else parse_json(step.__getstate__(), where, CheckpointError)
    return JsonFields.of(value, where, CheckpointError, f"{name}.")


def _parts(step: JsonFields) -> list[JsonFields]:
    """A step and all steps inside it."""
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
    """How many times longer a step can make a text, in bytes."""
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
    """The longest replacement of a charsmap: a trie's size, the trie, zero-ended replacements."""
    data = base64.b64decode(charsmap)
    replacements = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return float(max(1, *map(len, replacements), 1))


def _check_use(where: str, backend: tokenizers.Tokenizer) -> None:
    """Raise if the library panics with the file, which it then does for any text."""
    try:
        backend.decode(backend.encode(TRIAL).ids)
    except Exception:  # the tokenizer may still take other texts
        return
    except BaseException as error:
        raise library_error(error, f"{where}: expected a tokenizer") from None


def _check_ids(where: str, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Check for tokens that the model does not have: an error if every prompt would hold them, else
    a warning."""
    number = backend.get_vocab_size(with_added_tokens=False)
    if number > vocab_size:
        raise CheckpointError(
            f"{where}: expected at most {vocab_size} tokens, as the model has, got {number}"
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


def _filed_templates(directory: Path) -> dict[str, str]:
    """Chat templates by name, from files of their own; these replace all others."""
    whole = directory / "chat_template.jinja"
    templates = {"default": _template_text(whole)} if whole.is_file() else {}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _template_text(file)
    return templates


def chat_settings(fields: JsonFields) -> ChatSettings:
    """The special tokens and chat templates in the fields of a tokenizer_config.json.

    Raises:
        CheckpointError: a field has the wrong type.
    """
    return ChatSettings(roles_of(fields), _listed_templates(fields))


def _listed_templates(settings: JsonFields) -> dict[str, str]:
    """Templates by name, from one template, a list of named templates, or an object."""
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
