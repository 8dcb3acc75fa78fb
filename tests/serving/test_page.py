"""The page at ``/``, as far as it can be known without a browser."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from eecore.serving.page_files import FOLDER, KINDS
from servers import Asker


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


def test_what_the_page_asks_for_exists(server: Asker) -> None:
    script, page = server.get("/page/page.js").text, server.get("/").text
    assert set(re.findall(r'at\("(\w+)"\)', script)) <= set(re.findall(r'id="(\w+)"', page))
    for path in re.findall(r'fetch\("([^"]+)"', script):
        assert server.get(f"/{path}").status_code in (200, 405)
    about = server.get("/page/depth.json").json()
    assert about["model"] == "intent"
    assert len(about["colours"]) == 13
    assert about["colours"][12] == "rgb(251,146,60)"
    assert "speculative:3,6" in about["policies"]


def test_no_other_files(server: Asker) -> None:
    for name in ("app.py", "..%2Fapp.py", "../app.py", "%2e%2e/app.py", "index.html/"):
        assert server.get(f"/page/{name}").status_code in (307, 404)


def test_the_script_is_one() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    script = (FOLDER / "page.js").read_text()
    command = [node, "--input-type=module", "--check"]
    subprocess.run(command, input=script, text=True, check=True, capture_output=True)
