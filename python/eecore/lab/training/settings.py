"""How settings are checked: whether each can be used, and what is expected of it."""

from __future__ import annotations

from eecore.errors import TrainingError
from eecore.values import shown

__all__ = ["Checks", "check"]

Checks = dict[str, tuple[bool, str]]


def check(checks: Checks, settings: object, prefix: str = "") -> None:
    """Raise a TrainingError that names the first setting which cannot be used."""
    for name, (ok, expected) in checks.items():
        if not ok:
            got = shown(getattr(settings, name))
            raise TrainingError(f"{prefix}{name}: expected {expected}, got {got}")
