"""An OpenAI-compatible server in which every request says how deep it may go.

A request goes through ``app.py`` (the endpoints), ``admission.py`` (who is let in), ``bodies.py``,
``protocol.py`` (the fields), ``asking.py`` (requests of the engine, made in a thread),
``answering.py`` (which runs them), ``tool_calls.py`` (calls in the answers) and ``shapes.py``
(OpenAI's words for what came). ``responses.py`` makes a chat of a request to /v1/responses,
``response_shape.py`` items and events of what came of it. ``depth.py`` knows the exit policies that
may be asked for, ``served.py`` the model, ``metrics.py`` counts, ``tracing.py`` makes spans,
``server.py`` is the process. ``ray.py`` runs several on Ray Serve, ``replicas.py`` says which of
them a request goes to.
Needs ``pip install 'eecore[serve]'``; to import the package alone does not.

An engine may run in a process of its own: ``remote.py`` starts it, and again when it has ended, and
talks to it in the messages of ``wire.py``. ``engine_process.py`` and ``stepping.py`` are what it
does.
"""

from __future__ import annotations

from importlib.util import find_spec

from eecore.errors import EecoreError

__all__ = ["MissingExtraError", "require_extra"]

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "msgspec")


class MissingExtraError(EecoreError, ImportError):
    """The packages that the server needs are not installed."""


def require_extra() -> None:
    """Raise unless the packages of the server are there.

    Raises:
        MissingExtraError: says how to install them.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"eecore serve: expected {', '.join(NEEDED)}, got no {missing[0]}: "
            "pip install 'eecore[serve]'"
        )
