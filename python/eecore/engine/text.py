"""The text of a request as it grows: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eecore.models import IncrementalDecoder, Tokenizer


class Decoded(NamedTuple):
    """The text of a request's first tokens; decoding more tokens makes another ``Decoded``."""

    decoder: IncrementalDecoder
    num_tokens: int = 0
    text: str = ""
    stops: bool = False
    """A stop string has appeared; the text ends before it."""
    is_whole: bool = False
    """The decoder holds back no more text."""


class TextStream:
    """Turns tokens into text that can be shown at once, and watches for stop strings.

    Text that may begin a stop string is held back. Tokens are decoded when the caller asks for the
    text, or at once where there are stop strings: most requests are never read step by step, and
    decoding takes as long as other large parts of a step. The caller may read the steps of a
    request in another thread, since the state is never half changed.

    Args:
        token_ids: the request's tokens, a list that grows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        stop: tuple[str, ...],
        token_ids: list[int],
    ) -> None:
        self._tokenizer, self._prompt_ids = tokenizer, prompt_ids
        self._stop = stop
        self.watches = bool(stop)
        """Whether there are stop strings."""
        self._longest = max(map(len, stop), default=1)
        self._token_ids = token_ids
        self._decoded = Decoded(tokenizer.incremental(prompt_ids))
        self._shown = 0
        self._last_piece = 0, False, ""

    def show(self, tokens: Mapping[int, str]) -> None:
        """Give special tokens a text, before there are any tokens."""
        self._decoded = Decoded(self._tokenizer.incremental(self._prompt_ids, shown=tokens))

    @property
    def decoded(self) -> Decoded:
        """The text decoded so far."""
        return self._decoded

    def after(self, decoded: Decoded, token_ids: Sequence[int]) -> Decoded:
        """The decoded text with more tokens."""
        if not token_ids:
            return decoded
        decoder = decoded.decoder.copy()
        piece = decoder.extend(token_ids)
        return self._with(decoded, decoder, decoded.num_tokens + len(token_ids), piece)

    def whole(self, decoded: Decoded) -> Decoded:
        """The decoded text with what the decoder still holds back."""
        if decoded.is_whole:
            return decoded
        decoder = decoded.decoder.copy()
        piece = decoder.finish()
        return self._with(decoded, decoder, decoded.num_tokens, piece, is_whole=True)

    def keep(self, decoded: Decoded) -> None:
        """Store a decoded text, unless more tokens have been decoded since."""
        if not self._decoded.is_whole and decoded.num_tokens >= self._decoded.num_tokens:
            self._decoded = decoded

    def shows(self, decoded: Decoded, *, final: bool) -> tuple[str, int]:
        """The new text that can be shown for certain, and the characters shown after it."""
        end = len(decoded.text) if final else len(decoded.text) - self._held_back(decoded.text)
        return decoded.text[self._shown : end], max(self._shown, end)

    def mark_shown(self, shown: int) -> None:
        """Store how many characters of the text have been shown."""
        self._shown = shown

    def show_up_to(self, num_tokens: int, *, final: bool = False) -> str:
        """The text that the first ``num_tokens`` add to what was shown, which is decoded now. A
        call that was interrupted and is repeated returns the same text.

        Args:
            final: whether no more tokens follow.
        """
        if self._last_piece[:2] != (num_tokens, final):
            decoded = self._decoded
            decoded = self.after(decoded, self._token_ids[decoded.num_tokens : num_tokens])
            if final:
                decoded = self.whole(decoded)
            text, shown = self.shows(decoded, final=final)
            piece = num_tokens, final, text
            self._decoded, self._shown, self._last_piece = decoded, shown, piece
        return self._last_piece[2]

    def _with(
        self,
        before: Decoded,
        decoder: IncrementalDecoder,
        num_tokens: int,
        piece: str,
        *,
        is_whole: bool = False,
    ) -> Decoded:
        """The text so far with one more piece, up to the first stop string."""
        text, stops = before.text, before.stops
        if piece and not stops:
            text += piece
            if self._stop:
                search_from = max(0, len(before.text) - self._longest + 1)
                found = [at for s in self._stop if (at := text.find(s, search_from)) >= 0]
                if found:
                    text, stops = text[: min(found)], True
        return Decoded(decoder, num_tokens, text, stops, is_whole)

    def _held_back(self, text: str) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
