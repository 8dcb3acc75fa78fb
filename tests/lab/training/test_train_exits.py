"""``eecore train-exits`` as a user meets it: answers, states, a head, and its directory."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import eecore
from bench.harness.prompts import QUESTIONS
from devices import heads_in_floats
from eecore import models
from eecore.cli.app import run
from eecore.lab.answers.questions import builtin_questions
from eecore.lab.training.draft_head import DraftHead, HeadSizes
from eecore.lab.training.head_keys import TextKeys, keys_at
from eecore.lab.training.trainer import StepTrainer
from eecore.models import network_digest
from eecore.models.recurrent_head import head_floats
from looped_models import write_looped
from pack_head import pack
from tiny_models import write_model
from tiny_t5 import write_t5

USAGE, MODEL, REQUEST = 2, 3, 4
STAGES = (
    (None, "writing: "),
    ("writing", "reading: "),
    ("reading", "step 30 of "),
    ("training", None),
)
"""For each step in which a run is stopped: what it goes on with, and where it stops next."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chat model, a model that cannot chat, and questions."""
    folder = tmp_path_factory.mktemp("train_exits")
    write_model(folder / "model", num_hidden_layers=3, max_position_embeddings=2048)
    write_model(folder / "dumb", num_hidden_layers=3)
    settings = folder / "dumb" / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}
    settings.write_text(json.dumps(kept))
    write_model(folder / "wordless", num_hidden_layers=3, tokenizer=False)
    questions = "\n".join(f"What is {number} and {number}?" for number in range(90))
    (folder / "questions.txt").write_text(questions)
    return folder


def arguments(folder: Path, out: Path, *more: str, model: str = "model") -> list[str]:
    return [
        *("train-exits", str(folder / model), "--out", str(out)),
        *("--prompts", str(folder / "questions.txt"), "--tokens", "1400", "--answer-tokens", "16"),
        *("--vocabulary", "120", "--epochs", "3", "--batch-size", "4", "--threads", "1", *more),
    ]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The directory of a head."""
    out = folder / "head"
    assert run(arguments(folder, out, "--epochs", "4")) == 0
    return out


def test_a_head_and_what_is_said_of_it(trained: Path) -> None:
    tensors = load_file(trained / "head.safetensors")
    about = json.loads((trained / "head.json").read_text())
    hidden, inner = 64, 96
    shapes = {
        "taps.norm": (3, hidden),
        "taps.weight": (3, hidden, hidden),
        "state.norm": (hidden,),
        "state.weight": (hidden, hidden),
        "token.norm": (hidden,),
        "token.weight": (hidden, hidden),
        "attention.norm": (hidden,),
        "attention.query": (4, 128, hidden),
        "attention.output": (4, hidden, 128),
        "mlp.norm": (1, hidden),
        "mlp.gate": (1, inner, hidden),
        "mlp.up": (1, inner, hidden),
        "mlp.down": (1, hidden, inner),
        "norm": (hidden,),
        "vocabulary": (120,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    vocabulary = tensors.pop("vocabulary")
    assert vocabulary.dtype == torch.int32
    assert (vocabulary[1:] > vocabulary[:-1]).all()
    assert 257 in vocabulary.tolist()  # what ends a text
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert (about["version"], about["kind"], about["taps"]) == (2, "state and token", [1, 2, 3])
    assert about["attention"]["queries"] == 128
    assert len(about["attention"]["layers"]) == len(about["attention"]["key_heads"]) == 4
    model = eecore.load(trained.parent / "model", device="cpu", kv_cache_tokens=64)
    assert about["model"] == {
        "digest": network_digest(model.network),
        "num_layers": 3,
        "hidden_size": hidden,
        "vocab_size": 320,
    }
    assert about["weights"] == "float32"
    assert 0 < about["training"]["tokens"] < 1400
    assert about["policy"]["num_drafts"] >= 1
    assert about["agreement"]["by_position"][0] > 5 / 120
    names = {path.name for path in (trained.parent / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_the_runtime_drafts_by_it(
    folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime's head gives the same as a step of the training loop."""
    model = eecore.load(folder / "model", device="cpu", kv_cache_tokens=1024, exits=trained)
    assert model.tokenizer is not None
    prompts = []
    for number in range(0, 90, 2):
        asked = [{"role": "user", "content": f"What is {number} and {number}?"}]
        prompts.append(model.tokenizer.encode_chat(asked))
    settings: dict[str, Any] = {"max_tokens": 16}
    expected = eecore.generate(model, prompts, **settings)
    got = eecore.generate(model, prompts, exit=eecore.HeadDrafts(3, 0.0), **settings)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert sum(output.stats.accepted for output in got) > 0

    heads_in_floats(monkeypatch)
    head, runs = _trained_head(trained), models.load_head(trained, model.network)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(5, 3, 64, generator=generator)
    embedded = torch.randn(5, 64, generator=generator)
    network, text = model.network, prompts[0]
    kv = models.KVCache.allocate(
        network.config, 1, len(text), device=network.device, dtype=network.dtype
    )
    network.layers(0, 3, network.embed(torch.tensor(text)), kv, network.whole_text(len(text)))
    positions = torch.tensor([3, 9, 4, 8, 12])  # of the tokens; as many keys are before them
    keys = keys_at(kv, runs.settings.attended, torch.arange(len(text)))
    cos_sin = network.cos_sin(20, 0)
    seen = TextKeys.of(keys, torch.zeros(5).long(), positions - 1, cos_sin)
    with torch.no_grad():
        state = head.step(head.begin(states), embedded, seen)
    got_state = runs.step(
        runs.begin(list(states.unbind(1))),
        embedded,
        models.SeenKeys(
            kv,
            models.AttentionBatch(
                positions=positions,
                slot_mapping=torch.full((5,), -1),
                page_table=torch.zeros(5, 1, dtype=torch.int32),
                seq_lens=positions.int(),
                query_start_loc=torch.arange(6, dtype=torch.int32),
            ),
            network.no_keys(5),
        ),
    )
    torch.testing.assert_close(got_state, state, rtol=2e-2, atol=2e-2)  # keys in bfloat16


