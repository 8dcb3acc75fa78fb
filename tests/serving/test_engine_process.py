"""An engine in a process of its own: the same answers, and the death of a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

import eecore
from eecore.cli.app import run
from eecore.errors import EngineLostError, RequestError
from eecore.serving import remote
from eecore.serving.remote import RemoteModel
from eecore.serving.server import listen, serve
from eecore.serving.settings import ServerSettings, service_of
from eecore.serving.wire import Start
from head_packs import write_pack
from servers import LONG, Asker, asker, assert_idle, ended_within, events, listening, started
from tiny_gguf import write_gguf
from tiny_models import write_model
from tiny_t5 import write_t5

PROMPT = "turn the kitchen lights down to 20 percent"
ENDLESS: dict[str, Any] = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True}
CLASSIFIED = {"mode": "confident", "measure": "classifier", "threshold": 0.6}
SCHEMA = {
    "type": "object",
    "properties": {"level": {"type": "integer", "maximum": 99}},
    "required": ["level"],
    "additionalProperties": False,
}


@contextmanager
def beside(path: Path, **settings: Any) -> Iterator[tuple[Asker, RemoteModel]]:
    """A server of a model in another process."""
    options = {"kv_cache_tokens": 4096, "dtype": "float32"}
    model = RemoteModel(Start(path, options, 1, settings.get("max_num_seqs")))
    service = service_of(model, ServerSettings(**settings))
    try:
        yield asker(model, **settings), model
    finally:
        service.served.engine.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the shipped model, a classifier and a draft head."""
    directory = tmp_path_factory.mktemp("process") / "intent"
    directory.mkdir()
    for path in eecore.default_model().iterdir():
        (directory / path.name).symlink_to(path)
    torch.manual_seed(0)
    hidden = json.loads((directory / "config.json").read_text())["hidden_size"]
    tensors = {"weight1": torch.randn(2, hidden) / 8, "bias1": torch.zeros(2)}
    save_file(tensors, directory / "classifier.safetensors")
    write_pack(directory / "exits", eecore.load(directory, dtype="float32"))
    return directory


@pytest.fixture(scope="module")
def there(directory: Path) -> Iterator[Asker]:
    """The server whose engine is in another process."""
    with beside(directory) as (server, _):
        yield server
        assert_idle(server.service)


@pytest.fixture(scope="module")
def here(directory: Path) -> Asker:
    return asker(eecore.load(directory, dtype="float32", kv_cache_tokens=4096))


def without_names(answer: Any) -> Any:
    """An answer without its names and times, which differ by request."""
    kept = {name: value for name, value in answer.items() if name not in ("id", "created")}
    timed = ("tokens_per_s", "full_depth_tokens_per_s", "speedup")
    told = {name: value for name, value in kept["usage"]["eecore"].items() if name not in timed}
    return {**kept, "usage": {**kept["usage"], "eecore": told}}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_tokens": 1},
        {"stop": [" light", "zz"], "echo": True},
        {"stop_token_ids": [*range(0, 600, 2)], "ignore_eos": True},
        {"logprobs": 3, "logit_bias": {"5": 2.5}},
        {"logprobs": 2, "echo": True},
        {"logprobs": 0, "echo": True, "max_tokens": 0},
        {"n": 3, "temperature": 0.8, "seed": 5, "top_p": 0.9, "return_exit_layers": True},
        {"prompt": [[5, 6, 7], [9, 4]], "ignore_eos": True},
        {"guided_json": SCHEMA, "exit": "fixed:9"},
        {"guided_choice": ["on", "off"], "return_exit_layers": True},
        {"presence_penalty": 1.5, "min_p": 0.1, "temperature": 1.1, "seed": 2**64 - 1},
    ],
    ids=lambda asked: "-".join(asked) or "plain",
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_answers(here: Asker, there: Asker, asked: Any, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "exit": "full", **asked, "stream": stream}
    answers = [server.post("/v1/completions", json=body) for server in (here, there)]
    assert answers[0].status_code == 200
    if not stream:
        assert without_names(answers[0].json()) == without_names(answers[1].json())
        return
    expected, found = ([chosen(events(answer.text), i) for i in range(3)] for answer in answers)
    assert expected == found


