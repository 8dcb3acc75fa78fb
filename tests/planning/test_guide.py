"""Guides: only allowed tokens in every mode, and lossless modes stay lossless."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from tokenizers import AddedToken, Tokenizer

import eecore
from devices import engine_of, load
from eecore import (
    Auto,
    ConfidentExit,
    EngineConfig,
    FixedExit,
    Full,
    Guide,
    GuideError,
    PromptLookup,
    RequestError,
    SamplingParams,
    SelfSpeculative,
)
from eecore.exits import Exit
from eecore.guide import FORMATS, enforceable
from eecore.planning import grammars
from eecore.planning.guided import Guides
from reference_decoding import ReferenceModel
from tiny_models import random_prompts, write_model
from tiny_t5 import write_t5
from workloads import LOSSLESS, Request, check_company

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 257


def letters(*lengths: int, seed: int) -> list[list[int]]:
    """Prompts without half a character at their end."""
    return [[64 + token % 26 for token in p] for p in random_prompts(*lengths, seed=seed)]


PROMPTS = letters(5, 1, 23, 9, seed=1)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GUIDES = {
    "schema": Guide.json_schema(SCHEMA),
    "object": Guide.json_object(),
    "regex": Guide.regex(r"(ab|ba){2,9}-[0-9]{3}(\.[x-z]+)?"),
    "choice": Guide.choice(["turn it on", "turn it off", "turn", 'say "no"\n']),
    "lark": Guide.grammar('start: "(" start ")" | "x" | start "+" start'),
    "gbnf": Guide.grammar('root ::= "yes" ", " [a-c]+ ";"'),
}
each_guide = pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES.keys())


def outputs_of(model: eecore.Model, **settings: Any) -> list[eecore.Output]:
    return eecore.generate(model, PROMPTS, **{"max_tokens": 40, "exit": "full", **settings})


def tokens_of(model: eecore.Model, **settings: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs_of(model, **settings)]


def bytes_of(model: eecore.Model) -> dict[int, str]:
    """The tokens that are a character of ASCII by themselves."""
    assert model.tokenizer is not None
    texts = {token: model.tokenizer.decode([token]) for token in range(256)}
    return {token: text for token, text in texts.items() if len(text) == 1 and text.isascii()}


PATTERNS = [r"(ab|ba){2,9}-[0-9]{3}(\.[x-z]+)?", "[a-f]{0,6}", "a{3,}b?", "x", r"(no|yes)\n{0,2}"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_output_is_the_reference(
    tiny: eecore.Model, reference: ReferenceModel, pattern: str
) -> None:
    """The most probable of the tokens after which the pattern can still match."""
    alphabet = bytes_of(tiny)
    outputs = outputs_of(tiny, guide=Guide.regex(pattern), max_tokens=12)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sequence, h = reference.start(prompt)
        text, reason = "", "length"
        while len(sequence.new_tokens) < 12:
            allowed = [
                token
                for token, character in alphabet.items()
                if regex.fullmatch(pattern, text + character, partial=True)
            ]
            ends = regex.fullmatch(pattern, text) is not None
            if ends and not allowed and text:
                reason = "stop"
                break
            allowed += [EOS] * ends
            logits = reference.head(h)
            token = max(allowed, key=lambda t, logits=logits: float(logits[t]))
            sequence.tokens.append(token)
            if token == EOS:
                reason = "stop"
                break
            text += alphabet[token]
            h = reference.through(sequence)
        if not any(regex.fullmatch(pattern, text + c, partial=True) for c in alphabet.values()):
            reason = "stop"
        assert (output.token_ids, output.finish_reason) == (sequence.new_tokens, reason)


@each_guide
@pytest.mark.parametrize("policy", LOSSLESS, ids=str)
def test_lossless_modes_give_what_full_gives(
    agreeing: eecore.Model, guide: Guide, policy: Exit
) -> None:
    expected = outputs_of(agreeing, guide=guide)
    got = outputs_of(agreeing, guide=guide, exit=policy)
    for one, other in zip(got, expected, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.finish_reason == other.finish_reason
        assert one.confidences == pytest.approx(other.confidences, abs=1e-4)


@pytest.mark.parametrize("policy", LOSSLESS[:4], ids=str)
def test_what_can_only_come_is_drafted(agreeing: eecore.Model, policy: Exit) -> None:
    guide = Guide.grammar('start: "[the very same beginning]" /[ab]/ "[and the same end]"')
    for output in outputs_of(agreeing, guide=guide, exit=policy, max_tokens=50):
        stats = output.stats
        assert stats.drafted == stats.accepted > 30
        assert stats.contract == policy.contract


@each_guide
def test_whatever_is_drawn_is_drawn_without_drafts(agreeing: eecore.Model, guide: Guide) -> None:
    settings: dict[str, Any] = {"guide": guide, "temperature": 1.3, "seed": 5, "logprobs": 2}
    settings |= {"frequency_penalty": 0.3, "top_k": 50}
    expected = outputs_of(agreeing, **settings)
    for policy in LOSSLESS:
        got = outputs_of(agreeing, exit=policy, **settings)
        assert [o.token_ids for o in got] == [o.token_ids for o in expected]
        for one, other in zip(got, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"red", "green"}
    )


@pytest.mark.parametrize(
    "policy",
    [Full(), PromptLookup(4), FixedExit(2), ConfidentExit(threshold=0.1), Auto()],
    ids=str,
)
def test_texts_follow_the_schema_in_every_mode(agreeing: eecore.Model, policy: Exit) -> None:
    """The model knows no JSON, and the temperature is any."""
    sampling = [
        SamplingParams(max_tokens=150, temperature=heat, seed=i, guide=GUIDES["schema"])
        for i, heat in enumerate((0.0, 0.5, 1.0, 3.0, 1.0, 2.0))
    ]
    prompts = letters(4, 9, 2, 7, 1, 3, seed=2)
    outputs = eecore.generate(agreeing, prompts, exit=policy, sampling=sampling)
    whole = [output.text for output in outputs if output.finish_reason == "stop"]
    assert len(whole) >= 4
    assert all(text is not None and follows_schema(text) for text in whole)


def test_mixed_batches_and_preemptions(agreeing: eecore.Model) -> None:
    """A guide affects no other request; a replayed text keeps its guide's state."""
    ways: list[tuple[Exit, Guide | None, float]] = [
        (Full(), GUIDES["schema"], 0.0),
        (PromptLookup(4, min_ngram=1), None, 0.0),
        (SelfSpeculative(2, 3), GUIDES["regex"], 1.0),
        (SelfSpeculative(2, 3), None, 0.0),
        (ConfidentExit(threshold=0.9), GUIDES["object"], 1.0),
        (PromptLookup(4, min_ngram=1), GUIDES["lark"], 0.0),
        (Full(), None, 1.0),
    ]
    prompts = letters(4, 9, 2, 17, 1, 3, 6, seed=2)
    requests = [
        Request(
            prompt,
            policy,
            SamplingParams(max_tokens=25, temperature=heat, seed=i, guide=guide),
        )
        for i, (prompt, (policy, guide, heat)) in enumerate(zip(prompts, ways, strict=True))
    ]
    few_pages = engine_of(agreeing, EngineConfig(kv_cache_tokens=80, page_size=4))
    check_company(agreeing, requests, few_pages)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_comes_where_the_guide_lets_it(tiny: eecore.Model, ignore_eos: bool) -> None:
    """Even if the model prefers to end elsewhere, or the end token ends nothing."""
    settings: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "ignore_eos": ignore_eos}
    for output in outputs_of(tiny, guide=Guide.regex("[ab]{4,}"), **settings):
        assert len(output.token_ids) == 5
        assert output.token_ids[-1] == EOS
        assert output.finish_reason == "stop"
        assert output.text is not None
        assert len(output.text) == 4
    for output in outputs_of(tiny, guide=Guide.regex("[ab]{4}"), **settings):
        assert len(output.token_ids) == 4
        assert output.finish_reason == "stop"


