#!/usr/bin/env bash
# Answers that the limit of tokens cuts off, in the stream helpers of openai 3.57.0.
#
# Guess: at the end of chat.completions.stream() and responses.stream() the helper gives the answer
#   that create() gives for the same bytes, also where max_tokens has cut it off; only a parsed
#   response_format makes the length an error.
# Seen: get_final_completion() raises LengthFinishReasonError for plain text without a
#   response_format, and get_final_response() raises RuntimeError, since response.incomplete is not
#   the event that it waits for. A model whose thought takes all tokens is lost in both. create()
#   returns it.
#
# Output seen:
#   chat create: On
#   chat stream: LengthFinishReasonError
#   response create: On, incomplete
#   response stream: RuntimeError
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==3.57.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai

PART = {"type": "output_text", "text": "On", "annotations": [], "logprobs": []}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "status": "incomplete"}
RESPONSE = {
    "id": "r", "object": "response", "created_at": 1, "model": "m", "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"}, "error": None, "instructions": None,
    "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0, "tools": [],
    "tool_choice": "auto", "output": [{**MESSAGE, "content": [PART]}],
}
BEGUN = {**RESPONSE, "status": "in_progress", "incomplete_details": None, "output": []}


def chat(kind, **choice):
    head = {"id": "c", "object": kind, "created": 1, "model": "m"}
    return {**head, "choices": [{"index": 0, "finish_reason": None, **choice}]}


class Server(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "messages" in asked:
            said = {"role": "assistant", "content": "On"}
            whole = chat("chat.completion", message=said, finish_reason="length")
            chunk = "chat.completion.chunk"
            events = [chat(chunk, delta=said), chat(chunk, delta={}, finish_reason="length")]
            text = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
        else:
            whole, place = RESPONSE, {"output_index": 0, "content_index": 0, "item_id": "m"}
            item = {**MESSAGE, "status": "in_progress", "content": []}
            events = [
                {"type": "response.created", "response": BEGUN},
                {"type": "response.output_item.added", "output_index": 0, "item": item},
                {"type": "response.content_part.added", **place, "part": {**PART, "text": ""}},
                {"type": "response.output_text.delta", **place, "delta": "On", "logprobs": []},
                {"type": "response.incomplete", "response": RESPONSE},
            ]
            numbered = [{**each, "sequence_number": i} for i, each in enumerate(events)]
            text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in numbered)
        body = text if asked.get("stream") else json.dumps(whole)
        self.send_response(200)
        kind = "text/event-stream" if asked.get("stream") else "application/json"
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body.encode())


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none")
messages = [{"role": "user", "content": "Hello"}]


def named(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__


with client.chat.completions.stream(model="m", messages=messages, max_tokens=1) as stream:
    streamed = named(lambda: stream.get_final_completion().choices[0].message.content)
with client.responses.stream(model="m", input="Hello", max_output_tokens=1) as stream:
    responded = named(lambda: stream.get_final_response().output_text)
answer = client.chat.completions.create(model="m", messages=messages, max_tokens=1)
response = client.responses.create(model="m", input="Hello", max_output_tokens=1)
seen = {
    "chat create": answer.choices[0].message.content,
    "chat stream": streamed,
    "response create": f"{response.output_text}, {response.status}",
    "response stream": responded,
}
for name, value in seen.items():
    print(f"{name}: {value}")
expected = ["On", "LengthFinishReasonError", "On, incomplete", "RuntimeError"]
sys.exit(list(seen.values()) != expected)
PYTHON
