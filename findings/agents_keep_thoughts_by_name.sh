#!/usr/bin/env bash
# A thought before a call of a tool, in a loop of openai-agents 0.24.0 over chat completions.
#
# Guess: a thought is read under both names that servers use, reasoning_content and reasoning, and
#   goes back with the call and its result, or does not, whichever name it had.
# Seen: under reasoning alone it goes back, in the same field. Under reasoning_content, or under
#   both names, it is shown but does not go back, so the model's next turn cannot see it, unless
#   the model's name has "deepseek" in it. A stream with both names has the thought twice in one
#   item, as summary and as content.
#
# Output seen:
#   reasoning: once, goes back as reasoning
#   reasoning_content: once, does not go back
#   both: once, does not go back
#   both, streamed: twice, does not go back
#   both, from a model called deepseek: once, goes back as reasoning_content
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai-agents==0.24.0 \
  openai==3.57.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

NAMES = ["reasoning_content", "reasoning"]
CALL = {"id": "a", "type": "function", "function": {"name": "lock", "arguments": "{}"}}
asked = []


class Server(BaseHTTPRequestHandler):
    """Thinks and calls a tool, then answers. The path has the names of the thought."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append(body["messages"])
        is_last = body["messages"][-1]["role"] == "tool"
        said = {name: "Which door?" for name in self.path.split("/")[1].split("+")}
        said = {"content": "Locked."} if is_last else {**said, "tool_calls": [{"index": 0, **CALL}]}
        reason = "stop" if is_last else "tool_calls"
        head = {"id": "c", "created": 1, "model": "m", "object": "chat.completion"}
        choice = {"index": 0, "finish_reason": reason}
        if body.get("stream"):
            head["object"] += ".chunk"
            chunks = [{"delta": said, "finish_reason": None}, {"delta": {}}]
            chunks = [{**head, "choices": [{**choice, **each}]} for each in chunks]
            text = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
        else:
            message = {"role": "assistant", "content": None, **said}
            text = json.dumps({**head, "choices": [{**choice, "message": message}]})
        self.send_response(200)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
set_tracing_disabled(True)


@function_tool
def lock() -> str:
    """Lock the door."""
    return "done"


async def behaviour(*names, stream=False, model="m"):
    address = f"http://127.0.0.1:{server.server_port}/{'+'.join(names)}"
    client = AsyncOpenAI(base_url=address, api_key="none", max_retries=0)
    agent = Agent("it", model=OpenAIChatCompletionsModel(model, client), tools=[lock])
    if stream:
        result = Runner.run_streamed(agent, "Lock it.")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "Lock it.")
    (item,) = (each.raw_item for each in result.new_items if each.type == "reasoning_item")
    times = ("not", "once", "twice")[len(item.summary) + len(item.content or ())]
    answer = next(each for each in asked[-1] if each["role"] == "assistant")
    back = [name for name in NAMES if answer.get(name)]
    return f"{times}, {f'goes back as {back[0]}' if back else 'does not go back'}"


seen = {
    "reasoning": asyncio.run(behaviour("reasoning")),
    "reasoning_content": asyncio.run(behaviour("reasoning_content")),
    "both": asyncio.run(behaviour(*NAMES)),
    "both, streamed": asyncio.run(behaviour(*NAMES, stream=True)),
    "both, from a model called deepseek": asyncio.run(behaviour(*NAMES, model="deepseek")),
}
for names, what in seen.items():
    print(f"{names}: {what}")
lost = "does not go back"
expected = ["once, goes back as reasoning", f"once, {lost}", f"once, {lost}", f"twice, {lost}"]
sys.exit(list(seen.values()) != [*expected, "once, goes back as reasoning_content"])
PYTHON
