"""Clients of other projects against a server; each runs if it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import eecore
from servers import Asker, asker, assert_idle, listening

SAID = "lock the front door"
MEANT = "[HassTurnOn [name front door]]"
MESSAGES = [{"role": "user", "content": SAID}]
SHALLOW = {"exit": "fixed:6"}
CONTRACT = "fixed exit after layer 6: no promise about quality"


class Door(BaseModel):
    """Which one."""

    door: Literal["front", "back"]


@pytest.fixture(scope="module")
def caller(intent: eecore.Model) -> Asker:
    """A server of a model that is said to call tools; the guides make it."""
    return asker(intent, tool_parser="hermes")


@pytest.fixture(scope="module")
def address(caller: Asker) -> Iterator[str]:
    with listening(caller.service) as url:
        yield f"{url}/v1"
    assert_idle(caller.service)


class TestLiteLLM:
    @pytest.fixture
    def ask(self, address: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
        litellm = pytest.importorskip("litellm")

        def ask(**settings: Any) -> Any:
            model = {"model": "openai/intent", "api_base": address, "api_key": "none"}
            return litellm.completion(**model, messages=MESSAGES, **settings)

        return ask

    def test_an_answer(self, ask: Any) -> None:
        assert ask().choices[0].message.content == MEANT

    def test_how_deep_it_may_go(self, ask: Any) -> None:
        usage = ask(extra_body=SHALLOW).usage.model_dump()
        assert usage["eecore"]["contract"] == CONTRACT

    def test_a_stream(self, ask: Any) -> None:
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == MEANT
        assert chunks[-1].usage.completion_tokens == 8

    def test_its_errors_are_ours(self, ask: Any) -> None:
        litellm = pytest.importorskip("litellm")
        with pytest.raises(litellm.BadRequestError, match=r"expected 1\.\.12"):
            ask(extra_body={"exit": "fixed:99"})


class TestLangChain:
    @pytest.fixture
    def chat(self, address: str) -> Any:
        langchain = pytest.importorskip("langchain_openai")

        def chat(**settings: Any) -> Any:
            model = {"model": "intent", "base_url": address, "api_key": "none", "max_retries": 0}
            return langchain.ChatOpenAI(**model, **settings)

        return chat

    def test_an_answer(self, chat: Any) -> None:
        answer = chat(extra_body=SHALLOW).invoke(SAID)
        assert answer.response_metadata["token_usage"]["eecore"]["contract"] == CONTRACT
        assert chat().invoke(SAID).content == MEANT

    def test_a_stream(self, chat: Any) -> None:
        chunks = list(chat(stream_usage=True).stream(SAID))
        assert "".join(chunk.content for chunk in chunks) == MEANT
        (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
        assert usage["output_tokens"] == 8

    def test_several_at_once(self, chat: Any) -> None:
        async def asks() -> list[Any]:
            return list(await chat().abatch([SAID] * 4))

        assert [answer.content for answer in asyncio.run(asks())] == [MEANT] * 4

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, chat: Any, method: str) -> None:
        model = chat(max_tokens=200).with_structured_output(Door, method=method)
        assert isinstance(model.invoke(SAID), Door)

    def test_responses(self, chat: Any) -> None:
        model = chat(use_responses_api=True)
        assert model.invoke(SAID).text == MEANT
        chunks = list(model.stream(SAID))
        assert "".join(chunk.text for chunk in chunks) == MEANT
        (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
        assert usage["output_tokens"] == 8

    @pytest.mark.parametrize("choice", ["any", "Door"])
    def test_tools(self, chat: Any, choice: str) -> None:
        model = chat(max_tokens=200).bind_tools([Door], tool_choice=choice)
        (call,) = model.invoke(SAID).tool_calls
        assert call["name"] == "Door"
        assert Door(**call["args"])
        chunks = [chunk for chunk in model.stream(SAID) if chunk.tool_call_chunks]
        assert chunks[0].tool_call_chunks[0]["name"] == "Door"


@pytest.mark.parametrize("streams", [False, True])
def test_openais_agents_loop(address: str, streams: bool) -> None:
    """The agents use /v1/responses by default."""
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    opened = []

    def open_door(door: Literal["front", "back"]) -> str:
        """Open a door."""
        opened.append(door)
        return SAID

    client = openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0)
    agent = agents.Agent(
        name="home",
        instructions="Be brief.",
        model=agents.OpenAIResponsesModel("intent", client),
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=64),
        tools=[agents.function_tool(open_door)],
    )
    settings = {"run_config": agents.RunConfig(tracing_disabled=True)}

    async def main() -> Any:
        if not streams:
            return await agents.Runner.run(agent, SAID, **settings)
        result = agents.Runner.run_streamed(agent, SAID, **settings)
        async for _ in result.stream_events():
            pass
        return result

    # Once a tool has been called none has to be.
    assert asyncio.run(main()).final_output == MEANT
    assert len(opened) == 1


def test_what_the_schema_allows_and_what_it_forbids(caller: Asker) -> None:
    """Every answer is one that the schema names, and none is an internal error."""
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    checks = schemathesis.checks
    schema = schemathesis.openapi.from_asgi("/openapi.json", caller.app)
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = schemathesis.GenerationMode
        for mode in (modes.POSITIVE, modes.NEGATIVE) if operation.body else (modes.POSITIVE,):

            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            @hypothesis.settings(
                max_examples=15,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            def ask(case: Any) -> None:
                nonlocal tried
                tried += 1
                case.call_and_validate(
                    checks=[
                        checks.not_a_server_error,
                        schemathesis.specs.openapi.checks.status_code_conformance,
                        schemathesis.specs.openapi.checks.content_type_conformance,
                        schemathesis.specs.openapi.checks.response_schema_conformance,
                    ]
                )

            ask()
    assert tried > 50
    assert_idle(caller.service)
