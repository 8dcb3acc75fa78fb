"""Stores the matrices of draft heads in blocks of 4 bits, in place, at a third of the size.

    python scripts/pack_head.py python/eecore/data/heads/*

On a CPU a head drafts with exactly these blocks, so that its drafts do not change. On other devices
its matrices are the dequantised blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from eecore import ops
from eecore.files.whole import replacing
from eecore.models.readers.head_file import COLUMNS, WEIGHTS_NAME, HeadFile, read_head_settings
from eecore.models.recurrent_head import LAYERS


def in_blocks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a pack with matrices in blocks of 4 bits, in which a CPU drafts.

    A matrix is a float tensor named ``*.weight``, ``mlp.*`` or ``attention.*`` whose rows are whole
    blocks; norms and the vocabulary stay as they are.
    """
    made = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.is_floating_point() and not name.endswith("norm")
        if is_matrix and tensor.shape[-1] % COLUMNS == 0:
            rows = tensor.float().flatten(0, -2).contiguous()
            tensor = ops.quantise_weight(rows, LAYERS).view(*tensor.shape[:-1], -1)
        made[name] = tensor
    return made


def pack(directory: Path) -> None:
    """Pack the head of one directory; the new file is read again before it replaces the old one."""
    file = directory / WEIGHTS_NAME
    before = file.stat().st_size
    tensors = in_blocks(load_file(file))
    with replacing(file) as partial:
        partial.write_bytes(save(tensors, {"format": "pt"}))
    HeadFile(directory, read_head_settings(directory))
    print(f"{file}: {before:,} bytes, now {file.stat().st_size:,}")


def main(words: Sequence[str]) -> int:
    for word in words:
        pack(Path(word))
    return 0 if words else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
