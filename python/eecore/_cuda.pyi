"""CUDA kernels: importing it registers them; see csrc/cuda/module.cpp."""

class CapturedGraph:
    """What ``stream`` is asked to do from here to :meth:`end`, to be launched many times."""

    def __init__(self, stream: int, device: int) -> None:
        """RuntimeError when the stream is being captured already, or is the default stream."""

    def end(self) -> None:
        """Close the capture and make it ready to launch.

        Raises:
            RuntimeError: it is closed already, a body is open, or the runtime refuses.
        """

    def launch(self, stream: int, device: int) -> None:
        """Run what was captured, behind the work on a stream; returns at once."""

class ConditionalBody:
    """Work that a graph under capture does only when a flag on the device says so.

    Until :meth:`end`, what is launched on ``stream`` is captured as the body of an IF node, which
    ends what the stream has captured so far. Bodies nest; see csrc/cuda/conditional_body.h.
    """

    def __init__(self, stream: int, device: int, flag: int, when: bool) -> None:
        """``flag`` is the address of a bool on the device: the body runs where it is ``when``.

        Raises:
            RuntimeError: ``stream`` is not being captured, or the runtime refuses.
        """

    def end(self) -> None:
        """Close the body. RuntimeError when it is closed already, or one inside is open."""
