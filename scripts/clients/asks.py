"""One request of a client from PyPI: python asks.py CLIENT CHECK URL MODEL.

A client is a class; its methods are the checks that its interface has. Each uses the client as its
documentation does, and returns what the client has parsed. Exit code 0: it is what was asked for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel

CHECKS = ("chat", "stream", "tools", "schema", "logprobs")
KEY = "none"
SAID = "Name the capital of France in one sentence."
ASKED = "What is the weather in Paris?"
TOLD = "Ada Lovelace is 36 years old."
FEW = {"max_tokens": 40}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": CITY}
TOOLS = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Weather(BaseModel):
    """The weather in a city."""

    city: str


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: the name of the city.
    """
    return f"sunny in {city}"


class Client:
    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self.place = {"model": model, "base_url": url, "api_key": KEY}

    def sdk(self, kind: str = "OpenAI") -> Any:
        import openai

        return getattr(openai, kind)(base_url=self.url, api_key=KEY, max_retries=0)


class OpenAI(Client):
    """The client, and the base of those whose answers are its objects."""

    def ask(self, said: str, **settings: Any) -> Any:
        messages = [{"role": "user", "content": said}]
        return self.sdk().chat.completions.create(model=self.model, messages=messages, **settings)

    def chat(self) -> Any:
        return self.ask(SAID, max_completion_tokens=40).choices[0].message.content

    def stream(self) -> Any:
        chunks = self.ask(SAID, stream=True, stream_options={"include_usage": True}, **FEW)
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]

    def tools(self) -> Any:
        return json.loads(
            self.ask(ASKED, **TOOLS).choices[0].message.tool_calls[0].function.arguments
        )

    def schema(self) -> Any:
        ask = self.sdk().chat.completions.parse
        messages = [{"role": "user", "content": TOLD}]
        answer = ask(model=self.model, messages=messages, response_format=Person)
        return answer.choices[0].message.parsed

    def logprobs(self) -> Any:
        answer = self.ask(SAID, logprobs=True, top_logprobs=3, **FEW)
        return [token.logprob for token in answer.choices[0].logprobs.content]


class LiteLLM(OpenAI):
    def ask(self, said: str, **settings: Any) -> Any:
        import litellm

        place = {"model": f"openai/{self.model}", "api_base": self.url, "api_key": KEY}
        return litellm.completion(messages=[{"role": "user", "content": said}], **place, **settings)

    def schema(self) -> Any:
        return self.ask(TOLD, response_format=Person).choices[0].message.content


class Instructor(OpenAI):
    def ask(self, said: str, kind: Any = None, mode: str = "TOOLS", **settings: Any) -> Any:
        import instructor

        client = instructor.from_openai(self.sdk(), mode=instructor.Mode[mode])
        more = {"messages": [{"role": "user", "content": said}], "max_retries": 0, **settings}
        return client.chat.completions.create(response_model=kind, model=self.model, **more)

    def tools(self) -> Any:  # its usual mode: a tool by name
        return self.ask(ASKED, Weather)

    def schema(self) -> Any:
        return self.ask(TOLD, Person, "JSON_SCHEMA")


class LangChain(Client):
    def ask(self, **settings: Any) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(**self.place, **settings)

    def chat(self) -> Any:
        return self.ask(**FEW).invoke(SAID).text

    def stream(self) -> Any:
        return [chunk.text for chunk in self.ask(**FEW).stream(SAID)]

    def tools(self) -> Any:
        model = self.ask().bind_tools([get_weather], tool_choice="any")
        return model.invoke(ASKED).tool_calls[0]["args"]

    def schema(self) -> Any:
        return self.ask().with_structured_output(Person).invoke(TOLD)

    def logprobs(self) -> Any:
        answer = self.ask(**FEW).bind(logprobs=True).invoke(SAID)
        return [token["logprob"] for token in answer.response_metadata["logprobs"]["content"]]


class LlamaIndex(Client):
    def ask(self, **settings: Any) -> Any:
        from llama_index.llms.openai_like import OpenAILike

        kind = {"is_chat_model": True, "is_function_calling_model": True}
        return OpenAILike(self.model, api_base=self.url, api_key=KEY, **kind, **settings)

    def chat(self) -> Any:
        return self.ask(**FEW).complete(SAID).text

    def stream(self) -> Any:
        return [part.delta for part in self.ask(**FEW).stream_complete(SAID)]

    def tools(self) -> Any:
        from llama_index.core.tools import FunctionTool

        model, tools = self.ask(), [FunctionTool.from_defaults(get_weather)]
        answer = model.chat_with_tools(tools, ASKED, tool_required=True)
        return model.get_tool_calls_from_response(answer)[0].tool_kwargs

    def schema(self) -> Any:
        return self.ask().as_structured_llm(Person).complete(TOLD).raw

    def logprobs(self) -> Any:
        from llama_index.core.llms import ChatMessage

        model = self.ask(logprobs=True, top_logprobs=2, **FEW)
        answer = model.chat([ChatMessage(content=SAID)])
        return [token.logprob for tokens in answer.logprobs for token in tokens]


