"""Budgets of thoughts: where they end, what binds the answer alone, the same text everywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eecore
from devices import engine_of, load
from eecore import (
    ConfidentExit,
    EngineConfig,
    FixedExit,
    Full,
    Guide,
    HeadDrafts,
    PromptLookup,
    RequestError,
    SamplingParams,
    SelfSpeculative,
    ThoughtStop,
)
from eecore.exits import Exit
from eecore.models import Tokenizer
from eecore.models.text.thinking import Thinking
from eecore.planning.thoughts import OVERTIME, GuidedThought
from head_packs import write_pack
from thinking_models import ALWAYS, CLOSES, HYBRID, OPENS, QUESTION, WORDS, write_thinking_model
from tiny_models import scale_layers, write_model
from workloads import LOSSLESS, Request, check_company, same, serve, tokens_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:think. expected a rule that was calibrated"),
]

EOS = 257
SENTENCES = {CLOSES: -100, 198: 4, 0: 4}
"""Biases with which many tokens end a line, or with ! a sentence."""
NUMBER = Guide.regex("[0-9]{3}")
CLOSED = "\n</think>\n\n"


def agreeing(directory: Path, template: str, **settings: Any) -> Path:
    write_thinking_model(directory, template, seed=3, num_hidden_layers=5, **settings)
    return scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model whose template opens the thought, with a draft head."""
    directory = agreeing(tmp_path_factory.mktemp("budgets") / "always", ALWAYS)
    write_pack(directory / "exits", eecore.load(directory), taps=(2,), follows_tokens=True)
    return load(directory, kv_cache_tokens=4096)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = agreeing(tmp_path_factory.mktemp("budgets") / "hybrid", HYBRID)
    return load(directory, kv_cache_tokens=4096)


def asked(model: eecore.Model, question: str = "Why?", **variables: Any) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat([{"role": "user", "content": question}], **variables)


# Where a thought ends


