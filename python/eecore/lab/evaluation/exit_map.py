"""The map of a text: each token's exit layer, and the confidence after every layer.

The text is written by the model under a policy, or given. In a given text every token is predicted
from the tokens before it, and its exit is where the policy would have accepted the prediction. The
confidences come from one pass over the whole text through all layers.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

import torch
from torch import Tensor

from eecore.calibration.exit_scores import Scored, forced_states
from eecore.calibration.generated import generated
from eecore.decoding.heads import measure_states
from eecore.errors import RequestError
from eecore.exits import ConfidentExit, Exit, FixedExit
from eecore.generation import Model
from eecore.models import LlamaModel, Network
from eecore.output import depth_colour


@dataclass(frozen=True)
class MapToken:
    """One token of the map."""

    text: str
    exit_layer: int | None
    """None for the prompt's tokens, which are not predicted."""
    confidences: dict[int, float]
    """By exit layer: the policy's measure on the state that predicts this token."""


@dataclass(frozen=True)
class ExitMap:
    """A text with its exit layers."""

    num_layers: int
    lowest: int
    """The earliest possible exit."""
    measure: str
    contract: str
    tokens: tuple[MapToken, ...]

    @property
    def mean_exit_layer(self) -> float:
        layers = [token.exit_layer for token in self.tokens if token.exit_layer is not None]
        return sum(layers) / len(layers)

    def html(self) -> str:
        """A page without other files: tokens as boxes, details on hover or focus."""
        boxes = "".join(self._box(token) for token in self.tokens)
        scale = "".join(
            f'<span style="background:{self._colour(layer)}">{layer}</span>'
            for layer in range(self.lowest, self.num_layers + 1)
        )
        return PAGE.format(
            contract=html.escape(self.contract),
            mean=f"{self.mean_exit_layer:.2f}",
            num_layers=self.num_layers,
            scale=scale,
            boxes=boxes,
        )

    def _box(self, token: MapToken) -> str:
        shown = html.escape(token.text.replace("\n", "⏎")) or "·"
        after = "<br>" * token.text.count("\n")
        if token.exit_layer is None:
            return f'<span class="given">{shown}</span>{after}'
        rows = "".join(
            f"<tr{' class=exit' if layer == token.exit_layer else ''}><th>{layer}</th>"
            f'<td><meter min="0" max="1" value="{value:.4f}"></meter></td><td>{value:.3f}</td></tr>'
            for layer, value in token.confidences.items()
        )
        colour = self._colour(token.exit_layer)
        return (
            f'<span class="token" tabindex="0" style="background:{colour}" '
            f'data-exit-layer="{token.exit_layer}">{shown}<span class="card" role="tooltip">'
            f"<b>layer {token.exit_layer} of {self.num_layers}</b>"
            f"<table><caption>{self.measure} by layer</caption>{rows}</table></span></span>{after}"
        )

    def _colour(self, layer: int) -> str:
        return depth_colour(layer, self.lowest, self.num_layers)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Exit layers</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.9 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #1e293b; background: #fff; }}
