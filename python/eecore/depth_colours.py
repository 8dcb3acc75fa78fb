"""Colours of exit layers: from sky blue (the lowest possible exit) over violet to orange (all
layers).
"""

from __future__ import annotations

STOPS = ((56, 189, 248), (167, 139, 250), (251, 146, 60))


def depth_colour(layer: int, lowest: int, num_layers: int) -> str:
    """``rgb(r,g,b)`` for a token that exited after ``layer`` layers."""
    share = (layer - lowest) / max(num_layers - lowest, 1)
    at = min(max(share, 0.0), 1.0) * (len(STOPS) - 1)
    low = min(int(at), len(STOPS) - 2)
    red, green, blue = (
        round(a + (b - a) * (at - low)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True)
    )
    return f"rgb({red},{green},{blue})"
