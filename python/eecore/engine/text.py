"""The text of a request as it grows: incremental decoding and stop strings."""

from __future__ import annotations

from eecore.models import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Turns tokens into text that can be shown at once, and watches for stop strings.

    Text that may still turn out to begin a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], stop: tuple[str, ...]) -> None:
        self._decoder = tokenizer.incremental(prompt_ids)
        self._stop = stop
        self._shown = 0
        self._ended = False
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Adds a token; True when a stop string has appeared (the text then ends before it)."""
        return self._append(self._decoder.add(token_id))

    def finish(self) -> None:
        """Adds what the decoder still holds back."""
        self._append(self._decoder.finish())

    def _append(self, piece: str) -> bool:
        if not piece or self._ended:
            return False
        longest = max((len(s) for s in self._stop), default=1)
        search_from = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [at for s in self._stop if (at := self.text.find(s, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._ended = True
        return bool(found)

    def take(self, *, final: bool) -> str:
        """New text since the last call, up to what can be shown for certain."""
        end = len(self.text) if final else len(self.text) - self._held_back()
        if end <= self._shown:
            return ""
        piece = self.text[self._shown : end]
        self._shown = end
        return piece

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
