"""``model.generate`` of transformers on eecore's engine: its call, its arguments, early exit.

``model.generate(**inputs, custom_generate=eecore.generate_for_transformers, exit="auto")``: the
arguments are used as transformers prepares them; an argument that eecore does not support raises an
error that names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils.generic import ModelOutput

from eecore.config import SamplingParams, T5Config
from eecore.errors import RequestError
from eecore.exit_text import parse_exit, usual_exit
from eecore.exits import Exit
from eecore.generation import stream
from eecore.integrations.transformers_model import adopted_model
from eecore.output import Output, RequestFailedError, StepOutput
from eecore.values import shown

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

Criterion = Callable[[Tensor, Any], Any]

# Logits processors that transformers makes from settings which eecore's sampling has; other
# processors change logits in unknown ways.
PROCESSORS = {
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
}
# Criteria that follow from settings too; others are called for each token.
CRITERIA = {"EosTokenCriteria", "MaxLengthCriteria"}
# Fields of a generation config that are taken over, or have no effect here.
SETTINGS = {
    "bos_token_id",
    "cache_implementation",
    "decoder_start_token_id",
    "disable_compile",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "max_time",
    "min_p",
    "num_return_sequences",
    "pad_token_id",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "use_cache",
}
# Names of the KV cache: from transformers 5.24 on, and before.
CACHES = ("cache", "past_key_values")
# Arguments that transformers prepares for a forward pass of its own.
PREPARED = {
    *CACHES,
    "attention_mask",
    "cache_position",
    "encoder_outputs",
    "logits_to_keep",
    "position_ids",
    "use_cache",
}


@dataclass
class EarlyExitOutput(ModelOutput):
    """The result of a call with ``return_dict_in_generate=True``.

    Attributes:
        sequences: int64 [batch_size, length], prompts and answers, padded on the right.
        contracts: for each sequence, the promise of its exit policy: lossless, calibrated, ...
        exit_layers: for each sequence, the layers that each new token ran.
        confidences: for each sequence, the policy's measure for each new token.
        outputs: eecore's output of each sequence; None where a stopping criterion of the caller
            ended one of them.
    """

    sequences: Tensor | None = None
    contracts: list[str] | None = None
    exit_layers: list[list[int]] | None = None
    confidences: list[list[float]] | None = None
    outputs: list[Output] | None = None


def generate_for_transformers(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    exit: Exit | str | None = None,
    stop: str | Sequence[str] = (),
    inputs_tensor: Tensor | None = None,
    **prepared: Any,
) -> Tensor | EarlyExitOutput:
    """Generate on eecore's engine: ``model.generate(..., custom_generate=generate_for_transformers,
    exit=...)``.

    Prompts may be padded on the left, with an attention mask. Greedy answers are those of
    transformers; sampled ones have its distribution, and follow ``torch.manual_seed``. The first
    call turns the model into one of eecore's, see :func:`eecore.from_transformers`; each call
    checks whether the model has changed since, and does it again where it has.

    Args:
        model: given by transformers, like the arguments up to ``generation_config``.
        input_ids: int64 [batch_size, prompt_length].
        logits_processor: the processors that follow from the settings.
        stopping_criteria: those that follow from the settings, and the caller's own, which are
            called for each sequence and token, with the sequence (int64 [1, length]) and None for
            its scores.
        generation_config: length, sampling, end tokens, ``return_dict_in_generate``.
        exit: an exit policy, or its text; None: as in :func:`eecore.generate`.
        stop: texts that end an answer, for a model that got a tokenizer by
            :func:`eecore.from_transformers`; without one, pass transformers' StopStringCriteria as
            a stopping criterion, since ``stop_strings`` do not reach a custom function.
        inputs_tensor: an encoder's inputs, given by transformers.
        prepared: further arguments of a forward pass, of which only the attention mask is used.

    Returns:
        int64 [batch_size, length]: prompts and answers, padded where they ended early; an
        :class:`EarlyExitOutput` with ``return_dict_in_generate``.

    Raises:
        RequestError: an argument is not supported.
        ModelError: the model cannot be one of eecore's: it has adapters that are not merged, hooks,
            or code of its own.
        RequestFailedError: one answer failed; the other answers are lost with it, since a tensor
            cannot report an error.
    """
    _refuse(logits_processor, generation_config, prepared)
    if torch.is_autocast_enabled(model.device.type):
        raise RequestError("autocast: expected none with eecore, got it enabled")
    criteria = [each for each in stopping_criteria if type(each).__name__ not in CRITERIA]
    ours = adopted_model(model)
    policy = parse_exit(exit) if isinstance(exit, str) else exit
    if policy is None:
        policy = parse_exit(usual_exit(ours.network.device))
    is_t5 = isinstance(ours.config, T5Config)
    given = input_ids if inputs_tensor is None or not is_t5 else inputs_tensor
    prompts = _prompts(given, prepared.get("attention_mask"))
    if is_t5 and input_ids.shape[1] != 1:
        raise RequestError(
            f"decoder_input_ids: expected only the start token, got {input_ids.shape[1]} tokens"
        )
    settings = _sampling(generation_config, input_ids.shape[1], len(prompts), stop)
    streamer = _streamer()
    if streamer is not None and len(prompts) > 1:
        raise RequestError(f"streamer: expected one sequence, got {len(prompts)}")
    order: list[str] = []
    rows: dict[str, _Row] = {}
    with closing(stream(ours, prompts, exit=policy, sampling=settings, order=order)) as steps:
        for step in steps:
            if not rows:
                begun = zip(order, input_ids, strict=True)
                rows = {name: _Row(ids, criteria) for name, ids in begun}
            rows[step.request_id].take(step, streamer)
            if all(row.is_over for row in rows.values()):
                break
    if streamer is not None:
        streamer.end()
    made = list(rows.values())
    for row in made:
        if row.output is not None and row.output.finish_reason == "error":
            raise RequestFailedError(row.output)
    sequences = _sequences(input_ids, [row.tokens for row in made], _pad(generation_config))
    if not generation_config.return_dict_in_generate:
        return sequences
    outputs = [row.output for row in made if row.output is not None]
    return EarlyExitOutput(
        sequences=sequences,
        contracts=[policy.contract] * len(made),
        exit_layers=[row.exit_layers for row in made],
        confidences=[row.confidences for row in made],
        outputs=outputs if len(outputs) == len(made) else None,
    )


class _Row:
    """A sequence as it grows, until its output or a criterion ends it."""

    def __init__(self, input_ids: Tensor, criteria: Sequence[Criterion]) -> None:
        self._input_ids, self._criteria = input_ids, criteria
        self._is_cut = False
        self.tokens: list[int] = []
        self.exit_layers: list[int] = []
        self.confidences: list[float] = []
        self.output: Output | None = None

    @property
    def is_over(self) -> bool:
        return self._is_cut or self.output is not None

    def take(self, step: StepOutput, streamer: Any) -> None:
        """Add the tokens of a step, up to one at which a criterion ends the sequence."""
        added = zip(step.token_ids, step.exit_layers, step.confidences, strict=True)
        for token, layer, confidence in added:
            if self._is_cut:
                return
            self.tokens.append(token)
            self.exit_layers.append(layer)
            self.confidences.append(confidence)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            self._is_cut = self._ends()
        if not self._is_cut:
            self.output = step.output

    def _ends(self) -> bool:
        if not self._criteria:
            return False
        new = torch.tensor(self.tokens, device=self._input_ids.device)
        ids = torch.cat((self._input_ids, new)).unsqueeze(0)
        return any(_answer(criterion, ids) for criterion in self._criteria)


def _answer(criterion: Criterion, ids: Tensor) -> bool:
    """The answer of a criterion for one sequence."""
    answer = torch.as_tensor(criterion(ids, None))
    if answer.numel() != 1:
        raise RequestError(
            f"stopping_criteria: expected a bool for one sequence, got {list(answer.shape)} from "
            f"{_name(criterion)}"
        )
    return bool(answer)


def _name(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))


def _refuse(
    processors: LogitsProcessorList,
    config: GenerationConfig,
    prepared: dict[str, Any],
) -> None:
    """Raise an error for the first argument that is not supported."""
    usual: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    for name in sorted(set(config.to_diff_dict()) - SETTINGS):
        value = getattr(config, name, None)
        is_usual = value is None or value is False or value == usual.get(name)
        if not (is_usual or name.startswith("_")):
            raise RequestError(f"{name}: expected none with eecore, got {shown(value)}")
    for each in processors:
        if type(each).__name__ not in PROCESSORS:
            raise RequestError(f"logits_processor: expected none, got {type(each).__name__}")
    for name, value in prepared.items():
        if name not in PREPARED and value is not None:
            raise RequestError(f"{name}: expected none with eecore, got {shown(value)}")
    for name in CACHES:
        cache = prepared.get(name)
        if cache is not None and getattr(cache, "get_seq_length", lambda: 0)() > 0:
            raise RequestError(f"{name}: expected none, got a cache that is filled")


def _prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The prompts without their padding."""
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise RequestError(
            f"input_ids: expected token ids [batch_size, length], got {list(input_ids.shape)} of "
            f"{input_ids.dtype}"
        )
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        return rows
    prompts = []
    for i, (row, kept) in enumerate(zip(rows, mask.bool().tolist(), strict=True)):
        prompt = [token for token, is_kept in zip(row, kept, strict=True) if is_kept]
        ends = kept[-len(prompt) :] if prompt else []
        if not (all(ends) or all(kept[: len(prompt)])):
            raise RequestError(
                f"attention_mask: expected padding only at an end of a prompt, got it within [{i}]"
            )
        prompts.append(prompt)
    return prompts


