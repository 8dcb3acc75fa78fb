"""README and docs/ are right about commands, options, variables, names and files."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import eecore
from eecore.cli.app import command_line
from eecore.exit_text import MODES
from eecore.serving.elsewhere import WITHOUT_EFFECT, meaning
from eecore.serving.protocol import (
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [*FRONT, *sorted(DOCS.rglob("*.md"))]}
PAGE = pytest.mark.parametrize("page", PAGES)

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
# Fields that need no word: every request of OpenAI's has them, or they are vLLM's and plain.
OPENAIS = {"messages", "model", "prompt", "user"}
OPENAIS |= {"add_generation_prompt", "add_special_tokens", "return_token_strs"}


def commands(page: str) -> list[list[str]]:
    """The words of each command of a page, in blocks for a shell and in running text."""
    text = PAGES[page].read_text()
    lines = [
        line
        for language, block in FENCED.findall(text)
        if language == "bash"
        for line in block.replace("\\\n", " ").split("\n")
    ]
    lines += INLINE.findall(FENCED.sub("", text))
    parts = [part for line in lines for part in re.split(r"\||&&|;", line.partition(" # ")[0])]
    return [words for part in parts if (words := words_of(part))]


def words_of(command: str) -> list[str]:
    """The words of one command, without the variables that are set for it."""
    try:
        words = shlex.split(command)
    except ValueError:  # a part of a string
        return []
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def said(page: str, program: str) -> list[list[str]]:
    """The commands of a program on a page."""
    return [words[1:] for words in commands(page) if words[0] == program and len(words) > 1]


@cache
def options(name: str = "") -> set[str]:
    """The options of eecore, or of a command of it, which has to exist."""
    command: Any = command_line()
    if name:
        assert name in command.commands, f"eecore {name}: there is no such command"
        command = command.commands[name]
    every = {"--help", "-h"}
    for parameter in command.params:
        every |= {*parameter.opts, *parameter.secondary_opts}
    return every


@PAGE
def test_commands_and_their_options_are_there(page: str) -> None:
    for words in said(page, "eecore"):
        name = "" if words[0].startswith("-") else words[0]
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in options(name), f"eecore {' '.join(words)}"
        assert options(name)


def test_options_of_running_text_belong_to_some_command() -> None:
    command: Any = command_line()
    every: set[str] = set()
    for name in command.commands:
        every |= options(name)
    pages = ("exit-modes", "python", "command-line", "serving", "models", "lab")
    found = 0
    for page in pages:
        text = FENCED.sub("", (DOCS / f"{page}.md").read_text())
        for code in INLINE.findall(text):
            if code.startswith("--"):
                found += 1
                assert re.split(r"[ =]", code)[0] in every, f"{page}.md: {code}"
    assert found > 20


@PAGE
def test_make_has_the_targets(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in said(page, "make"):
        assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), f"make {words[0]}"


@PAGE
def test_scripts_that_are_run_are_there(page: str) -> None:
    for program in ("python", "serve"):
        for words in said(page, program):
            for word in words:
                if re.fullmatch(r"[\w/]+\.(py|yaml)", word):
                    assert (ROOT / word).is_file(), f"{page}: {word}"


@PAGE
def test_links_lead_to_files(page: str) -> None:
    text = FENCED.sub("", PAGES[page].read_text())
    for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
        if "://" not in target:
            assert (PAGES[page].parent / target).exists(), f"{page}: {target}"


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bEECORE_[A-Z_]+\b", text))


def test_the_environment_that_is_read_is_the_one_described() -> None:
    described = variables((DOCS / "environment.md").read_text())
    read: set[str] = set()
    mentioned: set[str] = set()
    for folder, suffix in (
        *(("python/eecore", ".py"), ("csrc", ".cpp"), ("csrc", ".h"), ("scripts", ".sh")),
        *(("tests", ".py"), ("bench", ".py"), ("tests/emulator", ".cpp")),
    ):
        for path in (ROOT / folder).rglob(f"*{suffix}"):
            if path == Path(__file__):
                continue
            text = path.read_text()
            mentioned |= variables(text)
            if folder in ("python/eecore", "csrc", "scripts"):
                read |= set(re.findall(r'(?:environ\S*|getenv\(|envvar=)"(EECORE_\w+)"', text))
                read |= set(re.findall(r"\$\{(EECORE_\w+):-", text))
    assert "EECORE_CPU_CAPABILITY" in read
    assert read <= described
    assert described <= mentioned


def test_the_page_of_the_api_has_every_public_name() -> None:
    named = re.findall(r"^::: eecore\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(eecore.__all__) - {"ops"})


def test_the_page_of_exit_modes_has_the_list_of_modes() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)\(.*?\)`\]\(#.*?\) \| `(.*?)` \|",
        (DOCS / "exit-modes.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [(mode.policy.__name__, mode.form) for mode in MODES.values()]


def test_the_extras_that_are_described_are_those_of_the_project() -> None:
    _, _, after = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    extras = re.findall(r"^([\w-]+) = \[", after.partition("\n[")[0], re.MULTILINE)
    table = (DOCS / "getting-started.md").read_text().partition("## Extras")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = [name for row in rows for name in INLINE.findall(row) if "pip" not in name]
    assert sorted(named) == sorted(extras)


def test_the_endpoints_that_are_described_are_those_of_the_server() -> None:
    source = (ROOT / "python" / "eecore" / "serving" / "app.py").read_text()
    routes = set(re.findall(r'@app\.(?:get|post)\("(/[\w/]*)"', source)) - {"/"}
    routes = {route for route in routes if not route.startswith("/page")}
    page = (DOCS / "serving.md").read_text()
    (row,) = re.findall(r"^\| endpoints \| (.*) \|$", page, re.MULTILINE)
    assert {*routes, "/openapi.json", "/"} == set(INLINE.findall(row))


def test_the_fields_that_are_described_are_those_of_requests() -> None:
    page = (DOCS / "serving.md").read_text()
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    rows = "fields|guides|without effect|a 400"
    found = re.findall(rf"^\| (?:{rows}) \| (.*) \|$", page, re.MULTILINE)
    names = [INLINE.findall(row) for row in found]
    named, beside = (
        {name.partition(".")[0] for each in some for name in each}
        for some in (names[:2], names[2:])
    )
    assert len(found) == 4
    assert named <= known
    beside -= {"exit", "serving/elsewhere", *WITHOUT_EFFECT}
    assert all(name in known or meaning(name, frozenset(known))[1] for name in beside)
    everywhere = {name for code in INLINE.findall(page) for name in re.findall(r"\w+", code)}
    assert known - everywhere <= OPENAIS


def test_the_fields_of_responses_that_are_described_are_those_of_requests() -> None:
    _, _, after = (DOCS / "serving.md").read_text().partition("\n## Responses\n")
    section = after.partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)
    own = {*ResponsesRequest.model_fields} - {*AnswerRequest.model_fields}
    named = {name for row in rows for name in INLINE.findall(row)}
    (refused,) = re.findall(r"^\| refused \| (.*) \|$", section, re.MULTILINE)
    beside = {*INLINE.findall(refused)} - {"disabled"}
    assert named == own - beside
    others = beside - own - CompletionRequest.model_fields.keys()
    assert all(meaning(name, frozenset(own))[1] for name in others)
