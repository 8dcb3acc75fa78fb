"""An OpenAI-compatible server in which every request chooses its exit policy.

A request goes through ``app.py`` (the endpoints), ``admission.py`` (the limit of sequences),
``bodies.py`` (bytes), ``protocol.py`` (fields), ``asking.py`` (makes requests for the engine, in a
thread), ``answering.py`` (runs them), ``tool_calls.py`` (finds calls in the answers) and
``shapes.py`` (writes the answer in OpenAI's format). ``responses.py`` turns a request to
/v1/responses into a chat, ``response_shape.py`` its answer into items and events. ``depth.py``
knows the exit policies that may be asked for, ``served.py`` the model, ``metrics.py`` counts,
``server.py`` is the process. The server needs ``pip install '.[serve]'``; importing the package
alone does not.
"""

from __future__ import annotations

from importlib.util import find_spec

from eecore.errors import EecoreError

__all__ = ["MissingExtraError", "require_extra"]

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "msgspec")


class MissingExtraError(EecoreError, ImportError):
    """The packages that the server needs are not installed."""


def require_extra() -> None:
    """Raise an error unless the packages of the server are installed.

    Raises:
        MissingExtraError: a package is missing; the message says how to install it.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"eecore serve: expected {', '.join(NEEDED)}, got no {missing[0]}: "
            "pip install '.[serve]' in a clone of eecore"
        )