def written(
    directory: Path,
    script: str,
    budget: int | None,
    *,
    template: str = ALWAYS,
    markers: bool = True,
    max_tokens: int = 1000,
    num_drafts: int = 0,
) -> str:
    """The text of a model that would write ``script``, under a budget."""
    if not directory.exists():
        write_thinking_model(directory, template, markers=markers)
    tokenizer = Tokenizer.from_directory(directory)
    thinking = Thinking.of(tokenizer)
    assert tokenizer is not None
    assert thinking is not None
    prompt = tokenizer.encode_chat(QUESTION)
    start = thinking.start(prompt)
    assert start is not None
    guided = GuidedThought(
        tokenizer, thinking, start, prompt, budget, max_tokens, frozenset({EOS}), None, 320
    )
    wished = tokenizer.encode(script, add_special_tokens=False)
    ids: list[int] = []
    while wished and len(ids) < max_tokens:
        drafts = guided.drafts(ids, wished[:num_drafts], num_drafts, frozenset({EOS}))
        masks = np.zeros((num_drafts + 1, guided.num_words), dtype=np.int32)
        guided.write_masks(masks, ids, drafts)
        if not guided.may_mask(ids, num_drafts):  # then layers may draft
            assert (masks == -1).all()
        for row in range(len(drafts) + 1):
            allowed = [t for t in range(320) if masks[row].view(np.uint32)[t // 32] >> t % 32 & 1]
            token = wished[0] if wished and wished[0] in allowed else allowed[0]
            if wished and (len(allowed) > 1 or token == wished[0]):
                wished.pop(0)
            ids.append(token)
            if row == len(drafts) or drafts[row] != token or not wished:
                break
    return tokenizer.decode(ids, skip_special_tokens=False)


LONG = "x" * 200
PLACES = [
    ("One. Two. Three.", 3, f"One.{CLOSED} Two. Three."),
    ("One. Two. Three.", 4, f"One.{CLOSED} Two. Three."),
    ("One. Two. Three.", 5, f"One. {CLOSED}Two. Three."),
    ("One. Two. Three.", 6, f"One. Two.{CLOSED} Three."),
    ("One\nTwo\nThree", 2, "One\n</think>\n\nTwo\nThree"),
    ("It is 3.14 or so. Yes", 6, f"It is 3.14 or so.{CLOSED} Yes"),
    ('"Is it?" Yes', 2, f'"Is it?{CLOSED}" Yes'),
    (LONG, 4, LONG[: 4 + OVERTIME] + CLOSED + LONG[4 + OVERTIME :]),
    (LONG, 0, f"{CLOSED}{LONG}"),
    ("One.</think>Two. Three.", 9, "One.</think>Two. Three."),
    ("One", 9, "One"),
    ("One. Two. Three.", None, "One. Two. Three."),
]


@pytest.mark.parametrize(("script", "budget", "expected"), PLACES)
@pytest.mark.parametrize("num_drafts", [0, 1, 7])
def test_a_thought_ends_with_a_sentence_or_a_line(
    tmp_path: Path, script: str, budget: int | None, expected: str, num_drafts: int
) -> None:
    assert written(tmp_path / "m", script, budget, num_drafts=num_drafts) == expected


def test_a_model_that_opens_its_thought(tmp_path: Path) -> None:
    assert written(tmp_path / "m", "<think>\nOne. Two.", 3, template=HYBRID) == (
        f"<think>\nOne.{CLOSED} Two."
    )
    assert written(tmp_path / "m", "<think>One", 0) == f"<think>{CLOSED}One"
    assert written(tmp_path / "m", "One. Two.", 3) == "One. Two."


def test_markers_in_words_close_a_thought(tmp_path: Path) -> None:
    opens, closes = "Here is my thought process:", "\nHere is my response:\n\n"
    found = written(tmp_path / "m", f"{opens} One.Two.", 4, template=WORDS, markers=False)
    assert found == f"{opens} One.{closes}Two."


def test_the_answer_has_room(tmp_path: Path) -> None:
    for most, room in ((100, 16), (30, 13), (5, 1)):
        found = written(tmp_path / "m", LONG, 1000, max_tokens=most)
        thought, _, answer = found.partition("\n</think>\n\n")
        assert len(answer) == room
        assert len(thought) == most - room - 4


def test_an_answer_does_not_end_before_it_begins(always: eecore.Model) -> None:
    """Even where the model would end the text once its thought is cut."""
    (output,) = eecore.generate(
        always, asked(always), thinking_budget=0, logit_bias={EOS: 100}, max_tokens=80
    )
    closing = always.tokenizer.encode(CLOSED) if always.tokenizer else []
    assert output.token_ids[: len(closing)] == closing
    assert len(output.token_ids) == len(closing) + 2
    assert output.token_ids[-1] == EOS
    assert output.finish_reason == "stop"


# The same text everywhere

BUDGETS: list[dict[str, Any]] = [
    {"thinking_budget": 0},
    {"thinking_budget": 7},
    {"thinking_budget": 7, "guide": NUMBER},
    {"thinking_budget": 1000},
    {"guide": NUMBER, "logit_bias": {CLOSES: 3}},
    {"thinking_budget": 12, "stop": ("e", "\n")},
    {"thinking_budget": 5, "repetition_penalty": 1.3, "logprobs": 2},
    *({"thinking_budget": budget, "logit_bias": SENTENCES} for budget in (10, 17, 25)),
    {"think": ThoughtStop(0.0, 1, every=6, stem=" A", max_answer=5), "max_tokens": 110},
    {"think": ThoughtStop(0.0, 2, every=4, stem=" A", max_answer=3), "guide": NUMBER},
    {"think": ThoughtStop(math.inf, every=5, max_answer=4), "thinking_budget": 30},
]


def outputs_of(model: eecore.Model, policy: Exit, heat: float) -> list[eecore.Output]:
    questions = [f"Why {number}{'ab' * number}?" for number in range(len(BUDGETS))]
    sampling = [
        SamplingParams(**{"max_tokens": 70, "temperature": heat, "seed": seed, **settings})
        for seed, settings in enumerate(BUDGETS)
    ]
    prompts = [asked(model, question) for question in questions]
    return eecore.generate(model, prompts, exit=policy, sampling=sampling)


@pytest.mark.parametrize("policy", [*LOSSLESS, HeadDrafts(4, 0.0)], ids=str)
@pytest.mark.parametrize("name", ["always", "hybrid"])
def test_lossless_modes_give_what_full_gives(
    policy: Exit, name: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    if isinstance(policy, HeadDrafts) and name == "hybrid":
        return  # it has no head
    expected, got = (outputs_of(model, each, 0.0) for each in (Full(), policy))
    for one, other in zip(got, expected, strict=True):
        assert (one.token_ids, one.text, one.thought) == (
            other.token_ids,
            other.text,
            other.thought,
        )
        assert one.finish_reason == other.finish_reason
        assert one.stats.thought_tokens == other.stats.thought_tokens
        assert one.stats.thought_end == other.stats.thought_end
        assert one.thought_probes == other.thought_probes


@pytest.mark.parametrize("policy", LOSSLESS[:3], ids=str)
def test_layers_draft_within_a_thought_and_after_it(always: eecore.Model, policy: Exit) -> None:
    """Not near its end, where tokens have masks."""
    full, got = (
        eecore.generate(
            always,
            asked(always),
            exit=each,
            thinking_budget=60,
            max_tokens=200,
            ignore_eos=True,
            logit_bias={CLOSES: -100},
        )[0]
        for each in (Full(), policy)
    )
    assert got.token_ids == full.token_ids
    count = got.stats.thought_tokens
    assert 60 < count < 100
    assert got.stats.drafted > 30
    if not isinstance(policy, SelfSpeculative):
        return  # drafts run the last layer, too
    drafted = [layer < 5 for layer in got.exit_layers]
    assert any(drafted[: count - OVERTIME - policy.max_drafts])
    assert not any(drafted[60:count])
    assert any(drafted[count:])


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_each_budget_holds(always: eecore.Model, heat: float) -> None:
    for output, settings in zip(outputs_of(always, Full(), heat), BUDGETS, strict=True):
        budget = settings.get("thinking_budget")
        assert output.thought is not None
        if budget is not None:
            assert output.stats.thought_tokens <= budget + OVERTIME + 2
            assert output.text or "stop" in settings
        if "guide" in settings:
            assert output.text is not None
            assert output.text.isdigit()
            assert len(output.text) == 3
            assert output.finish_reason == "stop"


def test_mixed_batches_and_preemptions(always: eecore.Model) -> None:
    ways: list[tuple[Exit, dict[str, Any], float]] = [
        (Full(), {"thinking_budget": 4}, 0.0),
        (PromptLookup(4, min_ngram=1), {"thinking_budget": 9}, 0.0),
        (SelfSpeculative(2, 3), {"thinking_budget": 3, "guide": NUMBER}, 1.0),
        (SelfSpeculative(2, 3), {}, 0.0),
        (ConfidentExit(threshold=0.9), {"thinking_budget": 6}, 1.0),
        (PromptLookup(4, min_ngram=1), {"guide": NUMBER}, 0.0),
        (Full(), {}, 1.0),
        (HeadDrafts(3, 0.0), {"thinking_budget": 2}, 0.0),
        (eecore.Auto(), {"thinking_budget": 8}, 0.0),
        (eecore.Auto(), {"think": ThoughtStop(0.0, 1, every=6, stem=" A", max_answer=5)}, 0.0),
        (SelfSpeculative(2, 3), {"think": ThoughtStop(math.inf, every=5, stem=" A")}, 1.0),
        (ConfidentExit(threshold=0.9), {"think": ThoughtStop(0.0, 1, every=4, stem=" A")}, 0.0),
        (FixedExit(3), {"think": ThoughtStop(0.0, 1, every=4, stem=" A", max_answer=3)}, 1.0),
    ]
    requests = [
        Request(
            asked(always, "W" + "hy" * (seed % 3)),
            policy,
            SamplingParams(max_tokens=50, temperature=heat, seed=seed, ignore_eos=True, **more),
        )
        for seed, (policy, more, heat) in enumerate(ways)
    ]
    few_pages = engine_of(always, EngineConfig(kv_cache_tokens=160, page_size=4))
    check_company(always, requests, few_pages)
    together = serve(engine_of(always), requests)
    ahead = serve(engine_of(always, ahead=True), requests)
    assert all(map(same, ahead, together))


def test_masks_that_end_before_those_of_others(always: eecore.Model) -> None:
    """A row without masks needs the fused head, which rows that all had masks did not."""
    ways: list[tuple[Exit, dict[str, Any], float]] = [
        (PromptLookup(4, min_ngram=1), {"thinking_budget": 9}, 0.0),
        (SelfSpeculative(2, 3), {"thinking_budget": 3, "guide": NUMBER}, 1.0),
        (SelfSpeculative(2, 3), {}, 0.0),
    ]
    requests = [
        Request(
            asked(always, "W" + "hy" * (seed % 3)),
            policy,
            SamplingParams(max_tokens=50, temperature=heat, seed=seed, ignore_eos=True, **more),
        )
        for seed, (policy, more, heat) in enumerate(ways, 1)
    ]
    alone = [serve(engine_of(always), [request])[0] for request in requests]
    together = serve(engine_of(always), requests)
    assert tokens_of(together) == tokens_of(alone)


def test_a_budget_that_is_not_reached_changes_nothing(always: eecore.Model) -> None:
    for settings in ({}, {"temperature": 1.0, "seed": 5}):
        prompt = asked(always)
        free, bound = (
            eecore.generate(
                always,
                prompt,
                max_tokens=80,
                thinking_budget=budget,
                logit_bias={CLOSES: 6},
                **settings,  # type: ignore[arg-type]
            )[0]
            for budget in (None, 1000)
        )
        assert free.stats.thought_tokens < 60
        assert (free.token_ids, free.text) == (bound.token_ids, bound.text)


# What binds the answer alone


def test_a_guide_lets_the_model_think_first(hybrid: eecore.Model) -> None:
    settings: dict[str, Any] = {"guide": NUMBER, "max_tokens": 60, "thinking_budget": 9}
    (thinks,) = eecore.generate(hybrid, asked(hybrid), **settings, logit_bias={OPENS: 100})
    assert thinks.token_ids[0] == OPENS
    assert thinks.thought is not None
    assert len(thinks.text or "") == 3
    for prompt in (asked(hybrid, enable_thinking=False), asked(hybrid)):
        (answers,) = eecore.generate(hybrid, prompt, **settings, logit_bias={OPENS: -100})
        assert (answers.thought, len(answers.text or "")) == (None, 3)
        assert len(answers.token_ids) == 3


def test_a_guided_text_does_not_end_within_its_thought(always: eecore.Model) -> None:
    (output,) = eecore.generate(
        always, asked(always), guide=NUMBER, thinking_budget=5, logit_bias={EOS: 100}, max_tokens=60
    )
    assert len(output.text or "") == 3


def test_a_schema_is_followed_after_the_thought(always: eecore.Model) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    prompts = [asked(always, question) for question in ("Why?", "What?", "Who?")]
    for output in eecore.generate(
        always,
        prompts,
        guide=Guide.json_schema(schema),
        thinking_budget=6,
        max_tokens=90,
        temperature=1.0,
        seed=1,
        exit="auto",
    ):
        assert isinstance(json.loads(output.text or "")["a"], int)
        assert output.thought


# What is refused


def refusals(model: eecore.Model, prompts: Sequence[Any], **settings: Any) -> str:
    with pytest.raises(RequestError) as caught:
        eecore.generate(model, list(prompts), **settings)
    return str(caught.value)


def test_budgets_that_cannot_be(always: eecore.Model, tmp_path: Path) -> None:
    prompts = [asked(always)]
    for budget in (-1, 1.5, True, "a"):
        said = refusals(always, prompts, thinking_budget=budget)
        assert said.startswith("thinking_budget: expected None or a whole number, 0..")
    said = refusals(always, prompts, thinking_budget=3, max_tokens=4)
    assert said.startswith("max_tokens: expected at least 5 with thinking_budget")
    plain = load(write_model(tmp_path / "plain"), kv_cache_tokens=256)
    said = refusals(plain, ["a"], thinking_budget=3)
    assert said.startswith("thinking_budget: expected a model with markers of thoughts")


def test_a_prompt_without_a_thought_has_no_budget(hybrid: eecore.Model) -> None:
    prompt = asked(hybrid, enable_thinking=False)
    free, bound = (
        eecore.generate(hybrid, prompt, max_tokens=12, thinking_budget=budget)[0]
        for budget in (None, 0)
    )
    assert free.token_ids == bound.token_ids
    assert bound.thought is None
