#!/usr/bin/env bash
# A prefix language model, HRM-Text, in transformers 5.24.0: generate() with and without a cache,
# where token_type_ids say that the prompt is read in both directions.
#
# Guess: use_cache is about speed, so the greedy text is the same.
# Seen: without a cache it is another text, and nothing says so. generate() gives every new token
#   the type of the prompt's last one, 1, so the answer joins the prefix: its tokens see those after
#   them. With a cache only the first call makes the mask. Without token_type_ids both agree.
#
# Output seen:
#   no types: the same text
#   types of the prompt: another text
#   the text with a cache: that of new tokens of type 0
#   the text without a cache: that of new tokens of type 1
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import HrmTextConfig, HrmTextForCausalLM

sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
tokens = dict(pad_token_id=0, eos_token_id=None)
config = HrmTextConfig(**sizes, **tokens, num_attention_heads=4, head_dim=16)
model = HrmTextForCausalLM(config).eval()
generator = torch.Generator().manual_seed(1)
with torch.no_grad():
    for weight in model.parameters():
        if weight.ndim > 1:
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn * 1.3 * weight.shape[-1] ** -0.5)
prompt = torch.randint(3, 97, (1, 10), generator=generator)
ones = torch.ones_like(prompt)


def generated(use_cache, **types):
    settings = dict(max_new_tokens=12, do_sample=False, use_cache=use_cache)
    return model.generate(prompt, **settings, **types)[0, 10:].tolist()


@torch.no_grad()
def by_hand(new_type):
    """Each token from the whole text, where new tokens have a type."""
    ids, types = prompt, ones
    for _ in range(12):
        logits = model(ids, token_type_ids=types, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        types = torch.cat([types, torch.full((1, 1), new_type)], 1)
    return ids[0, 10:].tolist()


with_cache, without = (generated(each, token_type_ids=ones) for each in (True, False))
plain = generated(True) == generated(False)
print(f"no types: {'the same' if plain else 'another'} text")
print(f"types of the prompt: {'the same' if with_cache == without else 'another'} text")
types = [[name for name in (0, 1) if by_hand(name) == text] for text in (with_cache, without)]
for name, (found, *_) in zip(("with", "without"), types):
    print(f"the text {name} a cache: that of new tokens of type {found}")
sys.exit(not (plain and types == [[0], [1]]))
PYTHON
