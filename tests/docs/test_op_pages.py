"""Every op has a section in docs/ops, whose example runs, and a line in the table of ops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eecore import ops

PAGES = Path(__file__).resolve().parents[2] / "docs" / "ops"
TEXTS = {page.stem: page.read_text() for page in PAGES.glob("*.md")}
SECTIONS = {
    op: (page, text)
    for page, whole in TEXTS.items()
    for op, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", whole, re.MULTILINE | re.DOTALL)
    if page != "index"
}


@pytest.mark.parametrize("op", ops.OP_NAMES)
def test_the_example_of_an_op_runs(op: str) -> None:
    page, text = SECTIONS[op]
    assert f"\n::: eecore.ops.{op}\n" in text
    codes = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert codes
    for code in codes:
        assert f"ops.{op}(" in code
        assert "assert" in code
        exec(compile(code, f"{page}.md", "exec"), {"__name__": "__main__"})


def test_every_export_is_described_once() -> None:
    """So that links to it have one target."""
    named = re.findall(r"^::: eecore\.ops\.(\w+)$", "\n".join(TEXTS.values()), re.MULTILINE)
    blocks = {"BLOCK_FORMATS", "DELTA_TILE", "FLOAT_BLOCK_FORMATS"}
    constants = {*blocks, "CPU_ONLY_OPS", "OP_NAMES"}
    assert sorted(named) == sorted(set(ops.__all__) - constants)
    assert sorted(SECTIONS) == sorted(ops.OP_NAMES)


def test_the_table_has_every_op_and_its_devices() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)`\]\((\w+)\.md#(\w+)\) \| .+ \| yes \| (yes|no) \|$",
        TEXTS["index"],
        re.MULTILINE,
    )
    assert rows == [
        (op, SECTIONS[op][0], op, "no" if op in ops.CPU_ONLY_OPS else "yes") for op in ops.OP_NAMES
    ]