header {{ margin-bottom: 1.5rem; line-height: 1.5; }}
.scale span {{ display: inline-block; min-width: 1.6em; text-align: center; font-size: .8rem; }}
.given {{ color: #64748b; white-space: pre-wrap; }}
.token {{ position: relative; white-space: pre-wrap; border-radius: 3px; padding: .1em .05em;
  margin-right: 1px; cursor: default; }}
.card {{ display: none; position: absolute; left: 0; top: 1.9em; z-index: 1; background: #0f172a;
  color: #f8fafc; padding: .6em .8em; border-radius: 6px; font-size: .8rem; line-height: 1.3;
  white-space: nowrap; }}
.token:hover, .token:focus {{ outline: 2px solid #0f172a; }}
.token:hover .card, .token:focus .card {{ display: block; }}
.card caption {{ text-align: left; opacity: .8; }}
.card th, .card td {{ text-align: right; padding: 0 .3em; font-weight: normal; }}
.card tr.exit {{ font-weight: bold; background: #334155; }}
.card meter {{ width: 8em; }}
</style></head><body>
<header><h1>Exit layers</h1><p>{contract}. Mean exit layer {mean} of {num_layers}.</p>
<p class="scale">exit layer {scale}</p></header>
<main>{boxes}</main>
</body></html>
"""


def map_exits(
    model: Model, prompt: str, policy: Exit, *, text: str = "", max_tokens: int = 0
) -> ExitMap:
    """The exit layers of a text after a prompt.

    Args:
        model: from :func:`eecore.load`, with a tokenizer.
        prompt: the text before; its tokens have no exit.
        text: a given text to map after the prompt.
        max_tokens: tokens to write greedily after the prompt instead; 0 maps ``text``.

    Raises:
        RequestError: the settings cannot be used, or a given text needs another policy.
    """
    tokenizer, config = model.tokenizer, model.config
    if tokenizer is None:
        raise RequestError("exits: expected a model with a tokenizer, got one without")
    if bool(text) == bool(max_tokens):
        raise RequestError("exits: expected either a text or max_tokens, got both or neither")
    if text and not isinstance(policy, ConfidentExit):
        raise RequestError(f"exits: expected ConfidentExit for a given text, got {policy!r}")
    policy.check(config)
    policy = policy.settled(config)
    given = tokenizer.encode(prompt)
    if not given:
        raise RequestError("prompt: expected one token or more, got none")
    exit_layers: list[int] | None = None
    if max_tokens:
        (output,) = generated(model, prompt, exit=policy, max_tokens=max_tokens)
        learnt, exit_layers = output.token_ids, output.exit_layers
    else:
        learnt = tokenizer.encode(text, add_special_tokens=False)
    sequence = Scored.of(config, given, learnt)
    if len(sequence.token_ids) > config.max_position:
        raise RequestError(
            f"exits: expected at most {config.max_position} tokens, got {len(sequence.token_ids)}"
        )
    measured = policy if isinstance(policy, ConfidentExit) else ConfidentExit()
    table = _confidences(model.network, sequence, measured)
    if exit_layers is None:
        exit_layers = [
            _exit(measured, config.exit_layers, row, t, len(learnt)) for t, row in enumerate(table)
        ]
    decoder = tokenizer.incremental(given if sequence.input_ids is None else ())
    pieces = [decoder.add(token) for token in learnt]
    lowest = policy.exit_layer if isinstance(policy, FixedExit) else config.num_layers
    if isinstance(policy, ConfidentExit):
        lowest = min(policy.points(config.exit_layers), default=config.num_layers)
    return ExitMap(
        num_layers=config.num_layers,
        lowest=min([lowest, *exit_layers]),
        measure=measured.measure,
        contract=policy.contract,
        tokens=(
            MapToken(prompt, None, {}),
            *(
                MapToken(piece, layer, row)
                for piece, layer, row in zip(pieces, exit_layers, table, strict=True)
            ),
        ),
    )


def _exit(
    policy: ConfidentExit, exit_layers: range, confidences: dict[int, float], t: int, count: int
) -> int:
    """The layer at which the policy would have accepted the prediction of token ``t``."""
    last = exit_layers[-1]
    for layer in sorted(policy.points(exit_layers)):
        threshold = policy.threshold_at(layer, t, count)
        if threshold < 1.0 and confidences[layer] >= threshold:
            return layer
    return last


@torch.inference_mode()
def _confidences(
    network: Network, sequence: Scored, policy: ConfidentExit
) -> list[dict[int, float]]:
    """Confidences by predicted token and exit layer, from one pass through all layers."""
    rows = slice(sequence.first - 1, len(sequence.token_ids) - 1)
    every = network.config.exit_layers
    columns = [
        _measured(network, policy, previous[rows], hidden[rows])
        for _, previous, hidden in forced_states(network, sequence, every)
    ]
    if policy.measure == "gate":  # the last loop takes what is left
        stays = torch.stack([1 - column for column in columns]).cumprod(0)
        stays[-1] = 0
        columns = list(1 - stays)
    by_token = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(every, values, strict=True)) for values in by_token]


def _measured(network: Network, policy: ConfidentExit, previous: Tensor, hidden: Tensor) -> Tensor:
    if policy.measure == "softmax":
        return network.confidence(hidden.contiguous()).confidence
    if policy.measure == "gate":
        assert isinstance(network, LlamaModel)
        assert network.gate is not None
        return network.gate(hidden.contiguous())
    return measure_states(
        network, policy.measure, policy.classifier, previous.contiguous(), hidden.contiguous()
    )
