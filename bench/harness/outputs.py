"""Times of requests that ran in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import eecore


def decoding_seconds(outputs: Sequence[eecore.Output]) -> float:
    """From when the last prompt of the batch had its first token until the last one was done."""
    stats = [output.stats for output in outputs]
    return max(s.total_s for s in stats) - max(s.time_to_first_token_s for s in stats)
