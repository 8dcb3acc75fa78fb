"""What rounds of ``Auto`` requests cost: passes that verify, steps of a head or a layer, the host.

Nobody is asked: all of it is measured as rounds run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eecore.planning.layer_rounds import LayerRounds
from eecore.planning.pass_times import (
    LEAST_ROUND,
    LEAST_ROW_COST,
    MOST_SLOWER,
    ROW_COST,
    Anchor,
    Pace,
    PassTimes,
    StepCost,
)

__all__ = ["HEAD_COST", "MEASURE_AGAIN", "SURPRISE", "RoundCosts"]

# Of passes of full depth in a row of which none went on from the last, this one counts and those
# behind it; of those that did, once full depth is known. Behind drafts a machine is slower for a
# while: it had less to do, and what it keeps in cache is older.
UNSTEADY_PASSES, SETTLED_PASSES = 3, 3
# For so many rounds what follows from many measurements is held, unless one is so far off.
HOLD = 8
MOST_HELD = 1024
SURPRISE = 0.1
# Rounds after which full depth is measured once more, where it was not the best: at first, and each
# time twice as many.
MEASURE_AGAIN = (8, 256)
# Rounds in which that is tried.
MOST_TRIES = 5
# Of how long it takes to choose, and of what lies between two rounds, what a new one weighs.
NEW_TIME = 0.08
# A look that takes more times as long as others was disturbed.
MOST_OF_LOOK = 2.0
# Drafts that a request alone is given at first, which show what rows take.
FEW_ALONE = 4
# Of one drafted token besides its layers, as a share of full depth: the LM head.
HEAD_COST = 0.1


@dataclass(slots=True)
class _SinceFull:
    """Rounds without full depth."""

    rounds: int = 0
    most: int = MEASURE_AGAIN[0]
    """Until it is measured."""
    tries: int = 0
    requests: int = 0
    """Of the last try."""

    def begin_again(self) -> None:
        """It has been measured, or tried often enough."""
        if self.rounds >= self.most:
            self.most = min(2 * self.most, MEASURE_AGAIN[1])
        self.rounds = self.tries = 0


class RoundCosts:
    """Seconds of rounds by their requests and drafts, as they are measured.

    What follows from many measurements is held for some rounds: :meth:`held` and :meth:`hold`.

    Args:
        num_layers: of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._head_steps: dict[int, StepCost] = {}  # by about so many rows
        self._looks: dict[int, float] = {}  # seconds that choosing takes, by about so many rows
        # And what lies behind a round of full depth, or one of drafts.
        self._between: dict[tuple[int, bool], float] = {}
        self._layer_rounds: dict[int, LayerRounds] = {}
        self._pace = Pace()
        self._full = PassTimes(self._pace)
        # By about so many requests: each has keys and values of its own to be read.
        self._verify: dict[int, PassTimes] = {}
        # Since full depth of about so many rows, and until it is measured again.
        self._since_full: dict[int, _SinceFull] = {}
        self._unsteady = self._steady = 0  # passes of full depth in a row, by how they went on
        self._clock = 0  # rounds that were chosen
        self._held: dict[Any, tuple[int, Any]] = {}

    def begin_round(self) -> None:
        """One more is chosen: what is held grows older."""
        self._clock += 1

    # Asking

    def full(self, rows: int) -> float | None:
        """A round of full depth; None where it is not known."""
        return self._full.near(rows)

    def fewer(self, rows: float, anchor: Anchor) -> float:
        """A round of full depth of fewer requests and what lies behind it, as a share of the
        anchor's; the fewer there are, the more each takes.
        """
        low = int(rows)
        shares = [self._fewer(count, anchor) for count in (low, min(low + 1, anchor[0]))]
        return shares[0] + (rows - low) * (shares[1] - shares[0])

    def _fewer(self, rows: int, anchor: Anchor) -> float:
        """Of a whole number of requests; in proportion where it is not known."""
        key = "fewer", rows, anchor[0]
        share: float | None = self.held(key)
        if share is None:
            most, seconds = anchor[0], self._full.near(rows) if rows else 0.0
            share = rows / most
            if seconds is not None:
                share = (seconds + self.host(rows)) / (anchor[1] + self.host(most))
            share = min(max(share, rows / most), 1.0)
            self.hold(key, share)
        return share

    def is_full_due(self, rows: int) -> bool:
        """Whether full depth is to be measured once more; it is tried for a few rounds of the same
        requests, as it may never go on for long enough to count.
        """
        since = self._since_full.get(rows.bit_length())
        if since is None or since.rounds < since.most:
            return False
        if since.tries and (since.requests != rows or since.tries >= MOST_TRIES):
            since.begin_again()
            return False
        since.tries, since.requests = since.tries + 1, rows
        return True

    def _count_drafted(self, rows: int) -> None:
        """One more round without full depth."""
        self._since_full.setdefault(rows.bit_length(), _SinceFull()).rounds += 1

    def look(self, rows: int) -> float:
        """Seconds that choosing takes for so many requests."""
        return self._looks.get(rows.bit_length(), 0.0)

    def host(self, rows: int, *, drafts: bool = False) -> float:
        """Seconds of the host behind a round of so many requests: of full depth, or with drafts,
        which gives them more tokens.
        """
        about = rows.bit_length()
        full = self._between.get((about, False), 0.0)
        return self._between.get((about, True), full) if drafts else full

    def row(self, anchor: Anchor) -> float:
        """Of a draft in a round that is given some, in tokens of full depth: of several requests
        the average of as many as half of these have, since rows are multiplied some at a time.
        """
        rows, seconds = anchor
        key = "row", rows
        cost: float | None = self.held(key)
        if cost is None:
            count = max(rows // 2, 1)
            passes = self.passes(anchor, count)
            more = (passes[count] - passes[0]) * seconds / count
            cost = max(rows * more / (seconds + self.host(rows)), LEAST_ROW_COST)
            self.hold(key, cost)
        return cost

    def head(self, rows: int) -> StepCost:
        """Of steps of a head, in passes of full depth."""
        about = rows.bit_length()
        known = self._head_steps.get(about)
        if known is None:
            known = self._head_steps[about] = StepCost()
        return known

    def passes(self, anchor: Anchor, most: int) -> list[float]:
        """Passes that verify 0 to ``most`` drafts, or to more, as shares of the anchor's."""
        rows, seconds = anchor
        key = "passes", rows, 1 << max(most - 1, 0).bit_length()
        passes: list[float] | None = self.held(key)
        if passes is None:
            counts = range(rows, rows + key[2] + 1)
            passes = [self._verified(count, anchor) / seconds for count in counts]
            self.hold(key, passes)
        return passes

    def between_passes(self, drafts: float, anchor: Anchor) -> float:
        """A pass that verifies so many drafts on average, as a share of the anchor's."""
        low = int(drafts)
        passes = self.passes(anchor, low + 1)
        return passes[low] + (drafts - low) * (passes[low + 1] - passes[low])

    def _verified(self, rows: int, anchor: Anchor) -> float:
        """Seconds of a pass that verifies."""
        return self._passes_of(anchor[0]).of(rows, anchor, self._full)

    def _passes_of(self, requests: int) -> PassTimes:
        """Passes that verified drafts of so many requests."""
        about = requests.bit_length()
        passes = self._verify.get(about)
        if passes is None:
            passes = self._verify[about] = PassTimes(self._pace)
        return passes

    def most_drafts(self, rows: int) -> int:
        """That a round is given: few show what rows take, and then twice as many."""
        known = self._passes_of(rows).most_rows
        return 2 * known - rows if known > rows else max(rows // 2, FEW_ALONE)

    def layer(self, layer: int, anchor: Anchor) -> tuple[float, float]:
        """Of a round in which a layer drafts, in passes of full depth: without a step, each step's.

        A step takes its layers and a head; what it drafted is verified by the others.
        """
        base, step = self._layer(layer, anchor).line(anchor[0])
        return base / anchor[1], step / anchor[1]

    def _layer(self, layer: int, anchor: Anchor) -> LayerRounds:
        known = self._layer_rounds.get(layer)
        if known is None:
            rows, seconds = anchor
            own = layer / self._num_layers

            def expected(requests: int, steps: int) -> float:
                full = seconds
                if requests != rows:
                    near = self._full.near(requests)
                    full = self._full.of(requests, anchor) if near is None else near
                verified = self._verified(requests * (1 + steps), (requests, full))
                verified = full + (1.0 - own) * (verified - full)
                return verified + steps * (own + HEAD_COST) * full

            known = LayerRounds(expected, (rows, 2 * rows), self._pace)
            self._layer_rounds[layer] = known
        return known

    def round(self, rows: int, full: float, drafted: int, steps: int, layer: int) -> float:
        """Seconds that a round is expected to take."""
        if layer and steps:
            base, step = self._layer(layer, (rows, full)).line(rows)
            return max(base + steps * step, LEAST_ROUND * full)
        verified = self._verified(rows + drafted, (rows, full)) if drafted or layer else full
        return verified + (0.0 if layer else steps * self.head(rows).step * full)

    def held(self, key: Any, rounds: int = HOLD) -> Any:
        """What is held for some rounds; None where it has to be made anew."""
        found = self._held.get(key)
        return None if found is None or self._clock - found[0] >= rounds else found[1]

    def hold(self, key: Any, value: Any) -> None:
        """What was made anew, until it is some rounds old or a pass was a surprise."""
        if len(self._held) >= MOST_HELD:
            self._held.clear()
        self._held[key] = self._clock, value

    # Learning

    def learn_look(self, rows: int, seconds: float) -> float:
        """How long it took to choose for so many requests, and to learn of what was chosen.

        Returns:
            What of it counts.
        """
        known = self._looks.get(rows.bit_length(), seconds)
        seconds = min(seconds, MOST_OF_LOOK * known)
        self._looks[rows.bit_length()] = known + NEW_TIME * (seconds - known)
        return seconds

    def learn_between(self, rows: int, seconds: float, *, drafts: bool = False) -> None:
        """How long it was from a round of so many requests to their next one.

        It is hardly longer behind a round that gives several tokens: what a small model's drafts
        save is to a good part this. No more is believed than a pass of full depth takes.
        """
        full = self._full.near(rows)
        if full is None:
            return
        seconds = min(seconds, full)
        key = rows.bit_length(), drafts
        known = self._between.get(key, seconds)
        seconds = min(seconds, 2.0 * known)
        self._between[key] = known + NEW_TIME * (seconds - known)

    def learn_full(self, rows: int, seconds: float, *, steady: int = 1) -> None:
        """How long a round of full depth took.

        One behind another of the same requests is faster: it counts, and any that comes behind
        some that were not.

        Args:
            rows: requests.
            seconds: that it took.
            steady: rounds of full depth since the last one told of, with this one, each of which
                went on from the one before; 0 if this did not.
        """
        self._unsteady = 0 if steady else self._unsteady + 1
        self._steady = self._steady + steady if steady else 0
        is_known = self._full.near(rows) is not None
        if 0 < self._unsteady < UNSTEADY_PASSES or 0 < self._steady < SETTLED_PASSES * is_known:
            return
        self._note(self._full.add(rows, seconds))
        since = self._since_full.get(rows.bit_length())
        if since is not None:
            since.begin_again()

    def learn_given(self, rows: int, drafted: int, ahead: int, seconds: float) -> None:
        """How long a round took that was given ``drafted`` drafts of ``rows`` requests.

        Args:
            rows: requests.
            drafted: drafts.
            ahead: steps of a draft head behind it.
            seconds: the round's.
        """
        self._count_drafted(rows)
        full = self._full.near(rows)
        if full is None:
            return
        of_head = ahead * self.head(rows).step * full
        passed = max(seconds - of_head, full / MOST_SLOWER)
        passes = self._passes_of(rows)
        if passes.known(rows + drafted) is None:
            usual = max(
                self._verified(rows + drafted, (rows, full)), (1.0 + ROW_COST * drafted) * full
            )
            passed = min(max(passed, full), MOST_SLOWER * usual)
        self._note(passes.add(rows + drafted, passed))
        if ahead and not drafted:
            self.head(rows).add(ahead, seconds / (self._full.near(rows) or full))

    def learn_drafted(self, layer: int, rows: int, steps: int, seconds: float) -> None:
        """How long a round took in which a layer drafted for ``rows`` requests.

        Args:
            layer: that drafted.
            rows: requests.
            steps: drafts of the request with most of them.
            seconds: the round's.
        """
        self._count_drafted(rows)
        full = self._full.near(rows)
        if full is None:
            return
        if steps:
            self._note(self._layer(layer, (rows, full)).add(rows, steps, seconds))

    def _note(self, moved: float) -> None:
        """Nothing is held any longer where a round is taken to be another part of others."""
        if abs(moved) > SURPRISE:
            self._held.clear()
