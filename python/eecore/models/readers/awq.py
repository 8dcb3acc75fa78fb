"""Layers quantised by AWQ, as AutoAWQ stores them (``gemm``).

``qweight`` int32 [in, out / 8]: the 4-bit numbers of a word, the lowest first, are outputs 0, 2, 4,
6, 1, 3, 5, 7 of eight; ``qzeros`` int32 [groups, out / 8] in the same order; ``scales``
[groups, out].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eecore.models.readers.config_fields import ConfigFields
from eecore.models.readers.quantised_layout import (
    FLOATS,
    Layout,
    StoredModule,
    group_size,
    num_groups,
)
from eecore.models.readers.quantised_matrix import QuantisedMatrix, unpacked

PARTS = ("qweight", "qzeros", "scales")
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of outputs 0..7 in a word."""


def awq(fields: ConfigFields) -> Layout:
    """The layout of a config.json's ``quantization_config``."""
    bits = fields.integer("bits", default=fields.integer("w_bit", default=4))
    if bits != 4:
        raise fields.unsupported("bits", "4", bits)
    named = fields.text("checkpoint_format", fields.text("format", "gemm"))
    if (version := fields.text("version", named).lower()) != "gemm":
        raise fields.unsupported("version", "gemm", version)
    if fields.text("backend", None) == "llm-awq":
        raise fields.unsupported("backend", "the layout of autoawq", "llm-awq")
    if not fields.flag("zero_point", True):
        raise fields.unsupported("zero_point", "true", False)
    size = group_size(fields, group_size(fields, 128, "q_group_size"))
    return Layout("awq", PARTS, [_Scheme(size)])


@dataclass(frozen=True)
class _Scheme:
    group_size: int

    def fits(self, module: StoredModule) -> bool:  # noqa: ARG002 (the only scheme)
        return True

    def check(self, module: StoredModule) -> None:
        if module.num_rows % 8:
            raise module.unsupported("rows by the 8", f"{module.num_rows} rows")
        count = num_groups(module, self.group_size)
        module.check("qweight", ("I32",), (module.num_columns, module.num_rows // 8))
        module.check("scales", FLOATS, (count, module.num_rows))
        module.check("qzeros", ("I32",), (count, module.num_rows // 8))

    def matrix(self, module: StoredModule) -> QuantisedMatrix:
        qweight, scales = module.tensor("qweight"), module.tensor("scales")

        def quants(begin: int, end: int) -> Tensor:
            return _in_order(qweight[:, begin // 8 : end // 8]).T.contiguous()

        return QuantisedMatrix(
            4,
            quants,
            scales.T,
            _in_order(module.tensor("qzeros")).T,
            module.groups_in_order(len(scales)),
        )


def _in_order(words: Tensor) -> Tensor:
    """uint8 [n, out]: the numbers in words [n, out / 8], in the order of outputs."""
    numbers = unpacked(words, 4)
    return numbers.view(len(words), -1, 8)[..., PLACES].view_as(numbers)