class Llm(Client):
    def ask(self, said: str, **settings: Any) -> Any:
        from llm.default_plugins.openai_models import Chat

        place = {"model_name": self.model, "api_base": self.url}
        model = Chat("served", key=KEY, supports_schema=True, supports_tools=True, **place)
        return model.prompt(said, **settings)

    def chat(self) -> Any:
        return self.ask(SAID, stream=False, **FEW).text()

    def stream(self) -> Any:
        return list(self.ask(SAID, **FEW))

    def tools(self) -> Any:  # it has no tool_choice
        return self.ask(ASKED, tools=[get_weather], temperature=0).tool_calls()[0].arguments

    def schema(self) -> Any:
        return self.ask(TOLD, schema=Person).text()


class PydanticAI(Client):
    def ask(self, kind: Any = str, **settings: Any) -> Any:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel(self.model, provider=OpenAIProvider(self.url, api_key=KEY))
        return Agent(model, output_type=kind, model_settings=settings, retries=0)

    def chat(self) -> Any:
        return self.ask(**FEW).run_sync(SAID).output

    def stream(self) -> Any:
        agent = self.ask(openai_continuous_usage_stats=True, **FEW)
        return list(agent.run_stream_sync(SAID).stream_text(delta=True, debounce_by=None))

    def tools(self) -> Any:  # its usual output: a tool that is required
        return self.ask(Weather).run_sync(ASKED).output

    def schema(self) -> Any:
        from pydantic_ai import NativeOutput

        return self.ask(NativeOutput(Person)).run_sync(TOLD).output

    def logprobs(self) -> Any:
        result = self.ask(openai_logprobs=True, openai_top_logprobs=2, **FEW).run_sync(SAID)
        return [token["logprob"] for token in result.response.provider_details["logprobs"]]


class Haystack(Client):
    def ask(self, said: str, tools: Any = None, callback: Any = None, **settings: Any) -> Any:
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.utils import Secret

        place = {"model": self.model, "api_base_url": self.url, "max_retries": 0}
        given = {"tools": tools, "streaming_callback": callback}
        generator = OpenAIChatGenerator(Secret.from_token(KEY), **place, **given)
        return generator.run(said, generation_kwargs=settings)["replies"][0]

    def chat(self) -> Any:
        return self.ask(SAID, **FEW).text

    def stream(self) -> Any:
        pieces: list[str] = []
        self.ask(SAID, callback=lambda piece: pieces.append(piece.content), **FEW)
        return pieces

    def tools(self) -> Any:
        from haystack.tools import create_tool_from_function

        tools = [create_tool_from_function(get_weather)]
        return self.ask(ASKED, tools, tool_choice="required").tool_calls[0].arguments

    def schema(self) -> Any:
        return self.ask(TOLD, response_format=Person).text

    def logprobs(self) -> Any:
        answer = self.ask(SAID, logprobs=True, **FEW)
        return [token["logprob"] for token in answer.meta["logprobs"]["content"]]


