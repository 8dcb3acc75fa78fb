"""The command line as a user meets it: its output, the stream, and the exit code."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pty
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console

import eecore
from command_line import (
    FAILED,
    INTERRUPTED,
    LONG,
    MODEL,
    NO_READER,
    REQUEST,
    USAGE,
    error_of,
    start,
)
from eecore.cli.app import run
from eecore.cli.depth import DepthPainter, depth_style, has_colours, said_depths
from eecore.cli.results import StreamedText, TextByPrompt
from eecore.config import ANSWERS
from eecore.decoding.iterate import Iterations
from eecore.decoding.prefill import Prefill
from eecore.models.readers import load
from eecore.scheduling.scheduler import Work
from head_packs import write_pack
from tiny_families import write_family, write_family_gguf
from tiny_models import write_model
from tripwire import Fault

ASKS_PYDANTIC = importlib.util.find_spec("typer._adapters") is not None


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# What is asked for comes out


def test_generate_prints_the_text_of_the_library(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", model, "Once upon", "--raw", "--max-tokens", "12", "--exits", "none"]
    assert run(command) == 0
    expected = eecore.generate(eecore.load(model), "Once upon", max_tokens=12)[0].text
    captured = capsys.readouterr()
    assert captured.out.removesuffix("\n") == (expected or "").removesuffix("\n")
    assert captured.err == ""


def test_json_has_everything_of_an_output(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", model, "Once upon", "--raw", "-n", "6", "--ignore-eos", "--json"]
    assert run([*command, "--exit", "full", "--logprobs", "2"]) == 0
    record = json.loads(capsys.readouterr().out)
    expected = eecore.generate(
        eecore.load(model), "Once upon", exit="full", max_tokens=6, ignore_eos=True, logprobs=2
    )[0]
    assert record["index"] == 0
    assert record["prompt"] == "Once upon"
    assert record["text"] == expected.text
    assert record["token_ids"] == expected.token_ids
    assert record["exit_layers"] == [4] * 6
    assert record["finish_reason"] == "length"
    assert record["logprobs"] == pytest.approx(expected.logprobs)
    assert [len(top) for top in record["top_logprobs"]] == [2] * 6
    assert record["stats"]["contract"] == expected.stats.contract
    assert record["stats"]["layers_run"] == expected.stats.layers_run
    assert record["stats"]["tokens_per_s"] > 0
    assert record["stats"]["draft_acceptance"] is None


@pytest.mark.parametrize(
    ("options", "contract"),
    [
        (["full"], "full: every layer"),
        (["fixed:2"], "fixed exit after layer 2"),
        (["confident:0.2", "--batch-mode", "all"], "confident exit (softmax, threshold 0.2)"),
        (["confident:0.8", "--measure", "state", "--exit-points", "1,3"], "confident exit (state"),
        (["confident:0.5", "--min-exit-layer", "2", "--decay-tau", "4"], "confident exit (softmax"),
        (["speculative:2,3", "--draft-threshold", "0.4"], "self-speculation (exit layer 2"),
        (["draft-verify:4", "--skip-attention", "1-2", "--skip-mlp", "2"], "draft and verify (3"),
        (["lookup:3"], "prompt lookup (3 drafts): lossless"),
        (["auto"], "auto (at most 10 drafts): lossless"),
    ],
)
def test_every_exit_mode_runs(
    model: str, options: list[str], contract: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", model, "abc", "-n", "10", "-t", "0", "--json", "--exit"]
    assert run([*command, *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stats"]["contract"].startswith(contract)
    if "lossless" in record["stats"]["contract"]:
        assert run([*command, "full"]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == record["token_ids"]


def test_the_classifier_measure_reads_its_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "classifier.safetensors"
    save_file({"weight1": torch.zeros(2, 64), "bias1": torch.tensor([0.0, 5.0])}, file)
    command = ["generate", model, "abc", "-n", "4", "--ignore-eos", "--json"]
    assert run([*command, "--exit", "confident:0.9", "--classifier", str(file)]) == 0
    # The first token comes from the prompt, which always runs all layers.
    assert json.loads(capsys.readouterr().out)["exit_layers"] == [4, 1, 1, 1]


def test_a_file_of_prompts_comes_back_in_order(
    model: str, lines: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines("prompts.txt", "first\n\nsecond one\nthird\n")
    assert run(["generate", model, "--file", file, "-n", "5", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["prompt"] for record in records] == ["first", "second one", "third"]
    assert run(["generate", model, "--file", file, "-n", "5", "--stats"]) == 0
    captured = capsys.readouterr()
    heads = [line for line in captured.out.splitlines() if line.startswith("==> ")]
    assert heads == ["==> 1/3: first", "==> 2/3: second one", "==> 3/3: third"]
    assert re.search(r"^speed +[\d.]+x full depth's, the same text: ", captured.err, re.MULTILINE)


def test_outputs_of_prompts_wait_for_those_before_them(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = eecore.load(model)
    first, second = eecore.generate(loaded, ["a", "b"], max_tokens=2)
    results = TextByPrompt(["a", "b"], loaded, None)
    results.done(1, second)
    assert capsys.readouterr().out == ""
    results.done(0, first)
    assert re.findall(r"==> (\d)/2", capsys.readouterr().out) == ["1", "2"]


def test_text_that_no_step_has_shown_comes_at_the_end(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of an answer that is cut off, where it may have become a stop string."""
    loaded = eecore.load(model)
    (output,) = eecore.generate(loaded, ["a"], max_tokens=8, ignore_eos=True)
    StreamedText(["a"], loaded, None, "a").done(0, output)
    assert capsys.readouterr().out.removesuffix("\n") == (output.text or "").removesuffix("\n")


