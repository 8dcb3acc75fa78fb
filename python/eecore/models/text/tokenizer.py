"""Text to token ids and back: a ``tokenizer.json`` with its special tokens and chat template.

Special tokens around a text, such as a beginning-of-sequence token, come from the file's own
post-processor, as in transformers. :class:`IncrementalDecoder` decodes streams.
"""

from __future__ import annotations

import hashlib
import json
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
    read_tokenizer,
)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A vocabulary writes single bytes in SentencePiece's way, <0xF0>, or as one of GPT-2's letters.
BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTED = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED}
BYTE_LEVEL |= {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
# The end of a text in which spaces before punctuation may still be found.
UNSETTLED = re.compile(r"[ '.?!,ntmsver]+\Z")
# Tokenizer files that eecore does not read.
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")
# Tokens of a prompt that are decoded with the tokens after it, for the spaces between them.
CONTEXT_TOKENS = 8
# Tokens that are decoded together, at most, before older ones are dropped.
MAX_WINDOW = 32


class Tokenizer:
    """Encodes and decodes as transformers does for the same directory.

    Args:
        settings: special tokens and chat templates; the template ``tool_use`` is for conversations
            with tools.
        name: the tokenizer's name in errors.
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
        """The template of conversations for which there is no named template."""
        self._cleans_up = settings.cleans_up
        self._compiled: ChatTemplate | None = None

    @classmethod
    def from_directory(cls, directory: Path, vocab_size: int | None = None) -> Tokenizer | None:
        """The directory's tokenizer, or None when it has no tokenizer.json.

        Raises:
            ModelError: a tokenizer file cannot be used, or has ids that the model does not have.
        """
        if not (directory / "tokenizer.json").is_file():
            others = [name for name in OTHER_TOKENIZERS if (directory / name).is_file()]
            if others:
                warnings.warn(
                    f"{directory}: expected tokenizer.json, got {others[0]} alone: ids only",
                    stacklevel=3,
                )
            return None
        return cls(*read_tokenizer(directory, vocab_size), str(directory))

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included; a model may have a few more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as written in the vocabulary."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """The ids of tokens that are found in a text before it is split, special or not."""
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def sha256(self) -> str:
        """The digest of the vocabulary and the chat templates."""
        words = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        templates = [self.chat_template, sorted(self.named_templates.items())]
        return hashlib.sha256(json.dumps([words, templates]).encode()).hexdigest()

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return str(self._backend.to_str())

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def spelled_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is written as bytes, ``<0xF0>`` or a letter for each.

        None for any other token.
        """
        written = self._backend.id_to_token(token_id) or ""
        if found := BYTE_FALLBACK.fullmatch(written):
            return bytes.fromhex(found[1])
        if not written or not BYTE_LEVEL.keys() >= set(written):
            return None
        return bytes(BYTE_LEVEL[letter] for letter in written)

    @cached_property
    def replaces_each_byte(self) -> bool:
        """Whether each byte of an incomplete character becomes U+FFFD; otherwise all become one."""
        return self.token_id("<0x00>") is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by default with the model's special tokens around them.

        Raises:
            RequestError: the text is not a string, or cannot be encoded in UTF-8.
            ModelError: the tokenizer fails.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            got = ascii(text)[:80] if isinstance(text, str) else type(text).__name__
            raise RequestError(f"text: expected text that UTF-8 can encode, got {got}") from None
        except BaseException as error:
            raise self._failure("text", error) from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: a value is not a token id.
            ModelError: the tokenizer fails.
        """
        text = self._raw_text(token_ids, skip_special_tokens)
        return cleaned(text) if self._cleans_up else text

    def _raw_text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
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
        """The text that ``token_ids`` add to the prompt's text, as a stream would give it."""
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
            skip_special_tokens: whether special tokens have no text.
            shown: texts of special tokens that have one all the same.
        """

        def decode(ids: Sequence[int]) -> str:
            return self._raw_text(ids, skip_special_tokens)

        kind = CleaningDecoder if self._cleans_up else IncrementalDecoder
        if not shown:
            return kind(decode, prompt_ids)
        return kind(lambda ids: _decoded_around(decode, ids, shown), prompt_ids)

    def hidden(self, tokens: Iterable[str]) -> dict[int, str]:
        """The tokens, by their ids, that are special and so have no text."""
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
            add_generation_prompt: whether the text ends with the beginning of an answer; None:
                unless the last message is continued.
            continue_final_message: whether the text ends with the last message's text, to be
                continued.
            **variables: values for the template (``tools``, ``enable_thinking``, ...).

        Raises:
            RequestError: the messages are not a conversation, or the template refuses them.
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
        """Token ids of a conversation, which are a chat model's prompt for the next answer.

        Args:
            messages: each with a ``role`` and a ``content``.
            **variables: as for :meth:`apply_chat_template`.

        Raises:
            RequestError: the messages are not a conversation, or the template refuses them.
            ChatTemplateError: a ModelError: there is no template, or it fails or never ends.
        """
        text = self.apply_chat_template(messages, **variables)
        return self.encode(text, add_special_tokens=False)

    def template_for(self, variables: Mapping[str, Any]) -> str:
        """The template for a conversation, as in transformers: ``tool_use``, if there is one, for
        conversations with tools, else the default.

        Raises:
            ChatTemplateError: there is no template.
        """
        if variables.get("tools") is not None and "tool_use" in self.named_templates:
            return self.named_templates["tool_use"]
        if self.chat_template is None:
            raise ChatTemplateError("chat_template: expected one in the model directory, got none")
        return self.chat_template


class IncrementalDecoder:
    """Turns tokens of a stream into text, never giving half a character.

    The text given so far is always the text of the tokens so far, without bytes that may still
    become a character. A window of recent tokens is decoded with and without the newest tokens, and
    the difference is new: this keeps a leading space, which decoders drop at the start of a text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_given = len(self._window)
        self._given: str | None = None  # the text of the window's given tokens, once it is known

    def copy(self) -> IncrementalDecoder:
        """An independent decoder in the same state."""
        other = object.__new__(type(self))  # a fifth of the time of copy.copy
        other.__dict__ |= self.__dict__
        other._window = self._window.copy()
        return other

    def add(self, token_id: int) -> str:
        """The text that a token completes; empty while a character is incomplete."""
        return self.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> str:
        """The text that several tokens complete."""
        self._window += token_ids
        return self._take(whole=False)

    def finish(self) -> str:
        """The rest of the text: U+FFFD for bytes that never became a character."""
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
            # Tokens that gave no text are no context, so the tokens before them are kept.
            self._window = self._window[self._num_given if new else -CONTEXT_TOKENS :]
            self._given = None
        self._num_given = len(self._window)
        return new


class CleaningDecoder(IncrementalDecoder):
    """Also removes spaces before punctuation: text that may still lose a space is held back."""

    _held = ""

    def _take(self, *, whole: bool) -> str:
        self._held += super()._take(whole=whole)
        settled = UNSETTLED.search(self._held)
        end = len(self._held) if whole or settled is None else settled.start()
        text, self._held = self._held[:end], self._held[end:]
        return cleaned(text)


def cleaned(text: str) -> str:
    """A text without the spaces that some tokenizers put before punctuation."""
    for ending in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(ending, ending.strip())
    return text


def _decoded_around(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], shown: Mapping[int, str]
) -> str:
    """The text of tokens, with given texts for the special tokens that are shown."""
    parts: list[str] = []
    begin = 0
    for at, token in enumerate(token_ids):
        if token in shown:
            parts += [decode(token_ids[begin:at]), shown[token]]
            begin = at + 1
    return "".join([*parts, decode(token_ids[begin:])])
