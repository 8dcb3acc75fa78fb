"""Real text of every Python installation: beginnings of the standard library's docstrings."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import warnings

MODULES = (
    "argparse asyncio.events bisect calendar collections configparser contextlib csv dataclasses "
    "datetime decimal difflib email.message fractions functools gettext heapq html http.client "
    "imaplib inspect ipaddress json locale logging mailbox numbers os pathlib pickle pprint "
    "queue random re sched shutil smtplib socket statistics string subprocess tarfile tempfile "
    "textwrap threading typing unittest.case urllib.parse uuid weakref zipfile"
).split()


def real_prompts(count: int, *, words: int = 12, seed: int = 0) -> list[str]:
    """``count`` different prompts of about ``words`` words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # members that are on their way out
        unique = _beginnings(words)
    if len(unique) < count:
        raise ValueError(f"expected {count} prompts, found {len(unique)}")
    return random.Random(seed).sample(unique, count)


@functools.cache
def _beginnings(words: int) -> list[str]:
    found = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for _, member in sorted(inspect.getmembers(module)):
            if inspect.isfunction(member) or inspect.isclass(member):
                text = " ".join((inspect.getdoc(member) or "").split()[:words])
                if len(text.split()) == words and text.isascii():
                    found.add(text)
    return sorted(found)
