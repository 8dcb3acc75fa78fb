"""The modules, processes and garbage collections of a command before its first token, counted."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from command_line import start
from eecore.cli.process import kept

COUNTING = """
import gc, json, sys
seen = {"processes": [], "collections": 0}
def hook(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        seen["processes"].append(event)
def collected(phase, info):
    seen["collections"] += phase == "start" and info["generation"] == 2
sys.addaudithook(hook)
gc.callbacks.append(collected)
from eecore.cli.process import run_process
code = run_process()
seen |= {"modules": sorted(sys.modules), "frozen": gc.get_freeze_count(), "on": gc.isenabled()}
print(json.dumps(seen), file=sys.stderr)
sys.exit(code)
"""
UNUSED = {
    "datasets",
    "fastapi",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "prompt_toolkit",
    "starlette",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "uvicorn",
    "eecore.integrations",
    "eecore.lab",
    "eecore.serving",
}
MAX_OWN_MODULES = 155


def counted(*arguments: str) -> tuple[str, dict[str, Any]]:
    """The output of a command, and its counts."""
    with start(arguments, program=("-c", COUNTING)) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return out, json.loads(error.splitlines()[-1])


def test_one_answer_of_the_shipped_model_does_nothing_that_it_does_not_need() -> None:
    out, seen = counted("generate", "turn on the light", "--json")
    answer = json.loads(out)
    assert answer["text"] == "[HassTurnOn [domain light]]"
    own = [name for name in seen["modules"] if name.partition(".")[0] == "eecore"]
    assert not UNUSED & set(seen["modules"])
    assert len(own) <= MAX_OWN_MODULES
    assert seen["processes"] == []
    # Each passes through all that torch's import made; without `kept` there are a dozen.
    assert seen["collections"] <= 1
    assert seen["frozen"] > 100_000
    assert seen["on"]
    # The prompt once, each token but the first, which comes of it, and at most one wrong draft.
    assert answer["stats"]["prompt_layers_run"] == 12 * answer["stats"]["prompt_tokens"]
    assert answer["stats"]["layers_run"] <= 12 * len(answer["token_ids"])


def test_help_imports_neither_torch_nor_what_answers() -> None:
    out, seen = counted("generate", "--help")
    assert "--max-tokens" in out
    assert not {"torch", "numpy", "tokenizers", "eecore.generation"} & set(seen["modules"])
    assert seen["processes"] == []


def test_collections_go_on_after_an_import_that_fails() -> None:
    frozen = gc.get_freeze_count()

    @kept()
    def failing() -> None:
        assert not gc.isenabled()
        raise ImportError

    with pytest.raises(ImportError):
        failing()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen  # nothing new: what lies about may still be collected
