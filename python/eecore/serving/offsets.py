"""Offsets of tokens in a text, in characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from eecore.models.text.tokenizer import CONTEXT_TOKENS
from eecore.serving.served import ServedModel


class TextOffsets:
    """Counts the characters of a text token by token.

    A token begins at the character that its first byte belongs to, so the parts of a character all
    begin there. Special tokens take no room unless the text has them written out, nor does the
    space that a decoder drops before the first word.

    Args:
        before: tokens before the first one; the last of them may end within a character.
        begin: characters before the first token.
        text: the text of the tokens, where it is known.
    """

    def __init__(
        self,
        served: ServedModel,
        before: Sequence[int] = (),
        begin: int = 0,
        text: str | None = None,
    ) -> None:
        self._served, self._at, self._text = served, begin, text
        tokenizer = served.model.tokenizer
        each_byte = tokenizer is not None and tokenizer.replaces_each_byte
        # One character for each byte of an incomplete character, or one for all of them.
        errors = "surrogateescape" if each_byte else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        spelled = b"".join(map(served.shown_bytes, before[-CONTEXT_TOKENS:]))
        self._is_first = not spelled
        self._utf8.decode(spelled)

    def add(self, token: int) -> int:
        """The offset of the next token."""
        spelled = self._bytes(token)
        if not spelled:
            return self._capped(self._at)
        # A byte that does not continue the pending character ends it.
        ended = len(self._utf8.decode(spelled[:1]))
        is_pending = bool(self._utf8.getstate()[0])
        begins = self._at + ended - (not is_pending)
        self._at += ended + len(self._utf8.decode(spelled[1:]))
        return self._capped(begins)

    def _bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text."""
        served, shown = self._served, self._served.shown_bytes(token)
        if not shown and self._text is not None:
            written = served.token_text(token)
            shown = written.encode() if self._text.startswith(written, self._at) else b""
        if not shown or not self._is_first:
            return shown
        self._is_first = False
        if shown[:1] != b" ":
            return shown
        text = served.tokenizer.decode([token]) if self._text is None else self._text
        return shown if text.startswith(" ") else shown[1:]

    def _capped(self, at: int) -> int:
        return at if self._text is None else min(at, len(self._text))
