"""The page at ``/``, as far as it can be tested without a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import eecore
from eecore.serving.page_files import FOLDER, KINDS
from servers import Asker, asker
from tiny_models import write_model


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
    assert set(re.findall(r'at\("([\w-]+)"\)', script)) <= set(re.findall(r'id="([\w-]+)"', page))
    for path in re.findall(r'fetch\("([^"]+)"', script):
        assert server.get(f"/{path}").status_code in (200, 405)
    about = server.get("/page/depth.json").json()
    assert about["model"] == "intent"
    assert about["facts"] == "model.safetensors, 17.6 MB, 16.0 bits a weight"
    assert len(about["colours"]) == 13
    assert about["colours"][12] == "rgb(251,146,60)"
    modes = {mode["exit"]: mode for mode in about["policies"]}
    assert modes["speculative:3,6"] == {"exit": "speculative:3,6", "lossless": True, "lowest": 3}
    assert modes["full"]["lossless"]
    assert not modes["calibrated:softmax"]["lossless"]
    assert about["exit"] in modes
    assert len(about["prompts"]) == 3


@pytest.mark.parametrize(("weights", "run"), [(None, ""), ("int8", ", run in int8")])
def test_the_facts_of_a_model_in_parts(weights: str | None, run: str, tmp_path: Path) -> None:
    model = eecore.load(write_model(tmp_path, num_shards=2), weights=weights)
    facts = asker(model).get("/page/depth.json").json()["facts"]
    assert facts == f"2 files, 1.3 MB, 32.1 bits a weight{run}"


def test_no_other_files(server: Asker) -> None:
    for name in ("app.py", "..%2Fapp.py", "../app.py", "%2e%2e/app.py", "index.html/"):
        assert server.get(f"/page/{name}").status_code in (307, 404)


def test_the_script_is_one() -> None:
    program = shutil.which("node")
    if program is None:
        pytest.skip("no node")
    script = (FOLDER / "page.js").read_text()
    command = [program, "--input-type=module", "--check"]
    ran = subprocess.run(command, input=script, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr
