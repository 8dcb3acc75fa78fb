"""Texts that repeat themselves, found at fixed numbers of tokens.

The answer depends on the text alone, not on the rounds in which its tokens came.
"""

from __future__ import annotations

EVERY = 64
"""Tokens from one look at a text to the next."""
WINDOW = 512
"""Last tokens of a text that have to be a repetition."""
MAX_DIFFERENT = WINDOW // 4
"""Different sequences of four tokens that a repetition of that length may have."""


def is_due(before: int, added: int) -> bool:
    """Whether a text of ``before`` tokens is looked at once ``added`` tokens have come."""
    return before + added >= WINDOW and before // EVERY != (before + added) // EVERY


def repeats_itself(token_ids: list[int]) -> bool:
    """Whether the last :data:`WINDOW` tokens are few sequences of tokens, again and again."""
    if len(token_ids) < WINDOW or len(token_ids) % EVERY:
        return False
    last = token_ids[-WINDOW:]
    return len(set(zip(last, last[1:], last[2:], last[3:], strict=False))) <= MAX_DIFFERENT
