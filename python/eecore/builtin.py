"""The model that ships with eecore: *intent*, what somebody says to a home into its parse.

Trained for early exit by ``scripts/intents``; its directory has the model card, the exit classifier
and a calibrated threshold for each confidence measure.
"""

from __future__ import annotations

from pathlib import Path

from eecore.errors import ModelNotFoundError
from eecore.hub import fetch_model

__all__ = ["BUILTIN", "default_model", "model_directory"]

BUILTIN = "intent"


def default_model() -> Path:
    """The directory of the model that ships with eecore, what :func:`eecore.load` loads alone.

    Beside the model: ``measures/classifier.safetensors`` and ``calibration-MEASURE.json`` for
    softmax, state and classifier, which ``ConfidentExit.calibrated`` takes.

    Raises:
        ModelNotFoundError: this copy of eecore was packaged without it.
    """
    directory = Path(__file__).resolve().parent / "data" / BUILTIN
    if not (directory / "config.json").is_file():
        raise ModelNotFoundError(
            f"{directory}: expected the model that ships with eecore, got nothing: install again"
        )
    return directory


def model_directory(path: str | Path | None) -> Path:
    """The directory or GGUF file that is meant; a repository's is fetched.

    None, or ``intent`` where nothing is called so, is the model that ships.

    Raises:
        ModelError: see :func:`eecore.hub.fetch_model`.
    """
    if path is None or (str(path) == BUILTIN and not Path(path).exists()):
        return default_model()
    return fetch_model(path)