def test_lengths_and_stops_still_end_a_text(tiny: eecore.Model) -> None:
    guide = Guide.regex("(abc)*")
    for output in outputs_of(tiny, guide=guide, max_tokens=7, logit_bias={EOS: -100}):
        assert (output.text, output.finish_reason) == ("abcabca", "length")
    for output in outputs_of(tiny, guide=guide, stop="cab", logit_bias={EOS: -100}):
        assert (output.text, output.finish_reason) == ("ab", "stop")


def test_log_probabilities_are_those_among_what_may_come(tiny: eecore.Model) -> None:
    output = outputs_of(tiny, guide=Guide.regex("[ab]"), logprobs=5)[0]
    assert output.top_logprobs is not None
    (top,) = output.top_logprobs
    assert len(top) == 2
    assert sum(torch.tensor(list(top.values())).exp()).item() == pytest.approx(1, abs=1e-5)
    forced = outputs_of(tiny, guide=Guide.regex("q"), logprobs=0)[0]
    assert forced.logprobs == [0.0]
    assert forced.confidences == [1.0]


@pytest.mark.parametrize(
    "choices",
    [["turn", "turn it on"], ['say "no"\n', r"\d+[x](y)|^z$"], ["ö/ü\t✓", "日本", "\x00"]],
    ids=str,
)
def test_choices_are_no_patterns(tiny: eecore.Model, choices: list[str]) -> None:
    sampling = [
        SamplingParams(max_tokens=40, temperature=3.0, seed=i, guide=Guide.choice(choices))
        for i in range(12)
    ]
    outputs = eecore.generate(tiny, [[70]] * 12, sampling=sampling)
    assert {output.text for output in outputs} <= set(choices)
    assert {output.finish_reason for output in outputs} == {"stop"}
    many = Guide.choice([f"option number {i}" for i in range(4096)])
    (output,) = eecore.generate(tiny, [[70]], guide=many, max_tokens=40)
    assert re.fullmatch(r"option number \d+", output.text or "")