def test_the_same_scores_of_prompts(here: Asker, there: Asker) -> None:
    body = {"prompt": ["turn on the light", PROMPT], "max_tokens": 3, "prompt_logprobs": 2}
    mine, theirs = (server.post("/v1/completions", json=body).json() for server in (here, there))
    assert without_names(mine) == without_names(theirs)
    assert [choice["prompt_logprobs"][0] for choice in mine["choices"]] == [None, None]
    assert all(choice["prompt_logprobs"][1] for choice in mine["choices"])


def chosen(chunks: list[Any], index: int) -> Any:
    """The content of a choice in a stream, however the stream was cut."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    text = "".join(choice["text"] for choice in own)
    layers = [layer for choice in own for layer in choice.get("exit_layers", ())]
    logprobs = [choice["logprobs"] for choice in own if choice["logprobs"]]
    tokens = [token for each in logprobs for token in each["tokens"]]
    return text, layers, tokens, [choice["finish_reason"] for choice in own][-1:]


@pytest.mark.parametrize(
    "said",
    [
        "full",
        "fixed:6",
        "confident:0.5",
        {"mode": "confident", "measure": "state", "threshold": 0.7, "exit_points": [3, 6]},
        {"mode": "confident", "batch": "all", "decay_tau": 4, "min_exit_layer": 2},
        CLASSIFIED,
        "speculative:3,6",
        {"mode": "draft-verify", "skip_mlp": [4, 5], "skip_attention": [4], "adaptive": False},
        "lookup:4",
        {"mode": "head", "num_drafts": 3, "threshold": 0},
        {"mode": "auto", "exit_layers": [3], "lookup": False},
    ],
    ids=lambda said: said if isinstance(said, str) else str(said.get("measure", said["mode"])),
)
def test_every_policy(here: Asker, there: Asker, said: Any) -> None:
    body = {"prompt": PROMPT, "exit": said, "max_tokens": 24, "return_exit_layers": True}
    expected, found = (server.post("/v1/completions", json=body).json() for server in (here, there))
    assert "choices" in expected, expected
    (expected_choice,), (choice,) = expected["choices"], found["choices"]
    assert choice["text"] == expected_choice["text"]
    if isinstance(said, str) or said["mode"] != "auto":  # which follows measured times
        assert without_names(found) == without_names(expected)


def test_calls_of_tools_show_what_marks_them(here: Asker, there: Asker) -> None:
    """Special tokens then have a text in the process that decodes."""
    engine = there.service.served.engine
    tokenizer = here.service.served.tokenizer
    special = next(id for id in range(tokenizer.vocab_size) if not tokenizer.decode([id]))
    for stop in ((), ("never",)):
        sampling = eecore.SamplingParams(
            max_tokens=2, logit_bias={special: 100.0}, stop=stop, ignore_eos=True
        )
        prepared = engine.prepare([5, 6], exit="full", sampling=sampling)
        prepared.text.show({special: "<call>"})
        output = asyncio.run(engine.generate(prepared))
        assert output.token_ids == [special] * 2
        assert output.text == "<call><call>"


@pytest.mark.parametrize(
    "wrong",
    [
        {"exit": "fixed:40"},
        {"exit": "head", "temperature": 3e30},
        {"prompt": [10**9]},
        {"max_tokens": 10**6},
        {"guided_regex": "("},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        {"logit_bias": {"999999": 1}},
        {"logprobs": 10**6},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_the_same_refusals(here: Asker, there: Asker, wrong: Any) -> None:
    body = {"prompt": PROMPT, **wrong}
    expected, found = (server.post("/v1/completions", json=body) for server in (here, there))
    assert found.status_code == expected.status_code == 400
    assert found.json() == expected.json()


@pytest.mark.parametrize("kind", ["encoder", "file"])
def test_other_kinds_of_models(tmp_path: Path, kind: str) -> None:
    """A model with an encoder gets its input; a file's tokenizer is in the server as well."""
    if kind == "encoder":
        path = write_t5(tmp_path / "t5")
    else:
        path = write_gguf(tmp_path / "model.gguf", write_model(tmp_path / "model"))
    limits = eecore.EngineConfig(kv_cache_tokens=4096, max_num_seqs=3)
    model = eecore.load(path, dtype="float32", engine=limits)
    settings = {"max_num_seqs": 3, "max_waiting": 2}
    body = {"prompt": "some words", "max_tokens": 8, "exit": "full", "stop": "\0"}
    with beside(path, **settings) as (server, there):
        assert there.engine_config == limits
        servers = (asker(model, **settings), server)
        expected, found = (each.post("/v1/completions", json=body) for each in servers)
        assert expected.status_code == 200
        assert without_names(found.json()) == without_names(expected.json())
        refused = [each.post("/v1/completions", json={**body, "n": 9}).json() for each in servers]
        assert refused[0] == refused[1]


