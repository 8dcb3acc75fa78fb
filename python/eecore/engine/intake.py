"""Turns a user's prompt and settings into a request that the engine can serve, or an error."""

from __future__ import annotations

import random
import warnings
from weakref import WeakSet

from eecore.config import EngineConfig, SamplingParams, T5Config
from eecore.engine.text import TextStream
from eecore.errors import ExitError, RequestError
from eecore.exit_text import Policies, usual_exit
from eecore.exits import Exit
from eecore.models import Network, Tokenizer
from eecore.models.text.thinking import Thinking
from eecore.planning.auto import best_exit_layers
from eecore.planning.draft_state import AnyGuided, draft_state
from eecore.planning.guided import Guided, Guides
from eecore.planning.probes import ThoughtProbes
from eecore.planning.thoughts import GuidedThought
from eecore.scheduling.sequence import Sequence
from eecore.scheduling.states import MAX_UNCERTAIN
from eecore.thought_stop import ThoughtStop
from eecore.values import as_index, shown

ASKED: WeakSet[Network] = WeakSet()
"""Models that were already checked for a record of training for early exit."""


class Intake:
    """Checks requests to one model, and makes sequences of them.

    Args:
        network: the model.
    """

    def __init__(self, network: Network, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self._network, self._tokenizer, self._limits = network, tokenizer, config
        source = network.source
        self._policies = Policies(None if source is None else source.directory)
        self._seeds = random.Random()
        ends = network.config.eos_token_ids
        self.guides = Guides(tokenizer, network.config.vocab_size, ends)
        self.thinking = Thinking.of(tokenizer)

    def sequence(
        self, prompt: str | list[int], exit: Exit | str | None, sampling: SamplingParams | None
    ) -> Sequence:
        """A checked request, which has no id and no place in the queue yet.

        Raises:
            RequestError: for a prompt, setting, length or guide that can never be served.
            ExitError: for an exit policy that the model cannot run.
        """
        config = self._network.config
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling: expected SamplingParams, got {shown(sampling)}")
        usual = usual_exit(self._network.device)
        policy: object = usual if exit is None else exit
        if isinstance(policy, str):
            policy = self._policies.of(policy)
        if not isinstance(policy, Exit) or type(policy) is Exit:
            raise RequestError(f"exit: expected an exit policy such as Full(), got {shown(policy)}")
        prompt_ids = self._tokens(prompt)
        policy.check(config)
        policy = policy.settled(config)
        head = self._network.draft_head
        if policy.needs_head and head is None:
            raise ExitError(
                f"{type(policy).__name__}: expected a model with a draft head, got one without: "
                "load(..., draft_head=PATH), or exits=PACK, which eecore train-exits makes"
            )
        if policy.needs_vocabulary and head is not None and not head.vocabulary_sha256:
            raise ExitError(
                f"{type(policy).__name__}: expected a draft head that eecore train-exits made for "
                "the measure cut, got one with an LM head of its own"
            )
        if getattr(policy, "calibration", None) and self._limits.kv_cache_dtype != "auto":
            raise ExitError(
                "calibration: expected a KV cache in the model's dtype, as it was made with, "
                f"got {self._limits.kv_cache_dtype}"
            )
        vocabulary = None if head is None else head.vocabulary_sha256
        policy.check_request(self._network.source, vocabulary, sampling.temperature)
        input_ids = None
        if isinstance(config, T5Config):
            prompt_ids, input_ids = [config.decoder_start_token_id], prompt_ids
            if sampling.prompt_logprobs is not None:
                raise RequestError(
                    "prompt_logprobs: expected a model without an encoder, which predicts the "
                    f"tokens of its prompt, got {config.architecture}"
                )
        self._check_length(len(prompt_ids), input_ids, sampling.max_tokens)
        self._check_sampling(sampling)
        if sampling.seed is None:
            sampling = sampling.with_seed(self._seeds.getrandbits(63))
        sequence = Sequence(
            request_id="",
            prompt_ids=prompt_ids,
            sampling=sampling,
            exit=policy,
            arrival=-1,
            eos_token_ids=frozenset(config.eos_token_ids),
            input_ids=input_ids,
        )
        before = prompt_ids if input_ids is None else []
        guided = None if sampling.guide is None else self.guides.follow(sampling.guide)
        if policy.follows_thoughts and self.thinking is None:
            raise ExitError(
                f"{type(policy).__name__}.part: expected 'all' for a model without markers of "
                "thoughts, got 'thought'"
            )
        ends_thought = sampling.thinking_budget is not None or sampling.think is not None
        if guided is not None or ends_thought or policy.follows_thoughts:
            after = self._after_thought(sequence, before, guided)
            draft_state(sequence, config.exit_layers, after)
            sequence.is_masked = after is not None
            if isinstance(after, GuidedThought):
                sequence.is_masked = after.may_mask([], sequence.max_drafts)
        if self._tokenizer is not None:
            sequence.text = TextStream(
                self._tokenizer, before, sampling.stop, sequence.output_ids, self.thinking
            )
        if policy.wants_training(config.exit_layers) and self._network not in ASKED:
            self._ask_for_training(policy)
        return sequence

    def _after_thought(
        self, sequence: Sequence, prompt_ids: list[int], guided: Guided | None
    ) -> AnyGuided | None:
        """The guide of a text that may have a thought first; the guide alone where it has none."""
        thinking, sampling = self.thinking, sequence.sampling
        start = None if thinking is None else thinking.start(prompt_ids)
        tokenizer, config = self._tokenizer, self._network.config
        budget, stop = sampling.thinking_budget, self._thought_stop(sampling.think)
        if thinking is None or start is None or tokenizer is None:
            return guided
        made = GuidedThought(
            tokenizer,
            thinking,
            start,
            prompt_ids,
            budget,
            sampling.max_tokens,
            sequence.stop_set | sequence.eos_token_ids,
            guided,
            config.vocab_size,
            stop,
        )
        if stop is not None:
            probes = ThoughtProbes(tokenizer, made, stop, budget, config.exit_layers[-1])
            if config.delta is not None and made.max_probe > MAX_UNCERTAIN:
                raise RequestError(
                    f"think: expected probes of at most {MAX_UNCERTAIN} tokens for "
                    f"{config.architecture}, with stem and max_answer, got {made.max_probe}"
                )
            sequence.probes = probes
        return made

    def _thought_stop(self, think: ThoughtStop | str | None) -> ThoughtStop | None:
        """The rule that a request asks for; ``calibrated``: that beside the model."""
        if think is None:
            return None
        if isinstance(think, ThoughtStop):
            if think.contract == "uncalibrated" and not think.records:
                warnings.warn(
                    "think: expected a rule that was calibrated (eecore calibrate --think), got "
                    "one without: early answers may be others than those of whole thoughts",
                    stacklevel=6,
                )
            return think
        assert self._tokenizer is not None
        return self._policies.thought_stop(self._network.source, self._tokenizer.sha256)

    def _ask_for_training(self, policy: Exit) -> None:
        """Warn once about a model that has no record of good exits."""
        ASKED.add(self._network)
        source, layers = self._network.source, self._network.config.exit_layers
        if source is not None and (
            source.is_trained_to_exit or best_exit_layers(source.exit_agreement(layers))
        ):
            return
        name = "this model" if source is None else str(source.directory)
        warnings.warn(
            f"{policy.contract}: expected a model that was trained for early exit, got no record "
            f"of that beside {name} (eecore train writes one, eecore sweep --write measures it): "
            "its text may be poor",
            stacklevel=4,
        )

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError(
                    "prompt: expected token ids, since the model has no tokenizer; got a string"
                )
            if not prompt:
                raise RequestError("prompt: expected some text, got an empty string")
            try:
                prompt = self._tokenizer.encode(prompt)
            except Exception as error:  # half of a surrogate pair, for example
                raise RequestError(
                    f"prompt: expected text that the tokenizer takes, got {shown(prompt)}: {error}"
                ) from error
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"prompt: expected a string or a list of token ids, got {shown(prompt)}"
            )
        if not prompt:
            raise RequestError("prompt: expected at least one token, got none")
        return [self._token_id(token) for token in prompt]

    def _token_id(self, token: object) -> int:
        vocab_size = self._network.config.vocab_size
        number = token if type(token) is int else as_index(token)
        if number is None or not 0 <= number < vocab_size:
            raise RequestError(
                f"prompt: expected token ids 0..{vocab_size - 1}, got {shown(token)}"
            )
        return number

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Check the settings whose limits depend on the model."""
        vocab_size = self._network.config.vocab_size
        for name in ("thinking_budget", "think"):
            if (asked := getattr(sampling, name)) is None:
                continue
            if self.thinking is None:
                raise RequestError(
                    f"{name}: expected a model with markers of thoughts in its tokenizer or chat "
                    f"template, got {shown(asked)} for one without"
                )
            if sampling.max_tokens <= (needed := self.thinking.max_closing):
                raise RequestError(
                    f"max_tokens: expected at least {needed + 1} with {name}, which closing a "
                    f"thought and an answer take, got {sampling.max_tokens}"
                )
        if sampling.stop and self._tokenizer is None:
            raise RequestError("stop: expected a model with a tokenizer for stop strings")
        for token, _ in sampling.biases[-1:]:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias: expected token ids 0..{vocab_size - 1}, got {token}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(sampling, name)) is not None and asked > vocab_size:
                raise RequestError(
                    f"{name}: expected at most {vocab_size}, the size of the vocabulary, "
                    f"got {asked}"
                )

    def _check_length(
        self, prompt_tokens: int, input_ids: list[int] | None, max_tokens: int
    ) -> None:
        total = prompt_tokens + max_tokens
        given, config = f"prompt of {prompt_tokens} tokens", self._network.config
        if total > config.max_position:
            raise RequestError(
                f"{given} and max_tokens={max_tokens}: expected at most {config.max_position} "
                f"together, the size of the model's context, got {total}"
            )
        pages = -(-total // self._limits.page_size)
        if input_ids is not None:
            assert isinstance(config, T5Config)
            most, given = self._limits.max_input_tokens, f"input of {len(input_ids)} tokens"
            if len(input_ids) > (most or config.max_input):
                what = "max_input_tokens" if most else "what the model was made for"
                raise RequestError(
                    f"{given}: expected at most {most or config.max_input}, {what}"
                    + ("" if most else " (max_input_tokens of the engine sets another limit)")
                )
            pages += -(-len(input_ids) // self._limits.page_size)
            total += len(input_ids)
        if pages > self._limits.num_pages:
            room = self._limits.num_pages * self._limits.page_size
            raise RequestError(
                f"{given} and max_tokens={max_tokens}: expected at most {room} together, the size "
                f"of the KV cache (kv_cache_tokens), got {total}"
            )
