"""Bounds of a client's guide: its process bounds time and memory, and harms no other request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import eecore
from eecore import Guide, GuideError, RequestError, SamplingParams
from eecore.planning import matchers
from eecore.planning.guided import Guided, Guides
from tripwire import Interrupt, Tripwire

pytestmark = pytest.mark.usefixtures("one_thread")

BLANKS = 'start: "a" WS WS "b"\nWS: / +/\n'


def ambiguous(rules: int) -> str:
    """Rules that call the start on both sides, which fill each row of the parser many times."""
    names = [f"r{i}" for i in range(rules)]
    lines = [f'{name}: start "a{i}" | start start' for i, name in enumerate(names)]
    return "\n".join([f'start: {" | ".join(names)} | "x"', *lines])


def chain(rules: int) -> str:
    """Rules each of which names the next: too deep to go through by calls."""
    lines = [f'r{i}: r{i + 1} r{i + 2} | "a"' for i in range(rules)]
    return "\n".join(["start: r0", *lines, f'r{rules}: "b"', f'r{rules + 1}: "c"'])


HOSTILE = {
    "spaces without end": BLANKS,
    "spaces of rules": 'start: "a" ws ws "b"\nws: / +/\n',
    "a text without end": 'start: "a" start',
    "ambiguous": ambiguous(700),
    "deep": chain(8000),
    "long": f"start: {'x ' * 30000}\nx: y?\n" + 'y: "a" | "b"',
    "doubled": 'start: r60\nr0: "a"\n' + "\n".join(f"r{i + 1}: r{i} r{i}" for i in range(60)),
}
# Guides that are no grammars of their own.
OTHERS = [
    Guide.regex("(a|aa|aaa|aaaa){5000}"),
    Guide.regex("((((a{1000}){1000}){1000}){1000}b?)+"),
    Guide.regex(r"(\w{1,500}\W{1,500}){500}"),
    Guide.json_schema({"type": "string", "minLength": 10**8, "maxLength": 10**9}),
    Guide.json_schema({"type": "array", "minItems": 10**8, "items": {"type": "null"}}),
    Guide.json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 9}}}
    ),
    Guide.json_schema({"anyOf": [{"properties": {f"k{i}": {}}} for i in range(3000)]}),
    Guide.grammar('root ::= a{100000}\na ::= "b"{100000} | root'),
]


@pytest.fixture
def guides(tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> Guides:
    bounds = matchers.Bounds(compile_seconds=0.1, call_seconds=0.1)
    monkeypatch.setattr(matchers, "BOUNDS", bounds)
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


def test_hostile_grammars_end_and_others_go_on(guides: Guides) -> None:
    """All run at once; each ends in a refusal or a text."""

    def ask(guide: Guide) -> str:
        try:
            return str(walk(guides.follow(guide), 8))
        except GuideError as error:
            return str(error)

    hostile = [*map(Guide.grammar, HOSTILE.values()), *OTHERS]
    with ThreadPoolExecutor(len(hostile) + 1) as threads:
        said = threads.map(ask, hostile)
        assert walk(guides.follow(Guide.regex("[a-c]{4}")), 9) == 4
        answers = dict(zip([*HOSTILE, *range(len(OTHERS))], said, strict=True))
    for name in ("spaces without end", "spaces of rules", "a text without end", "deep"):
        assert "within bounds, got one too complex" in answers[name], answers
    assert walk(guides.follow(Guide.regex("[a-c]{5}")), 9) == 5


def test_a_refusal_is_remembered(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Guide] = []
    compile = matchers.GuideProcess.compile

    def counted(self: matchers.GuideProcess) -> None:
        made.append(self._guide)
        compile(self)

    monkeypatch.setattr(matchers.GuideProcess, "compile", counted)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(guides.follow, Guide.grammar(BLANKS)) for _ in range(4)]
        assert all(isinstance(each.exception(), GuideError) for each in asked)
    assert guides.knows(Guide.grammar(BLANKS))
    assert made == [Guide.grammar(BLANKS)]


@pytest.mark.parametrize("max_tokens", [3, 20])
def test_a_guide_that_costs_too_much_later_ends_its_request_alone(
    tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    monkeypatch.setattr(matchers, "BOUNDS", matchers.Bounds(call_seconds=0.2))
    # One of its own: the model remembers those that were refused.
    late = Guide.grammar(f'start: /[a-z]{{4}}/ "!" ws ws "{max_tokens}"\nws: / +/\n')
    sampling = [
        SamplingParams(max_tokens=max_tokens, guide=guide)
        for guide in (late, Guide.regex("[a-f]{30}"), None)
    ]
    alone = [
        eecore.generate(tiny, [[70, 71]], exit="full", sampling=each)[0] for each in sampling[1:]
    ]
    first, *others = eecore.generate(tiny, [[70, 71]] * 3, exit="full", sampling=sampling)
    assert [o.token_ids for o in others] == [o.token_ids for o in alone]
    if max_tokens > 4:
        assert first.finish_reason == "error"
        assert first.error is not None
        assert "guide: expected a grammar that can be followed within bounds" in first.error
        with pytest.raises(RequestError, match="within bounds"):
            eecore.generate(tiny, [[70]], sampling=sampling[0])
    else:
        assert first.finish_reason == "length"


def test_memory_is_bounded(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    little = matchers.Bounds(memory=1 << 20)
    monkeypatch.setattr(matchers, "BOUNDS", little)
    many = Guide.choice([f"{i}-{i * i}" for i in range(4096)])
    with pytest.raises(GuideError, match="within bounds, got one too complex"):
        guides.follow(many)


def test_processes_are_few_and_start_again(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "MAX_PROCESSES", 2)
    ways = [guides.follow(Guide.regex(f"[a-c]{{{n}}}x")) for n in range(1, 6)]
    alive = [way for way in ways if not way._start.is_closed]
    assert len(alive) == 2
    assert [walk(way, 9) for way in ways] == [2, 3, 4, 5, 6]
    assert sum(not way._start.is_closed for way in ways) <= 2


def test_an_interrupt_leaves_a_way_that_can_be_gone(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = guides.follow(Guide.regex("[a-c]{4}"))
    channel: Any = way._start._process._channel
    receive = channel.receive

    def interrupted() -> None:
        receive()
        raise KeyboardInterrupt

    monkeypatch.setattr(channel, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        walk(way, 9)
    assert walk(way, 9) == 4


def test_what_failed_once_is_compiled_another_time(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        matchers.GuideProcess, "compile", lambda _: (_ for _ in ()).throw(MemoryError)
    )
    with pytest.raises(MemoryError):
        guides.follow(Guide.regex("b"))
    monkeypatch.undo()
    assert walk(guides.follow(Guide.regex("b")), 9) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_leaves_guides_that_can_be_compiled(guides: Guides) -> None:
    guides.follow(Guide.regex("a"))
    with Tripwire() as wire:
        guides.follow(Guide.regex("b"))
    assert wire.lines > 20
    for at in range(1, wire.lines + 1):
        guide = Guide.regex(f"[a-c]{{{at}}}")
        with suppress(Interrupt), Tripwire(at):
            guides.follow(guide)
        assert walk(guides.follow(guide), at + 1) == at


def test_processes_end_with_their_guides(tiny: eecore.Model) -> None:
    guides = Guides(tiny.tokenizer, tiny.config.vocab_size, tiny.config.eos_token_ids)
    guides.follow(Guide.regex("a"))
    server = guides._fork._fork._server
    assert server is not None
    assert server[1].poll() is None
    del guides
    assert server[1].poll() == 0
