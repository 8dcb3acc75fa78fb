#!/usr/bin/env bash
# Numbers of a step in a JSON schema, as prices are, in llguidance 1.9.1: which forms of a multiple
# may be written.
#
# Guess: {"type": "number", "multipleOf": 0.25} allows every way to write a multiple, or its
#   shortest one: 0.5, 2.5, 1.0.
# Seen: an integer, or as many decimals as the step has and no fewer: 0.50 and 2.50, but not 0.5,
#   2.5 or 1.0. A model that has written 0.5 must add a zero. Steps of 0.5, 0.1 and 0.01 allow 0.5
#   and 2.5: a step of 0.01 takes fewer decimals than it has.
#
# Output seen:
#   0.25: 1 yes, 1.0 no, 1.00 yes, 0.5 no, 0.50 yes, 2.5 no
#   0.5: 1 yes, 1.0 yes, 1.00 no, 0.5 yes, 0.50 no, 2.5 yes
#   0.1: 1 yes, 1.0 yes, 1.00 no, 0.5 yes, 0.50 no, 2.5 yes
#   0.01: 1 yes, 1.0 yes, 1.00 yes, 0.5 yes, 0.50 yes, 2.5 yes
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 \
  tokenizers==0.23.3 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WANTED = {0.25: "yes no yes no yes no", 0.5: "yes yes no yes no yes", 0.1: "yes yes no yes no yes"}
WANTED[0.01] = "yes yes yes yes yes yes"

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
bound = LLTokenizer(tokenizer.to_str(), eos_token=256)


def allows(step, text):
    schema = json.dumps({"type": "number", "multipleOf": step})
    matcher = LLMatcher(bound, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    return matcher.consume_tokens(tokenizer.encode(text).ids) and matcher.is_accepting()


seen = {}
for step in WANTED:
    said = {text: allows(step, text) for text in ("1", "1.0", "1.00", "0.5", "0.50", "2.5")}
    seen[step] = " ".join("yes" if each else "no" for each in said.values())
    answers = zip(said, seen[step].split(), strict=True)
    print(f"{step}: " + ", ".join(f"{text} {answer}" for text, answer in answers))
sys.exit(seen != WANTED)
PYTHON
