"""``eecore train`` as a user meets it."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import eecore
from eecore.cli.app import run
from eecore.lab.training import loading, state_path
from eecore.lab.training.interrupts import stop_on_signals
from eecore.lab.training.run_files import is_begun
from eecore.lab.training.trainer import StepTrainer
from eecore.models import model_digest
from tiny_models import write_byte_tokenizer, write_model
from tiny_training import history

USAGE, MODEL, REQUEST, INTERRUPTED = 2, 3, 4, 130


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a model without weights, and data."""
    folder = tmp_path_factory.mktemp("train")
    write_model(folder / "model", num_hidden_layers=3)
    write_model(folder / "untrained", num_hidden_layers=3)
    (folder / "untrained" / "model.safetensors").unlink()
    lines = [{"input": f"{word}=", "target": word[::-1]} for word in ("ab", "cde", "fg", "hij")]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "text.txt").write_text("to be or not to be, that is the question\n")
    return folder


def arguments(folder: Path, out: Path, *more: str, model: str = "model") -> list[str]:
    needed = ["train", str(folder / model), "--data", str(folder / "data.jsonl")]
    return [*needed, "--out", str(out), "--device", "cpu", *more]


def test_a_run_from_start_to_generation(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    held_out = str(folder / "data.jsonl")
    options = ("--steps", "12", "--batch-size", "2", "--held-out", held_out)
    assert run(arguments(folder, out, *options, "--evaluate-steps", "6")) == 0
    shown = capsys.readouterr()
    assert shown.out == f"wrote {out}\n"
    settings = {
        *("steps: 12", "batch-size: 2", "epochs: 6", "sequences: 4", "weights: pretrained"),
        *("learning-rate: 0.0001", "schedule: cosine", "curriculum: gradual", "lora: none"),
        *("packing: no", "accumulate: 1", f"data: {held_out}", "processes: 1", f"out: {out}"),
    }
    assert settings <= set(shown.err.splitlines())
    assert re.search(r"12/12 \[.*, loss=[\d.]+\]", shown.err)
    assert re.search(
        r"step 6: held-out loss [\d.]+, agreement .* by exit: [\d. ]+ 1\.00", shown.err
    )
    about = json.loads((out / "exits.json").read_text())
    assert about["training"]["loss"]["curriculum"] == "gradual"
    assert about["training"]["layer_dropout"] == {"max_rate": 0.2, "over_time": "constant"}
    assert run(["generate", str(out), "ab=", "--max-tokens", "3", "--device", "cpu"]) == 0


def test_settings_reach_the_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "scratch"
    model = str(folder / "untrained" / "config.json")
    assert not run(
        [
            *("train", model, "--data", str(folder / "text.txt"), "--out", str(out)),
            *("--context", "8", "--epochs", "2", "--batch-size", "3", "--device", "cpu"),
            *("--curriculum", "rotational:2", "--e-scale", "0.2", "--layer-dropout", "0.1"),
        ]
    )
    training = json.loads((out / "exits.json").read_text())["training"]
    expected = {"kind": "layerskip", "e_scale": 0.2, "curriculum": "rotational", "rotation": 2}
    assert training["loss"] == expected
    assert training["layer_dropout"] == {"max_rate": 0.1, "over_time": "exponential"}
    assert training["steps"] == 4  # 42 tokens in windows of 8: 6, in batches of 3, twice
    calm = tmp_path / "calm"
    options = ("--loss", "calm", "--lora", "2", "--steps", "2", "--precision", "bfloat16")
    assert run(arguments(folder, calm, *options)) == 0
    training = json.loads((calm / "exits.json").read_text())["training"]
    assert training["loss"] == {"kind": "calm"}
    assert training["layer_dropout"] is None
    assert training["lora"] == {"rank": 2, "alpha": 4.0, "dropout": 0.0}
    assert (calm / "adapter" / "adapter_config.json").is_file()
    assert eecore.load(calm, device="cpu", kv_cache_tokens=64).config.num_layers == 3


def test_conversations_in_packed_rows_and_pieces(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = tmp_path / "chats.jsonl"
    messages = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]
        for word in ("ab", "cde", "fg", "hij", "klm")
    ]
    chats.write_text("\n".join(json.dumps({"messages": each}) for each in messages))
    out = tmp_path / "out"
    command = ["train", str(folder / "model"), "--data", str(chats), "--out", str(out)]
    options = ("--packing", "--context", "70", "--batch-size", "2", "--accumulate", "2")
    more = ("--schedule", "linear", "--final-learning-rate", "0", "--steps", "4", "--device", "cpu")
    assert run([*command, *options, *more]) == 0
    shown = capsys.readouterr().err
    # Some 30 tokens each, so two in a row, and two rows in a batch: the second one has one row.
    assert {"sequences: 5", "packing: yes", "epochs: 2"} <= set(shown.splitlines())
    training = json.loads((out / "exits.json").read_text())["training"]
    expected = {"packing": 70, "accumulate": 2, "schedule": "linear", "final_learning_rate": 0.0}
    assert {name: training[name] for name in expected} == expected
    rates = [entry["learning_rate"] for entry in history(out)]
    assert rates == pytest.approx([1e-4, 2e-4 / 3, 1e-4 / 3, 0])
    ask = ["generate", str(out), "ab", "--max-tokens", "2", "--device", "cpu"]
    assert run(ask) == 0


