"""Times of requests that ran in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import eecore


def spent(outputs: Sequence[eecore.Output]) -> float:
    """Seconds until the last one was done."""
    return max(output.stats.total_s for output in outputs)


def decoding_seconds(outputs: Sequence[eecore.Output]) -> float:
    """From when the last prompt of the batch had its first token."""
    return spent(outputs) - max(output.stats.time_to_first_token_s for output in outputs)
