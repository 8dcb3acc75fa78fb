"""The text of a request as it grows: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from eecore.models import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Turns tokens into text that can be shown at once, and watches for stop strings.

    Text that may still turn out to begin a stop string is held back. Tokens are decoded when
    somebody asks for the text, at once where there are stop strings: most requests are never read
    step by step, and decoding takes as long as much else of a step. Whoever asks may do so in
    another thread.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], stop: tuple[str, ...]) -> None:
        self._decoder = tokenizer.incremental(prompt_ids)
        self._stop = stop
        self._shown = 0
        self._ended = False
        self._text = ""
        self._lock = Lock()
        self._tokens: list[int] = []
        self._decoded = 0
        """Of the tokens, how many have been."""

    @property
    def text(self) -> str:
        """Of all tokens so far."""
        with self._lock:
            self._decode(len(self._tokens))
            return self._text

    def push(self, token_id: int) -> bool:
        """Adds a token; True when a stop string has appeared (the text then ends before it)."""
        self._tokens.append(token_id)
        if not self._stop:
            return False
        with self._lock:
            return self._decode(len(self._tokens))

    def finish(self) -> None:
        """Adds what the decoder still holds back."""
        with self._lock:
            self._decode(len(self._tokens))
            self._append(self._decoder.finish())

    def piece(self, *, final: bool) -> Callable[[], str]:
        """What gives the text that is new by now, up to what can be shown for certain, once."""
        if self._stop:
            with self._lock:
                taken = self._take(final=final)
            return lambda: taken
        count = len(self._tokens)
        return lambda: self._piece(count, final=final)

    def _piece(self, count: int, *, final: bool) -> str:
        with self._lock:
            self._decode(count)
            return self._take(final=final)

    def _decode(self, count: int) -> bool:
        """Up to so many tokens; whether a stop string has appeared."""
        fresh = self._tokens[self._decoded : count]
        self._decoded = max(self._decoded, count)
        return bool(fresh) and self._append(self._decoder.extend(fresh))

    def _append(self, piece: str) -> bool:
        if not piece or self._ended:
            return False
        longest = max((len(s) for s in self._stop), default=1)
        search_from = max(0, len(self._text) - longest + 1)
        self._text += piece
        found = [at for s in self._stop if (at := self._text.find(s, search_from)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._ended = True
        return bool(found)

    def _take(self, *, final: bool) -> str:
        """New text since the last call, up to what can be shown for certain."""
        end = len(self._text) if final else len(self._text) - self._held_back()
        if end <= self._shown:
            return ""
        piece = self._text[self._shown : end]
        self._shown = end
        return piece

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
