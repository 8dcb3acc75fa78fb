"""Probes of thoughts: where they come, what they read, and that they leave nothing."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import eecore
from devices import engine_of, load
from eecore import (
    ConfidentExit,
    EngineConfig,
    ExitError,
    FixedExit,
    Full,
    Output,
    Probe,
    PromptLookup,
    RequestError,
    SamplingParams,
    SelfSpeculative,
    ThoughtStop,
)
from eecore.calibration_file import ThoughtCalibration
from eecore.decoding.iterate import Iterations
from eecore.exits import Exit
from eecore.planning.probes import ThoughtProbes
from eecore.planning.row import Outcome
from eecore.planning.thoughts import GuidedThought
from eecore.scheduling.sequence import Sequence
from eecore.thought_stop import normalised
from thinking_models import ALWAYS, CLOSES, HYBRID, QUESTION, calibrated, write_thinking_model
from tiny_models import scale_layers, write_model
from tripwire import Fault
from workloads import Driver, Request, check_books, serve

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:think. expected a rule that was calibrated"),
]

STEM = " A"
RECORD = ThoughtStop(math.inf, every=6, stem=STEM, max_answer=5)
ENDS = ThoughtStop(0.0, 1, every=6, stem=STEM, max_answer=5)
LETTERS = {token: -100 for token in range(256) if not (33 <= token < 91 or token == 198)}
LINES = {**LETTERS, CLOSES: -100, 198: 3}
"""Biases with which a thought has whole characters, many line ends, and no end."""
CLOSED = "\n</think>\n\n"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model whose template opens the thought."""
    directory = tmp_path_factory.mktemp("probes") / "thinker"
    write_thinking_model(directory, ALWAYS, seed=3, num_hidden_layers=5)
    scale_layers(directory, {2: 0.2, 3: 0.1, 4: 0.2})
    return load(directory, kv_cache_tokens=4096)


def asked(model: eecore.Model, question: str = "Why?") -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode_chat([{"role": "user", "content": question}])


def thought(model: eecore.Model, think: Any, **settings: Any) -> Output:
    """What a model answers."""
    given = {"max_tokens": 150, "logit_bias": LINES, "ignore_eos": True, **settings}
    exit = given.pop("exit", Full())
    (output,) = eecore.generate(model, asked(model), exit=exit, think=think, **given)
    return output


# What a probe reads


def closing_after(model: eecore.Model, token_ids: list[int]) -> list[int]:
    """The tokens that close a thought."""
    assert model.tokenizer is not None
    at_line = model.tokenizer.decode(token_ids).endswith("\n")
    return model.tokenizer.encode(CLOSED.lstrip("\n") if at_line else CLOSED)


def expected_probe(model: eecore.Model, output: Output, count: int, exit: Exit) -> Probe:
    """The answer of a request of its own after the first tokens of a thought."""
    assert model.tokenizer is not None
    text = output.token_ids[:count]
    stem = model.tokenizer.encode(STEM)
    start = [*asked(model), *text, *closing_after(model, text), *stem]
    (answer,) = eecore.generate(model, start, exit=exit, max_tokens=5, logprobs=0)
    assert answer.logprobs is not None
    words = normalised(answer.text or "")
    mean = math.exp(sum(answer.logprobs) / len(answer.logprobs))
    return Probe(count, words, mean if words else 0.0)


@pytest.mark.parametrize("exit", [Full(), PromptLookup(4, min_ngram=1), FixedExit(3)], ids=str)
def test_a_probe_reads_what_a_request_of_its_own_would(thinker: eecore.Model, exit: Exit) -> None:
    output = thought(thinker, RECORD, exit=exit)
    deep = exit if isinstance(exit, FixedExit) else Full()
    probes = output.thought_probes[:-1]  # the last one comes after the end of the thought
    assert len(probes) > 5
    assert len({probe.answer for probe in probes}) > 2
    for probe in probes:
        expected = expected_probe(thinker, output, probe.num_tokens, deep)
        assert (probe.num_tokens, probe.answer) == (expected.num_tokens, expected.answer)
        if "\n" not in probe.answer and expected.confidence:
            assert probe.confidence == pytest.approx(expected.confidence, rel=1e-3)
    assert output.stats.probe_rows >= 8 * len(probes)


