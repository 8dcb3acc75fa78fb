#!/usr/bin/env bash
# FSDP in transformers 5.24.0's Trainer with accelerate 1.15.0, on the CPU: two processes over gloo.
#
# Guess: the Trainer refuses fsdp=True beside use_cpu=True, or divides the weights, as torch's own
#   fully_shard does on the CPU.
# Seen: it trains, and nothing says that the weights are not divided. Every process has the whole
#   model and the whole of AdamW's state, by DistributedDataParallel.
#
# Output seen (of each process):
#   distributed type: MULTI_CPU
#   model: DistributedDataParallel
#   weights in this process: 1024 of 1024
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
  numpy==2.4.6
cat > "$folder/train.py" <<'PYTHON'
import sys

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


arguments = TrainingArguments(
    sys.argv[1], max_steps=2, use_cpu=True, fsdp=True, report_to="none", save_strategy="no"
)
data = [{"x": torch.ones(32)} for _ in range(64)]
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.train()
here = sum(weight.numel() for weight in trainer.model_wrapped.parameters())
if arguments.process_index == 0:
    print(f"distributed type: {trainer.accelerator.distributed_type.name}")
    print(f"model: {type(trainer.model_wrapped).__name__}")
    print(f"weights in this process: {here} of {32 * 32}")
PYTHON
seen=$(OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc-per-node 2 --rdzv-backend c10d \
  --rdzv-endpoint localhost:0 "$folder/train.py" "$folder/out" 2> "$folder/errors" |
  grep -E "^(distributed type|model|weights)") || { tail -n 20 "$folder/errors"; exit 1; }
echo "$seen"
expected="distributed type: MULTI_CPU
model: DistributedDataParallel
weights in this process: 1024 of 1024"
[ "$seen" = "$expected" ]
! grep -qi "fsdp" "$folder/errors"
