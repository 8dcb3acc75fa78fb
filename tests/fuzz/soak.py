"""An engine that runs for long: ``make soak STEPS=1000000``, or ``python tests/fuzz/soak.py``.

Random requests of every policy come and go over few pages: preempted, cancelled, put on hold. Each
gives what it gives alone. Free pages and resident memory are sampled; once everything is warm their
curves have to be flat. Exit code 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fuzzing  # noqa: F401 (finds the folders of the tests)

# isort: split

import fuzz_engine
from devices import engine_of
from eecore import Engine
from workloads import check_books

NUM_SAMPLES = 200
WARM = 0.2
"""The share of the steps that warm up; memory must not grow after them."""
MAX_GROWTH_MB = 4.0
"""Growth of resident memory after the warm-up that an allocator may cause by itself."""


@dataclass(frozen=True)
class Sample:
    """Figures after some steps."""

    steps: int
    seconds: float
    rss_mb: float
    free_pages: int
    lost_pages: int


@dataclass
class Soak:
    """The clients of one engine.

    Attributes:
        finished, cancelled, tokens: counts.
    """

    engine: Engine
    chance: random.Random
    steps: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self._running: dict[str, int] = {}
        self._held: set[str] = set()

    def run(self, steps: int) -> None:
        """Run so many steps."""
        for _ in range(steps):
            self._clients()
            for step in self.engine.step():
                self.tokens += len(step.token_ids)
                if step.output is not None:
                    self._done(step.output)
            self.steps += 1

    def drain(self) -> None:
        """Cancel all that is unfinished."""
        for name in list(self._running):
            self._cancel(name)

    def _clients(self) -> None:
        """The clients' calls between two steps."""
        chance, engine = self.chance, self.engine
        while len(self._running) < 6 and (not self._active or chance.random() < 0.5):
            number = chance.randrange(fuzz_engine.NUM_REQUESTS)
            request = fuzz_engine.REQUESTS[0][number]
            name = engine.add_request(request.prompt, exit=request.exit, sampling=request.sampling)
            self._running[name] = number
        happens = chance.random()
        if happens < 0.06:
            name = chance.choice(list(self._running))
            if happens < 0.01:
                self._cancel(name)
            elif name in self._held:
                engine.resume(name)
                self._held.remove(name)
            elif self._active > 1:
                engine.hold(name)
                self._held.add(name)

    @property
    def _active(self) -> int:
        return len(self._running) - len(self._held)

    def _cancel(self, name: str) -> None:
        output = self.engine.cancel(name)
        assert output is not None
        self._done(output)

    def _done(self, output: fuzz_engine.Output) -> None:
        number = self._running.pop(output.request_id)
        self._held.discard(output.request_id)
        fuzz_engine.check(output, fuzz_engine.alone(0, number))
        self.preemptions += output.stats.preemptions
        self.cancelled += output.finish_reason == "cancelled"
        self.finished += output.finish_reason != "cancelled"


def rss_mb() -> float:
    """Resident memory of this process, in 2**20 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def sample(soak: Soak, started: float) -> Sample:
    """The figures now; the engine's books have to agree."""
    check_books(soak.engine)
    pages = soak.engine.pages
    unfinished = soak.engine.requests.values()
    held = len({page for s in unfinished for page in (*s.pages, *s.input_pages)})
    return Sample(
        soak.steps,
        round(time.monotonic() - started, 3),
        round(rss_mb(), 3),
        pages.num_free,
        pages.num_pages - pages.num_free - held,
    )


def growth_mb(samples: list[Sample]) -> float:
    """Memory growth after the warm-up: from the mean of the first third to that of the last."""
    warm = [s.rss_mb for s in samples if s.steps >= WARM * samples[-1].steps]
    third = max(len(warm) // 3, 1)
    return sum(warm[-third:]) / third - sum(warm[:third]) / third


def main() -> int:
    """The command line; 1 when a curve is not flat."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    asked = parser.parse_args()
    logging.getLogger("eecore").setLevel(logging.CRITICAL)
    fuzz_engine.prepare()
    for number in range(fuzz_engine.NUM_REQUESTS):
        fuzz_engine.alone(0, number)
    engine = engine_of(fuzz_engine.MODELS[0], fuzz_engine.CONFIGS[0])
    soak, started = Soak(engine, random.Random(asked.seed)), time.monotonic()
    samples = []
    for _ in range(NUM_SAMPLES):
        soak.run(max(asked.steps // NUM_SAMPLES, 1))
        samples.append(sample(soak, started))
    soak.drain()
    last = sample(soak, started)
    growth = growth_mb(samples)
    is_flat = growth < MAX_GROWTH_MB and last.free_pages == engine.pages.num_pages
    figures = {
        "steps": soak.steps,
        "steps_per_s": round(soak.steps / samples[-1].seconds),
        "requests": soak.finished + soak.cancelled,
        "cancelled": soak.cancelled,
        "preemptions": soak.preemptions,
        "tokens": soak.tokens,
        "lost_pages": max(s.lost_pages for s in samples),
        "pages_free_at_the_end": f"{last.free_pages} of {engine.pages.num_pages}",
        "rss_mb_at_first": samples[0].rss_mb,
        "rss_mb_at_the_end": samples[-1].rss_mb,
        "rss_growth_mb": round(growth, 3),
        "flat": is_flat,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
