#!/usr/bin/env bash
# A Qwen3.5 with tied embeddings, made and saved by transformers 5.24.0, and read back as a model of
# text (AutoModelForCausalLM), as its class for images and text (AutoModelForImageTextToText).
#
# Guess: tie_word_embeddings=True of the whole config also holds for its text part: both classes
#   read what was saved, and give the logits that the model had.
# Seen: the class for images and text looks at the flag of the whole config alone; the model of text
#   looks at that of text_config alone, which is False unless it is set there too. Nothing copies
#   the one to the other, neither when the config is made nor when it is saved. The file has no LM
#   head, so the model of text gets a random one, another in each process; a report on the log says
#   MISSING, and no exception is raised. With both flags set, both classes read the model.
#
# Output seen:
#   one flag, images and text: the logits that were saved
#   one flag, text: other logits, lm_head.weight is missing
#   both flags, text: the logits that were saved
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" 2>"$folder/log" <<'PYTHON'
import sys

import torch
import transformers

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
IMAGES |= {"out_hidden_size": 32, "num_position_embeddings": 4}


def behaviour(text, read):
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(
        text_config={**TEXT, **text}, vision_config=IMAGES, tie_word_embeddings=True
    )
    saved = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    saved.save_pretrained(sys.argv[1] + "/model")
    again, report = read.from_pretrained(sys.argv[1] + "/model", output_loading_info=True)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        same = torch.allclose(again(input_ids=ids).logits, saved(input_ids=ids).logits, atol=1e-5)
    missing = "".join(f", {name} is missing" for name in report["missing_keys"])
    return ("the logits that were saved" if same else "other logits") + missing


both = {"tie_word_embeddings": True}
seen = {
    "one flag, images and text": behaviour({}, transformers.AutoModelForImageTextToText),
    "one flag, text": behaviour({}, transformers.AutoModelForCausalLM),
    "both flags, text": behaviour(both, transformers.AutoModelForCausalLM),
}
for case, what in seen.items():
    print(f"{case}: {what}")
same, other = "the logits that were saved", "other logits, lm_head.weight is missing"
sys.exit(list(seen.values()) != [same, other, same])
PYTHON
