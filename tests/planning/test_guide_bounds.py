"""Bounds of a client's guide: compiling it is bounded, and so is each step; others go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import costly_guides
import eecore
from eecore import Guide, GuideError, RequestError, SamplingParams
from eecore.planning.grammars import Grammars
from eecore.planning.guided import Guided, Guides
from tripwire import Interrupt, Tripwire

pytestmark = pytest.mark.usefixtures("one_thread")

SPINS = Guide.grammar('// spin\nstart: "a"')
COSTLY = [*(f"// {cost}" for cost in costly_guides.COSTS), "// spin after a"]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    costly_guides.stand_in(monkeypatch)


@pytest.fixture
def guides(tiny: eecore.Model) -> Guides:
    return Guides(tiny.tokenizer, tiny.config.vocab_size, tiny.config.eos_token_ids)


def walk(guided: Guided, steps: int) -> int:
    """Take allowed tokens, and return how many."""
    masks = np.zeros((1, guided.num_words), dtype=np.int32)
    tokens: list[int] = []
    for _ in range(steps):
        guided.write_masks(masks, tokens, [])
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        tokens.append(int(allowed[len(tokens) * 7 % len(allowed)]))
        if guided.is_over(tokens):
            break
    return len(tokens)


def test_costly_guides_end_and_others_go_on(guides: Guides) -> None:
    """All run at once."""

    def ask(cost: str) -> str:
        way = guides.follow(Guide.grammar(f'{cost}\nstart: "a" /[b-d]/ "e"'))
        return str(walk(way, 9))

    with ThreadPoolExecutor(len(COSTLY) + 1) as threads:
        asked = {cost: threads.submit(ask, cost) for cost in ("// nothing after x", *COSTLY)}
        assert walk(guides.follow(Guide.regex("[a-c]{4}")), 9) == 4
    assert asked.pop("// nothing after x").result() == "3"
    for cost, answer in asked.items():
        done = "followed" if "after" in cost else "compiled"
        with pytest.raises(GuideError, match=f"can be {done} within bounds, got one too complex"):
            answer.result()
    assert walk(guides.follow(Guide.regex("[a-c]{5}")), 9) == 5


def test_a_refusal_is_remembered(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Guide] = []
    compiled = Grammars.compiled

    def counted(self: Grammars, guide: Guide) -> object:
        made.append(guide)
        return compiled(self, guide)

    monkeypatch.setattr(Grammars, "compiled", counted)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(guides.follow, SPINS) for _ in range(4)]
        assert all(isinstance(each.exception(), GuideError) for each in asked)
    assert made == [SPINS]


@pytest.mark.parametrize("max_tokens", [3, 20])
def test_a_guide_that_costs_too_much_later_ends_its_request_alone(
    tiny_directory: Path, max_tokens: int
) -> None:
    model = eecore.load(tiny_directory, kv_cache_tokens=1024)  # its guides have stand-ins
    late = Guide.grammar('// spin after !\nstart: /[a-z]{4}/ "!" /[a-z]{9}/')
    sampling = [
        SamplingParams(max_tokens=max_tokens, guide=guide)
        for guide in (late, Guide.regex("[a-f]{30}"), None)
    ]
    alone = [
        eecore.generate(model, [[70, 71]], exit="full", sampling=each)[0] for each in sampling[1:]
    ]
    first, *others = eecore.generate(model, [[70, 71]] * 3, exit="full", sampling=sampling)
    assert [o.token_ids for o in others] == [o.token_ids for o in alone]
    if max_tokens > 4:
        assert first.finish_reason == "error"
        assert first.error is not None
        assert "guide: expected a grammar that can be followed within bounds" in first.error
        with pytest.raises(RequestError, match="within bounds"):
            eecore.generate(model, [[70]], sampling=sampling[0])
    else:
        assert first.finish_reason == "length"


def test_what_failed_once_is_compiled_another_time(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammars, "compiled", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        guides.follow(Guide.regex("b"))
    monkeypatch.undo()
    assert walk(guides.follow(Guide.regex("b")), 9) == 1


def test_an_interrupt_at_any_line_leaves_guides_that_can_be_compiled(guides: Guides) -> None:
    guides.follow(Guide.regex("a"))
    with Tripwire() as wire:
        guides.follow(Guide.regex("b"))
    assert wire.lines > 10
    for at in range(1, wire.lines + 1):
        guide = Guide.regex(f"[a-c]{{{at}}}")
        with suppress(Interrupt), Tripwire(at):
            guides.follow(guide)
        assert walk(guides.follow(guide), at + 1) == at
