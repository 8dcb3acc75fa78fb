"""Layers that GPTQ made, as AutoGPTQ and GPT-QModel store them (``gptq``, ``gptq_v2``).

``qweight`` int32 [in / k, out], k = 32 / bits numbers of neighbouring columns in a word, the lowest
first; ``qzeros`` int32 [groups, out / k]; ``scales`` [groups, out]; ``g_idx`` int32 [in], the group
of each column, which act-order scatters. In the first format a zero point is stored less one: the
constant was subtracted from whole words, and is added to whole words here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from eecore.models.readers.config_json import ConfigFields
from eecore.models.readers.quantised_layout import BITS, FLOATS, StoredModule, num_groups
from eecore.models.readers.quantised_matrix import QuantisedMatrix, unpacked

__all__ = ["GPTQ"]

FORMATS = ("gptq", "gptq_v2")
ONE_A_NUMBER = {4: 0x11111111, 8: 0x01010101}
MOST_GROUP_SIZE = 1 << 20
MOST_OVERRIDES = 1 << 12


@dataclass(frozen=True)
class Scheme:
    """Numbers of a layer."""

    bits: int
    group_size: int
    """-1: all columns."""

    def fits(self, module: StoredModule) -> bool:
        """Whether a layer's numbers and scales look like these."""
        if "qweight" not in module or "scales" not in module:
            return False
        count = 1 if self.group_size == -1 else module.num_columns // self.group_size
        words = module.num_columns * self.bits // 32
        return (module.shape("qweight")[:1], module.shape("scales")[:1]) == ((words,), (count,))


@dataclass(frozen=True)
class GPTQ:
    """A directory's settings; layers may differ in theirs, and each has that which it fits."""

    schemes: tuple[Scheme, ...]
    zeros_less_one: bool
    ordered_by_activations: bool

    method: Literal["gptq"] = "gptq"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    @classmethod
    def of(cls, fields: ConfigFields) -> GPTQ:
        """Of a config.json's ``quantization_config``."""
        format = fields.text("checkpoint_format", fields.text("format", "gptq"))
        if format not in FORMATS:
            raise fields.unsupported("checkpoint_format", ", ".join(FORMATS), format)
        whole = _scheme(fields, None)
        return cls(
            (whole, *_overrides(fields, whole)),
            zeros_less_one=format == "gptq",
            ordered_by_activations=fields.flag("desc_act", False),
        )

    def check(self, module: StoredModule) -> None:
        """Raise unless its tensors are there, and fit together."""
        scheme = self._scheme(module)
        per_word = 32 // scheme.bits
        if module.num_rows % per_word or module.num_columns % per_word:
            raise module.unsupported(
                f"rows and columns by the {per_word}",
                f"{module.num_rows} rows of {module.num_columns} columns",
            )
        count = num_groups(module, scheme.group_size)
        module.check("qweight", ("I32",), (module.num_columns // per_word, module.num_rows))
        module.check("scales", FLOATS, (count, module.num_rows))
        module.check("qzeros", ("I32",), (count, module.num_rows // per_word))
        if self.ordered_by_activations or "g_idx" in module:
            module.check("g_idx", ("I32", "I64"), (module.num_columns,))
            module.groups("g_idx", count)

    def matrix(self, module: StoredModule) -> QuantisedMatrix:
        """Of a layer that has been checked."""
        bits = self._scheme(module).bits
        scales = module.tensor("scales")
        words = module.tensor("qzeros")
        if self.zeros_less_one:
            words = words + ONE_A_NUMBER[bits]
        has_groups = "g_idx" in module
        count = len(scales)
        return QuantisedMatrix(
            bits,
            _rows_of(module.tensor("qweight"), bits),
            scales.T,
            unpacked(words, bits).T,
            module.groups("g_idx", count) if has_groups else module.groups_in_order(count),
        )

    def _scheme(self, module: StoredModule) -> Scheme:
        """That which the shapes are of, else the one of the whole directory."""
        return next((each for each in self.schemes if each.fits(module)), self.schemes[0])


def _scheme(fields: ConfigFields, whole: Scheme | None) -> Scheme:
    bits = fields.integer("bits", default=None if whole is None else whole.bits)
    if bits not in BITS:
        raise fields.unsupported("bits", " and ".join(map(str, BITS)), bits)
    size = fields.integer(
        "group_size", -1, MOST_GROUP_SIZE, 128 if whole is None else whole.group_size
    )
    if size == 0:
        raise fields.wrong("group_size", "-1 or 1 and more", size)
    return Scheme(bits, size)


def _overrides(fields: ConfigFields, whole: Scheme) -> list[Scheme]:
    """Of ``dynamic``: names of layers with settings of their own, or that are left as they were."""
    dynamic = fields.inner("dynamic")
    names = [] if dynamic is None else [name for name in dynamic.names if name[:1] != "-"]
    if len(names) > MOST_OVERRIDES:
        raise fields.wrong("dynamic", f"at most {MOST_OVERRIDES} patterns", len(names))
    found: dict[Scheme, None] = {}
    for name in names:
        override = None if dynamic is None else dynamic.inner(name)
        if override is not None:
            found[_scheme(override, whole)] = None
    return [scheme for scheme in found if scheme != whole]


def _rows_of(qweight: Tensor, bits: int) -> Callable[[int, int], Tensor]:
    def quants(begin: int, end: int) -> Tensor:
        return unpacked(qweight[:, begin:end].T, bits)

    return quants
