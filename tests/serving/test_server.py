"""A server on a socket: OpenAI's own client, clients that disconnect, signals, counters."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn

import eecore
from eecore.cli.app import run
from eecore.serving.server import _Server
from servers import LONG, asker, assert_idle, events, listening, started
from tiny_models import write_model

PROMPT = "lock the front door"
TEXT = "[HassTurnOn [name front door]]"
ENDLESS = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True}


@pytest.fixture(scope="module")
def address(intent: eecore.Model) -> Iterator[str]:
    service = asker(intent).service
    with listening(service) as address:
        yield address
    assert_idle(service)


def test_openais_client(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    assert "intent:speculative-3-6" in [model.id for model in client.models.list()]
    depth: Any = {"exit": "speculative:3,6", "return_exit_layers": True}
    chat: Any = {"model": "intent", "messages": [{"role": "user", "content": PROMPT}]}
    answer = client.chat.completions.create(**chat, extra_body=depth)
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert (answer.usage.model_extra or {})["eecore"]["accepted"] == 6
    assert (answer.choices[0].model_extra or {})["exit_layers"] == [12, 3, 3, 3, 3, 3, 3, 12]

    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    text, layers, usage = "", [], None
    for chunk in client.chat.completions.create(**chat, **options, extra_body=depth):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            layers += (choice.model_extra or {}).get("exit_layers", [])
        usage = chunk.usage
    assert text == TEXT
    assert layers == [12, 3, 3, 3, 3, 3, 3, 12]
    assert usage is not None
    assert usage.completion_tokens == 8

    named = client.completions.create(model="intent:auto", prompt=PROMPT, max_tokens=64, logprobs=1)
    assert named.choices[0].text == TEXT
    with client.chat.completions.stream(**chat) as events:
        assert events.get_final_completion().choices[0].message.content == TEXT


@pytest.mark.parametrize("asks", ["chat.completions", "responses"])
def test_the_example_of_the_manual(
    address: str, asks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (code,) = [each for each in found if f"client.{asks}.create" in each]
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", address)
    exec(compile(code, "serving.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    if asks == "responses":
        assert "lossless" in said
    else:
        assert "".join(line.rpartition(" [")[0] for line in said.splitlines())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_leaves_gives_its_pages_back(
    endless: eecore.Model, stream: bool, choices: int
) -> None:
    service = asker(endless).service
    with listening(service) as address:
        client = http.client.HTTPConnection(address.removeprefix("http://"))
        body = json.dumps({**ENDLESS, "stream": stream, "n": choices})
        client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        if stream:
            assert client.getresponse().read(10) == b'data: {"id'
        while service.served.engine.engine.num_running < choices:
            time.sleep(0.002)
        client.close()
        assert_idle(service)
        found = httpx.get(f"{address}/metrics").text
        assert f'eecore_requests_total{{outcome="cancelled"}} {choices}.0' in found


def test_a_client_that_sends_too_much_gets_to_know(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIStatusError, match="expected at most 4194304 bytes") as caught:
        client.completions.create(model="intent", prompt="a" * (8 << 20))
    assert caught.value.status_code == 413
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: 9999999\r\nexpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")  # before any of it is sent


def test_a_client_that_does_not_read_holds_up_itself_alone(endless: eecore.Model) -> None:
    service = asker(endless).service
    with listening(service) as address:
        slow = http.client.HTTPConnection(address.removeprefix("http://"))
        body = json.dumps({**ENDLESS, "stream": True, "return_exit_layers": True})
        slow.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        slow.getresponse().read(10)
        short = {"prompt": "a", "max_tokens": 5}
        for _ in range(3):
            assert httpx.post(f"{address}/v1/completions", json=short).status_code == 200
        slow.close()
        assert_idle(service)


def test_what_is_counted(intent: eecore.Model) -> None:
    service = asker(intent).service
    with listening(service) as address:
        outputs = []
        for said, stream in (("full", False), ("speculative:3,6", True), ("fixed:6", False)):
            body = {"prompt": PROMPT, "max_tokens": 64, "exit": said, "stream": stream}
            assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
            policy = service.served.depths.policies.of(said)
            outputs += eecore.generate(intent, PROMPT, max_tokens=64, exit=policy)
        httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT, "exit": "deep"})
        text = httpx.get(f"{address}/metrics").text
    assert_idle(service)
    found = dict(re.findall(r"^([a-z0-9:_]+(?:{.*})?) ([0-9.e+-]+)$", text, re.MULTILINE))
    number = {name: float(value) for name, value in found.items()}
    generated = sum(len(output.token_ids) for output in outputs)
    ends = [output.finish_reason for output in outputs]
    assert number['eecore_requests_total{outcome="stop"}'] == ends.count("stop") > 0
    assert number['eecore_requests_total{outcome="refused"}'] == 1
    assert number["eecore_prompt_tokens_total"] == 15
    assert number["eecore_generation_tokens_total"] == generated
    assert number['vllm:generation_tokens_total{model_name="intent"}'] == generated
    sixth = len(outputs[2].token_ids)
    by_layer = "eecore_tokens_by_exit_layer_total"
    assert number[f'{by_layer}{{exit_layer="6",policy="fixed:6"}}'] == sixth
    assert number['eecore_layers_skipped_total{exit_layer="6"}'] == 6 * sixth
    assert number['eecore_layers_run_total{exit_layer="6"}'] == 6 * (sixth - 1)
    run = [value for name, value in number.items() if name.startswith("eecore_layers_run_total")]
    assert sum(run) == sum(o.stats.layers_run for o in outputs)
    drafts, drafting = outputs[1].stats, 'policy="speculative:3,6"'
    assert number[f"eecore_drafted_tokens_total{{{drafting}}}"] == drafts.drafted
    assert number[f"eecore_accepted_tokens_total{{{drafting}}}"] == drafts.accepted > 0
    assert number[f'{by_layer}{{exit_layer="3",{drafting}}}'] == drafts.accepted
    for name, alias in (
        ("time_to_first_token", "time_to_first_token"),
        ("inter_token", "request_time_per_output_token"),
        ("request", "e2e_request_latency"),
    ):
        assert number[f"eecore_{name}_seconds_count"] == 3
        seconds = number[f"eecore_{name}_seconds_sum"]
        assert number[f'vllm:{alias}_seconds_sum{{model_name="intent"}}'] == seconds > 0
        last = f'vllm:{alias}_seconds_bucket{{le="+Inf",model_name="intent"}}'
        assert number[last] == 3
    for name in ("inter_token_latency", "time_per_output_token"):
        assert number[f'vllm:{name}_seconds_count{{model_name="intent"}}'] == generated - 3
    stopped = 'vllm:request_success_total{finished_reason="stop",model_name="intent"}'
    assert number[stopped] == ends.count("stop")
    for name, count in (("draft", drafts.drafted), ("accepted", drafts.accepted)):
        assert number[f'vllm:spec_decode_num_{name}_tokens_total{{model_name="intent"}}'] == count
    assert number['vllm:cache_config_info{block_size="16",num_gpu_blocks="256"}'] == 1
    assert number["eecore_kv_pages"] == 256
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert number[f'vllm:{name}{{model_name="intent"}}'] == 0


# The command


@pytest.fixture(scope="module")
def endless_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("serve") / "endless"
    return str(write_model(directory, max_position_embeddings=2 * LONG))


def post(address: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json=body, timeout=120)


def test_sigterm_drains(endless_directory: str) -> None:
    with (
        started(endless_directory, "--warm-up") as (process, address),
        ThreadPoolExecutor(2) as pool,
    ):
        body = {**ENDLESS, "max_tokens": 2500}
        runs = pool.submit(post, address, body)
        client = httpx.Client()
        while "eecore_requests_running 1.0" not in client.get(f"{address}/metrics").text:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        while client.get(f"{address}/health").status_code == 200:
            time.sleep(0.01)
        refused = client.post(f"{address}/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert not runs.done()
        answer = runs.result()
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 2500
        client.close()
        assert process.wait(120) == 0
        assert process.stderr is not None
        said = process.stderr.read()
        assert said == (
            "ending: 1 answer is unfinished, for 30 s at most (Ctrl-C again cuts them off)\n"
        )


def cached_tokens(address: str, **headers: str) -> int:
    """The tokens of a prompt that the server has when it comes for the second time."""
    body = {"prompt": "a" * 50, "max_tokens": 1}
    for _ in range(2):
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=120)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_access_log(endless_directory: str) -> None:
    site = "https://example.org"
    options = ["--access-log", "--api-key", "secret", "--cors-origin", site]
    arguments = [endless_directory, *options, "--cors-origin", "http://localhost:3000"]
    with started(*arguments) as (process, address):
        body = {"prompt": "whatever", "max_tokens": 2, "stream": True}
        headers = {"authorization": "Bearer secret"}
        httpx.post(f"{address}/v1/completions", json=body, headers=headers)
        httpx.get(f"{address}/nothing")
        body = {"input": "whatever", "max_output_tokens": 2}
        answer = httpx.post(
            f"{address}/v1/responses", json=body, headers={**headers, "origin": site}
        )
        assert answer.headers["access-control-allow-origin"] == site
        asks = {"origin": "https://example.com", "access-control-request-method": "POST"}
        httpx.options(f"{address}/v1/responses", headers=asks)
        for wrong in ({"input": "whatever", "truncation": "whatever"}, {"input": ["whatever"]}):
            httpx.post(f"{address}/v1/responses", json=wrong, headers=headers)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        assert cached_tokens(address, **headers) == 48
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert not any("secret" in line or "whatever" in line for line in lines)
    found = [json.loads(line) for line in lines]
    assert [(each["method"], each["path"], each["status"]) for each in found] == [
        ("POST", "/v1/completions", 200),
        ("GET", "/nothing", 404),
        ("POST", "/v1/responses", 200),
        ("OPTIONS", "/v1/responses", 400),
        ("POST", "/v1/responses", 400),
        ("POST", "/v1/responses", 400),
    ]
    reasons = [str(each.get("reason")).partition(":")[0] for each in found]
    assert reasons == ["None", "GET /nothing", "None", "None", "truncation", "input.str"]
    assert found[0]["client"] == "127.0.0.1"
    assert found[0]["bytes"] > 100


@pytest.mark.parametrize(("drain", "second"), [("0.2", False), ("60", True)])
def test_what_does_not_end_is_cut_off(endless_directory: str, drain: str, second: bool) -> None:
    """When its time is up, or at a second signal."""
    with (
        started(endless_directory, "--drain", drain, "--no-prefix-cache") as (process, address),
        ThreadPoolExecutor(1) as pool,
    ):
        assert second or cached_tokens(address) == 0
        runs = pool.submit(post, address, ENDLESS)
        while "eecore_requests_running 1.0" not in httpx.get(f"{address}/metrics").text:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        if second:
            while httpx.get(f"{address}/health").status_code == 200:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        with suppress(httpx.HTTPError):  # the connection may have been closed
            assert runs.result().status_code == 503


def test_a_second_signal_while_the_server_looks_at_the_first_ends_it() -> None:
    service = SimpleNamespace(admission=SimpleNamespace(is_closing=False, taken=1))

    def draining(_left: int) -> None:
        server.handle_exit(signal.SIGINT, None)

    server = _Server(uvicorn.Config(None), service, 60.0, lambda: None, draining)  # type: ignore[arg-type]
    server.handle_exit(signal.SIGINT, None)
    assert asyncio.run(server.on_tick(0))
    assert server.should_exit


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run(["serve", *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [said for said in captured.err.splitlines() if not said.startswith("loading ")]
    return code, line


def test_commands_that_cannot_serve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused([str(tmp_path / "no")], capsys)[0] == 3
    code, line = refused(["--exit", "deep"], capsys)
    assert code == 4
    assert "--exit deep: exit: expected full, fixed" in line
    assert "--allow-exit x" in refused(["--allow-exit", "x"], capsys)[1]
    assert "--alias fixed" in refused(["--alias", "fixed"], capsys)[1]
    code, line = refused(["--tool-parser", "json"], capsys)
    assert code == 4
    assert "expected auto, granite, hermes, lfm2, llama3, mistral, mistral3, qwen3_coder" in line
    code, line = refused(["--cors-origin", "example.org"], capsys)
    assert code == 4
    assert "cors_origins: expected * or the origin of a site" in line
    code, line = refused(["--exit", "fixed:40", "--port", "0"], capsys)
    assert code == 4
    assert "1..12" in line
    assert refused(["--api-key", ""], capsys)[0] == 2
    assert refused(["--port", "70000"], capsys)[0] == 2
    code, line = refused(["--host", "no.such.host.invalid"], capsys)
    assert code == 4
    assert "no.such.host.invalid:8000: expected an address" in line
    from eecore import serving

    monkeypatch.setattr(serving, "find_spec", lambda _: None)
    assert "pip install '.[serve]'" in refused([], capsys)[1]


def test_a_port_that_is_taken(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(["--port", address.rpartition(":")[2]], capsys)
    assert code == 4
    assert "in use" in line


def test_a_crowd_of_which_some_stay(intent: eecore.Model) -> None:
    """Clients that stay get what they get alone; nothing is left of disconnects or bad requests."""
    service = asker(intent, max_num_seqs=8, max_waiting=200).service
    random = Random(0)
    policies = ["full", "speculative:3,6", "auto", "fixed:6", "confident:0.9"]

    async def one(client: httpx.AsyncClient, kind: str, said: str) -> str | None:
        body = {"prompt": PROMPT, "max_tokens": 40, "exit": said, "stream": kind == "streams"}
        if kind == "wrong":
            await client.post("/v1/completions", json={**body, "exit": "deep"})
        elif kind == "leaves":
            long = {**body, "ignore_eos": True, "max_tokens": 200, "n": 2}
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=long), random.random())
        else:
            answer = await client.post("/v1/completions", json=body)
            chunks = events(answer.text) if kind == "streams" else [answer.json()]
            return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return None

    async def main(address: str) -> list[tuple[str, str | None]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
            asked = [
                (random.choice(["stays", "streams", "leaves", "wrong"]), random.choice(policies))
                for _ in range(60)
            ]
            texts = await asyncio.gather(*(one(client, *each) for each in asked))
            return [(said, text) for (_, said), text in zip(asked, texts, strict=True)]

    alone = {
        said: eecore.generate(
            intent, PROMPT, max_tokens=40, exit=service.served.depths.policies.of(said)
        )[0].text
        for said in policies
    }
    with listening(service) as address:
        found = asyncio.run(main(address))
        assert_idle(service)
    assert {said for said, text in found if text is not None} == set(policies)
    for said, text in found:
        assert text in (None, alone[said])
