#!/usr/bin/env bash
# Yarn's settings in a GGUF file, in llama.cpp b11549 (xllamacpp 2026.10.11549): the bounds beta_fast
# and beta_slow, and attention_factor, which gguf 0.19.0 and llama.cpp's converter write for a model
# whose config.json has them, such as an Olmo 3.
#
# Guess: what the converter stores is used, or a warning says that it is not.
# Seen: for architecture llama none of rope.scaling.yarn_beta_fast, yarn_beta_slow and
#   yarn_attn_factor changes a logit; the bounds are 32 and 1, the factor 0.1 ln(factor) + 1, and
#   nothing says so. rope.scaling.attn_factor, an older field, is used, multiplied with that factor:
#   moving a config's attention_factor to it counts it twice. mistral3 uses both bounds, and not
#   yarn_attn_factor.
#
# Output seen:
#   llama, yarn_beta_fast: the same
#   llama, yarn_beta_slow: the same
#   llama, yarn_attn_factor: the same
#   llama, attn_factor: other logits
#   mistral3, yarn_beta_fast: other logits
#   mistral3, yarn_beta_slow: other logits
#   mistral3, yarn_attn_factor: the same
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check xllamacpp==2026.10.11549 \
  gguf==0.19.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder" 2>"$folder/log" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

FILE = Path(sys.argv[1]) / "model.gguf"
LAYERS, WIDTH, INNER, HEADS, VOCABULARY = 3, 64, 96, 4, 280


def write(architecture, settings):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(FILE, architecture)
    writer.add_context_length(32768)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    for name, value in settings.items():
        getattr(writer, f"add_rope_scaling_{name}")(value)
    tokens = ["<unk>", "<s>", "</s>"] + [f"word{index}" for index in range(3, VOCABULARY)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3] + [1] * (VOCABULARY - 3))
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        parts = {f"attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
        parts |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        parts |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) * 0.2 if len(shape) == 2 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logprobs(architecture, **settings):
    write(architecture, settings)
    params = xllamacpp.CommonParams()
    params.model.path = str(FILE)
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    prompt = list(range(20, 120))
    request = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
    (first,) = server.handle_completions(request)["choices"][0]["logprobs"]["content"]
    return [(each["id"], each["logprob"]) for each in first["top_logprobs"]]


seen = []
for architecture in ("llama", "mistral3"):
    plain = logprobs(architecture)
    assert plain == logprobs(architecture)
    names = ["yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor"]
    for name in [*names, "attn_factors"] if architecture == "llama" else names:
        value = {"yarn_beta_fast": 4.0, "yarn_beta_slow": 3.0}.get(name, 1.5)
        same = logprobs(architecture, **{name: value}) == plain
        field = name.removesuffix("s")
        seen.append(f"{architecture}, {field}: {'the same' if same else 'other logits'}")
print("\n".join(seen))
wanted = ["the same"] * 3 + ["other logits"] * 3 + ["the same"]
sys.exit([line.partition(": ")[2] for line in seen] != wanted)
PYTHON
