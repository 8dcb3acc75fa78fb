"""The model that ships with eecore: *intent*, which turns a request to a smart home into a
parse.

Trained for early exit by ``scripts/intents``; its directory has the model card, the exit classifier
and a calibrated threshold for each confidence measure.
"""

from __future__ import annotations

from pathlib import Path

from eecore.errors import ModelNotFoundError
from eecore.files.hub import fetch_model

BUILTIN = "intent"


def default_model() -> Path:
    """The directory of the model that ships with eecore, the default of :func:`eecore.load`.

    Its folder ``measures`` has ``classifier.safetensors`` and ``calibration-MEASURE.json`` for
    softmax, state and classifier, which ``ConfidentExit.calibrated`` takes.

    Raises:
        ModelNotFoundError: this copy of eecore was packaged without it.
    """
    directory = Path(__file__).resolve().parents[1] / "data" / BUILTIN
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(
            f"{directory}: expected the model that ships with eecore, got nothing: install again"
        )
    return directory


def model_directory(path: str | Path | None) -> Path:
    """The directory or GGUF file of a model; a repository's is fetched.

    None, or ``intent`` where no file has that name, is the model that ships with eecore.

    Raises:
        ModelError: see :func:`eecore.files.hub.fetch_model`.
    """
    if path is None or (str(path) == BUILTIN and not Path(path).exists()):
        return default_model()
    return fetch_model(path)
