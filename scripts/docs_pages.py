"""The hook of mkdocs for this repository, which mkdocs.yml loads for ``make docs``.

Pages outside of docs/ (README.md, CHANGELOG.md, bench/RESULTS.md, ...) are part of the site without
a copy in docs/. Pages link to files of the tree. The hook turns such a link into a link within the
site, or into plain text if the file is no page; if the file does not exist, ``make docs`` fails.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
IN_NAVIGATION = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/RESULTS.md")
LINKED = (
    "bench/README.md",
    "bench/models/*/*.svg",
    "bench/models/*/README.md",
    "bench/results/*.md",
    "bench/results/*.svg",
    "python/eecore/data/**/README.md",
    "tests/emulator/README.md",
)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")

log = logging.getLogger("mkdocs.hooks.docs_pages")


def on_config(config: MkDocsConfig) -> None:
    """Put the pages of folders into the navigation, in place of the folder."""
    assert config.nav is not None
    entries = [expanded(entry, Path(config.docs_dir)) for entry in config.nav]
    config.nav = [entry for entry in entries if entry]


def expanded(entry: Any, docs: Path) -> Any:
    """An entry of the navigation with folders expanded; None for a folder without pages."""
    if not isinstance(entry, dict):
        return entry
    ((title, inside),) = entry.items()
    if not isinstance(inside, str) or not inside.endswith("/"):
        return entry
    pages = sorted((docs / inside).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
    return {title: [f"{inside}{page.name}" for page in pages]} if pages else None


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages outside of docs/, and their images."""
    linked = [path.relative_to(ROOT).as_posix() for glob in LINKED for path in ROOT.glob(glob)]
    for name in (*IN_NAVIGATION, *sorted(linked)):
        file = File.generated(config, name, abs_src_path=str(ROOT / name))
        if name not in IN_NAVIGATION:
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the tree into links between pages of the site."""
    uri = page.file.src_uri
    is_in_docs = Path(page.file.abs_src_path or "").is_relative_to(config.docs_dir)
    folder = posixpath.dirname(f"docs/{uri}" if is_in_docs else uri)

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups(default="")
        if re.match(r"[a-z]+:|/", target):
            return found[0]
        in_tree = posixpath.normpath(posixpath.join(folder, target))
        in_site = in_tree.removeprefix("docs/")
        if files.get_file_from_path(in_site) is not None:
            return f"{image}[{text}]({posixpath.relpath(in_site, posixpath.dirname(uri))}{anchor})"
        if not (ROOT / in_tree).exists():
            log.warning("%s: a link to %s, which is not there", uri, in_tree)
        return text

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)
