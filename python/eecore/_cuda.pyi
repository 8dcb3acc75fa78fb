"""CUDA kernels: importing it registers them; see csrc/cuda/module.cpp."""

class ConditionalBody:
    """Work that a graph under capture does only when a flag on the device says so.

    Until :meth:`end`, what is launched on :attr:`stream` is captured as the body of an IF node,
    which ends what ``stream`` has captured so far. Bodies nest; see csrc/cuda/conditional_body.h.
    """

    def __init__(self, stream: int, device: int, flag: int, when: bool) -> None:
        """``flag`` is the address of a bool on the device: the body runs where it is ``when``.

        Raises:
            RuntimeError: ``stream`` is not being captured, or the runtime refuses.
        """

    @property
    def stream(self) -> int:
        """The cudaStream_t that the body is captured on."""

    def end(self) -> None:
        """Close the body. RuntimeError when it is closed already."""
