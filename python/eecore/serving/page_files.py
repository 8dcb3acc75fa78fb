"""The page at ``/``: plain files, and the facts of the model that they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import FileResponse

import eecore
from eecore.exits import Exit, Full
from eecore.models.source import weight_files
from eecore.output import depth_colour
from eecore.serving.refusals import ApiError
from eecore.serving.served import ServedModel

FOLDER = Path(__file__).resolve().parent / "page"
KINDS = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
}
CHAT: dict[str, Any] = {
    "hello": "What would you like to know?",
    "says": "Under an answer stands its speed. Words that were drafted, or that exited before the "
    "last layer, have a colour.",
    "prompts": [
        "Explain to a ten-year-old why the sky is blue.",
        "Write a Python function that checks whether a word is a palindrome, with an example.",
        "Correct the spelling: My freind and me went to the libary yesterday to reed a book.",
    ],
    "remembers": True,
}
HOME: dict[str, Any] = {
    "hello": "Tell a home what to do.",
    "says": "This small model ships with eecore: it turns what you say to a home into a command. "
    "It does not chat: for that, serve another one.",
    "prompts": [
        "turn the kitchen lights down to 20 percent",
        "play some jazz in the kitchen",
        "what is the temperature in the living room",
    ],
    "remembers": False,
}
# The page may talk to its own server only, and other sites cannot frame it.
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
        ApiError: 404: there is no such file.
    """
    if name not in KINDS:
        raise ApiError(404, f"page: expected {', '.join(KINDS)}, got {name[:100]!r}")
    return FileResponse(FOLDER / name, media_type=KINDS[name], headers=HEADERS)


def about(served: ServedModel) -> dict[str, Any]:
    """The model's name and file, how it is introduced, the colour of each exit layer from 0, and
    the policies that suit it.
    """
    layers = range(served.num_layers + 1)
    depths = served.depths
    policies = dict.fromkeys((depths.default, *depths.aliases))
    is_home = depths.policies.directory == eecore.default_model()
    return {
        "model": served.name,
        "facts": _facts(served),
        "num_layers": served.num_layers,
        "max_model_len": served.max_model_len,
        "colours": [depth_colour(layer, 1, served.num_layers) for layer in layers],
        "exit": depths.default,
        "temperature": served.usual_sampling(depths.policies.of(depths.default))["temperature"],
        "policies": [_mode(said, depths.policies.of(said)) for said in policies],
        **(HOME if is_home else CHAT),
    }


def _facts(served: ServedModel) -> str:
    """The weight file of a model, its size, and its bits for each weight."""
    source = served.model.network.source
    files = weight_files(source.directory) if source is not None else []
    if source is None or not files:
        return ""
    name = files[0].name if len(files) == 1 else f"{len(files)} files"
    size = sum(file.stat().st_size for file in files)
    bits = 8 * size / served.model.config.num_parameters
    run = f", run in {source.weights}" if source.weights else ""
    return f"{name}, {size / 1e6:,.1f} MB, {bits:.1f} bits a weight{run}"


def _mode(said: str, policy: Exit) -> dict[str, Any]:
    """The meaning of the colours under a policy."""
    is_lossless = policy == Full() or policy.contract.endswith("lossless")
    return {"exit": said, "lossless": is_lossless, "lowest": policy.lowest_exit}
