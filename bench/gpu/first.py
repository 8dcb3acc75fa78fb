"""What is likeliest to go wrong on a GPU that nothing has run on yet, in a minute.

python -m bench gpu-first body|splits [--device cpu]

``body``: bodies of IF nodes, one in another, between products that may start before each other has
ended; EECORE_EARLY_START=0 has them start in order. ``splits``: attention over a context that is
cut as models ask for it, and as the shapes of the call say. bench/gpu.sh runs it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.gpu.attention import AttentionShape, attention_work
from bench.gpu.timing import time_calls
from eecore import ops
from eecore.decoding.capture import run_program_on
from eecore.decoding.control import Control, OnHost

SIZE, NUM_ROWS = 1024, 4
SHAPES = (AttentionShape(1, 1, 32768), AttentionShape(8, 1, 4096), AttentionShape(8, 8, 4096))
TINY_SHAPES = (AttentionShape(2, 1, 700, 4, 2, 64),)


class Chain:
    """A program of six products; a flag passes over four of them, another over the last two of
    these.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._weight = (torch.randn(SIZE, SIZE, device=device) / SIZE**0.5).to(dtype)
        self._norm = torch.ones(SIZE, device=device, dtype=dtype)
        self._x = torch.randn(NUM_ROWS, SIZE, device=device).to(dtype)
        self._state, self._inner = torch.empty_like(self._x), torch.empty_like(self._x)
        self.out = torch.empty_like(self._x)
        self.flags = torch.zeros(2, dtype=torch.bool, device=device)

    def send(self) -> None:
        """Nothing changes on the host."""

    def run(self, control: Control) -> None:
        """All of its calls."""
        self._multiply(self._x, self._state, self._norm)
        control.unless(self.flags[:1], lambda: self._deeper(control))
        self._multiply(self._state, self.out, self._norm)

    def _deeper(self, control: Control) -> None:
        self._add()
        control.unless(self.flags[1:], self._add)

    def _add(self) -> None:
        self._multiply(self._state, self._inner, self._norm)
        self._multiply(self._inner, self._state, None, residual=self._state)

    def _multiply(
        self, x: Tensor, out: Tensor, norm: Tensor | None, residual: Tensor | None = None
    ) -> None:
        ops.skinny_linear(
            x, self._weight, norm_weight=norm, residual=residual, constant_weight=True, out=out
        )


def check_bodies(device: torch.device, dtype: torch.dtype) -> None:
    """A captured chain against its calls one by one, for all flags, and what a run takes."""
    chain = Chain(device, dtype)
    run = run_program_on(device)
    for flags in itertools.chain(*[itertools.product((False, True), repeat=2)] * 5):
        chain.flags.copy_(torch.tensor(flags))
        chain.run(OnHost())
        expected = chain.out.clone()
        chain.out.fill_(float("nan"))
        run(chain)
        if not torch.equal(chain.out, expected):
            raise SystemExit(f"flags {flags}: the graph and its calls one by one differ")
    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        run(chain)
        chain.out[0, 0].item()
        seconds.append(time.perf_counter() - begin)
    print(f"bodies: as call by call; {statistics.median(seconds) * 1e6:.1f} us a run")


def check_splits(device: torch.device, dtype: torch.dtype) -> None:
    """Both ways to cut, against torch and beside each other."""
    for shape in SHAPES if device.type == "cuda" else TINY_SHAPES:
        for split in (None, 0):
            work = attention_work(shape, dtype, device, split)
            assert work.result is not None
            assert work.peer_result is not None
            got, expected = work.result().double(), work.peer_result("torch SDPA").double()
            error = float((got - expected).norm() / expected.norm())
            if not error < 3e-2:
                raise SystemExit(f"{shape.name}, split {split}: off by {error:.1e} of the norm")
            times = time_calls(device, [work.call], 20)
            cut = "of the shapes" if split == 0 else "of models"
            print(f"{shape.name}, splits {cut}: {times.median * 1e6:.1f} us, error {error:.1e}")


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m bench gpu-first",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["body", "splits"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args(words)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    check = check_bodies if arguments.what == "body" else check_splits
    check(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