def _sampling(
    config: GenerationConfig, length: int, count: int, stop: str | Sequence[str]
) -> list[SamplingParams]:
    """The sampling parameters of each sequence."""
    ends = config._eos_token_tensor
    shared: dict[str, Any] = {
        "max_tokens": config.max_length - length,
        "ignore_eos": True,  # the call says which tokens end an answer
        "stop_token_ids": () if ends is None else tuple(ends.tolist()),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "repetition_penalty": _or(config.repetition_penalty, 1.0),
    }
    if not config.do_sample:
        return [SamplingParams(**shared)] * count
    shared |= {
        "temperature": _or(config.temperature, 1.0),
        "top_k": _or(config.top_k, 0),
        "top_p": _or(config.top_p, 1.0),
        "min_p": _or(config.min_p, 0.0),
    }
    seeds = torch.randint(2**62, (count,)).tolist()
    return [SamplingParams(**shared, seed=seed) for seed in seeds]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _pad(config: GenerationConfig) -> int:
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad)


def _sequences(input_ids: Tensor, rows: list[list[int]], pad: int) -> Tensor:
    longest = max(len(row) for row in rows)
    new = [row + [pad] * (longest - len(row)) for row in rows]
    return torch.cat((input_ids, torch.tensor(new, device=input_ids.device)), dim=1)


def _streamer() -> Any:
    """The streamer of the running call of ``generate``, which transformers does not pass to custom
    functions.
    """
    for frame in _callers():
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals.get("streamer")
    return None


def _callers() -> Iterator[Any]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
