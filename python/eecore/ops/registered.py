"""The compiled modules and the ops that they register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    from eecore import _C
except ImportError as error:
    if torch.__version__ < "2.10":  # torch compares these as versions
        raise ImportError(f"torch: expected 2.10 or newer, got {torch.__version__}") from error
    raise

__all__ = ["OP_NAMES", "build_info", "compiled", "cpu_only_ops", "cuda_module"]
__all__ += ["missing_cuda_ops"]

if torch.cuda.is_available() and _C.build_info()["cuda"]:
    from eecore import _cuda  # importing it registers the CUDA kernels

    cuda_module: Any = _cuda
else:
    cuda_module = None

OP_NAMES = tuple(
    sorted(
        name.removeprefix("eecore::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("eecore::")
    )
)
"""All ops for which ``csrc/ops`` has a schema."""
_cpu_only: set[str] = set()


def build_info() -> dict[str, Any]:
    """How this build was made and what it runs with.

    Keys: ``version``, ``compiler``, ``built_with_torch``, ``cuda`` (is ``eecore._cuda`` in the
    build), ``cuda_architectures``, ``cuda_note`` (why it is not), ``cpu_capabilities`` (all that
    this machine can run) and ``cpu_capability`` (the one in use; ``EECORE_CPU_CAPABILITY`` forces
    one).
    """
    info: dict[str, Any] = dict(_C.build_info())
    info["cpu_capabilities"] = _C.cpu_capabilities()
    info["cpu_capability"] = _C.cpu_capability()
    return info


def missing_cuda_ops() -> tuple[str, ...]:
    """Ops that should run on CUDA and cannot here: all of them without a GPU or the CUDA module."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in OP_NAMES if name not in _cpu_only)
    return tuple(name for name in names if not has_kernel(f"eecore::{name}", "CUDA"))


def compiled(op: str, *, cpu_only: bool = False) -> Callable[..., None]:
    """The op as it is registered: all arguments by position, outputs included.

    It has no gradients: where autograd records, it refuses tensors that require gradients, and
    tensors with a tangent of forward mode, which would be lost. An
    autograd kernel in Python would do the same, but would double the cost of a small op.

    Args:
        cpu_only: the op has no CUDA kernel by design.
    """
    if cpu_only:
        _cpu_only.add(op)
    overload: Callable[..., None] = getattr(torch.ops.eecore, op).default
    names = _argument_names(op)

    def call(*arguments: Any, **by_name: Any) -> None:
        if torch.is_grad_enabled():
            for name, value in (*zip(names, arguments, strict=False), *by_name.items()):
                if isinstance(value, Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"{op}: {name}: expected a tensor without gradients, or torch.no_grad(), "
                        "got one that requires grad"
                    )
        if forward_ad._current_level >= 0:  # within jvp, jacfwd or dual_level
            for name, value in (*zip(names, arguments, strict=False), *by_name.items()):
                if isinstance(value, Tensor) and _has_tangent(value):
                    raise RuntimeError(
                        f"{op}: {name}: expected a tensor without a tangent, got one: "
                        "there is no formula for forward mode"
                    )
        overload(*arguments, **by_name)

    return call


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def cpu_only_ops() -> tuple[str, ...]:
    """The ops without a CUDA kernel by design, sorted by name."""
    return tuple(sorted(_cpu_only))


def _argument_names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.eecore, op).default._schema.arguments]


def _fake_of(op: str) -> Callable[..., None]:
    """The fake kernel of an op, which only writes into its arguments: there is nothing to do.

    Torch calls it for tensors on any devices as soon as one of them is on ``meta``.
    """
    names = _argument_names(op)

    def fake(*arguments: Any, **by_name: Any) -> None:
        given = {**dict(zip(names, arguments, strict=False)), **by_name}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        first = next(iter(tensors.values()))
        for name, tensor in tensors.items():
            if tensor.device != first.device:
                raise RuntimeError(
                    f"{op}: {name}: expected a tensor on {first.device}, got one on {tensor.device}"
                )

    return fake


for _name in OP_NAMES:
    torch.library.register_fake(f"eecore::{_name}", _fake_of(_name))
