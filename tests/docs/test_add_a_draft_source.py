"""The code of docs/extending/add-a-draft-source.md runs, in the files that the page names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import eecore
import test_house
from eecore import Auto, Full
from eecore.planning import auto, sources
from eecore.planning.proposal import NOTHING, Proposal
from eecore.scheduling.sequence import Sequence as Request
from tiny_models import random_prompts

PAGE = test_house.ROOT / "docs" / "extending" / "add-a-draft-source.md"
PROMPTS = random_prompts(9, 21, seed=2)


class Willing(auto.Chooser):
    """A planner that verifies every proposal, whatever it costs."""

    def choose(self, *_: Any, **__: Any) -> auto.Choice:
        return auto.Choice(asks=True)

    def pick(
        self, _: Any, given: Sequence[Sequence[Proposal]], **__: Any
    ) -> tuple[list[Proposal], float]:
        return [its[-1].first(3) if its else NOTHING for its in given], 1.0


def test_a_source_that_the_page_makes_drafts(
    agreeing: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, listed = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    module = {**vars(sources), "Sequence": Request, "Proposal": Proposal}
    exec(compile(source, str(PAGE), "exec"), module)
    exec(compile(listed, str(PAGE), "exec"), module)
    monkeypatch.setattr(sources, "SOURCES", module["SOURCES"])
    settings = {"max_tokens": 24, "ignore_eos": True}
    expected = eecore.generate(agreeing, PROMPTS, exit=Full(), **settings)
    willing = Willing(agreeing.config.num_layers, None)
    learnt = {(torch.get_num_threads(), agreeing.network.draft_head): willing}
    monkeypatch.setattr(agreeing.network, "learnt", learnt)
    got = eecore.generate(agreeing, PROMPTS, exit=Auto(lookup=False), **settings)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert sum(output.stats.drafted for output in got) > 24
    assert {name for name, _ in willing.odds_of_all.counts} == {"repeated"}