def test_sampling_settings_that_are_left_out_are_the_models(tmp_path: Path) -> None:
    path = write_model(tmp_path / "hot")
    own = {"do_sample": True, "temperature": 1.5, "top_k": 40}
    (path / "generation_config.json").write_text(json.dumps(own))
    body = {"prompt": "abc", "max_tokens": 16, "ignore_eos": True, "seed": 7}
    with beside(path) as (there, remote_model):
        assert dict(remote_model.config.sampling) == {"temperature": 1.5, "top_k": 40}
        text = there.post("/v1/completions", body).json()["choices"][0]["text"]
    here = eecore.load(path, dtype="float32", kv_cache_tokens=4096)
    settings = {"max_tokens": 16, "ignore_eos": True, "seed": 7}
    for generation_config, sampling in (
        ("auto", eecore.SamplingParams.of(here, **settings)),
        ("none", eecore.SamplingParams(**settings)),
    ):
        (expected,) = eecore.generate(here, "abc", sampling=sampling)
        server = asker(here, generation_config=generation_config)
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == expected.text
        assert (text == expected.text) == (generation_config == "auto")
        greedy = server.post("/v1/completions", {**body, "temperature": 0}).json()
        (expected,) = eecore.generate(here, "abc", **{**settings, "temperature": 0.0})
        assert greedy["choices"][0]["text"] == expected.text
    with pytest.raises(RequestError, match="generation_config: expected auto, none, got 'vllm'"):
        ServerSettings(generation_config="vllm")


def test_a_crowd_of_which_some_leave(here: Asker, there: Asker) -> None:
    prompts = [f"turn light {number} on" for number in range(40)]
    policies = ["full", "speculative:3,6", "fixed:6", CLASSIFIED]
    random = Random(0)

    async def asks(client: httpx.AsyncClient) -> list[str]:
        async def one(number: int) -> str:
            said = policies[number % 4]
            body = {"prompt": prompts[number], "max_tokens": 16, "exit": said}
            answer = await client.post("/v1/completions", json=body)
            return str(answer.json()["choices"][0]["text"])

        async def leaves() -> None:
            long = {"prompt": "a", "ignore_eos": True, "max_tokens": 400, "n": 2}
            long["stream"] = random.random() < 0.5
            with suppress(asyncio.TimeoutError):
                asked = client.post("/v1/completions", json=long)
                await asyncio.wait_for(asked, 0.3 * random.random())

        left = asyncio.gather(*(leaves() for _ in range(20)))
        texts = await asyncio.gather(*map(one, range(len(prompts))))
        await left
        return texts

    assert there.run(asks) == here.run(asks)
    assert_idle(there.service)


def test_a_text_that_cannot_be_made_harms_no_other_request(there: Asker) -> None:
    engine = there.service.served.engine

    async def main() -> tuple[Any, Any]:
        requests = [engine.prepare(PROMPT, exit="full") for _ in range(2)]
        requests[0].text.after = lambda *_: 1 // 0
        outputs = [engine.generate(request) for request in requests]
        failed, other = await asyncio.gather(*outputs, return_exceptions=True)
        return failed, other

    restarts = engine.num_restarts
    failed, other = asyncio.run(main())
    assert isinstance(failed, RuntimeError)
    assert "engine: ZeroDivisionError" in str(failed)
    assert other.finish_reason == "stop"
    assert engine.num_restarts == restarts
    assert_idle(there.service)


# A model that goes on