def _trained_head(directory: Path) -> DraftHead:
    """The training's module with the files' weights."""
    sizes = HeadSizes(64, 3, 96, 1, 4, 128)
    head = DraftHead(sizes, 1e-5, torch.ones(64))
    tensors = load_file(directory / "head.safetensors")
    for name, stored in head.tensor_names.items():
        getattr(head, name).data.copy_(tensors[stored].float())
    return head


def test_a_stopped_run_goes_on_where_it_was(
    folder: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run is stopped in each of its three steps, and cut in the middle of a line and a row."""
    out = tmp_path / "head"
    said = []
    for module, name, calls in (
        ("eecore.lab.answers.writing", "write_answers", 20),
        ("eecore.lab.training.head_states", "collect_states", 1),
        ("eecore.lab.training.trainer", "StepTrainer.run", 30),
    ):
        with monkeypatch.context() as patch:
            _stopping_after(patch, module, name, calls)
            more = ["--epochs", "4", *(["--resume"] if out.exists() else [])]
            assert run(arguments(folder, out, *more)) == 130
        said.append(capsys.readouterr().err)
    work = out / "work"
    with (work / "answers.jsonl").open("a") as file:
        file.write('{"index":')
    with (work / "states" / "states.bin").open("ab") as file:
        file.write(b"xyz")
    assert run(arguments(folder, out, "--epochs", "4", "--resume")) == 0
    said.append(capsys.readouterr().err)
    for (begins, ends), text in zip(STAGES, said, strict=True):
        assert re.findall(r"resuming (\w+) after", text) == ([begins] if begins else [])
        assert ends is None or f"interrupted at {ends}" in text
    assert re.search(r"resuming training after step 30 of \d+\n", said[3])
    straight, resumed = (load_file(place / "head.safetensors") for place in (trained, out))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert sorted(answers(trained)) == sorted(answers(out))


@pytest.mark.parametrize("step_s", [None, 1e-9])
def test_minutes_become_steps(
    folder: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step_s: float | None,
) -> None:
    """A few steps are measured, without effect on the head; the answers are there already.

    Where a step takes longer than measured, the time still ends the run.
    """
    if step_s is not None:
        monkeypatch.setattr(StepTrainer, "seconds_per_step", lambda *_, **__: step_s)
    out, work = tmp_path / "head", tmp_path / "work"
    shutil.copytree(trained / "work", work, ignore=shutil.ignore_patterns("training"))
    command = arguments(folder, out, "--work", str(work), "--resume", "--minutes", "0.002")
    place = command.index("--epochs")
    del command[place : place + 2]
    assert run(command) == 0
    training = json.loads((out / "head.json").read_text())["training"]
    assert 1 <= training["steps"] < 1000  # in 120 ms
    assert training["seconds"] > 0


def test_a_head_begins_with_one_in_blocks_of_4_bits(
    folder: Path, trained: Path, tmp_path: Path
) -> None:
    """As the heads that ship are stored."""
    begins, out = tmp_path / "begins", tmp_path / "head"
    shutil.copytree(trained, begins, ignore=shutil.ignore_patterns("work"))
    pack(begins)
    few = ["--epochs", "0.01", "--begin", str(begins), "--learning-rate", "1e-9"]
    assert run(arguments(folder, out, *few)) == 0
    before, after = (load_file(place / "head.safetensors") for place in (begins, out))
    assert any(tensor.dtype == torch.uint8 for tensor in before.values())
    for name, tensor in before.items():
        floats = tensor if tensor.dtype == torch.int64 else head_floats(tensor)
        torch.testing.assert_close(after[name].to(floats.dtype), floats, atol=1e-3, rtol=0.02)


def test_a_head_begins_with_another(
    folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first step it is as good as the head it begins with."""
    out = tmp_path / "head"
    few = ["--epochs", "0.01", "--begin", str(trained), "--learning-rate", "1e-9"]
    assert run(arguments(folder, out, *few)) == 0
    before, after = (load_file(place / "head.safetensors") for place in (trained, out))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0.01)
    about = json.loads((out / "head.json").read_text())
    assert about["training"]["before"]["steps"] > about["training"]["steps"]
    capsys.readouterr()
    for more, code, said in (
        (["--taps", "1,3"], REQUEST, "taps: expected [1, 3], as this run has, got [1, 2, 3]"),
        (["--vocabulary", "100"], REQUEST, "vocabulary_size: expected 100, as this run has"),
        (["--begin", str(tmp_path)], MODEL, "head.json"),
    ):
        assert run(arguments(folder, tmp_path / "other", *few, *more)) == code
        assert said in capsys.readouterr().err
        assert not (tmp_path / "other").exists()


