"""A transformers model as the parts that exits need: layers, the state after each, and the head.

``h[l]`` is the residual stream after l layers, before the final norm, and ``head(h)`` is the final
norm and the LM head: every exit shares them (LayerSkip §4.1.2; CALM §3). The exits of a looped
model are the ends of its loops, whose states are normed already. :class:`ExitScores` says how
good they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eecore.errors import TrainingError
from eecore.lab.training.early_exit_loss import Targets

DECODERS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "SmolLM3ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "GraniteForCausalLM",
    "Phi3ForCausalLM",
    "MinistralForCausalLM",
    "Ministral3ForCausalLM",
)
ENCODER_DECODERS = ("T5ForConditionalGeneration",)
LOOPED = ("OuroForCausalLM",)


@dataclass(frozen=True, eq=False)
class ExitModel:
    """Layers, states and head of a model of :data:`DECODERS`, :data:`ENCODER_DECODERS` or
    :data:`LOOPED`.

    Attributes:
        model: the model that is trained: the transformers model, or the peft model around it.
        base: the transformers model itself.
        layers: the decoder's layers; the l-th one makes h[l] (l from 1), in a looped model of each
            loop.
        encoder_layers: the encoder's; none in a decoder-only model.
    """

    model: nn.Module
    base: Any
    layers: tuple[nn.Module, ...]
    encoder_layers: tuple[nn.Module, ...]

    @staticmethod
    def of(model: nn.Module) -> ExitModel:
        """The parts of a model, with peft's wrapper or without; a TrainingError for an unsupported
        class.
        """
        base: Any = model
        if hasattr(model, "get_base_model"):
            active: Any = getattr(model, "active_peft_config", None)
            if getattr(active, "is_prompt_learning", False):
                raise TrainingError(
                    f"model: expected LoRA or another adapter of weights, got {active.peft_type}"
                )
            base = model.get_base_model()  # type: ignore[operator]
        name = type(base).__name__
        if name in (*DECODERS, *LOOPED):
            return ExitModel(model, base, tuple(base.model.layers), ())
        if name in ENCODER_DECODERS:
            return ExitModel(model, base, tuple(base.decoder.block), tuple(base.encoder.block))
        raise TrainingError(
            f"model: expected one of {', '.join((*DECODERS, *LOOPED, *ENCODER_DECODERS))}, "
            f"got {name}"
        )

    @property
    def is_looped(self) -> bool:
        """Whether the layers run several times, and a gate says when to stop."""
        return type(self.base).__name__ in LOOPED

    @property
    def exit_layers(self) -> range:
        """The exit layers, ascending, one for each of :meth:`states`, the last one full depth."""
        step, loops = 1, 1
        if self.is_looped:
            step, loops = len(self.layers), int(self.base.config.total_ut_steps)
        return range(step, len(self.layers) * loops + 1, step)

    @property
    def num_layers(self) -> int:
        """Layers that a token runs through at full depth: those of all loops."""
        return self.exit_layers[-1]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def has_encoder(self) -> bool:
        return bool(self.encoder_layers)

    @property
    def decoder_start(self) -> int | None:
        """The token that starts the decoder of a model with an encoder; None for a decoder
        alone.
        """
        return int(self.base.config.decoder_start_token_id) if self.has_encoder else None

    def states(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Run all layers: ``[h[1], ..., h[L]]``, each [batch, length, hidden_size]; of a looped
        model the normed state after each loop.

        Args:
            inputs: for a decoder ``input_ids`` [batch, length], padded on the right (a token does
                not depend on tokens to its right), and for packed rows ``position_ids``, which
                begin at 0 with each text; with an encoder ``input_ids``, ``attention_mask`` and
                ``decoder_input_ids``.
        """
        with self._recorded_states() as states:
            if self.has_encoder:
                mask = inputs["attention_mask"]
                encoded = self.base.encoder(input_ids=inputs["input_ids"], attention_mask=mask)
                self.base.decoder(
                    input_ids=inputs["decoder_input_ids"],
                    encoder_hidden_states=encoded[0],
                    encoder_attention_mask=mask,
                    use_cache=False,
                )
            else:
                # From position_ids that begin anew, transformers makes masks that keep texts apart.
                self.base.model(
                    input_ids=inputs["input_ids"],
                    position_ids=inputs.get("position_ids"),
                    use_cache=False,
                )
        return states

    @contextmanager
    def _recorded_states(self) -> Iterator[list[Tensor]]:
        states: list[Tensor] = []

        def record(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        ends = (self.base.model.norm,) if self.is_looped else self.layers
        hooks = [end.register_forward_hook(record) for end in ends]
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """``head(h)``: states [..., hidden_size] to logits [..., vocab_size]."""
        base = self.base
        if self.is_looped:
            of_normed: Callable[[Tensor], Tensor] = base.lm_head
            return of_normed
        if not self.has_encoder:
            # Granite divides its logits, Gemma 2 caps them.
            divisor = float(getattr(base.config, "logits_scaling", 1.0))
            cap = getattr(base.config, "final_logit_softcapping", None)

            def decoder_head(state: Tensor) -> Tensor:
                logits: Tensor = base.lm_head(base.model.norm(state))
                if divisor != 1:
                    logits = logits / divisor
                return logits if cap is None else cap * torch.tanh(logits / cap)

            return decoder_head
        decoder = base.decoder
        scale = base.model_dim**-0.5 if base.config.scale_decoder_outputs else 1.0

        def head(state: Tensor) -> Tensor:
            logits: Tensor = base.lm_head(decoder.dropout(decoder.final_layer_norm(state)) * scale)
            return logits

        return head

    @property
    def gate(self) -> Callable[[Tensor], Tensor]:
        """The logit of a looped model's exit probability: [..., 1] of states [..., hidden_size]."""
        found: Callable[[Tensor], Tensor] = self.base.model.early_exit_gate
        return found


@dataclass(frozen=True)
class ExitScores:
    """Means over target tokens, one for each exit layer, ascending, tokens given.

    Attributes:
        loss: cross entropy of head(h[E]).
        accuracy: how often its argmax is the target.
        agreement: how often its argmax is that of the last layer.
        num_tokens: the number of targets.
    """

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    agreement: tuple[float, ...]
    num_tokens: int

    @staticmethod
    def of(sums: Tensor, num_tokens: int) -> ExitScores:
        """The scores of the sums of :func:`exit_sums`, over so many targets."""
        if not num_tokens:
            raise TrainingError("batches: expected at least one, got none")
        loss, accuracy, agreement = (sums / num_tokens).tolist()
        return ExitScores(tuple(loss), tuple(accuracy), tuple(agreement), num_tokens)


def exit_sums(model: ExitModel, states: list[Tensor], targets: Targets) -> Tensor:
    """float64 [3, exits]: loss, correct and agreeing tokens, summed over the targets."""
    head = model.head
    last = targets.logits(head, states[-1]).argmax(-1)
    columns = []
    for state in states:
        logits = targets.logits(head, state)
        chosen = logits.argmax(-1)
        loss = cross_entropy(logits, targets.tokens, reduction="sum")
        right, agreeing = (chosen == targets.tokens).sum(), (chosen == last).sum()
        columns.append(torch.stack([loss.double(), right.double(), agreeing.double()]))
    return torch.stack(columns, 1)
