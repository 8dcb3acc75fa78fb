"""How many of a layer's drafts stand: by where in a text they are made, and of each request.

Where a text begins as others do a layer is often as sure as all of them, however it fares later on.
"""

from __future__ import annotations

from eecore.planning.history import Odds, OwnDrafts

__all__ = ["MOST_SHARE", "LayerDrafts"]

# How many drafts an expectation weighs that was measured, and in one place what is known of all.
# What older drafts count beside newer ones, of all requests and of one.
PRIOR_MEASURED, PRIOR_OF_PLACE = 64.0, 16.0
OLDER_OF_ALL, OLDER_OF_REQUEST = 0.999, 0.98
# The share of drafts that stand of which nothing is known.
UNKNOWN = 0.5
# No more than this share of a layer's drafts are ever expected to stand.
MOST_SHARE = 0.999
# Expectations that are kept at most.
MOST_KEPT = 256


class LayerDrafts:
    """Of one exit layer, of all requests.

    Args:
        expected: the share of its drafts that stand, as it was measured on other texts; None if it
            was not.
    """

    def __init__(self, expected: float | None) -> None:
        if expected is None:
            self._everywhere = Odds(UNKNOWN, older=OLDER_OF_ALL)
        else:
            self._everywhere = Odds(expected, prior=PRIOR_MEASURED, older=OLDER_OF_ALL)
        self._odds: dict[int, Odds] = {}  # by about where in a text they were made
        self._kept: dict[tuple[int, int], list[float]] = {}

    def shares(self, written: int, count: int) -> list[float]:
        """That each of ``count`` drafts behind ``written`` tokens stands, if those before it do."""
        key = written, count
        found = self._kept.get(key)
        if found is None:
            found = []
            for position in range(written + 1, written + count + 1):
                odds = self._odds.get(position.bit_length(), self._everywhere)
                found.append(min(odds.share, MOST_SHARE))
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found

    def add(self, own: OwnDrafts, written: int, accepted: int, *, refused: bool) -> None:
        """Drafts of a request behind ``written`` tokens: so many stood, and perhaps one behind them
        did not.
        """
        old = OLDER_OF_REQUEST ** (accepted + refused)
        own.expected = old * own.expected + sum(self.shares(written, accepted + refused))
        own.stood = old * own.stood + accepted
        self._kept.clear()
        self._everywhere.add_run(accepted, refused=refused)
        position, last = written + 1, written + accepted
        while position <= last + refused:
            about = position.bit_length()
            odds = self._odds.get(about)
            if odds is None:
                odds = self._odds[about] = Odds(
                    self._everywhere.share, prior=PRIOR_OF_PLACE, older=OLDER_OF_ALL
                )
            behind = 1 << about
            stood = min(behind, last + 1) - position
            odds.add_run(stood, refused=refused and last + 1 < behind)
            position = behind