@pytest.fixture(scope="module")
def endless_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("process") / "endless"
    return write_model(directory, max_position_embeddings=2 * LONG)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between two processes."""
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(remote, "LAST_WAIT_S", 0.1)


@pytest.fixture(scope="module")
def endless(endless_directory: Path) -> Iterator[tuple[Asker, RemoteModel]]:
    model = RemoteModel(Start(endless_directory, {"kv_cache_tokens": 2 * LONG}, 1))
    server = asker(model)
    yield server, model
    server.service.served.engine.close()


def test_other_limits_than_its_own_are_refused(endless: tuple[Asker, RemoteModel]) -> None:
    with pytest.raises(RequestError, match="config: expected"):
        endless[1].async_engine(eecore.EngineConfig(max_num_seqs=3))


def waited_for(so: Callable[[], bool], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not so() and time.monotonic() < until:
        time.sleep(0.005)
    return so()


def killed(model: RemoteModel) -> None:
    model._engine._process.process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(endless: tuple[Asker, RemoteModel], stream: bool) -> None:
    service = endless[0].service
    view = service.served.engine.engine
    with listening(service) as address, suppress(httpx.ReadTimeout):
        body = {**ENDLESS, "stream": stream, "n": 2}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=0.5) as answer:
            for number, _ in enumerate(answer.iter_raw()):
                if number == 3:
                    break
    assert waited_for(lambda: not view.num_used_pages)
    assert_idle(service)


def test_a_deadline(endless: tuple[Asker, RemoteModel]) -> None:
    server = asker(endless[1], timeout=0.5)
    answer = server.post("/v1/completions", json=ENDLESS)
    assert answer.status_code == 504
    assert_idle(server.service)


def test_who_does_not_read_is_held(endless: tuple[Asker, RemoteModel]) -> None:
    engine = endless[0].service.served.engine

    async def main() -> list[int]:
        sampling = eecore.SamplingParams(max_tokens=200, ignore_eos=True)
        stream = engine.stream(engine.prepare([5], exit="full", sampling=sampling))
        tokens = (await anext(stream)).token_ids
        while not engine.engine.num_held:
            await asyncio.sleep(0.005)
        assert engine.engine.num_running == 0
        async for step in stream:
            tokens += step.token_ids
        return tokens

    assert len(asyncio.run(asyncio.wait_for(main(), 120))) == 200
    assert_idle(endless[0].service)


def test_a_name_that_is_in_use(endless: tuple[Asker, RemoteModel]) -> None:
    engine = endless[0].service.served.engine

    async def main() -> None:
        sampling = eecore.SamplingParams(max_tokens=LONG, ignore_eos=True)
        stream = engine.stream([5], sampling=sampling, request_id="x")
        assert (await anext(stream)).request_id == "x"
        with pytest.raises(RequestError, match="'x' is in use"):
            await anext(engine.stream([5], request_id="x"))
        stream.close()

    asyncio.run(main())
    assert_idle(endless[0].service)


@pytest.mark.usefixtures("quick")
def test_an_engine_that_is_killed(endless: tuple[Asker, RemoteModel]) -> None:
    (server, model), texts = endless, []
    view, before = server.service.served.engine.engine, model._engine.num_restarts
    with listening(server.service) as address, ThreadPoolExecutor(4) as pool:
        client = httpx.Client(base_url=address, timeout=120)
        post = f"{address}/v1/completions"
        wholes = [pool.submit(httpx.post, post, json=ENDLESS, timeout=120) for _ in range(3)]
        with client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as answer:
            assert answer.status_code == 200
            for text in answer.iter_text():
                texts.append(text)
                if len(texts) == 3:
                    assert waited_for(lambda: view.num_running + view.num_held == 4)
                    killed(model)
        error = events("".join(texts))[-1]["error"]
        assert error["code"] == "engine_lost"
        assert "ended by SIGKILL; it is being started again" in error["message"]
        for whole in wholes:
            found = whole.result(30)
            assert found.status_code == 503
            assert found.json()["error"] == error
            assert int(found.headers["retry-after"]) >= 1
        while (health := client.get("/health")).status_code != 200:
            assert health.json() == {"status": "without an engine"}
            refused = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            if refused.status_code != 200:  # it may be there by now
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_lost"
                assert "retry-after" in refused.headers
            time.sleep(0.02)
        again = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert again.status_code == 200
        metrics = client.get("/metrics").text
        assert f"eecore_engine_restarts_total {before + 1}.0" in metrics
    assert_idle(server.service)


@pytest.mark.usefixtures("quick")
def test_a_guide_that_waits_for_a_process_that_ends(endless: tuple[Asker, RemoteModel]) -> None:
    _, model = endless
    engine = model._engine
    assert waited_for(lambda: engine.is_up)
    process = engine._process.process
    process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        sampling = eecore.SamplingParams(guide=eecore.Guide.choice(["a"]))
        asked = pool.submit(engine.engine.prepare, [5], sampling=sampling)
        assert waited_for(lambda: bool(engine.answers))
        process.kill()
        with pytest.raises(EngineLostError, match="SIGKILL"):
            asked.result(30)
    with suppress(EngineLostError):  # it may be there by now
        engine.engine.prepare([5])
    assert waited_for(lambda: engine.is_up)


@pytest.mark.usefixtures("quick")
def test_a_server_that_gets_no_engine_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_FAILURES", 2)
    directory = write_model(tmp_path / "gone")
    model = RemoteModel(Start(directory, {}, 1))
    service = service_of(model, ServerSettings())

    def spoil() -> None:
        (directory / "config.json").unlink()
        killed(model)

    with pytest.raises(EngineLostError, match=r"2 failures, the last by .*config\.json"):
        serve(service, listen("127.0.0.1", 0), (), drain_seconds=1, ready=spoil)
    assert not service.served.engine.is_up


def test_warnings_of_the_other_process_are_said_here(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    (directory / "exits").mkdir()
    (directory / "exits" / "head.json").write_text("{}")
    (directory / "tokenizer.json").rename(directory / "vocab.json")
    with pytest.warns(UserWarning, match=".") as said, beside(directory):
        pass
    texts = [str(each.message) for each in said]
    assert sum("exits" in text and "it is not used" in text for text in texts) == 1
    assert sum("ids only" in text for text in texts) == 1


def test_an_untrained_model_is_warned_of_once(tmp_path: Path) -> None:
    """Both processes know the requests; the server's own process warns."""
    directory = write_model(tmp_path / "model")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with beside(directory) as (server, _):
            for policy in ("fixed:2", "confident:0.5", "fixed:1"):
                body = {"model": "model", "prompt": "hi", "max_tokens": 2, "exit": policy}
                assert server.post("/v1/completions", json=body).status_code == 200
    assert sum("trained for early exit" in str(warning.message) for warning in said) == 1