@pytest.mark.parametrize(
    ("name", "special"), [("<|x|>", True), ("<call>", False), ("[CALL]", True), ("[CALL]", False)]
)
def test_names_of_tokens_are_text(tmp_path: Path, name: str, special: bool) -> None:
    """Where a guide forces them, too, and in Lark's syntax they are the tokens."""
    path = write_model(tmp_path / "named") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False)])
    tokenizer.save(str(path))
    model = load(path.parent, kv_cache_tokens=1024)
    said = f"{name} and"
    for guide, text in (
        (Guide.choice([said]), said),
        (Guide.regex(re.escape(said)), said),
        (Guide.json_schema({"const": said}), f'"{said}"'),
        (Guide.grammar(f'start: "{said}"'), said),
        (Guide.grammar(f'root ::= "{said}"'), said),
    ):
        assert {output.text for output in outputs_of(model, guide=guide)} == {text}
    if name.startswith("<"):
        guide = Guide.grammar(f"start: {name} /{re.escape(name)}/ // {name}")
        (output, *_) = outputs_of(model, guide=guide)
        assert output.token_ids[0] == tokenizer.token_to_id(name)
        assert (output.text or "").endswith(name)
    with pytest.raises(GuideError, match="<nothing>"):
        outputs_of(model, guide=Guide.grammar("start: <nothing>"))


def test_an_encoder_decoder(tmp_path: Path) -> None:
    model = load(write_t5(tmp_path, "t5"), kv_cache_tokens=1024)
    for guide in (GUIDES["schema"], GUIDES["choice"]):
        full = tokens_of(model, guide=guide)
        assert tokens_of(model, guide=guide, exit=SelfSpeculative(1, 3)) == full
        assert tokens_of(model, guide=guide, exit=PromptLookup(min_ngram=1)) == full