def test_tensorboard_is_asked_for_and_says_what_it_needs(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(loading, "load_starting_point", lambda *_, **__: pytest.fail("read"))
    assert run(arguments(folder, tmp_path / "out", "--tensorboard")) == REQUEST
    said = capsys.readouterr().err
    assert "expected the package tensorboard" in said
    assert "pip install '.[tensorboard]'" in said
    assert not (tmp_path / "out").exists()


def test_a_model_with_an_encoder(folder: Path, tmp_path: Path) -> None:
    import transformers

    model = tmp_path / "t5"
    config = transformers.T5Config(
        vocab_size=260,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=257,
    )
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(model)
    write_byte_tokenizer(model)
    out = tmp_path / "out"
    options = ("--loss", "calm", "--layer-dropout", "0.5", "--steps", "3", "--batch-size", "2")
    held_out = ("--held-out", str(folder / "data.jsonl"))
    assert run(arguments(folder, out, *options, *held_out, model=str(model))) == 0
    about = json.loads((out / "exits.json").read_text())
    assert about["num_layers"] == len(about["held_out"]["loss"]) == 3
    trained = transformers.AutoModelForSeq2SeqLM.from_pretrained(out)
    assert type(trained).__name__ == "T5ForConditionalGeneration"


def test_ctrl_c_saves_and_resume_goes_on(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = ("--steps", "9", "--batch-size", "2")
    assert run(arguments(folder, whole, *options)) == 0
    log = StepTrainer.log

    def interrupt(trainer: StepTrainer, *given: Any) -> None:
        log(trainer, *given)
        if trainer.step == 4:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(StepTrainer, "log", interrupt)
        assert run(arguments(folder, stopped, *options)) == INTERRUPTED
    # The step after the signal is the first to be asked.
    assert (
        "interrupted after step 5 of 9; the same command with --resume" in capsys.readouterr().err
    )
    assert is_begun(state_path(stopped))
    assert signal.getsignal(signal.SIGINT) is before
    assert run(arguments(folder, stopped, *options)) == REQUEST
    assert "a run can be resumed there" in capsys.readouterr().err
    assert run(arguments(folder, stopped, *options, "--resume", "--checkpoint-minutes", "1")) == 0
    assert "resuming after step 5 of 9\n" in capsys.readouterr().err
    assert history(whole) == history(stopped)


def test_what_is_missing_is_said_before_the_model_is_read(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "load_starting_point", lambda *_, **__: pytest.fail("read"))
    out = tmp_path / "out"
    assert run(arguments(folder, out, "--held-out", str(tmp_path / "none"))) == REQUEST
    assert "none: No such file or directory" in capsys.readouterr().err
    assert run(arguments(folder, out, "--resume")) == REQUEST
    assert run(arguments(folder, folder)) == REQUEST
    assert "out: expected a new or empty directory" in capsys.readouterr().err
    assert not out.exists()


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with stop_on_signals() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_torchrun_passes_a_ctrl_c_on_which_is_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_commands_of_one_process_refuse_several(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    out = tmp_path / "out"
    data = ("--data", str(folder / "data.jsonl"))
    for name, *more in (("train-exits",), ("train-classifier", *data)):
        assert run([name, str(folder / "model"), "--out", str(out), *more]) == USAGE
        assert f"{name}: expected one process, got several of torchrun" in capsys.readouterr().err
    assert not out.exists()


def test_the_exit_classifier(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "classifier.safetensors"
    command = ["train-classifier", str(folder / "model"), "--data", str(folder / "data.jsonl")]
    command += ["--steps", "20", "--batch-size", "2", "--device", "cpu"]
    assert run([*command, "--out", str(out)]) == 0
    assert re.fullmatch(rf"loss [\d.]+ at first, .* wrote {out}\n", capsys.readouterr().out)
    with safe_open(str(out), "pt") as file:
        assert file.metadata()["model_sha256"] == model_digest(folder / "model")
    options = ["--exit", "confident:0.5", "--measure", "classifier", "--classifier", str(out)]
    generate = ["generate", str(folder / "model"), "ab=", "--max-tokens", "4", "--device", "cpu"]
    assert run([*generate, *options]) == 0
    assert run([*command, "--out", str(tmp_path / "none" / "c.safetensors")]) == USAGE
    untrained = ["train-classifier", str(folder / "untrained"), *command[2:], "--out", str(out)]
    assert run(untrained) == MODEL
    assert "untrained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--steps", "3", "--epochs", "1"), USAGE, "--steps: expected it or --epochs, got both"),
        (
            ("--loss", "focal"),
            USAGE,
            "--loss: expected one of layerskip, calm, last, looped, gate, got focal",
        ),
        (
            ("--loss", "calm", "--e-scale", "0.1"),
            USAGE,
            "--e-scale: expected none with --loss calm",
        ),
        (("--curriculum", "rotational:x"), USAGE, "--curriculum: expected rotational:R"),
        (("--curriculum", "rotational"), REQUEST, "rotation: expected 1 or more"),
        (("--curriculum", "spiral"), REQUEST, "curriculum: expected all, rotational or gradual"),
        (("--e-scale", "2"), REQUEST, "e_scale: expected 0..1, got 2"),
        (("--layer-dropout", "2"), REQUEST, "max_rate: expected 0..1, got 2"),
        (("--learning-rate", "0"), REQUEST, "learning_rate: expected a number above 0"),
        (("--precision", "int4"), REQUEST, "precision: expected float32 or bfloat16"),
        (("--device", "tpu"), USAGE, "--device: expected cpu or cuda, got tpu"),
        (("--accumulate", "17"), REQUEST, "accumulate: expected 1..batch_size=16, got 17"),
        (("--context", "4"), REQUEST, "data.jsonl:1: expected at most context=4 tokens"),
        (("--resume",), REQUEST, "run.json: expected a file, got nothing"),
    ],
)
def test_wrong_settings_are_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: Any,
    code: int,
    message: str,
) -> None:
    out = tmp_path / "out"
    assert run(arguments(folder, out, *options)) == code
    errors = capsys.readouterr().err.splitlines()
    assert message in errors[-1]
    assert errors[-1].startswith("error: ")
    assert not out.exists()


