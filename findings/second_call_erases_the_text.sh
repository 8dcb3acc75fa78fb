#!/usr/bin/env bash
# An answer of a thought, text and two calls, in parse_response of transformers 5.24.0 with a
# response_template whose content is all that no other field opens.
#
# Guess: the text before the calls is the content, whether one call follows or two: the line end
#   between two calls is left out, or joined to it.
# Seen: each piece outside of other fields replaces the one before. The line end between two calls
#   replaces the text and is stripped to nothing, so that the message has no content at all; text
#   before a thought, and the first of two thoughts, are lost in the same way. Nothing says so. A
#   content with "repeats" and "join" keeps all pieces.
#
# Output seen:
#   one call: content "Let me see."
#   two calls: no content
#   two calls, joined: content "Let me see."
#   text before the thought: content "Four."
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

from transformers.utils.chat_parsing import parse_response

START = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nTwo.\n</think>\n\n"


def behaviour(text, **content):
    template = {
        "start_anchor": START,
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True
            },
            "content": {"close": "<|im_end|>", **content},
        },
    }
    prompt = f"<|im_start|>user\n2 + 2?<|im_end|>\n{START}"
    message = parse_response(f"{text}<|im_end|>", template, prefix=prompt)
    assert message["thinking"] == "Two."
    said = message.get("content")
    return "no content" if said is None else f"content {json.dumps(said)}"


two = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"
seen = {
    "one call": behaviour(f"{THOUGHT}Let me see.\n{CALL}"),
    "two calls": behaviour(two),
    "two calls, joined": behaviour(two, repeats=True, join=""),
    "text before the thought": behaviour(f"Well. {THOUGHT}Four."),
}
for case, what in seen.items():
    print(f"{case}: {what}")
text = 'content "Let me see."'
sys.exit(list(seen.values()) != [text, "no content", text, 'content "Four."'])
PYTHON
