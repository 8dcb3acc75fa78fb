"""The page at ``/``: plain files beside this one, and what they have to know of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import FileResponse

from eecore.depth_colours import depth_colour
from eecore.serving.refusals import ApiError
from eecore.serving.served import ServedModel

__all__ = ["about", "page_file"]

FOLDER = Path(__file__).resolve().parent / "page"
KINDS = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
# It talks to its own server and nobody else, and nobody puts it into a frame.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_file(name: str) -> FileResponse:
    """One of the page's files.

    Raises:
        ApiError: 404: there is none such.
    """
    if name not in KINDS:
        raise ApiError(404, f"page: expected {', '.join(KINDS)}, got {name[:100]!r}")
    return FileResponse(FOLDER / name, media_type=KINDS[name], headers=HEADERS)


def about(served: ServedModel) -> dict[str, Any]:
    """The model's name, the colour of each exit layer from 0, and the policies that suit it."""
    layers = range(served.num_layers + 1)
    return {
        "model": served.name,
        "num_layers": served.num_layers,
        "colours": [depth_colour(layer, 1, served.num_layers) for layer in layers],
        "exit": served.depths.default,
        "policies": list(served.depths.aliases),
    }