def guides_of(model: eecore.Model) -> Guides:
    return Guides(model.tokenizer, model.config.vocab_size, model.config.eos_token_ids)


def test_a_way_is_where_the_tokens_are(tiny: eecore.Model) -> None:
    """After any earlier calls, an interrupted one included."""
    guides = guides_of(tiny)
    alphabet = {character: token for token, character in bytes_of(tiny).items()}
    texts = [[alphabet[c] for c in text] for text in ("", "ab", "abba-12", "abba-1", "ba", "abba")]

    def mask(guided: Any, text: list[int]) -> list[int]:
        words = np.zeros((2, guided.num_words), dtype=np.int32)
        guided.write_masks(words, text, [])
        assert not words[1].any()
        return words[0].tolist()  # type: ignore[no-any-return]

    fresh = [mask(guides.follow(GUIDES["regex"]), text) for text in texts]
    guided = guides.follow(GUIDES["regex"])
    for i in (0, 2, 3, 1, 5, 4, 2, 0):
        guided.is_over(texts[(i + 2) % 6])
        if i % 2:  # as an interrupt leaves it
            with suppress(KeyboardInterrupt), guided._at(texts[(i + 1) % 6]):
                raise KeyboardInterrupt
        assert mask(guided, texts[i]) == fresh[i]


