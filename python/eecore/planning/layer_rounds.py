"""How long rounds take in which a layer drafts, by their requests and the drafts of each.

Steps of few layers and a pass that verifies: both are about as long for no request as they are for
one, and grow with each. So there are four numbers to a layer, which every round tells of, whatever
its requests and drafts (recursive least squares of what is off, relative to what was expected).
"""

from __future__ import annotations

from collections.abc import Callable
from math import log

from eecore.planning.pass_times import LOG_MOST_SLOWER, MOST_SLOWER, NOISE, Pace

__all__ = ["LayerRounds"]

# How far it may be off what a round, or a step of it, is taken to be at first: the part that comes
# without requests, and what each adds. How much older rounds count beside newer ones.
OFF, OFF_OF_EACH, OLDER_ROUNDS = 0.15, 0.5, 0.99


class LayerRounds:
    """Of one exit layer.

    Args:
        expected: seconds of a round of so many requests and steps, as far as can be told.
        requests: two numbers of them at which it is asked.
        pace: the machine's, that others learn of too.
    """

    def __init__(
        self, expected: Callable[[int, int], float], requests: tuple[int, int], pace: Pace
    ) -> None:
        self._pace = pace
        (few, more), steps = sorted(requests), (1, 3)
        of_few, of_more = (
            _line(steps, [expected(count, step) / pace.now for step in steps])
            for count in (few, more)
        )
        none, each = _line((few, more), [of_few[0], of_more[0]])
        step, both = _line((few, more), [of_few[1], of_more[1]])
        # Seconds at the pace of 1: of no request and step, of each request, each step, and both.
        self._numbers = [none, each, step, both]
        base, of_step = none + each * few, step + both * few
        off = [OFF * base, OFF_OF_EACH * base / few, OFF * of_step, OFF_OF_EACH * of_step / few]
        self._unknown = [[off[i] * off[j] if i == j else 0.0 for j in range(4)] for i in range(4)]
        self._most = [self._unknown[i][i] for i in range(4)]

    def line(self, requests: int) -> tuple[float, float]:
        """Seconds of a round of so many requests without a step, and of each step of it."""
        none, each, step, both = self._numbers
        now = self._pace.now
        return now * max(none + each * requests, 0.0), now * max(step + both * requests, 0.0)

    def _of(self, requests: int, steps: float) -> float:
        none, each, step, both = self._numbers
        return none + each * requests + (step + both * requests) * steps

    def add(self, requests: int, steps: int, seconds: float) -> float:
        """A round that has been measured.

        Returns:
            How much longer such rounds are taken to be than before, as a logarithm.
        """
        expected = self._of(requests, steps)
        if expected <= 0.0:
            return 0.0
        both = requests * steps
        toward = [u[0] + u[1] * requests + u[2] * steps + u[3] * both for u in self._unknown]
        unknown = toward[0] + toward[1] * requests + toward[2] * steps + toward[3] * both
        relative = unknown / expected**2
        before = self._pace.now
        seconds = min(seconds, MOST_SLOWER * expected * before)
        off = max(log(seconds / (expected * before)), -LOG_MOST_SLOWER)
        self._pace.learn(off, relative)
        error = seconds / self._pace.now - expected
        gain = [a / (unknown + NOISE * expected**2) for a in toward]
        for i, part in enumerate(gain):
            self._numbers[i] += part * error
            row = self._unknown[i]
            for j, other in enumerate(toward):
                row[j] = (row[j] - part * other) / OLDER_ROUNDS
        for i, most in enumerate(self._most):
            if self._unknown[i][i] > most:  # no more is forgotten than was unknown
                shrink = (most / self._unknown[i][i]) ** 0.5
                for j in range(4):
                    self._unknown[i][j] *= shrink
                    self._unknown[j][i] *= shrink
        after = self._of(requests, steps)
        return log(after / expected) if after > 0.0 else 0.0


def _line(places: tuple[int, int], values: list[float]) -> tuple[float, float]:
    """Its value at 0, and what it rises by from place to place; it never falls."""
    rise = max((values[1] - values[0]) / (places[1] - places[0]), 0.0)
    return max(values[0] - rise * places[0], 0.0), rise
