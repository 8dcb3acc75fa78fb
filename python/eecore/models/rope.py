"""The table of the rotary embedding: cosines and sines of every position.

Computed in float32, operation for operation as transformers does, so that both rotate by the same
numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eecore.config import ModelConfig, RopeConfig


class RopeTables:
    """Cosines and sines of as many positions as a cache has slots, or as the model reaches.

    There is a table for each different rotary embedding of the layers, a separate one for queries
    that are scaled by their position, and one that rotates by nothing for layers without a rotary
    embedding. A config may claim a hundred million positions: tables hold only positions that a
    sequence in the cache can be at, and a larger cache gets longer tables. A table that was
    returned once never changes, since programs keep it.

    A rotary embedding of type longrope has divisors for short texts and for long texts. A table
    uses the divisors for long texts if a text in its cache can be longer than the original context,
    as in llama.cpp and vLLM. (transformers decides for each text, and computes keys anew when a
    text grows.)

    Attributes:
        places: for each layer, the numbers of its queries' table and of its keys' table.
        by_layer: ``places`` as int32 [num_layers, 2] on the device; None if there is one table.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._max_position, self._device = config.max_position, device
        self._rotary_dim = config.ropes[0].rotary_dim
        ropes = [None if place is None else config.ropes[place] for place in config.layer_ropes]
        wanted = [((rope, True), (rope, False)) for rope in ropes]
        self._kinds = list(dict.fromkeys(_kind(*each) for pair in wanted for each in pair))
        self.places = tuple(
            (self._kinds.index(_kind(*queries)), self._kinds.index(_kind(*keys)))
            for queries, keys in wanted
        )
        self.by_layer: Tensor | None = None
        if len(self._kinds) > 1:
            self.by_layer = torch.tensor(self.places, dtype=torch.int32, device=device)
        self._made: dict[bool, list[Tensor]] = {False: [], True: []}
        """Tables by whether they use a longrope's divisors for long texts."""

    def reaching(self, num_slots: int) -> Tensor:
        """Float32 [num_tables, >= num_slots, or max_position, rotary_dim]: see
        :func:`cos_sin_table`."""
        needed = min(num_slots, self._max_position)
        is_long = any(
            rope is not None and rope.type == "longrope" and needed > rope.original_max_position
            for rope, _ in self._kinds
        )
        made = self._made[is_long]
        if not made or made[-1].shape[1] < needed:
            rows = min(1 << max(needed - 1, 0).bit_length(), self._max_position)
            made.append(torch.stack([self._table(*kind, rows, is_long) for kind in self._kinds]))
        return made[-1]

    def _table(
        self, rope: RopeConfig | None, scales_queries: bool, rows: int, is_long: bool
    ) -> Tensor:
        if rope is None:
            table = torch.zeros(rows, self._rotary_dim, dtype=torch.float32, device=self._device)
            table[:, : self._rotary_dim // 2] = 1.0
            return table
        table = cos_sin_table(rope, rows, self._device, is_long=is_long)
        if scales_queries:
            table *= query_scales(rope, rows).to(self._device)[:, None]
        return table


def _kind(rope: RopeConfig | None, is_of_queries: bool) -> tuple[RopeConfig | None, bool]:
    """The key of a table: a rotary embedding, and whether queries are scaled by position."""
    return rope, is_of_queries and rope is not None and rope.query_scale_beta > 0


def query_scales(rope: RopeConfig, max_position: int) -> Tensor:
    """Float32 [max_position]: the factor of a query by its position (Llama 4, Ministral 3)."""
    positions = torch.arange(max_position, dtype=torch.float32)
    wraps = torch.floor(positions / rope.original_max_position)
    return 1 + rope.query_scale_beta * torch.log(1 + wraps)


def cos_sin_table(
    rope: RopeConfig, max_position: int, device: torch.device, *, is_long: bool = False
) -> Tensor:
    """Float32 [max_position, rotary_dim]: rotary_dim/2 cosines, then as many sines."""
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = positions[:, None] * frequencies(
        rope, is_long=is_long
    )  # [max_position, rotary_dim / 2]
    table = torch.empty(max_position, rope.rotary_dim, dtype=torch.float32)
    half = rope.rotary_dim // 2
    torch.cos(angles, out=table[:, :half])
    torch.sin(angles, out=table[:, half:])
    if rope.attention_factor != 1.0:
        table *= rope.attention_factor
    return table.to(device)


def frequencies(rope: RopeConfig, *, is_long: bool = False) -> Tensor:
    """Float32 [rotary_dim / 2]: the angle in radians by which each pair turns per position;
    ``is_long``: with a longrope's divisors for long texts."""
    if rope.type == "longrope":
        divisors = rope.long_factors if is_long else rope.short_factors
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _periods(rope))
    if rope.frequencies:
        return torch.tensor(rope.frequencies, dtype=torch.float32)
    return _FREQUENCIES[rope.type](rope)


def _periods(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    periods: Tensor = rope.theta**exponents
    return periods


def _default(rope: RopeConfig) -> Tensor:
    return 1.0 / _periods(rope)


def _linear(rope: RopeConfig) -> Tensor:
    return _default(rope) / rope.factor


def _llama3(rope: RopeConfig) -> Tensor:
    """Long waves are stretched, short waves kept, and waves in between blended (Llama 3.1)."""
    kept = _default(rope)
    wavelengths = 2 * math.pi / kept
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    kept_share = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept_share) * kept / rope.factor + kept_share * kept
    stretched = torch.where(wavelengths > shortest_stretched, kept / rope.factor, kept)
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig) -> Tensor:
    """Dimensions that turn often are kept, dimensions that turn seldom stretched (YaRN §3.2)."""
    periods = _periods(rope)
    low, high = _dimension_turning(rope, rope.beta_fast), _dimension_turning(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    dimensions = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    kept_share = 1 - ((dimensions - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * periods)) * (1 - kept_share) + (1.0 / periods) * kept_share


def _dimension_turning(rope: RopeConfig, turns: float) -> float:
    """The dimension, as a real number, that turns ``turns`` times in the original context."""
    turns_per_position = rope.original_max_position / (turns * 2 * math.pi)
    return (rope.rotary_dim * math.log(turns_per_position)) / (2 * math.log(rope.theta))


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