def test_there_may_be_no_more_questions(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "few"
    assert run(arguments(folder, out, "--tokens", "5000", "--epochs", "0.1")) == 0
    written = lines_of(out / "work" / "answers.jsonl")[1:]
    assert len(written) == 90
    tokens = sum(len(line["answer"]) for line in written)
    said = capsys.readouterr().err
    assert f"wrote {tokens} of 5000 tokens: there were no more questions" in said


def test_a_head_that_attends_begins_with_one_that_does_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "head"
    assert run(arguments(folder, plain, "--attend", "0")) == 0
    assert "attention.norm" not in load_file(plain / "head.safetensors")
    assert json.loads((plain / "head.json").read_text())["version"] == 1
    few = ["--epochs", "0.01", "--begin", str(plain), "--learning-rate", "1e-9"]
    assert run(arguments(folder, out, *few)) == 0
    before, after = (load_file(place / "head.safetensors") for place in (plain, out))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0.01)
    assert after["attention.output"].abs().max() < 1e-6
    attending = ["--begin", str(out), "--attend", "2"]
    assert run(arguments(folder, tmp_path / "other", *attending)) == REQUEST
    assert "attention: expected the key heads [(" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "more", "code", "said"),
    [
        ("none", [], MODEL, "none: expected a model directory"),
        ("dumb", [], MODEL, "chat_template: expected one in the model directory, got none"),
        ("wordless", [], MODEL, "expected a model with a tokenizer, got none"),
        ("t5", [], MODEL, "expected a model without an encoder, got T5ForConditionalGeneration"),
        ("looped", [], MODEL, "without loops for a head, got one that runs its layers 3 times"),
        ("model", ["--vocabulary", "321"], USAGE, "expected at most the model's 320 tokens"),
        ("model", ["--taps", "1,4"], USAGE, "ascending layers of 1..3, the last 3, got 1,4"),
        ("model", ["--taps", "2,1,3"], USAGE, "ascending layers of 1..3"),
        ("model", ["--taps", "one"], USAGE, "--taps: expected layers such as 10,20,30, got one"),
        ("model", ["--minutes", "1"], USAGE, "--minutes: expected it or --epochs, got both"),
        ("model", ["--prompts", "nowhere.txt"], REQUEST, "nowhere.txt: No such file"),
        ("model", ["--resume"], USAGE, "--resume: "),
        ("model", ["--precision", "float8"], USAGE, "'float8' is not one of"),
    ],
)
def test_bad_input_is_said_before_anything_is_made(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    more: list[str],
    code: int,
    said: str,
) -> None:
    if model in ("t5", "looped"):
        (write_t5 if model == "t5" else write_looped)(folder / model)
    out = tmp_path / "head"
    assert run(arguments(folder, out, *more, model=model)) == code
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_the_work_of_others_is_left_alone(
    folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(folder, trained)) == USAGE
    assert "--out: expected no head there yet, got one in " in capsys.readouterr().err
    assert run(arguments(folder, tmp_path / "head", "--work", str(trained / "work"))) == USAGE
    assert "expected a new or empty directory" in capsys.readouterr().err
    assert run(arguments(folder, tmp_path / "head", "--work", str(folder), "--resume")) == USAGE
    assert "expected a run, got no answers there" in capsys.readouterr().err
    write_model(folder / "other", num_hidden_layers=3, seed=1)
    work = ["--work", str(trained / "work"), "--resume"]
    assert run(arguments(folder, tmp_path / "head", *work, model="other")) == REQUEST
    assert "model: expected " in capsys.readouterr().err
    assert run(arguments(folder, tmp_path / "head", *work, "--taps", "3")) == REQUEST
    assert "taps: expected [3], as this run has, got [1, 2, 3]" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_too_few_texts_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.jsonl").write_text('{"prompt": "Why?"}\n')
    more = ["--prompts", str(tmp_path / "few.jsonl")]
    assert run(arguments(folder, tmp_path / "head", *more)) == REQUEST
    assert "texts: expected 2 or more, to hold one out, got 1" in capsys.readouterr().err


