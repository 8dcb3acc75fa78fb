"""Times of requests that ran in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import eecore


def decoding_seconds(outputs: Sequence[eecore.Output]) -> float:
    """Seconds from the first token of the batch's last prompt to the end of its last request."""
    stats = [output.stats for output in outputs]
    return max(s.total_s for s in stats) - max(s.time_to_first_token_s for s in stats)
