"""Text coloured by the exit layer of each token.

Colours run from sky blue (the lowest possible exit layer) over violet to orange (all layers). Where
there are no colours, the exit layers are shown as numbers after the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style
from rich.text import Text

from eecore.output import depth_colour

if TYPE_CHECKING:
    from eecore.exits import Exit
    from eecore.generation import Model


def has_colours(console: Console) -> bool:
    """Whether colours show: the terminal has them, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color


def depth_style(layer: int, lowest: int, num_layers: int) -> Style:
    """The colour of a token that exited after ``layer`` layers."""
    return Style(color=depth_colour(layer, lowest, num_layers))


def depth_legend(lowest: int, num_layers: int) -> Text:
    """The scale, as one line."""
    legend = Text("exit layer ")
    for layer in range(lowest, num_layers + 1):
        ends = layer in (lowest, num_layers)
        legend.append(f" {layer} " if ends else "█", depth_style(layer, lowest, num_layers))
    return legend


def is_lossless(policy: Exit) -> bool:
    """Whether all layers verify each token that fewer layers, or none, drafted."""
    return policy.contract.endswith("lossless")


def legend_of(policy: Exit, num_layers: int) -> Text:
    """The meaning of the colours under a policy, as one line."""
    if not is_lossless(policy):
        return depth_legend(min(policy.lowest_exit, num_layers), num_layers)
    legend = Text()
    for layer, words in ((0, "drafted, and verified by"), (num_layers, "computed by")):
        legend.append("█", depth_style(layer, 0, num_layers))
        legend.append(f" {words} all {num_layers} layers  ")
    return legend


def runs(layers: Sequence[int]) -> str:
    """Exit layers as ``12 30x4 12x2``."""
    groups = ((layer, len(list(group))) for layer, group in groupby(layers))
    return " ".join(str(layer) if count == 1 else f"{layer}x{count}" for layer, count in groups)


def said_depths(policy: Exit, layers: Sequence[int], num_layers: int) -> str:
    """The origin of a policy's tokens in words, for output without colours."""
    if not is_lossless(policy):
        return f"exit layers: {runs(layers)}"
    drafted = sum(layer < num_layers for layer in layers)
    return f"{drafted} of {len(layers)} tokens drafted, and verified by all {num_layers} layers"


class DepthPainter:
    """Colours one request's text as it grows, each token by its exit layer.

    The text is the engine's. It may come later than its tokens (half a character, the beginning of
    a stop string), so the length of each token's text is counted from the tokens themselves.

    Args:
        lowest: the layer of the first colour.
        verified: whether all layers verify drafts: there are two colours then, for drafted tokens
            and for others.
    """

    def __init__(
        self,
        model: Model,
        prompt_ids: Sequence[int],
        lowest: int = 1,
        *,
        verified: bool = False,
    ) -> None:
        self._num_layers = model.config.num_layers
        self._lowest, self._verified = (0 if verified else lowest), verified
        assert model.tokenizer is not None
        self._decoder = model.tokenizer.incremental(prompt_ids)
        self._pieces: deque[list[int]] = deque()  # [exit layer, characters still to come]
        self._layer = self._num_layers

    def add(self, token_ids: Sequence[int], exit_layers: Sequence[int], text: str) -> Text:
        """The text that a step added, in colour."""
        for token, layer in zip(token_ids, exit_layers, strict=True):
            if self._verified and layer < self._num_layers:
                layer = 0
            self._pieces.append([layer, len(self._decoder.add(token))])
        return self.paint(text)

    def skip(self, text: str) -> None:
        """Drop characters that are not shown: those of the tokens so far before ``text``."""
        self.paint("-" * (sum(count for _, count in self._pieces) - len(text)))

    def paint(self, text: str) -> Text:
        """The text of the oldest tokens whose text has not come yet, in colour."""
        painted = Text()
        while text:
            taken = len(text)
            while self._pieces and not self._pieces[0][1]:
                self._pieces.popleft()
            if self._pieces:
                self._layer, count = self._pieces[0]
                taken = min(count, taken)
                self._pieces[0][1] -= taken
            style = depth_style(self._layer, self._lowest, self._num_layers)
            painted.append(text[:taken], style)
            text = text[taken:]
        return painted
