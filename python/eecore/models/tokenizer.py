"""Text to token ids and back: a ``tokenizer.json`` with its special tokens and chat template.

Special tokens around a text (a beginning-of-sequence token, say) come from the file's own
post-processor, as in transformers. Streaming goes through :class:`IncrementalDecoder`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eecore.errors import CheckpointError, EecoreError, ModelError
from eecore.models.config_json import read_json

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Files of tokenizers that are not read.
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")
# How many tokens of a prompt are decoded with what follows it, for spaces between the two.
CONTEXT_TOKENS = 8
# Tokens that are decoded together at most before older ones are let go.
MAX_WINDOW = 32


class ChatTemplateError(EecoreError, ValueError):
    """The model has no chat template, or its template refuses the messages."""


class Tokenizer:
    """Encodes and decodes as transformers does for the same directory."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        """Role to token, as chat templates see them: bos_token, eos_token, ..."""
        self.chat_template = chat_template
        self._compiled_template: Template | None = None

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer | None:
        """The directory's tokenizer, or None when it has no tokenizer.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            others = [name for name in OTHER_TOKENIZERS if (directory / name).is_file()]
            if others:
                warnings.warn(
                    f"{directory}: expected tokenizer.json, got {others[0]} alone: ids only",
                    stacklevel=3,
                )
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: expected a tokenizer, got: {error}") from None
        settings_path = directory / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.is_file() else {}
        return cls(
            backend,
            special_tokens=_special_tokens(settings),
            chat_template=_chat_template(directory, settings),
        )

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included; a model may have a few rows more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, within the special tokens of the model unless told otherwise."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_after(
        self,
        prompt_ids: Sequence[int],
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text that ``token_ids`` add to the prompt's: all that a stream would give."""
        decoder = self.incremental(prompt_ids, skip_special_tokens=skip_special_tokens)
        return "".join([*map(decoder.add, token_ids), decoder.finish()])

    def incremental(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDecoder:
        """A decoder for tokens that follow a prompt one by one."""
        return IncrementalDecoder(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt_ids
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, special tokens written out.

        Encode it with ``add_special_tokens=False``. ``variables`` reach the template (``tools``,
        ``enable_thinking``, ...). A ChatTemplateError when the model has no template, or when the
        template refuses the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError("chat_template: expected one in the model directory, got none")
        try:
            if self._compiled_template is None:
                self._compiled_template = _template_environment().from_string(self.chat_template)
            return self._compiled_template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.special_tokens, **variables},
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ChatTemplateError(f"chat_template: {error}") from error


class IncrementalDecoder:
    """Turns tokens that come one by one into text, never giving half a character.

    The text given so far is always that of the tokens so far, up to bytes that may still become a
    character. A window of recent tokens is decoded with and without the newest ones, and the
    difference is new: so a leading space, which decoders drop at the very start, is kept.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_given = len(self._window)
        self._given: str | None = None  # the text of the window's given tokens, once it is known

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        return self.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> str:
        """The same of several tokens at once."""
        self._window += token_ids
        return self._take(whole=False)

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that never became a character."""
        return self._take(whole=True)

    def _take(self, *, whole: bool) -> str:
        if self._num_given == len(self._window):
            return ""
        if self._given is None:
            self._given = self._decode(self._window[: self._num_given]).rstrip(REPLACEMENT)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and not whole:
            return ""
        new = text[len(self._given) :]
        self._given = text.rstrip(REPLACEMENT)
        if len(self._window) > MAX_WINDOW:
            # Tokens without text of their own are no context: what came before them stays.
            self._window = self._window[self._num_given if new else -CONTEXT_TOKENS :]
            self._given = None
        self._num_given = len(self._window)
        return new


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role to token of a tokenizer_config.json; a token may be a string or an object."""
    tokens = {}
    for role in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"):
        token = settings.get(role)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            tokens[role] = token
    return tokens


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{directory / 'tokenizer_config.json'}: chat_template: expected a string, "
            f"got {type(template).__name__}"
        )
    return template


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's part: kept as is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Templates come with models, so they run in jinja2's sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
