"""The compiled ops: a typed wrapper for each, by families.

Shapes are given as ``[num_tokens, num_q_heads, head_dim]``. Every op runs on the CPU (float32 and
bfloat16) and, where the CUDA module has it, on CUDA (also float16). An op writes into tensors that
it is given and returns nothing that aliases them; the wrappers allocate outputs that were left out.
A tensor of the wrong shape, dtype, device or stride is a ``RuntimeError`` that names the argument,
what was expected and what it got, raised before anything is written. So is memory that is written
and overlaps another argument, or itself. Zero tokens or sequences are legal. No op has
gradients: outside of ``torch.no_grad()`` a tensor that requires some is a ``RuntimeError``, too.

The ops are registered as ``torch.ops.eecore.*`` with their mutations declared, so they work under
``torch.compile``.
"""

from eecore.ops import attention, exits, graphs, layers, products, rounds, sampling, tape, weights
from eecore.ops.attention import *  # noqa: F403 (each lists its names in __all__)
from eecore.ops.exits import *  # noqa: F403
from eecore.ops.graphs import *  # noqa: F403
from eecore.ops.layers import *  # noqa: F403
from eecore.ops.products import *  # noqa: F403
from eecore.ops.registered import OP_NAMES, build_info, cpu_only_ops, missing_cuda_ops
from eecore.ops.rounds import *  # noqa: F403
from eecore.ops.sampling import *  # noqa: F403
from eecore.ops.tape import *  # noqa: F403
from eecore.ops.weights import *  # noqa: F403

CPU_ONLY_OPS = cpu_only_ops()
"""Ops without a CUDA kernel by design; the module of each says why."""

__all__ = ["CPU_ONLY_OPS", "OP_NAMES", "build_info", "missing_cuda_ops"]
__all__ += attention.__all__
__all__ += exits.__all__
__all__ += graphs.__all__
__all__ += layers.__all__
__all__ += products.__all__
__all__ += rounds.__all__
__all__ += sampling.__all__
__all__ += tape.__all__
__all__ += weights.__all__