def test_a_model_that_cannot_be_trained_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(model: str, *options: str) -> tuple[int, str]:
        code = run(arguments(folder, tmp_path / "out", *options, model=model))
        return code, capsys.readouterr().err.splitlines()[-1]

    code, line = error("nothing")
    assert (code, "expected a model directory" in line) == (MODEL, True)
    bare = write_model(tmp_path / "bare", tokenizer=False)
    code, line = error(str(bare))
    assert (code, "expected tokenizer.json, got none" in line) == (REQUEST, True)
    with_another = ("--steps", "1", "--tokenizer", str(folder / "model"))
    assert run(arguments(folder, tmp_path / "ok", *with_another, model=str(bare))) == 0
    assert (tmp_path / "ok" / "tokenizer.json").is_file()
    small = write_model(tmp_path / "small", vocab_size=100)
    code, line = error(str(small))
    assert (code, "expected at most the model's 100 tokens, got 260" in line) == (REQUEST, True)
    endless = write_model(tmp_path / "endless", "qwen2", eos_token_id=None, bos_token_id=None)
    code, line = error(str(endless))
    assert (code, "expected an eos_token_id" in line) == (REQUEST, True)
    (folder / "untrained" / "pytorch_model.bin").write_bytes(b"")
    code, line = error("untrained")
    assert (code, "expected weights as safetensors, got pytorch_model.bin" in line) == (MODEL, True)
    (folder / "untrained" / "pytorch_model.bin").unlink()
    broken = tmp_path / "broken"
    broken.mkdir()
    write_byte_tokenizer(broken)
    (broken / "config.json").write_text('{"model_type": "none of them"}')
    code, line = error(str(broken))
    assert (code, "broken/config.json: architectures: supported are" in line) == (MODEL, True)
