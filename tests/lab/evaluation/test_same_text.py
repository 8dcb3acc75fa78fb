"""``eecore verify`` finds texts that hang on their company, and none where none does."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import eecore
from eecore.cli.app import run
from eecore.errors import RequestError
from eecore.lab.evaluation.same_text import verify
from eecore.lab.evaluation.same_text_of_servers import verify_server
from eecore.scheduling.prefix_cache import PrefixCache
from head_packs import write_pack
from servers import asker, listening
from tiny_models import scale_layers, write_model

PROMPTS = [list(range(first, first + 40)) for first in (3, 50, 120)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("model") / "llama", num_hidden_layers=3, seed=8)
    scale_layers(made, {1: 0.3, 2: 0.3})
    write_pack(made / "exits", eecore.load(made), taps=(2,), follows_tokens=True)
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> eecore.Model:
    return eecore.load(directory, kv_cache_tokens=1024)


def test_no_text_hangs_on_its_company(model: eecore.Model) -> None:
    tallies, differences = verify(model, PROMPTS, requests=96, max_tokens=24, seed=5)
    assert differences == []
    modes = {"full", "auto:10", "lookup:6", "head:4", "draft-verify:4", "confident:0.5", "fixed:1"}
    assert set(tallies) >= modes
    of_all = tallies.values()
    assert sum(each.requests for each in of_all) == 96
    for happened in ("sampled", "drafted", "cached", "preempted", "cancelled"):
        assert sum(getattr(each, happened) for each in of_all) > 0, happened


def test_a_wrong_page_in_the_prefix_cache_is_found(
    model: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PrefixCache, "_chain", lambda _self, _, count: list(map(bytes, range(count)))
    )
    tallies, differences = verify(model, PROMPTS, requests=96, max_tokens=24, seed=5)
    assert sum(each.differ for each in tallies.values()) == len(differences) > 0
    assert "]: expected " in str(differences[0])


def test_the_command_says_so(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["verify", str(directory), "--requests", "12", "--seed", "1", "--max-tokens", "8"]
    assert run(told) == 0
    assert "seed 1" in capsys.readouterr().out
    assert run(["verify", "--server", "http://127.0.0.1:9"]) > 1
    assert "expected an OpenAI server" in capsys.readouterr().err
    assert run(["verify", "--server", "http://127.0.0.1:9", "--weights", "int8"]) > 1
    assert "--weights: expected none with --server" in capsys.readouterr().err


def test_a_fingerprint_is_of_the_model_its_formats_and_of_what_a_mode_promises(
    directory: Path, model: eecore.Model, tmp_path: Path
) -> None:
    def of(made: eecore.Model, policy: str = "full") -> str:
        (output,) = eecore.generate(made, PROMPTS[0], exit=policy, max_tokens=1)
        found = output.stats.fingerprint
        assert found is not None
        return found

    own = of(model)
    assert own.startswith(f"eecore-{eecore.build_info()['version']}-")
    assert of(eecore.load(directory, kv_cache_tokens=512)) == own
    assert {of(model, policy) for policy in ("auto", "speculative:1,2", "lookup")} == {own}
    assert len({own, of(model, "fixed:1"), of(model, "fixed:2"), of(model, "confident:0.9")}) == 4
    copy = shutil.copytree(directory, tmp_path / "copy")
    copied = eecore.load(copy, kv_cache_tokens=512)
    others = [{"dtype": "bfloat16"}, {"weights": "int8"}, {"kv_cache_dtype": "fp8"}]
    found = {of(eecore.load(directory, kv_cache_tokens=512, **other)) for other in others}
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1.0
    save_file(tensors, copy / "model.safetensors")
    assert len({own, of(eecore.load(copy, kv_cache_tokens=512)), *found}) == 5
    shutil.rmtree(copy)
    assert of(copied) == own  # of the files that were loaded


# Servers


class Answers(BaseHTTPRequestHandler):
    """A server's answers, which hang on the requests that it answers at the same time."""

    running, hangs_on_company, has_scores, reply = 0, False, True, None

    def do_GET(self) -> None:
        self.say({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).running += 1
        time.sleep(0.02)
        others = self.running - 1 if self.hangs_on_company else 0
        type(self).running -= 1
        scores = {"token_logprobs": [-0.25 - others]} if self.has_scores else None
        choice = {"text": f"{asked['seed']}", "logprobs": scores}
        self.say({"choices": [choice]} if self.reply is None else self.reply)

    def say(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    handler = type("Handler", (Answers,), settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("hangs_on_company", [False, True])
def test_a_server_whose_scores_hang_on_its_company_is_found(hangs_on_company: bool) -> None:
    with serving(hangs_on_company=hangs_on_company) as url:
        rows, found = verify_server(url, ["some text", "another"], requests=16)
    assert [row["requests"] for row in rows.values()] == [8, 8]
    assert sum(row["texts_differ"] for row in rows.values()) == 0
    assert bool(found) == hangs_on_company == any(row["logprobs_differ"] for row in rows.values())


def test_a_server_without_log_probabilities_is_said_to_have_none() -> None:
    with serving(has_scores=False) as url:
        rows, found = verify_server(f"{url}/v1", ["some text"], requests=4)
    assert found == []
    assert [row["without_logprobs"] for row in rows.values()] == [2, 2]


def test_eecores_own_server_gives_the_same_alone_and_together(model: eecore.Model) -> None:
    with listening(asker(model).service) as url:
        rows, found = verify_server(url, ["to be or not to be"], requests=16, max_tokens=16)
    assert found == []
    assert all(row["without_logprobs"] == 0 for row in rows.values())


@pytest.mark.parametrize(
    "reply",
    [
        {},
        [],
        {"choices": []},
        {"choices": [{"text": "a", "logprobs": 1}]},
        {"choices": [{"text": "a", "logprobs": {"token_logprobs": [None]}}]},
    ],
)
def test_a_reply_that_is_no_completion_is_an_error(reply: Any) -> None:
    expected = pytest.raises(RequestError, match="expected an OpenAI server's reply")
    with serving(reply=reply) as url, expected:
        verify_server(url, ["some text"], model="m", requests=1)


def test_a_server_that_refuses_is_an_error(model: eecore.Model) -> None:
    with listening(asker(model).service) as url, pytest.raises(RequestError, match="got 404"):
        verify_server(url, ["some text"], model="another", requests=1)
