"""Typed look-ups in a model's config.json, and the ranges of numbers in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from eecore.config import MAX_END_TOKENS, MAX_VOCAB
from eecore.errors import UnsupportedModelError
from eecore.files.json_fields import REQUIRED, JsonFields
from eecore.values import shown

HEAD_DIMS = range(8, 256 + 1, 8)
THETAS = (1.0, 1e12)
FACTORS = (1.0, 1e6)


class ConfigFields(JsonFields):
    """The fields of a model; a value that is valid but not supported is a different error."""

    def unsupported(self, name: str, expected: str, got: Any) -> UnsupportedModelError:
        """The error of a field whose value is not supported."""
        return UnsupportedModelError(
            f"{self.where}: {self.prefix}{name}: supported are {expected}, got {shown(got)}"
        )

    def choice(self, name: str, supported: Collection[str], default: Any = REQUIRED) -> str:
        """A text, one of those supported."""
        text: str = self.text(name, default)
        if text not in supported:
            raise self.unsupported(name, ", ".join(supported), text)
        return text

    def head_dim(self, name: str, default: Any = REQUIRED) -> int:
        """A head's size for which there are kernels."""
        size: int = self.integer(name, default=default)
        if size not in HEAD_DIMS:
            raise self.unsupported(
                name, f"multiples of {HEAD_DIMS.step} up to {HEAD_DIMS[-1]}", size
            )
        return size

    def token_ids(self, name: str) -> tuple[int, ...]:
        """The ids of a field with one id or a list; none if the field is absent."""
        is_one = name in self and not self.has_list(name)
        ids = (self.integer(name, 0, MAX_VOCAB),) if is_one else ()
        if not is_one:
            ids = self.integers(name, 0, MAX_VOCAB, (), most=MAX_END_TOKENS)
        return tuple(dict.fromkeys(ids))
