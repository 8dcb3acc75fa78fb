#!/usr/bin/env bash
# Packed rows in transformers 5.24.0: several texts in one row, told apart by position_ids that
# begin at 0 again.
#
# Guess: the mask keeps the texts apart wherever position_ids show them.
# Seen: only with use_cache=False and without an attention mask. With the default
#   use_cache=True, in training mode too, or with a mask of ones, which masks nothing, the second
#   text sees the first one, and nothing says so.
#
# Output seen (largest difference from the two texts alone):
#   use_cache=False: apart
#   default: mixed
#   default, in training mode: mixed
#   use_cache=False and a mask of ones: mixed
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
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).eval()
ids = torch.randint(3, 97, (1, 24))
places = torch.cat([torch.arange(10), torch.arange(14)])[None]
ones = torch.ones_like(ids)


@torch.no_grad()
def behaviour(**settings):
    alone = torch.cat([model(ids[:, :10]).logits, model(ids[:, 10:]).logits], dim=1)
    off = (model(ids, position_ids=places, **settings).logits - alone).abs().max()
    return "apart" if off < 1e-5 else "mixed"


seen = {
    "use_cache=False": behaviour(use_cache=False),
    "default": behaviour(),
    "use_cache=False and a mask of ones": behaviour(use_cache=False, attention_mask=ones),
}
model.train()
seen["default, in training mode"] = behaviour()
for name, found in seen.items():
    print(f"{name}: {found}")
sys.exit(sorted(seen.values()) != ["apart", "mixed", "mixed", "mixed"])
PYTHON
