#!/usr/bin/env bash
# Names of tokens as text in a grammar of llguidance 1.9.1, such as the <tool_call> before a call
# that must be made, with a tokenizer that has a token of this name.
#
# Guess: the mask allows the bytes of the name, or the token where it is not special, and the
#   matcher takes what the mask allows.
# Seen: where the name is all that can follow, the mask allows the token alone, and the matcher then
#   rejects it. A token in angle brackets is special to llguidance, whatever tokenizer.json says, so
#   this meets Qwen's <tool_call>, which is not special there. A name without brackets fails only
#   where it is special. Beside any other choice the name is allowed as bytes, and all goes well.
#
# Output seen:
#   <call>, not special, forced: allowed, then rejected
#   <call>, not special, beside "x": taken
#   [CALL], not special, forced: taken
#   [CALL], special, forced: allowed, then rejected
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 \
  tokenizers==0.23.3 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
END, CALL = 256, 257


def behaviour(name, special, rule):
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.add_tokens([AddedToken(name, special=special, normalized=False)])
    tokenizer = LLTokenizer(made.to_str(), n_vocab=258, eos_token=[END])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(rule), log_level=0)
    words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
    allowed = [token for token in range(258) if words[token // 32] >> (token % 32) & 1]
    token = CALL if CALL in allowed else allowed[0]
    return "taken" if matcher.consume_token(token) else "allowed, then rejected"


seen = {
    "<call>, not special, forced": behaviour("<call>", False, 'start: "<call>"'),
    '<call>, not special, beside "x"': behaviour("<call>", False, 'start: "<call>" | "x"'),
    "[CALL], not special, forced": behaviour("[CALL]", False, 'start: "[CALL]"'),
    "[CALL], special, forced": behaviour("[CALL]", True, 'start: "[CALL]"'),
}
for case, what in seen.items():
    print(f"{case}: {what}")
rejected = [case for case, what in seen.items() if what != "taken"]
sys.exit(rejected != ["<call>, not special, forced", "[CALL], special, forced"])
PYTHON
