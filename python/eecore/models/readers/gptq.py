"""Layers quantised by GPTQ, as AutoGPTQ and GPT-QModel store them (``gptq``, ``gptq_v2``).

``qweight`` int32 [in / k, out], k = 32 / bits numbers of neighbouring columns in a word, the lowest
first; ``qzeros`` int32 [groups, out / k]; ``scales`` [groups, out]; ``g_idx`` int32 [in], the group
of each column, which is not in order with act-order. The ``gptq`` format stores zero points minus
one: the constant was subtracted from whole words, and is added to whole words here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.quantised_layout import (
    BITS,
    FLOATS,
    Layout,
    StoredModule,
    group_size,
    num_groups,
)
from eecore.models.readers.quantised_matrix import QuantisedMatrix, unpacked

FORMATS = ("gptq", "gptq_v2")
PARTS = ("qweight", "qzeros", "scales", "g_idx")
ONE_A_NUMBER = {4: 0x11111111, 8: 0x01010101}
MAX_OVERRIDES = 1 << 12


def gptq(fields: ConfigFields) -> Layout:
    """The layout of a config.json's ``quantization_config``."""
    format = fields.choice("checkpoint_format", FORMATS, fields.text("format", "gptq"))
    settings = (format == "gptq", fields.flag("desc_act", False))
    whole = _scheme(fields, None, 128, *settings)
    schemes = {whole: None}
    dynamic = fields.inner("dynamic")
    # Patterns of layers with their own settings; one with "-" first is for layers left in floats.
    names = [] if dynamic is None else [name for name in dynamic.names if name[:1] != "-"]
    if len(names) > MAX_OVERRIDES:
        raise fields.wrong("dynamic", f"at most {MAX_OVERRIDES} patterns", len(names))
    for name in names:
        override = None if dynamic is None else dynamic.inner(name)
        if override is not None:
            schemes[_scheme(override, whole.bits, whole.group_size, *settings)] = None
    return Layout("gptq", PARTS, list(schemes))


@dataclass(frozen=True)
class _Scheme:
    bits: int
    group_size: int
    """Columns that share a scale; -1: all columns."""
    zeros_less_one: bool
    ordered_by_activations: bool

    def fits(self, module: StoredModule) -> bool:
        if "qweight" not in module or "scales" not in module:
            return False
        count = 1 if self.group_size == -1 else module.num_columns // self.group_size
        words = module.num_columns * self.bits // 32
        return (module.shape("qweight")[:1], module.shape("scales")[:1]) == ((words,), (count,))

    def check(self, module: StoredModule) -> None:
        per_word = 32 // self.bits
        if module.num_rows % per_word or module.num_columns % per_word:
            raise module.unsupported(
                f"rows and columns by the {per_word}",
                f"{module.num_rows} rows of {module.num_columns} columns",
            )
        count = num_groups(module, self.group_size)
        module.check("qweight", ("I32",), (module.num_columns // per_word, module.num_rows))
        module.check("scales", FLOATS, (count, module.num_rows))
        module.check("qzeros", ("I32",), (count, module.num_rows // per_word))
        if self.ordered_by_activations or "g_idx" in module:
            module.check("g_idx", ("I32", "I64"), (module.num_columns,))
            module.groups("g_idx", count)

    def matrix(self, module: StoredModule) -> QuantisedMatrix:
        qweight, scales, words = map(module.tensor, ("qweight", "scales", "qzeros"))
        if self.zeros_less_one:
            words = words + ONE_A_NUMBER[self.bits]
        has_groups, count = "g_idx" in module, len(scales)

        def quants(begin: int, end: int) -> Tensor:
            return unpacked(qweight[:, begin:end].T, self.bits)

        return QuantisedMatrix(
            self.bits,
            quants,
            scales.T,
            unpacked(words, self.bits).T,
            module.groups("g_idx", count) if has_groups else module.groups_in_order(count),
        )


def _scheme(fields: ConfigFields, bits: int | None, size: int, *settings: bool) -> _Scheme:
    bits = fields.integer("bits", default=bits)
    if bits not in BITS:
        raise fields.unsupported("bits", " and ".join(map(str, BITS)), bits)
    return _Scheme(bits, group_size(fields, size), *settings)
