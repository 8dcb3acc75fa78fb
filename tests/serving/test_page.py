"""The page at ``/``, as far as it can be tested without a browser."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess

import pytest

import eecore
from eecore.serving.page_files import FOLDER, KINDS
from servers import Asker, asker


def test_the_page_and_its_files(server: Asker) -> None:
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)
    assert sorted(named) == ["page/page.css", "page/page.js"]
    for name in named:
        answer = server.get(f"/{name}")
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert len(answer.content) > 100
    assert {path.name for path in FOLDER.iterdir()} == set(KINDS)
    assert server.get("/page/markdown.js").headers["content-type"].startswith("text/javascript")


def test_what_the_page_asks_for_exists(server: Asker) -> None:
    script, page = server.get("/page/page.js").text, server.get("/").text
    assert set(re.findall(r'at\("([\w-]+)"\)', script)) <= set(re.findall(r'id="([\w-]+)"', page))
    for path in re.findall(r'fetch\("([^"]+)"', script):
        assert server.get(f"/{path}").status_code in (200, 405)
    about = server.get("/page/depth.json").json()
    assert about["model"] == "intent"
    assert len(about["colours"]) == 13
    assert about["colours"][12] == "rgb(251,146,60)"
    modes = {mode["exit"]: mode for mode in about["policies"]}
    assert modes["speculative:3,6"] == {"exit": "speculative:3,6", "lossless": True, "lowest": 3}
    assert modes["full"]["lossless"]
    assert not modes["calibrated:softmax"]["lossless"]
    assert about["exit"] in modes
    assert len(about["prompts"]) == 3


def test_a_model_that_talks_is_introduced_as_one(tiny: eecore.Model) -> None:
    about = asker(tiny).get("/page/depth.json").json()
    assert about["remembers"]
    assert "home" not in about["hello"]


def test_no_other_files(server: Asker) -> None:
    for name in ("app.py", "..%2Fapp.py", "../app.py", "%2e%2e/app.py", "index.html/"):
        assert server.get(f"/page/{name}").status_code in (307, 404)


@pytest.mark.parametrize("name", ["page.js", "markdown.js"])
def test_a_script_is_one(name: str) -> None:
    node([(FOLDER / name).read_text()], "--check")


MARKDOWN = {
    "# One\n\na **b** *c* `d*e*` ~~f~~": "<h1>One</h1><p>a <strong>b</strong> <em>c</em> "
    "<code>d*e*</code> <del>f</del></p>",
    "two\nlines\n\nsnake_case and 2 * 3 * 4": "<p>two\nlines</p><p>snake_case and 2 * 3 * 4</p>",
    "1. one\n   - a\n   - b\n2. two": "<ol><li><p>one</p><ul><li><p>a</p></li><li><p>b</p></li>"
    "</ul></li><li><p>two</p></li></ol>",
    "```py\nif a:\n    b\n```\nafter": "<pre py>if a:\n    b</pre><p>after</p>",
    "```\nnever **closed": "<pre>never **closed</pre>",
    "> said\n\n---\n\n| a | b |\n|---|---|\n| 1 | **2** |": "<blockquote><p>said</p></blockquote>"
    "<hr></hr><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><strong>2</strong></td></tr>"
    "</table>",
    "[x](https://a.b/c) [y](javascript:alert(1)) <b>z</b>": "<p><a https://a.b/c>x</a> "
    "[y](javascript:alert(1)) <b>z</b></p>",
    "[HassLightSet [area kitchen]]": "<p>[HassLightSet [area kitchen]]</p>",
    "**open, \\*not\\*": "<p>**open, *not*</p>",
    "": "",
}
SHOW = """
const shown = (node) => node.text ?? `<${node.tag}${node.href ? " " + node.href : ""}` +
  `${node.language ? " " + node.language : ""}>${node.children.map(shown).join("")}</${node.tag}>`;
const placed = (text, node) => node.text === undefined
  ? node.children.every((child) => placed(text, child))
  : text.slice(node.at, node.at + node.text.length) === node.text;
const found = TEXTS.map((text) => blocksOf(text).map((node) => {
  if (!placed(text, node)) throw new Error(text);
  return shown(node);
}).join(""));
console.log(JSON.stringify(found));
"""


def test_markdown_becomes_a_tree_that_knows_its_text() -> None:
    texts = f"const TEXTS = {json.dumps(list(MARKDOWN))};"
    said = node([(FOLDER / "markdown.js").read_text(), texts, SHOW], "-")
    assert json.loads(said) == list(MARKDOWN.values())


def test_any_text_is_markdown() -> None:
    chance = random.Random(5)
    parts = ["*", "**", "_", "`", "```", "\n", "\n\n", "- ", "1. ", "> ", "|", "|-|-|"]
    parts += ["[", "](", ")"]
    parts += ["  ", "    ", "#", " ", "a", "é", "https://a.b", "\\", "~~", "***", "😀"]
    drawn = ["".join(chance.choices(parts, k=chance.randrange(60))) for _ in range(500)]
    drawn += ["> " * 500 + "a", "- " * 500 + "a", "*a " * 2000, "[" * 2000, "`" * 2000, "|a" * 2000]
    texts = f"const TEXTS = {json.dumps(drawn)};"
    assert len(json.loads(node([(FOLDER / "markdown.js").read_text(), texts, SHOW], "-"))) == 506


def node(scripts: list[str], option: str) -> str:
    """The output of a script."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("no node")
    command = [program, "--input-type=module", option]
    ran = subprocess.run(command, input="\n".join(scripts), text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