def test_a_probe_verifies_the_last_answer(
    thinker: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These drafts change nothing but the number of passes."""
    runs: list[tuple[list[Probe], Counter[str]]] = []
    for verifies in (True, False):
        counts: Counter[str] = Counter()
        probes_of = ThoughtProbes
        learn, begin = probes_of.learn, probes_of.begin

        def counted(self: Any, outcome: Outcome, learn: Any = learn, counts: Any = counts) -> None:
            assert outcome.sequence.draft is not None
            counts["passes"] += 1
            counts["accepted"] += max(0, outcome.counters.accepted - outcome.sequence.draft.forced)
            learn(self, outcome)

        def forgetful(
            self: Any, sequence: Sequence, begin: Any = begin, verifies: bool = verifies
        ) -> Sequence:
            self._last = self._last if verifies else []
            made: Sequence = begin(self, sequence)
            return made

        with monkeypatch.context() as patch:
            patch.setattr(probes_of, "learn", counted)
            patch.setattr(probes_of, "begin", forgetful)
            steady = ThoughtStop(math.inf, every=2, stem=STEM * 9, max_answer=5)
            runs.append((thought(thinker, steady).thought_probes, counts))
    (found, counts), (plain, alone) = runs
    assert found == plain
    assert alone["accepted"] == 0 < counts["accepted"]
    assert counts["passes"] < alone["passes"]


def test_a_probe_whose_guess_is_right_is_one_round(
    thinker: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is guessed, the probes are the same."""
    probes_of, passes, guesses = ThoughtProbes, list[Counter[int]](), list[list[int]]()
    learn, guess = probes_of.learn, probes_of._guess
    right: list[int] = []
    for _ in range(2):
        counts: Counter[int] = Counter()
        passes.append(counts)

        def counted(self: Any, outcome: Outcome, counts: Counter[int] = counts) -> None:
            counts[len(self.found)] += 1
            learn(self, outcome)
            if not right and self._last:
                right.extend(self._last)

        def guessed(self: Any, sequence: Sequence) -> list[int]:
            guesses.append(guess(self, sequence))
            return list(right)

        with monkeypatch.context() as patch:
            patch.setattr(probes_of, "learn", counted)
            patch.setattr(probes_of, "_guess", guessed)
            output = thought(thinker, RECORD)
    assert output.thought_probes == thought(thinker, RECORD).thought_probes
    assert passes[0][0] > passes[1][0] == 1


def test_the_first_guess_is_the_last_number_of_the_thought(thinker: eecore.Model) -> None:
    sequence = engine_of(thinker).prepare(asked(thinker), sampling=SamplingParams(think=RECORD))
    assert thinker.tokenizer is not None
    assert sequence.probes is not None
    for text, guess in (("3+4=7. So 7.\n", " 7."), ("It is 1,250.5 or", " 1,250.5."), ("Hm.", "")):
        sequence.output_ids = thinker.tokenizer.encode(text, add_special_tokens=False)
        assert thinker.tokenizer.decode(sequence.probes._guess(sequence)) == guess


def test_an_answer_is_whole_once_its_line_ends(thinker: eecore.Model) -> None:
    """Whatever drafts were accepted after that."""
    engine = engine_of(thinker)
    sequence = engine.prepare(asked(thinker), sampling=SamplingParams(think=RECORD))
    assert thinker.tokenizer is not None
    assert sequence.probes is not None
    for text, count in (("42\nx", 3), ("\n42", 0), ("42", 0), ("4. No", 3), ("3.14", 0)):
        probe = sequence.probes.begin(sequence)
        probe.output_ids = thinker.tokenizer.encode(text, add_special_tokens=False)
        assert sequence.probes._num_whole(probe) == count


# Where a thought ends


@pytest.mark.parametrize("think", [RECORD, ENDS, None], ids=["records", "ends", "budget"])
def test_nothing_comes_of_quiet_tokens(thinker: eecore.Model, think: ThoughtStop | None) -> None:
    """And the place after them is that of one token after another."""
    rng, num_quiet = random.Random(7), 0
    letters = [token for token in range(33, 91) if token not in (CLOSES, 46)]
    for round in range(40):
        budget = rng.choice([None, 90, 120]) if think is not None else 100
        sampling = SamplingParams(max_tokens=250, think=think, thinking_budget=budget)
        skips, steps = (
            engine_of(thinker).prepare(asked(thinker), sampling=sampling).draft for _ in range(2)
        )
        assert skips is not None
        assert steps is not None
        guided, other = skips.guided, steps.guided
        assert isinstance(guided, GuidedThought)
        assert isinstance(other, GuidedThought)
        text = rng.choices([*letters, *[198] * 60], k=rng.choice([60, 160]))
        text[rng.randrange(len(text))] = CLOSES if round % 2 else 46
        known = list[int]()
        while text:
            more, text = text[: (count := rng.choice([1, 1, 4]))], text[count:]
            is_quiet = guided.is_quiet(known, more)
            num_quiet += is_quiet
            for token in more:
                known.append(token)
                other._place = place = other._after(other._place, token)
                assert not (is_quiet and (place.is_due or place.forced))
                if not is_quiet:
                    own = guided.at(known)
                    assert own._replace(decoder=place.decoder) == place
    assert num_quiet > 500


def test_probes_leave_nothing(thinker: eecore.Model) -> None:
    for exit in (Full(), SelfSpeculative(2, 4), ConfidentExit(0.5), FixedExit(3)):
        for heat in (0.0, 1.0)[: 1 if exit.max_drafts else 2]:  # what is drawn depends on drafts
            settings: dict[str, Any] = {"exit": exit, "temperature": heat, "seed": 5}
            plain = thought(thinker, None, thinking_budget=1000, **settings)
            output = thought(thinker, RECORD, **settings)
            assert output.thought_probes
            assert plain.token_ids == output.token_ids
            assert plain.confidences == output.confidences or exit.max_drafts
            assert (plain.stats.probe_rows, plain.thought_probes) == (0, [])
            assert output.stats.thought_end == plain.stats.thought_end == "budget"


def test_a_thought_ends_where_the_rule_says(thinker: eecore.Model) -> None:
    free, output = thought(thinker, RECORD), thought(thinker, ENDS)
    first = next(probe for probe in free.thought_probes if probe.answer)
    assert output.thought_probes[-1] == first
    assert output.stats.thought_end == "confident"
    count = first.num_tokens
    assert output.token_ids[:count] == free.token_ids[:count]
    assert output.token_ids[count : count + 4].count(CLOSES) == 1
    assert output.stats.thought_tokens <= count + 2
    assert output.text
    never = thought(thinker, ThoughtStop(1.0, every=6, stem=STEM, max_answer=5))
    assert never.token_ids == free.token_ids
    assert never.thought_probes == [p for p in free.thought_probes if p.num_tokens < 150][:-1]


def test_places_of_probes(thinker: eecore.Model) -> None:
    """At the first end of a paragraph after so many tokens, at latest after twice as many."""
    output = thought(thinker, RECORD, logit_bias={**LINES, 198: 7})
    assert thinker.tokenizer is not None
    last, early = 0, 0
    for probe in output.thought_probes[:-1]:
        text = thinker.tokenizer.decode(output.token_ids[: probe.num_tokens])
        assert 6 <= probe.num_tokens - last <= 12
        is_early = probe.num_tokens - last < 12
        assert not is_early or text.endswith("\n\n")
        last, early = probe.num_tokens, early + is_early
    assert early


def test_the_model_may_close_its_thought(thinker: eecore.Model) -> None:
    output = thought(thinker, RECORD, logit_bias={CLOSES: 4})
    assert output.stats.thought_end == "model"
    numbers = [probe.num_tokens for probe in output.thought_probes]
    assert numbers == sorted(set(numbers))  # the answer is not probed
    assert numbers[-1] == output.stats.thought_tokens
    ended = thought(thinker, ENDS, logit_bias={CLOSES: 100})
    assert (ended.stats.thought_end, ended.thought_probes) == ("model", [])


def test_a_probe_has_room(thinker: eecore.Model) -> None:
    """No probe reaches beyond the tokens that the request may have."""
    for most in range(12, 40):
        output = thought(thinker, RECORD, max_tokens=most)
        assert len(output.token_ids) == most
        for probe in output.thought_probes:
            assert probe.num_tokens + 4 + 2 + 5 <= most + 3


@pytest.mark.parametrize(
    "exit", [Full(), PromptLookup(4, min_ngram=1), SelfSpeculative(2, 4), eecore.Auto()], ids=str
)
def test_the_pass_of_a_probe_gives_the_next_token(
    thinker: eecore.Model, monkeypatch: pytest.MonkeyPatch, exit: Exit
) -> None:
    """Where the request chooses it as a probe does, and does not end its thought there."""
    iterate, counts, plain_ids = Iterations.iterate, list[int](), list[int]()

    def counted(self: Any, works: Any, **how: Any) -> Any:
        counts[-1] += 1
        return iterate(self, works, **how)

    monkeypatch.setattr(Iterations, "iterate", counted)
    one = replace(RECORD, max_answer=1)
    for bias in ({}, {5: 0.5}):
        counts.clear()
        settings: dict[str, Any] = {"exit": exit, "logit_bias": bias, "logprobs": 0}
        plain, probed = (
            (counts.append(0), thought(thinker, think, **settings))[1] for think in (None, one)
        )
        plain_ids = plain_ids or plain.token_ids
        assert len(probed.thought_probes) > 5
        assert probed.token_ids[:120] == plain.token_ids[:120]  # then room is left for an answer
        assert probed.logprobs is not None
        assert plain.logprobs is not None
        assert probed.logprobs[:120] == pytest.approx(plain.logprobs[:120], abs=1e-5)
        if exit == Full():
            assert probed.confidences[:120] == plain.confidences[:120]
            surplus = counts[1] - counts[0]
            # The last probe comes before the first token of the answer, which has a mask.
            assert surplus == (len(probed.thought_probes) if bias else 1)
    ends = [replace(ENDS, max_answer=1, stem=stem) for stem in (" A", "1+1=", "Yes", "So")]
    outputs = [thought(thinker, end, exit=exit, logit_bias={}) for end in ends]
    assert [output.stats.thought_end for output in outputs].count("confident") > 1
    for output in outputs:
        count = output.thought_probes[-1].num_tokens
        assert output.token_ids[:count] == plain_ids[:count]
        if output.stats.thought_end == "confident":
            closing = closing_after(thinker, output.token_ids[:count])
            assert output.token_ids[count : count + len(closing)] == closing


# What happens to a request within a probe


def until_probed(driver: Driver, name: str) -> Sequence:
    """Step until a request is probed; returns its sequence."""
    while (sequence := driver.engine.requests[name]).probe is None:
        driver.step()
    return sequence


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cancel_and_hold_within_a_probe(thinker: eecore.Model, steps: int, page_size: int) -> None:
    sampling = SamplingParams(max_tokens=60, think=RECORD, logit_bias=LINES, ignore_eos=True)
    requests = [Request(asked(thinker, text), Full(), sampling) for text in ("Why?", "Who?")]
    expected = [output.token_ids for output in serve(engine_of(thinker), requests)]
    driver = Driver(engine_of(thinker, EngineConfig(kv_cache_tokens=512, page_size=page_size)))
    for name in ("a", "b", "c"):
        driver.add(requests["abc".index(name) % 2], name)
    until_probed(driver, "a")
    for _ in range(steps):
        driver.step()
    check_books(driver.engine)
    driver.hold("a")
    driver.step()
    until_probed(driver, "b")
    output = driver.cancel("b")
    assert output is not None
    assert output.token_ids == expected[1][: len(output.token_ids)]
    driver.resume("a")
    check_books(driver.engine)
    driver.finish()
    assert [driver.outputs[name].token_ids for name in "ac"] == [expected[0]] * 2


def test_a_request_that_loses_its_pages_is_probed_anew(thinker: eecore.Model) -> None:
    """Wherever in a probe it loses them."""
    sampling = SamplingParams(max_tokens=60, think=RECORD, logit_bias=LINES, ignore_eos=True)
    requests = [Request(asked(thinker, text), Full(), sampling) for text in ("Why?", "Who?")]
    expected = serve(engine_of(thinker), requests)
    for steps in range(5):
        driver = Driver(engine_of(thinker, EngineConfig(kv_cache_tokens=512, page_size=4)))
        for name, request in zip("ab", requests, strict=True):
            driver.add(request, name)
        sequence = until_probed(driver, "b")
        for _ in range(steps):
            driver.step()
        driver.engine.scheduler.preempt(sequence)
        check_books(driver.engine)
        driver.finish()
        for name, output in zip("ab", expected, strict=True):
            assert driver.outputs[name].token_ids == output.token_ids
            assert driver.outputs[name].thought_probes == output.thought_probes


def test_probes_with_few_pages(thinker: eecore.Model) -> None:
    """A probe has its pages at once, and takes them from younger requests."""
    sampling = SamplingParams(max_tokens=60, think=RECORD, logit_bias=LINES, ignore_eos=True)
    requests = [Request(asked(thinker, text), Full(), sampling) for text in ("Why?", "Who?", "?")]
    expected = serve(engine_of(thinker), requests)
    for room in (96, 120, 160):
        few = EngineConfig(kv_cache_tokens=room, page_size=2)
        outputs = serve(engine_of(thinker, few), requests)
        assert sum(output.stats.preemptions for output in outputs) > 0
        for output, other in zip(outputs, expected, strict=True):
            assert output.token_ids == other.token_ids
            assert output.thought_probes == other.thought_probes


def test_pages_of_a_probe_are_not_shared(thinker: eecore.Model) -> None:
    """A prompt that begins as a probe does finds the request's own keys alone."""
    engine = engine_of(thinker, EngineConfig(kv_cache_tokens=2048, page_size=2))
    sampling = SamplingParams(max_tokens=60, think=RECORD, logit_bias=LINES, ignore_eos=True)
    (output,) = serve(engine, [Request(asked(thinker), Full(), sampling)])
    assert thinker.tokenizer is not None
    closing = thinker.tokenizer.encode(CLOSED)
    for probe in output.thought_probes[:-1]:
        prompt = [*asked(thinker), *output.token_ids[: probe.num_tokens], *closing, 5, 6]
        plain = SamplingParams(max_tokens=4)
        (cached,) = serve(engine, [Request(prompt, Full(), plain)])
        (alone,) = serve(engine_of(thinker), [Request(prompt, Full(), plain)])
        assert cached.stats.cached_tokens >= probe.num_tokens
        assert cached.token_ids == alone.token_ids


def test_a_probe_that_fails_has_no_answer(
    thinker: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = thought(thinker, RECORD)
    run, calls = Iterations._run_family, iter(range(1000))

    def failing(self: Any, rows: Any, *how: Any) -> Any:
        if any(row.sequence.parent is not None for row in rows) and next(calls) < 4:
            raise Fault("of this probe")
        return run(self, rows, *how)

    monkeypatch.setattr(Iterations, "_run_family", failing)
    output = thought(thinker, RECORD)
    assert output.token_ids == plain.token_ids
    assert output.finish_reason == "length"
    num_failed = next(i for i, p in enumerate(output.thought_probes) if p.answer or p.confidence)
    assert num_failed
    assert output.thought_probes[-3:] == plain.thought_probes[-3:]


# The rule beside the model


def test_the_rule_beside_the_model(tmp_path: Path) -> None:
    directory = write_thinking_model(tmp_path / "m", ALWAYS, seed=3)
    model = load(directory, kv_cache_tokens=2048)
    with pytest.raises(ExitError, match=r"^think: expected calibration-thoughts.json beside"):
        thought(model, "calibrated")
    path = ThoughtCalibration.file_of(directory)
    calibrated(model, ENDS, model_sha256="0" * 64).save(path)
    with pytest.raises(ExitError, match=r"^calibration: made for model 000000000000"):
        thought(model, "calibrated")
    calibrated(model, ENDS).save(path)
    output, expected = thought(model, "calibrated"), thought(model, ENDS)
    assert output.token_ids == expected.token_ids
    assert output.thought_probes == expected.thought_probes
    promise = "calibrated (at most 0.02 other answers, confidence 0.9, on 600 questions, greedy)"
    assert (output.stats.thought_end, output.stats.thought_contract) == ("confident", promise)
    assert expected.stats.thought_contract == "uncalibrated"
    assert output.stats.fingerprint != thought(model, None).stats.fingerprint


def test_a_rule_without_a_calibration_warns(thinker: eecore.Model) -> None:
    with pytest.warns(UserWarning, match=r"^think: expected a rule that was calibrated"):
        thought(thinker, ENDS)
    assert thought(thinker, RECORD).stats.thought_contract == "uncalibrated"


# Exits in thoughts alone


@pytest.mark.parametrize("ahead", [False, True], ids=["landed", "ahead"])
def test_tokens_exit_in_a_thought_alone(thinker: eecore.Model, ahead: bool) -> None:
    """The answer runs all layers, over the keys that the thought's exits have left."""
    settings = {"max_tokens": 60, "logit_bias": LINES, "ignore_eos": True}
    sampling = SamplingParams(thinking_budget=20, **settings)  # type: ignore[arg-type]
    policies = [ConfidentExit(0.0, part=part) for part in ("all", "thought")]
    requests = [
        Request(asked(thinker, text), policy, sampling)
        for text in ("Why?", "Who?")
        for policy in [*policies, Full()]
    ]
    for outputs in (
        serve(engine_of(thinker, ahead=ahead), requests),
        [serve(engine_of(thinker, ahead=ahead), [request])[0] for request in requests],
    ):
        for always, thinks, full in zip(outputs[::3], outputs[1::3], outputs[2::3], strict=True):
            count = thinks.stats.thought_tokens
            assert 20 <= count < 58
            assert thinks.token_ids[:count] == always.token_ids[:count] != full.token_ids[:count]
            assert set(thinks.exit_layers[1:count]) == {1}
            assert set(thinks.exit_layers[count + 2 :]) == {5}
            assert set(always.exit_layers[1:]) == {1}
            assert thinks.stats.contract.startswith("confident exit in thoughts (softmax,")


def test_answers_without_thoughts_never_exit(thinker: eecore.Model, plain: eecore.Model) -> None:
    for prompt in ([5, 6, 7], asked(thinker)[:-3]):
        policy = ConfidentExit(0.0, part="thought")
        output, full = (
            eecore.generate(thinker, prompt, exit=exit, max_tokens=9)[0]
            for exit in (policy, Full())
        )
        assert output.token_ids == full.token_ids
        assert set(output.exit_layers) == {5}
    with pytest.raises(ExitError, match=r"^ConfidentExit.part: expected 'all' for a model without"):
        eecore.generate(plain, "a", exit=ConfidentExit(0.5, part="thought"))


# What is refused


@pytest.fixture
def plain(tmp_path: Path) -> eecore.Model:
    return load(write_model(tmp_path / "plain"), kv_cache_tokens=256)


def test_rules_that_cannot_be(thinker: eecore.Model, plain: eecore.Model) -> None:
    for think in (3, "always", True, {"threshold": 0.5}):
        with pytest.raises(RequestError, match=r"^think: expected None or a ThoughtStop"):
            SamplingParams(think=think)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^think: expected a model with markers of thoughts"):
        eecore.generate(plain, "a", think=RECORD)
    with pytest.raises(RequestError, match=r"^max_tokens: expected at least 5 with think,"):
        thought(thinker, RECORD, max_tokens=4)


def test_an_answer_without_a_thought_has_no_probes(tmp_path: Path) -> None:
    model = load(write_thinking_model(tmp_path / "m", HYBRID), kv_cache_tokens=512)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode_chat(QUESTION, enable_thinking=False)
    (output,) = eecore.generate(model, prompt, think=ENDS, max_tokens=40)
    assert (output.thought, output.thought_probes, output.stats.thought_end) == (None, [], None)