def test_a_process_that_is_killed_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PROGRAM", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(EngineLostError, match="load the model, but its process was ended by SIGK"):
        RemoteModel(Start(eecore.default_model(), {}))


# The command


def of_server(pid: int) -> int:
    """The process of a server's engine."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                return int(path.parent.name)
    raise AssertionError("no engine")


def test_signals_are_the_servers(endless_directory: Path) -> None:
    """A terminal sends them to both processes; no engine outlives its server."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("no /proc")
    with started(str(endless_directory)) as (process, address), ThreadPoolExecutor(1) as pool:
        engine = of_server(process.pid)
        post = f"{address}/v1/completions"
        runs = pool.submit(httpx.post, post, json={**ENDLESS, "max_tokens": 300}, timeout=120)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine, number)
        assert runs.result().status_code == 200
        runs = pool.submit(httpx.post, post, json=ENDLESS, timeout=120)
        while "eecore_requests_running 1.0" not in httpx.get(f"{address}/metrics").text:
            time.sleep(0.01)
        process.kill()
        assert ended_within(engine, 60)
        with pytest.raises(httpx.HTTPError):
            runs.result()


@pytest.mark.parametrize(
    "spoilt",
    [
        ("--device", "cuda:7"),
        ("--exits", "nowhere"),
        ("--kv-cache-tokens", str(10**15)),
        ("truncated",),
    ],
    ids=lambda spoilt: spoilt[0],
)
def test_models_that_cannot_be_loaded(
    spoilt: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line and the exit code are the same in either process."""
    directory = write_model(tmp_path / "model")
    arguments = list(spoilt)
    if spoilt == ("truncated",):
        (directory / "model.safetensors").write_bytes(b"\x10")
        arguments = []
    said = []
    for engine in ("thread", "process"):
        code = run(["serve", str(directory), "--port", "0", "--engine", engine, *arguments])
        captured = capsys.readouterr()
        assert captured.out == ""
        said.append((code, captured.err))
    assert said[0] == said[1]
    assert said[0][0] in (1, 3, 4)
    assert said[0][1].startswith(f"loading {directory.name}\nerror: ")
