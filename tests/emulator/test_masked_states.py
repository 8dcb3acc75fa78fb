"""States of texts on the path of CUDA, where rows are masked which the CPU's tapes leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

import eecore
import emulated
from devices import as_on_cuda
from eecore import Full, SelfSpeculative
from tiny_families import write_family
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows_that_draft_no_more_leave_their_states_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.route(monkeypatch)
    write_family(tmp_path, "qwen3_5")
    model = as_on_cuda(eecore.load(tmp_path, device="cpu", kv_cache_tokens=256))
    prompts = random_prompts(9, 5, 7, seed=1, vocab_size=256)

    def tokens(policy: eecore.Exit) -> list[list[int]]:
        given = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        return [o.token_ids for o in eecore.generate(model, prompts, exit=policy, **given)]

    assert tokens(SelfSpeculative(1, 4, draft_threshold=0.2)) == tokens(Full())
