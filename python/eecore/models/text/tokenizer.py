"""Text to token ids and back: a ``tokenizer.json`` with its special tokens and chat template.

Special tokens around a text (a beginning-of-sequence token, say) come from the file's own
post-processor, as in transformers. Streaming goes through :class:`IncrementalDecoder`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from eecore.errors import RequestError
from eecore.models.text.chat_template import ChatTemplate, ChatTemplateError
from eecore.models.text.tokenizer_files import (
    ChatSettings,
    library_error,
    read_chat_settings,
    read_tokenizer,
)

__all__ = ["ChatTemplateError", "IncrementalDecoder", "Tokenizer"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How a vocabulary writes a byte that is no character: SentencePiece's way, and GPT-2's letters.
BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED}
BYTE_LEVEL |= {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
# Files of tokenizers that are not read.
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")
# How many tokens of a prompt are decoded with what follows it, for spaces between the two.
CONTEXT_TOKENS = 8
# Tokens that are decoded together at most before older ones are let go.
MAX_WINDOW = 32


class Tokenizer:
    """Encodes and decodes as transformers does for the same directory.

    Args:
        backend: of the tokenizers library.
        settings: special tokens, and chat templates, of which ``tool_use`` is for conversations
            with tools.
        name: what errors call it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: ChatSettings | None = None,
        name: str = "tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.name = backend, name
        settings = settings or ChatSettings()
        self.special_tokens = dict(settings.special_tokens)
        """Role to token, as chat templates see them: bos_token, eos_token, ..."""
        self.named_templates = dict(settings.templates)
        self.chat_template = self.named_templates.pop("default", None)
        """The template of all conversations that have none by name."""
        self._compiled: ChatTemplate | None = None

    @classmethod
    def from_directory(cls, directory: Path, vocab_size: int | None = None) -> Tokenizer | None:
        """The directory's tokenizer, or None when it has no tokenizer.json.

        Args:
            directory: of the model.
            vocab_size: how many token ids the model has.

        Raises:
            ModelError: a file of it cannot be used, or has other ids than the model.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            others = [name for name in OTHER_TOKENIZERS if (directory / name).is_file()]
            if others:
                warnings.warn(
                    f"{directory}: expected tokenizer.json, got {others[0]} alone: ids only",
                    stacklevel=3,
                )
            return None
        backend = read_tokenizer(path, vocab_size)
        return cls(backend, read_chat_settings(directory), str(directory))

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included; a model may have a few rows more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as it is written in the vocabulary."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def to_json(self) -> str:
        """As a tokenizer.json."""
        return str(self._backend.to_str())

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def spelled_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token whose vocabulary spells bytes, ``<0xF0>`` or a letter for each.

        None for a token that is not written like that.
        """
        written = self._backend.id_to_token(token_id) or ""
        if found := BYTE_FALLBACK.fullmatch(written):
            return bytes.fromhex(found[1])
        if not written or not BYTE_LEVEL.keys() >= set(written):
            return None
        return bytes(BYTE_LEVEL[letter] for letter in written)

    @cached_property
    def replaces_each_byte(self) -> bool:
        """Whether every byte of half a character is U+FFFD in a text; otherwise all together."""
        return self.token_id("<0x00>") is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, within the special tokens of the model unless told otherwise.

        Raises:
            RequestError: it is no text, or not one that UTF-8 can say.
            ModelError: the tokenizer fails.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            got = ascii(text)[:80] if isinstance(text, str) else type(text).__name__
            raise RequestError(f"text: expected text that UTF-8 can say, got {got}") from None
        except BaseException as error:
            raise self._failure("text", error) from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: they are no token ids.
            ModelError: the tokenizer fails.
        """
        try:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token_ids: expected token ids, got: {error}") from None
        except BaseException as error:
            raise self._failure("token ids", error) from None

    def _failure(self, what: str, error: BaseException) -> BaseException:
        return library_error(error, f"{self.name}: tokenizer.json: expected to take {what}")

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
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: Mapping[int, str] | None = None,
    ) -> IncrementalDecoder:
        """A decoder for tokens that follow a prompt one by one.

        Args:
            prompt_ids: what they follow.
            skip_special_tokens: they have no text.
            shown: special tokens that have one all the same.
        """

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        if not shown:
            return IncrementalDecoder(decode, prompt_ids)
        return IncrementalDecoder(lambda ids: _decoded_around(decode, ids, shown), prompt_ids)

    def hidden(self, tokens: Iterable[str]) -> dict[int, str]:
        """Special tokens among some tokens, which have no text, by their ids."""
        ids = {self.token_id(token): token for token in tokens}
        return {id: token for id, token in ids.items() if id is not None and not self.decode([id])}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, special tokens written out.

        Encode it with ``add_special_tokens=False``, as :meth:`encode_chat` does.

        Args:
            messages: each with a ``role`` and a ``content``.
            add_generation_prompt: whether an answer begins at the end; None: unless the last
                message goes on.
            continue_final_message: the text ends with that of the last message, to be continued.
            **variables: that reach the template (``tools``, ``enable_thinking``, ...).

        Raises:
            RequestError: the messages are no conversation, or none for this model.
            ChatTemplateError: a ModelError: there is no template, or it fails or never ends.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message: expected it without add_generation_prompt, got both"
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        source = self.template_for(variables)
        compiled = self._compiled
        if compiled is None or compiled.source != source:
            self._compiled = compiled = ChatTemplate(source, f"{self.name}: chat_template")
        return compiled.render(
            messages,
            {
                "tools": None,
                "documents": None,
                **self.special_tokens,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            },
            continues=continue_final_message,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation, as its next answer is asked for: a prompt of a chat model.

        Args:
            messages: each with a ``role`` and a ``content``.
            **variables: that reach the template.

        Raises:
            RequestError: the messages are no conversation, or none for this model.
            ChatTemplateError: a ModelError: there is no template, or it fails or never ends.
        """
        text = self.apply_chat_template(messages, **variables)
        return self.encode(text, add_special_tokens=False)

    def template_for(self, variables: Mapping[str, Any]) -> str:
        """The template for tools where there are several by name and tools, as in transformers.

        Raises:
            ChatTemplateError: there is none.
        """
        if variables.get("tools") is not None and "tool_use" in self.named_templates:
            return self.named_templates["tool_use"]
        if self.chat_template is None:
            raise ChatTemplateError("chat_template: expected one in the model directory, got none")
        return self.chat_template


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

    def copy(self) -> IncrementalDecoder:
        """One that goes on from here by itself."""
        other = IncrementalDecoder.__new__(IncrementalDecoder)
        other._decode, other._window = self._decode, self._window.copy()
        other._num_given, other._given = self._num_given, self._given
        return other

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        return self.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> str:
        """The text that several tokens complete."""
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


def _decoded_around(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], shown: Mapping[int, str]
) -> str:
    """The text of tokens, of which some have one of their own."""
    parts: list[str] = []
    begin = 0
    for at, token in enumerate(token_ids):
        if token in shown:
            parts += [decode(token_ids[begin:at]), shown[token]]
            begin = at + 1
    return "".join([*parts, decode(token_ids[begin:])])