class DSPy(Client):
    def ask(self, signature: Any = None, **settings: Any) -> Any:
        """A model, or a program; the provider is declared, so that it gets schemas and tools."""
        import dspy
        from dspy import lm15

        access = lm15.AccessPolicy("served", env_keys=("OPENAI_API_KEY",), base_url=self.url)
        provider = lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat())
        lm15.register_provider(provider, supports=lm15.ModelSupport(True, False, True))
        model = dspy.LM(f"served/{self.model}", cache=False, num_retries=0, **settings)
        dspy.configure(lm=model, adapter=dspy.JSONAdapter())
        return model if signature is None else dspy.Predict(signature)

    def chat(self) -> Any:
        return self.ask(**FEW)(SAID)[0]

    def stream(self) -> Any:
        import dspy

        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        program = self.ask("question -> answer", max_tokens=200)
        streams = dspy.streamify(program, stream_listeners=[listener], async_streaming=False)
        parts = streams(question=SAID)
        return [part.chunk for part in parts if isinstance(part, dspy.streaming.StreamResponse)]

    def tools(self) -> Any:  # it has no tool_choice
        import dspy

        program = self.ask("question, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
        calls = program(question=ASKED, tools=[dspy.Tool(get_weather)]).calls
        return calls.tool_calls[0].args

    def schema(self) -> Any:
        import dspy

        signature = dspy.Signature("text -> person: Person", custom_types={"Person": Person})
        return self.ask(signature)(text=TOLD).person

    def logprobs(self) -> Any:
        answer = self.ask(logprobs=True, **FEW)(SAID)[0]
        return [token.logprob for token in answer["logprobs"].content]


class Smolagents(OpenAI):
    def model_of(self) -> Any:
        from smolagents import OpenAIModel

        return OpenAIModel(self.model, api_base=self.url, api_key=KEY)

    def ask(self, said: str, **settings: Any) -> Any:
        messages = [{"role": "user", "content": [{"type": "text", "text": said}]}]
        if settings.pop("stream", False):
            settings.pop("stream_options")
            return self.model_of().generate_stream(messages, **settings)
        return self.model_of().generate(messages, **settings).raw

    def stream(self) -> Any:
        return [part.content for part in self.ask(SAID, stream=True, stream_options=None, **FEW)]

    def tools(self) -> Any:
        from smolagents import tool

        answer = self.ask(ASKED, tools_to_call_from=[tool(get_weather)])
        return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)

    def schema(self) -> Any:
        form = {"name": "person", "schema": Person.model_json_schema()}
        answer = self.ask(TOLD, response_format={"type": "json_schema", "json_schema": form})
        return answer.choices[0].message.content


class OpenAIAgents(Client):
    """Streams and log-probabilities by /v1/responses, its usual interface; the rest by chats."""

    def ask(self, kind: str, settings: Any = None, **more: Any) -> Any:
        import agents

        agents.set_tracing_disabled(True)
        model = getattr(agents, kind)(self.model, self.sdk("AsyncOpenAI"))
        settings = agents.ModelSettings(**settings or {})
        return agents.Agent(
            "a", instructions="Be brief.", model=model, model_settings=settings, **more
        )

    def run(self, said: str, *given: Any, **more: Any) -> Any:
        import agents

        return agents.Runner.run_sync(self.ask(*given, **more), said)

    def chat(self) -> Any:
        return self.run(SAID, "OpenAIChatCompletionsModel", FEW).final_output

    def stream(self) -> Any:
        import agents

        async def main() -> Any:
            run = agents.Runner.run_streamed(self.ask("OpenAIResponsesModel", FEW), SAID)
            events = [getattr(event, "data", None) async for event in run.stream_events()]
            kind = "response.output_text.delta"
            return [event.delta for event in events if getattr(event, "type", "") == kind]

        return asyncio.run(main())

    def tools(self) -> Any:
        import agents

        more = {"tools": [agents.function_tool(get_weather)]}
        more["tool_use_behavior"] = "stop_on_first_tool"
        answer = self.run(ASKED, "OpenAIChatCompletionsModel", {"tool_choice": "required"}, **more)
        return json.loads(answer.raw_responses[0].output[0].arguments)

    def schema(self) -> Any:
        return self.run(TOLD, "OpenAIChatCompletionsModel", output_type=Person).final_output

    def logprobs(self) -> Any:
        answer = self.run(SAID, "OpenAIResponsesModel", {"top_logprobs": 2, **FEW})
        return [token.logprob for token in answer.raw_responses[0].output[0].content[0].logprobs]


CLIENTS: dict[str, type[Client]] = {
    "openai": OpenAI,
    "litellm": LiteLLM,
    "langchain-openai": LangChain,
    "llama-index-llms-openai-like": LlamaIndex,
    "instructor": Instructor,
    "llm": Llm,
    "pydantic-ai-slim": PydanticAI,
    "haystack-ai": Haystack,
    "dspy": DSPy,
    "smolagents": Smolagents,
    "openai-agents": OpenAIAgents,
}


def check(name: str, got: Any) -> None:
    """Raise an error unless a check returned what it should."""
    kind = {"tools": Weather, "schema": Person}.get(name)
    if kind is not None:
        given = got.model_dump() if isinstance(got, BaseModel) else got
        (kind.model_validate_json if isinstance(given, str) else kind.model_validate)(given)
    elif name == "logprobs" and not (got and all(value <= 0 for value in got)):
        raise ValueError(f"expected log-probabilities, got {got}")
    elif name == "stream" and len([piece for piece in got if piece]) < 2:
        raise ValueError(f"expected several pieces, got {got}")
    elif name == "chat" and not got.strip():
        raise ValueError(f"expected text, got {got!r}")


if __name__ == "__main__":
    name, asked, url, model = sys.argv[1:]
    ask = getattr(CLIENTS[name](url, model), asked, None)
    got = "-" if ask is None else ask()
    if ask is not None:
        check(asked, got)
    print(str(got)[:100].replace("\n", " "))