def test_a_question_that_cannot_be_asked_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.txt").write_text("Who?\n" + 600 * "why " + "\n")
    more = ["--prompts", str(tmp_path / "long.txt")]
    assert run(arguments(folder, tmp_path / "head", *more)) == REQUEST
    assert "error: question 2: " in capsys.readouterr().err


def test_the_questions_that_ship() -> None:
    questions = list(islice(builtin_questions(0), 3000))
    assert len(set(questions)) == 3000
    assert questions[:50] == list(islice(builtin_questions(0), 50))
    assert questions[:50] != list(islice(builtin_questions(1), 50))
    benchmark = {question.lower() for question in QUESTIONS}
    assert not benchmark & {question.lower() for question in questions}
    assert not any("{" + name + "}" in q for q in questions for name in ("name", "place", "thing"))


def answers(out: Path) -> list[str]:
    return (out / "work" / "answers.jsonl").read_text().splitlines()


def _stopping_after(patch: pytest.MonkeyPatch, module: str, name: str, calls: int) -> None:
    """Tell a step of the command to stop once it has asked so often."""
    *places, last = name.split(".")
    place: Any = importlib.import_module(module)
    for part in places:
        place = getattr(place, part)
    original = getattr(place, last)

    def stopping(*given: Any, **options: Any) -> Any:
        asked = itertools.count(1)

        def should_stop() -> bool:
            return next(asked) >= calls

        if "should_stop" in options:
            options["should_stop"] = should_stop
        else:
            given = (given[0], should_stop, *given[2:])
        return original(*given, **options)

    patch.setattr(place, last, stopping)
