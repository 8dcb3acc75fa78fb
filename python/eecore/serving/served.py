"""The model that a server serves: its names, its limits, and the text of its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from eecore.config import OWN, SamplingParams, T5Config
from eecore.engine.async_engine import AsyncEngine
from eecore.exits import Exit
from eecore.generation import Model
from eecore.models import Tokenizer
from eecore.models.text.tokenizer import REPLACEMENT
from eecore.serving.depth import Depths
from eecore.serving.refusals import ApiError, invalid
from eecore.serving.tool_calls import ToolFormat

MAX_KNOWN_TOKENS = 1 << 16
"""Tokens whose text is kept."""
# Characters that a tokenizer may turn into one before it splits a text into tokens.
SHRINKING = 4


@dataclass(eq=False)
class ServedModel:
    """A model and its engine, as a server offers them.

    Args:
        model: from :func:`eecore.load`.
        name: what requests call it.
        depths: the policies that requests may choose.
        max_choices: the most answers of one request.
        tool_format: the model's format of tool calls; None: calls stay text.
        samples_as_model: settings that a request leaves out are the model's own, not greedy.
    """

    model: Model
    name: str
    depths: Depths
    engine: AsyncEngine
    max_choices: int = 128
    tool_format: ToolFormat | None = None
    samples_as_model: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.token_text = lru_cache(MAX_KNOWN_TOKENS)(self._token_text)
        self.token_bytes = lru_cache(MAX_KNOWN_TOKENS)(self._token_bytes)
        self.shown_bytes = lru_cache(MAX_KNOWN_TOKENS)(self._shown_bytes)

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
        """About the number of tokens of the longest prompt."""
        config, limits = self.model.config, self.engine.engine.config
        if isinstance(config, T5Config):
            return limits.max_input_tokens or config.max_input
        return self.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ApiError: 400: the model has none.
        """
        if self.model.tokenizer is None:
            raise invalid("prompt: expected token ids, since the model has no tokenizer", "prompt")
        return self.model.tokenizer

    def room(self, prompt_tokens: int) -> int:
        """The number of tokens that can follow a prompt; 0 or less: it is too long itself."""
        return self.engine.engine.config.room(self.model.config, prompt_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text. A text that is far too long is refused before it is tokenized.

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

    def sampling(self, policy: Exit, given: dict[str, Any], *, answers: bool) -> SamplingParams:
        """The settings of a request.

        Args:
            policy: of the request.
            given: the settings that it has.
            answers: whether it is for an answer in free text; else a text is continued, or has to
                follow a guide.

        Raises:
            RequestError: a value that cannot be.
        """
        if not self.samples_as_model:
            return SamplingParams(**given)
        if answers:
            return SamplingParams.of_answer(self.model, policy, **given)
        return SamplingParams.of(self.model, **given)

    def usual_sampling(self, policy: Exit) -> dict[str, float]:
        """The settings of an answer whose request has none; of a completion without a template."""
        has_chats = self.model.tokenizer is not None and self.model.tokenizer.chat_template
        sampling = self.sampling(policy, {}, answers=bool(has_chats))
        return {name: getattr(sampling, name) for name in OWN}

    def says(self, asked: str | None) -> str | None:
        """The exit policy in a model's name; None for the model's name alone.

        Raises:
            ApiError: 404: there is no such model.
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
        """The entries of /v1/models: the model, and one for each listed policy."""
        depths = self.depths
        own = self._card(self.name, depths.default)
        named = [self._card(f"{self.name}:{depths.name_of(s)}", s) for s in depths.aliases]
        return [own, *named]

    def card(self, asked: str) -> dict[str, Any]:
        """The entry of one name.

        Raises:
            ApiError: 404: there is no such model.
            ExitError: the model cannot run the policy.
        """
        said = self.says(asked) or self.depths.default
        policy = self.depths.chosen(None if asked == self.name else said)
        policy.check(self.model.config)
        return self._card(asked, said)

    def _card(self, name: str, said: str) -> dict[str, Any]:
        policy = self.depths.policies.of(said)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "eecore",
            "root": self.name,
            "parent": None if name == self.name else self.name,
            "max_model_len": self.max_model_len,
            "exit": said,
            "contract": policy.contract,
            "sampling": self.usual_sampling(policy),
            "num_layers": self.num_layers,
        }

    def _token_text(self, token: int, *, shows_special: bool = True) -> str:
        """A token's text in the middle of a text, since a decoder drops a leading space at the
        start.
        """
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return f"token_id:{token}"
        before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        return tokenizer.decode_after(before, [token], skip_special_tokens=not shows_special)

    def _token_bytes(self, token: int) -> bytes:
        """A token's text in UTF-8; the bytes themselves for parts of characters."""
        text, tokenizer = self.token_text(token), self.model.tokenizer
        if tokenizer is None or REPLACEMENT not in text:
            return text.encode()
        return tokenizer.spelled_bytes(token) or text.encode()

    def _shown_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none where it is special."""
        return self.token_bytes(token) if self._token_text(token, shows_special=False) else b""