def test_a_proposal_ends_where_it_may_not_go_on(tiny: eecore.Model) -> None:
    guided = guides_of(tiny).follow(Guide.regex("ab[cd]ef[gh]*"))
    alphabet = {character: token for token, character in bytes_of(tiny).items()}

    def drafts(text: str, proposed: str, most: int, stops: str = "") -> str:
        ids = [[alphabet[c] for c in each] for each in (text, proposed, stops)]
        got = guided.drafts(ids[0], ids[1], most, frozenset(ids[2]))
        return "".join(bytes_of(tiny)[token] for token in got)

    assert drafts("", "abdefgh", 9) == "abdefgh"
    assert drafts("", "abdefgh", 3) == "abd"
    assert drafts("", "abdx", 9) == "abdef"
    assert drafts("", "x", 9) == "ab"
    assert drafts("ab", "", 9) == ""
    assert drafts("abc", "", 1) == "e"
    assert drafts("abc", "ef", 9, "f") == "e"


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (
            lambda: Guide.regex("(a"),
            "guide: expected a regex that can be .*unclosed",
        ),
        (lambda: Guide.regex("(?=a)b"), "guide: expected a regex that can be compiled, got"),
        (lambda: Guide.regex(""), r"guide: expected a text of 1\.\.262144 characters, got ''"),
        (lambda: Guide.regex("a" * 300000), r"guide: expected a text of 1\.\.262144 characters"),
        (lambda: Guide.regex("\ud800"), "guide: expected text that UTF-8 can say"),
        (
            lambda: Guide.regex(r"[^\x00-\x{10FFFF}]"),
            "guide: expected a regex that matches some text",
        ),
        (lambda: Guide.json_schema({"type": "no"}), "guide: type: expected array, .* got 'no'"),
        (lambda: Guide.json_schema({"$ref": "#/x"}), "guide: expected a json that can be compiled"),
        (lambda: Guide.json_schema({"enum": []}), "guide: expected a json that can be compiled"),
        (lambda: Guide.json_schema("[1]"), r"guide: expected a JSON schema, an object, got \[1\]"),
        *(
            (lambda schema=schema: Guide.json_schema(schema), r"expected integers of at most 2\^53")
            for schema in (
                {"const": 2**53 + 1},
                {"properties": {"a": {"anyOf": [{"enum": [1, {"b": [-(2**60)]}]}]}}},
                {"$defs": {"minimum": {"minimum": 2**64}}},
            )
        ),
        (lambda: Guide.json_schema(nested(300)), "guide: expected a schema that is less deep"),
        (lambda: Guide.json_schema("{"), "guide: expected a JSON schema, got: Expecting"),
        (lambda: Guide.json_schema({"const": {1, 2}}), "guide: expected what JSON can say, got"),
        (lambda: Guide.json_schema({"const": float("nan")}), "guide: expected what JSON can say"),
        (lambda: Guide.json_schema('{"a":' * 9999), "guide: expected a JSON schema, got"),
        (lambda: Guide.json_schema('{"not":' * 400 + "{}" + "}" * 400), "guide: expected a "),
        (lambda: Guide.choice([]), r"guide: expected 1\.\.4096 choices, none empty, got \[\]"),
        (lambda: Guide.choice("abc"), r"guide: expected 1\.\.4096 choices, none empty, got 'abc'"),
        (lambda: Guide.choice(["a", ""]), r"guide: expected 1\.\.4096 choices, none empty"),
        (lambda: Guide.grammar("%%%"), "guide: expected a grammar that can be compiled"),
        (lambda: Guide.grammar("start: " + "(" * 999), "guide: expected a grammar that can be"),
        (lambda: Guide("json5", "{}"), "guide: expected a kind of json, regex, .*got 'json5'"),
        (lambda: "[a-z]", r"guide: expected None or a Guide, got '\[a-z\]'"),
    ],
)
def test_guides_that_cannot_be(tiny: eecore.Model, guide: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        eecore.generate(tiny, [[1]], guide=guide())


def test_formats_that_are_not_known_are_annotations(tiny: eecore.Model) -> None:
    """They are in any place of a schema, not in values or names of properties."""
    schema = {
        "properties": {"format": {"type": "string", "format": "int32"}, "b": {"$ref": "#/x/y"}},
        "required": ["format", "b"],
        "additionalProperties": False,
        "type": "object",
        "x": {"y": {"anyOf": [{"type": "string", "format": "binary", "maxLength": 2}]}},
    }
    for output in outputs_of(tiny, guide=Guide.json_schema(schema), logit_bias={0: 1.0}):
        assert re.match(r'\{( |\n[ \t]*)?"format"', output.text or "")
    guides = guides_of(tiny)
    for name in FORMATS:
        guides.follow(Guide.json_schema({"type": "string", "format": name}))
    (output,) = outputs_of(tiny, guide=Guide.json_schema({"const": {"format": "x"}}))[:1]
    assert json.loads(output.text or "") == {"format": "x"}
    (output,) = outputs_of(tiny, guide=Guide.json_schema({"type": "string", "format": "date"}))[:1]
    assert re.fullmatch(r'"\d{4}-\d\d-\d\d"', output.text or "")


def nested(depth: int) -> dict[str, Any]:
    """A schema within schemas."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


def test_objects_are_closed_unless_a_schema_opens_them() -> None:
    inner = {"properties": {"b": {"type": "string"}, "properties": {}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": inner}, "$defs": {"it": inner}}
    closed = enforceable(schema)
    for part in (closed, closed["properties"]["a"], closed["$defs"]["it"]):
        assert part["additionalProperties"] is False
    assert "additionalProperties" not in inner
    assert "additionalProperties" not in closed["properties"]["a"]["properties"]
    for opened in (
        {"type": "object"},
        {**inner, "additionalProperties": {"type": "integer"}},
        {**inner, "patternProperties": {"x": {}}},
        {**inner, "required": ["b", "c"]},
        {**inner, "required": [{}]},
        {"allOf": [inner, {"properties": {"c": {}}}]},
        {"properties": {"a": inner}, "anyOf": [inner]},
    ):
        assert enforceable(opened) == opened


COUNT = {"type": "integer", "maximum": 9}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ({}, {"additionalProperties": COUNT}),
        ({"type": "string", "title": "Name"}, {"additionalProperties": COUNT}),
        ({"const": "a"}, {"properties": {"a": COUNT}, "additionalProperties": False}),
        (
            {"type": "string", "enum": ["a", "b"]},
            {"properties": {"a": COUNT, "b": COUNT}, "additionalProperties": False},
        ),
        (
            {"$ref": "#/$defs/letters"},
            {"properties": {"a": COUNT, "b": COUNT}, "additionalProperties": False},
        ),
        (
            {"type": "string", "pattern": "^[ab]$"},
            {"patternProperties": {"^[ab]$": COUNT}, "additionalProperties": False},
        ),
    ],
    ids=str,
)
def test_names_of_properties_become_properties(
    tiny: eecore.Model, names: Any, wanted: dict[str, Any]
) -> None:
    """Zod's records and pydantic's dictionaries have propertyNames."""
    definitions = {"$defs": {"letters": {"type": "string", "enum": ["a", "b"]}}}
    inner = {"type": "object", "propertyNames": names, "additionalProperties": COUNT}
    made = {"type": "object"} | wanted
    assert enforceable(inner | definitions) == made | definitions
    resource = {"$id": "tool:0", **inner, **definitions}
    assert enforceable({"items": resource}) == {"items": {"$id": "tool:0", **made, **definitions}}
    guides_of(tiny).follow(Guide.json_schema(inner | definitions))


def test_names_that_properties_cannot_say_stay() -> None:
    many = [f"name {index}" for index in range(4096)]
    for names in (
        {"type": "string", "minLength": 2},
        {"enum": ["a", 1]},
        {"enum": "ab"},
        {"pattern": ["a"]},
        {"type": "integer"},
        {"$ref": "#/$defs/other"},
        {"$ref": "#/properties"},
        {"type": "string", "enum": many},
        False,
    ):
        schema = {"propertyNames": names, "additionalProperties": {"enum": many[:20]}}
        assert enforceable(schema) == schema
    named = {"propertyNames": {"const": "a"}, "patternProperties": {"a": {}}}
    assert enforceable(named) == named


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
        {"propertyNames": {"minLength": 2}},
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
        {"type": "string", "format": 5},
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused(tiny: eecore.Model, schema: Any) -> None:
    with pytest.raises(GuideError, match="guide: expected a json that can be compiled, got"):
        guides_of(tiny).follow(Guide.json_schema(schema))


def test_what_a_guide_needs(tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GuideError, match="guide: expected a model with a tokenizer"):
        Guides(None, 320, [EOS]).follow(Guide.regex("a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GuideError, match=r"guide: .*llguidance.*pip install '\.\[guided\]'"):
        guides_of(tiny).follow(Guide.regex("a"))


def test_a_guide_beyond_its_limits_ends_its_request_alone(
    tiny: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammars.LIMITS, "max_lexer_states", 20)
    large = SamplingParams(max_tokens=9, guide=Guide.regex("(ab|ba){2,40}-[0-9]{3}"))
    others = SamplingParams(max_tokens=9, guide=Guide.regex("[ab]+x"))
    expected = eecore.generate(tiny, [PROMPTS[0]], sampling=others)[0].token_ids
    outputs = eecore.generate(tiny, [PROMPTS[0]] * 2, sampling=[large, others])
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error is not None
    assert "guide: expected to follow it, got: lexer error" in outputs[0].error
    assert outputs[1].token_ids == expected


@each_guide
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_round_without_room_for_drafts_follows_its_guide(
    agreeing: eecore.Model, guide: Guide, steps: int
) -> None:
    """Any round may be the first without room."""
    expected = tokens_of(agreeing, guide=guide)
    tokens_of(agreeing, guide=guide, exit=Auto())  # there is something to know
    engine = agreeing.engine()
    sampling = SamplingParams(max_tokens=40, guide=guide)
    names = [engine.add_request(prompt, exit=Auto(), sampling=sampling) for prompt in PROMPTS]
    done = [output for _ in range(steps) for output in engine.step()]
    for sequence in engine.requests.values():
        sequence.is_resting = True  # no pages are held for drafts
    done += list(engine.run())
    agreeing.network.learnt.clear()
    got = {step.request_id: step.output for step in done if step.output is not None}
    assert [got[name].token_ids for name in names] == expected
    assert all(output.error is None for output in got.values())
