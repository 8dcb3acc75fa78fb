"""What the rows of a plan attend to of an encoder's states, in the plan's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from eecore.decoding.batch import fill_page_table
from eecore.decoding.twin_memory import Field
from eecore.models import CrossBatch

__all__ = ["cross_batch", "cross_fields", "load_cross"]


def cross_fields(num_rows: int, max_input_pages: int) -> dict[str, Field]:
    """The fields of ``num_rows`` sequences; none without an encoder."""
    if not max_input_pages:
        return {}
    return {
        "input_page_table": (torch.int32, (num_rows, max_input_pages)),
        "input_lens": (torch.int32, (num_rows,)),
    }


def cross_batch(device: dict[str, Tensor]) -> CrossBatch | None:
    """Of the fields on the device, where there are any."""
    if "input_lens" not in device:
        return None
    return CrossBatch(device["input_page_table"], device["input_lens"])


def load_cross(host: dict[str, Tensor], pages: list[list[int]], lengths: list[int]) -> None:
    """Write each sequence's pages and tokens; rows without a sequence attend to nothing."""
    if "input_lens" in host:
        fill_page_table(host["input_page_table"].numpy(), pages)
        host["input_lens"].numpy()[:] = lengths + [0] * (len(host["input_lens"]) - len(lengths))