def test_json_lines_of_prompts_may_be_strings_tokens_or_objects(
    model: str, lines: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines("prompts.jsonl", '"abc"\n[97, 98, 99]\n{"prompt": "abc", "id": 3}\n')
    assert run(["generate", model, "-f", file, "-n", "5", "--seed", "3", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 3
    assert records[0]["token_ids"] == records[2]["token_ids"]


def test_stdin_is_one_prompt_and_with_file_dash_one_a_line(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "two\nlines\n")
    assert run(["generate", model, "-n", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "two\nlines"
    pipe_in(monkeypatch, "two\nlines\n")
    assert run(["generate", model, "-f", "-", "-n", "2", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_model_without_a_tokenizer_takes_and_gives_ids(
    tmp_path: Path, lines: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = str(write_model(tmp_path / "bare", tokenizer=False))
    file = lines("ids.jsonl", "[1, 2, 3]\n")
    assert run(["generate", bare, "-f", file, "-n", "4", "--ignore-eos", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] is None
    assert run(["generate", bare, "-f", file, "-n", "4", "--ignore-eos"]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in record["token_ids"]]
    assert run(["generate", bare, "text"]) == REQUEST
    assert "no tokenizer" in error_of(capsys.readouterr())


def test_a_prompt_goes_into_the_template_unless_raw(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", model, "hi", "-n", "3", "--json"]
    assert run([*command, "--system", "be short"]) == 0
    record = json.loads(capsys.readouterr().out)
    written = (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer = eecore.load(model).tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(written, add_special_tokens=False)
    assert record["prompt"] == "hi"
    assert record["stats"]["prompt_tokens"] == len(prompt)
    assert run([*command, "--raw"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stats"]["prompt_tokens"] == len(tokenizer.encode("hi"))


def test_an_answer_may_fill_the_context_and_a_text_may_not(
    model: str, lines: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", model, "hi", "--ignore-eos", "--stats"]
    assert run(command) == 0
    said = capsys.readouterr().err
    assert "note: the text was cut at the end of the context (--max-tokens)" in said
    prompt, new = re.search(r"tokens +(\d+) new, (\d+) of prompts", said).groups()  # type: ignore[union-attr]
    assert int(prompt) + int(new) == eecore.load(model).config.max_position
    assert run([*command, "--raw"]) == 0
    said = capsys.readouterr().err
    assert "note: the text was cut after 128 tokens (--max-tokens)" in said
    assert run([*command, "-n", "3"]) == 0  # as the caller said
    assert "cut" not in capsys.readouterr().err
    file = lines("prompts.txt", "a\nb\n")
    assert run(["generate", model, "-f", file, "--raw", "--ignore-eos"]) == 0
    assert "note: 2 of 2 texts were cut after 128 tokens" in capsys.readouterr().err
    assert run(["generate", model, "x" * 600]) == REQUEST
    assert "512 together" in error_of(capsys.readouterr())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), ANSWERS),
        (("--raw",), {}),
        (("--min-p", "0.1"), {"min_p": 0.1}),
        (("--presence-penalty", "0", "--top-p", "1"), {**ANSWERS, "top_p": 1.0}),
    ],
)
def test_answers_are_sampled_where_neither_model_nor_caller_says_how(
    model: str,
    given: tuple[str, ...],
    expected: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["generate", model, "abc", "-n", "16", "--ignore-eos", "--seed", "7", "--json"]
    assert run([*command, *given]) == 0
    loaded = eecore.load(model)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": "abc"}])
    asked = "abc" if "--raw" in given else ids
    fixed = {"max_tokens": 16, "ignore_eos": True, "seed": 7}
    (output,) = eecore.generate(loaded, asked, **fixed, **expected)
    assert json.loads(capsys.readouterr().out)["token_ids"] == output.token_ids


def test_depth_in_words() -> None:
    assert said_depths(eecore.Full(), [4, 4], 4) == "exit layers: 4x2"
    assert said_depths(eecore.ConfidentExit(0.9), [4, 2, 2], 4) == "exit layers: 4 2x2"
    lossless = said_depths(eecore.PromptLookup(), [4, 0, 0, 4, 2], 4)
    assert lossless == "3 of 5 tokens drafted, and verified by all 4 layers"


def test_info_says_what_the_model_is(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", model, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["config"]["architecture"] == "LlamaForCausalLM"
    assert facts["exit_layers"] == [1, 4]
    assert facts["kv_bytes_per_token"] == 4 * 2 * 2 * 64 * 4
    assert facts["num_parameters"] == eecore.load(model).config.num_parameters
    assert facts["tokenizer"]["chat_template"] is True
    assert facts["build"]["cpu_capability"]
    assert run(["info", model]) == 0
    assert "exit layers 1..4" in capsys.readouterr().out


def test_info_shows_the_shipped_head_that_loading_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model of the same sizes has no head."""
    own, other = tmp_path / "own", tmp_path / "other"
    for seed, path in enumerate((own, other)):
        write_family(path, "gemma2", seed)
    write_pack(tmp_path / "heads" / "own", eecore.load(own))
    monkeypatch.setattr("eecore.models.readers.head_file.SHIPPED", tmp_path / "heads")
    for path in (own, other, write_family_gguf(tmp_path / "own.gguf", own, "gemma2")):
        head = eecore.load(path).network.draft_head
        assert (head is not None) == (path != other)
        assert run(["info", str(path)]) == 0
        is_shown = re.search(r"draft head +ships with eecore; ", capsys.readouterr().out)
        assert (is_shown is not None) == (path != other)


def test_search_writes_what_generate_reads(
    model: str,
    tmp_path: Path,
    lines: Callable[[str, str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, out = lines("text.txt", "some text to look at, twice over"), tmp_path / "skips.json"
    command = ["search", model, "--text", text, "--out", str(out), "--max-tokens", "24"]
    assert run([*command, "--max-skipped", "2"]) == 0
    captured = capsys.readouterr()
    assert "predicted speed-up" in captured.err
    assert f"wrote {out}" in captured.out
    assert len(json.loads(out.read_text())) >= 1
    assert (
        run(["generate", model, "a", "-n", "3", "--exit", "draft-verify", "--skips", str(out)]) == 0
    )


def test_a_search_that_is_interrupted_keeps_what_it_found(
    model: str,
    tmp_path: Path,
    lines: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = eecore.search_skipped_sublayers

    def interrupted(*args: Any, progress: Callable[[Any], None], **settings: Any) -> Any:
        def once(step: Any) -> None:
            progress(step)
            raise KeyboardInterrupt

        return whole(*args, progress=once, **settings)

    monkeypatch.setattr(eecore, "search_skipped_sublayers", interrupted)
    out, text = tmp_path / "skips.json", lines("text.txt", "some text to look at")
    command = ["search", model, "--text", text, "--out", str(out), "--max-tokens", "8"]
    assert run(command) == INTERRUPTED
    assert len(json.loads(out.read_text())) == 1


# What cannot be done is said in one line


def test_a_model_that_cannot_be_loaded(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(path: str, *said: str) -> None:
        assert run(["generate", path, "hi"]) == MODEL
        message = error_of(capsys.readouterr())
        assert message.startswith("error: ")
        for words in said:
            assert words in message

    fails(str(tmp_path / "nowhere"), "nowhere", "got nothing")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails("owner/name", "got owner/name", "HF_HUB_OFFLINE")
    (tmp_path / "file.gguf").write_text("")
    fails(str(tmp_path / "file.gguf"), "expected a GGUF file")
    (tmp_path / "empty").mkdir()
    fails(str(tmp_path / "empty"), "config.json")
    other = write_model(tmp_path / "other", architectures=["MambaForCausalLM"])
    fails(str(other), "MambaForCausalLM", "LlamaForCausalLM")
    corrupt = write_model(tmp_path / "corrupt")
    (corrupt / "config.json").write_text('{"architectures": [')
    fails(str(corrupt), "config.json", "JSON")
    truncated = write_model(tmp_path / "truncated") / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    fails(str(truncated.parent), "model.safetensors")
    assert run(["info", str(truncated.parent)]) == MODEL
    capsys.readouterr()
    assert run(["generate", model, "hi", "--dtype", "int4"]) == MODEL
    assert "int4" in error_of(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hi", "--exit", "fixed:5"], "exit_layer: expected 1..4"),
        (["hi", "--exit", "fixed:0"], "exit_layer: expected 1..4"),
        (["hi", "--exit", "speculative:4,2"], "exit_layer: expected 1..3"),
        (["hi", "--exit", "speculative:2,0"], "num_drafts"),
        (["hi", "--exit", "confident:1.5"], "threshold: expected None or 0..1"),
        (["hi", "--exit", "confident", "--min-exit-layer", "9"], "min_exit_layer"),
        (["hi", "--exit", "draft-verify", "--skip-mlp", "7"], "skip_mlp"),
        ([""], "prompt: expected some text"),
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--max-tokens", "600"], "512 together"),
        (["hi", "--kv-cache-tokens", "16"], "kv_cache_tokens"),
        (["\udcff"], "UTF-8"),
        (["--file", "no-such-file"], "no-such-file"),
    ],
)
def test_a_request_that_cannot_be_served(
    model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", model, *arguments]) == REQUEST
    assert said in error_of(capsys.readouterr())


def test_a_bad_line_in_a_file_is_named(
    model: str, lines: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    for text, said in (
        ('"ok"\n{"prompt": \n', "prompts.jsonl:2: expected JSON"),
        ('{"text": "hi"}\n', "prompts.jsonl:1"),
        ('{"prompt": ""}\n', "prompts.jsonl:1"),
        ('{"prompt": [5, true]}\n', "prompts.jsonl:1"),
        ("\n\n", "at least one prompt"),
    ):
        assert run(["generate", model, "--file", lines("prompts.jsonl", text)]) == REQUEST
        assert said in error_of(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hi", "--exit", "deep"], "--exit: expected full"),
        (["hi", "--exit", "fixed"], "fixed:E"),
        (["hi", "--exit", "fixed:two"], "expected fixed:E, such as"),
        (["hi", "--exit", "confident:high"], "confident[:THRESHOLD]"),
        (["hi", "--exit", "speculative:4"], "speculative:E,D"),
        (["hi", "--exit", "draft-verify"], "--skips"),
        (["hi", "--exit", "draft-verify", "--skips", "no-such-file"], "no-such-file"),
        (["hi", "--exit", "confident", "--exit-points", "a-b"], "--exit-points"),
        (["hi", "--exit", "confident", "--measure", "classifier"], "--classifier"),
        (["hi", "--measure", "state"], "--measure: goes with --exit confident"),
        (["hi", "--file", "prompts.txt"], "got both"),
        (["hi", "--json", "--depth"], "--depth"),
        (["hi", "--raw", "--system", "x"], "--raw"),
        (["hi", "--no-such-option"], "--no-such-option"),
        (["hi", "--threads", "many"], "--threads"),
    ],
)
def test_wrong_usage(
    model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", model, *arguments]) == USAGE
    message = error_of(capsys.readouterr())
    assert message.startswith("error: ")
    assert said in message
    assert "eecore generate --help" in message


def test_debug_shows_the_traceback(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", model, "hi", "--exit", "fixed:9", "--debug"]) == REQUEST
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert captured.splitlines()[-1].startswith("error: ")


def test_an_unexpected_error_is_one_line_too(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("out of luck\nand a long story")

    monkeypatch.setattr(eecore, "load", broken)
    assert run(["generate", model, "hi"]) == FAILED
    message = error_of(capsys.readouterr())
    assert message == "error: RuntimeError: out of luck (--debug shows where)"


def test_convert_says_what_is_wrong(
    model: str, lines: Callable[[str, str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(tmp_path / "nothing.gguf"), str(tmp_path / "out")]) == MODEL
    assert "nothing.gguf" in error_of(capsys.readouterr())
    assert run(["convert", lines("text.gguf", "not a GGUF file"), str(tmp_path / "out")]) == MODEL
    assert "GGUF" in error_of(capsys.readouterr())
    assert not (tmp_path / "out").exists()
    assert run(["convert", lines("text.gguf", ""), model]) == USAGE
    assert "new or empty directory" in error_of(capsys.readouterr())


# Being stopped


def test_ctrl_c_keeps_the_text_so_far(endless: str) -> None:
    command = start(["generate", endless, "hi", "-n", str(LONG), "--ignore-eos"])
    assert command.stdout is not None
    first = command.stdout.read(1)
    command.send_signal(signal.SIGINT)
    rest, error = command.communicate(timeout=120)
    assert command.returncode == INTERRUPTED
    assert first + rest
    assert error == "interrupted\n"


@pytest.mark.parametrize(
    "owner", [eecore.Engine, Iterations], ids=["between steps", "inside of one"]
)
def test_ctrl_c_with_many_prompts_writes_what_there_is(
    owner: Any,
    model: str,
    lines: Callable[[str, str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = iter(range(100))
    name = "step" if owner is eecore.Engine else "iterate"
    step = getattr(owner, name)

    def interrupted(*args: Any, **settings: Any) -> Any:
        if next(steps) == 5:
            raise KeyboardInterrupt
        return step(*args, **settings)

    monkeypatch.setattr(owner, name, interrupted)
    file = lines("prompts.txt", "a\nb\nc\n")
    command = ["generate", model, "-f", file, "-n", "50", "--ignore-eos", "--json", "--stats"]
    assert run(command) == INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err.endswith("interrupted\n")
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert {record["finish_reason"] for record in records} == {"cancelled"}
    assert {len(record["token_ids"]) for record in records} == {5}
    assert re.search(r"^tokens +15 new, ", captured.err, re.MULTILINE)


def test_a_reader_that_goes_away_ends_it_quietly(endless: str) -> None:
    command = start(["generate", endless, "hi", "-n", str(LONG), "--ignore-eos"])
    assert command.stdout is not None
    command.stdout.read(1)
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == ""
    assert command.wait(timeout=120) == NO_READER


# On a terminal


def on_a_terminal(arguments: list[str]) -> str:
    """Everything that the command shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    env = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = start(arguments, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert command.wait(timeout=120) == 0, shown
    return shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "a b", "-n", "x"), "--max-tokens: expected a valid integer, got 'x'"),
        (("generate", "a b", "-t", "hot"), "--temperature: expected a valid number, got 'hot'"),
        (("generate", "a b", "-n", "9" * 5000), "--max-tokens: Unable to parse input string as an"),
        (("serve", "--port", "65536"), "--port: expected less than or equal to 65535, got '65536'"),
    ],
)
@pytest.mark.skipif(not ASKS_PYDANTIC, reason="this typer has words of its own")
def test_a_value_that_cannot_be_is_named(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(arguments)) == USAGE
    assert error_of(capsys.readouterr()).startswith(f"error: {said}")


def test_a_prompt_of_one_word_is_taken_as_a_model_and_the_error_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hint = "; if it is the prompt: intent hello, or another model before it"
    assert run(["generate", "hello"]) == MODEL
    assert error_of(capsys.readouterr()).endswith(f"or intent, got nothing{hint}")
    for no_word in (["generate", "hello", "there"], ["generate", "./hello"], ["info", "hello"]):
        assert run(no_word) == MODEL
        assert "if it is the prompt" not in error_of(capsys.readouterr())


def without_colours(shown: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)


def test_depth_is_colour_on_a_terminal(model: str) -> None:
    command = ["generate", model, "abc", "-n", "8", "--ignore-eos", "--depth"]
    shown = on_a_terminal([*command, "--exit", "speculative:2,2"])
    assert "\x1b[38;2;" in shown
    words = without_colours(shown)
    assert "█ drafted, and verified by all 4 layers  █ computed by all 4 layers  " in words
    assert "tokens drafted" not in words
    told = Console(force_terminal=True, color_system="truecolor", _environ={"NO_COLOR": "1"})
    assert not has_colours(told)


def test_each_token_has_the_colour_of_its_own_layer(model: str) -> None:
    loaded = eecore.load(model)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode("aé b")  # é is two tokens, the first of which has no text yet
    layers = [1, 2, 3, 4, 2]
    painter = DepthPainter(loaded, [])
    late = painter.add(ids[:3], layers[:3], "a"), painter.add(ids[3:], layers[3:], "é b")
    spans = [(text.plain[s.start : s.end], s.style) for text in late for s in text.spans]
    colours = [("a", 1), ("é", 3), (" ", 4), ("b", 2)]
    assert spans == [(char, depth_style(layer, 1, 4)) for char, layer in colours]


def test_a_prompt_that_fails_is_reported_and_the_others_are_served(
    model: str,
    lines: Callable[[str, str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = Prefill._chunk

    def broken(prefill: Prefill, work: Work) -> Any:
        if work.sequence.request_id == "request-1":
            raise Fault("no b today")
        return chunk(prefill, work)

    monkeypatch.setattr(Prefill, "_chunk", broken)
    file = lines("prompts.txt", "a\nb\nc\n")
    assert run(["generate", model, "-f", file, "-n", "3", "--ignore-eos", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: prompt 2: Fault: no b today\n"
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [record["finish_reason"] for record in records] == ["length", "error", "length"]
    assert [record.get("error") for record in records] == [None, "Fault: no b today", None]


A_MODEL, A_HEAD = "expected a model directory", "exits: expected a directory with head.json"


@pytest.mark.parametrize(
    ("given", "expected", "got"),
    [
        ("pack", A_MODEL, "a draft head (head.json), which --exits takes"),
        ("pack/head.safetensors", A_MODEL, "a file of a draft head, pack"),
        ("model/config.json", A_MODEL, "a file of a model, model"),
        ("eagle", "architectures: supported are", "LlamaForCausalLMEagle3"),
        (".", A_MODEL, "a directory without config.json; "),
        ("ggufs", A_MODEL, "a directory of GGUF files: name one, such as ggufs/a.gguf"),
        ("model --exits eagle", A_HEAD, "(published heads are for draft_head), got eagle"),
        ("model --exits model", A_HEAD, "got model, a model"),
        ("model --exits pack/head.json", A_HEAD, "a file of a draft head, pack"),
        ("model --exits ggufs/a.gguf", A_HEAD, "a.gguf, a file"),
    ],
)
def test_what_is_something_else_is_named_before_anything_is_loaded(
    given: str,
    expected: str,
    got: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    Path("model").symlink_to(model)
    for name, files in (
        ("pack", ("head.json", "head.safetensors")),
        ("eagle", ("config.json",)),
        ("ggufs", ("a.gguf",)),
    ):
        Path(name).mkdir()
        for file in files:
            Path(name, file).touch()
    Path("eagle/config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    path, *options = given.split()
    assert run(["generate", path, "hello", *options]) == MODEL
    said = error_of(capsys.readouterr())
    assert expected in said
    assert got in said
