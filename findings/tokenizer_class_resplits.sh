#!/usr/bin/env bash
# The class that tokenizer_config.json names, in transformers 5.24.0.
#
# Guess: AutoTokenizer gives the ids of tokenizer.json, whichever fast class tokenizer_config.json
#   names, as transformers 4 did.
# Seen: GPT2Tokenizer, the class that SmolLM2's directories name, takes vocabulary and merges from
#   tokenizer.json and splits texts in its own way. A step that splits digits one by one is gone,
#   with no warning. With LlamaTokenizer, which is as wrong a name for this file, or
#   PreTrainedTokenizerFast, tokenizer.json is taken as it is.
#
# Output seen (tokens of "12"):
#   tokenizer.json: ['1', '2']
#   PreTrainedTokenizerFast: ['1', '2']
#   LlamaTokenizer: ['1', '2']
#   GPT2Tokenizer: ['12']
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocab = {token: index for index, token in enumerate([*letters, "12", "<|endoftext|>"])}
made = Tokenizer(models.BPE(vocab, [("1", "2")]))
digits = pre_tokenizers.Digits(individual_digits=True)
to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
made.decoder = decoders.ByteLevel()

seen = {"tokenizer.json": made.encode("12").tokens}
for name in ("PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer"):
    directory = Path(sys.argv[1], name)
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    seen[name] = AutoTokenizer.from_pretrained(directory).tokenize("12")
for name, tokens in seen.items():
    print(f"{name}: {tokens}")
sys.exit(list(map(len, seen.values())) != [2, 2, 2, 1])
PYTHON
