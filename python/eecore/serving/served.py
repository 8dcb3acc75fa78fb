"""The model that a server serves: its names, its limits, and the text of its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from eecore.config import AnyModelConfig, EngineConfig, SamplingParams, T5Config
from eecore.engine.async_engine import AsyncEngine
from eecore.engine.view import ModelFacts
from eecore.models import Tokenizer
from eecore.models.text.tokenizer import REPLACEMENT
from eecore.serving.depth import Depths
from eecore.serving.refusals import ApiError, invalid
from eecore.serving.tool_calls import ToolFormat

__all__ = ["Servable", "ServedModel"]

MOST_KNOWN_TOKENS = 1 << 16
# How many characters a tokenizer may make one of, before it splits them into tokens.
SHRINKING = 4


class Servable(Protocol):
    """What a server needs of a model, whose weights may be in another process."""

    @property
    def network(self) -> ModelFacts: ...
    @property
    def config(self) -> AnyModelConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def engine_config(self) -> EngineConfig: ...

    def async_engine(self, config: EngineConfig | None = None) -> AsyncEngine:
        """Streams of its engine; with ``config`` of one with these limits."""


@dataclass(eq=False)
class ServedModel:
    """A model behind a server.

    Args:
        model: from :func:`eecore.load`, or with its engine in another process.
        name: what requests call it.
        depths: the policies that they may choose.
        engine: that runs them.
        max_choices: of one request.
        tool_format: how it writes calls of tools; None: they are text.
        sampling: the settings that a request leaves out.
    """

    model: Servable
    name: str
    depths: Depths
    engine: AsyncEngine
    max_choices: int = 128
    tool_format: ToolFormat | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.token_text = lru_cache(MOST_KNOWN_TOKENS)(self._token_text)
        self.token_bytes = lru_cache(MOST_KNOWN_TOKENS)(self._token_bytes)
        self.shown_bytes = lru_cache(MOST_KNOWN_TOKENS)(self._shown_bytes)

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        limits = self.engine.engine.config
        return min(self.model.config.max_position, limits.num_pages * limits.page_size)

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt, or about."""
        config, limits = self.model.config, self.engine.engine.config
        if isinstance(config, T5Config):
            return limits.max_input_tokens or config.max_input
        return self.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model.

        Raises:
            ApiError: 400: it has none.
        """
        if self.model.tokenizer is None:
            raise invalid("prompt: expected token ids, since the model has no tokenizer", "prompt")
        return self.model.tokenizer

    def room(self, prompt_tokens: int) -> int:
        """Tokens that can follow a prompt; 0 or less: it is too long itself."""
        return self.engine.engine.config.room(self.model.config, prompt_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a text. One that is far too long is not looked at.

        Raises:
            ApiError: 400: it is far too long, or the model has no tokenizer.
            RequestError: it is no text.
        """
        most = SHRINKING * self.tokenizer.longest_token * self.max_prompt
        if len(text) > most:
            raise invalid(
                f"prompt of {len(text)} characters: expected at most {self.max_prompt} tokens",
                code="context_length_exceeded",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def says(self, asked: str | None) -> str | None:
        """The exit policy that a model's name asks for; None for the model alone.

        Raises:
            ApiError: 404: no such model.
        """
        if asked is None or asked == self.name:
            return None
        if asked.startswith(f"{self.name}:"):
            said = self.depths.of_name(asked[len(self.name) + 1 :])
            if said is not None:
                return said
        raise ApiError(
            404,
            f"model: expected {self.name} or {self.name}:POLICY, got {asked[:100]!r}",
            param="model",
            code="model_not_found",
        )

    def cards(self) -> list[dict[str, Any]]:
        """What /v1/models lists: the model, and once more under each policy."""
        depths = self.depths
        own = self._card(self.name, depths.default)
        named = [self._card(f"{self.name}:{depths.name_of(s)}", s) for s in depths.aliases]
        return [own, *named]

    def card(self, asked: str) -> dict[str, Any]:
        """Of one name.

        Raises:
            ApiError: 404: no such model.
            ExitError: one that the model cannot run.
        """
        said = self.says(asked) or self.depths.default
        policy = self.depths.chosen(None if asked == self.name else said)
        policy.check(self.model.config)
        return self._card(asked, said)

    def _card(self, name: str, said: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "eecore",
            "root": self.name,
            "parent": None if name == self.name else self.name,
            "max_model_len": self.max_model_len,
            "exit": said,
            "contract": self.depths.policies.of(said).contract,
            "num_layers": self.num_layers,
        }

    def _token_text(self, token: int, *, shows_special: bool = True) -> str:
        """A token's text in the middle of one: a decoder drops a leading space at the start."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return f"token_id:{token}"
        before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        return tokenizer.decode_after(before, [token], skip_special_tokens=not shows_special)

    def _token_bytes(self, token: int) -> bytes:
        """A token's text in UTF-8; the bytes themselves where they are parts of characters."""
        text, tokenizer = self.token_text(token), self.model.tokenizer
        if tokenizer is None or REPLACEMENT not in text:
            return text.encode()
        return tokenizer.spelled_bytes(token) or text.encode()

    def _shown_bytes(self, token: int) -> bytes:
        """What a token adds to a text; nothing where it is special."""
        return self.token_bytes(token) if self._token_text(token, shows_special=False) else b""
