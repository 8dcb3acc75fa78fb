"""A model that says a set text, so that servers of any engine can be compared by their answers.

Each token is followed by one other: embeddings are one-hot, layers add nothing, and the output
matrix has the next token of each. Some tokens have a second, weaker successor, which a request
takes by its ``logit_bias``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.decode.models import add_settings, named_by_gguf, weight_shapes, write

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LINE_END = "Ċ"
"""A line end, as tokenizers of bytes write it. Each prompt ends with one."""
SPECIAL = ("<|im_start|>", "<|im_end|>")
END = SPECIAL[1]
SUM = '\n{"name": "sum", "arguments": {"of": 2}}\n'
SAID = {
    "<think>": ("\nTwo, two.",),
    "\nTwo, two.": (" Four.",),
    "Two, two.": (" Four.",),
    " Four.": (" Sure?", " Or "),
    " Sure?": (" Yes.\n", END),
    " Yes.\n": ("</think>",),
    "</think>": ("\n\n",),
    "\n\n": ("It is", "Let me see.\n"),
    "It is": (" 4.",),
    " 4.": (END,),
    "Let me see.\n": ("<tool_call>",),
    " Or ": ("<tool_call>",),
    "<tool_call>": (SUM,),
    SUM: ("</tool_call>",),
    "</tool_call>": (END, " No."),
    " No.": (" Yes.\n",),
    "Well. ": ("<think>",),
}
"""The successors of each text that is one token, the usual one first."""
LOGITS = (10.0, 8.0)
"""Logits of the two; those of all other tokens are 0."""
BIAS = 5.0
_HISTORY = """
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"""
TEMPLATES = {
    "model": f"""{_HISTORY}
    {{%- if enable_thinking is defined and not enable_thinking %}}
        {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
    {{%- endif %}}
{{%- endif %}}""",
    "template": f"{_HISTORY}{{{{- '<think>\\n' }}}}{{%- endif %}}",
}
"""Chat templates by what opens a thought: as Qwen3's, and as that of DeepSeek-R1's distillations.
Thoughts before the last question are left out.
"""
BEGINS = {"model": ("<think>", "Well. "), "template": ("Two, two.",)}
"""The successors of a prompt, by the same."""
HEADS, HEAD_DIM = 5, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": HEADS * HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": len(ALPHABET) + SPECIAL.index(END),
    "torch_dtype": "float32",
}


def vocabulary() -> list[str]:
    """The tokens: single bytes, special tokens, then markers and texts."""
    texts = (text for before, after in SAID.items() for text in (before, *after))
    return list(dict.fromkeys((*ALPHABET, *SPECIAL, *texts)))


def biased(*texts: str) -> dict[str, float]:
    """The ``logit_bias`` that takes these second successors."""
    tokens = vocabulary()
    return {str(tokens.index(text)): BIAS for text in texts}


def weights(opens: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint; ``opens``: what opens a thought, a key of ``TEMPLATES``."""
    tokens, size = vocabulary(), CONFIG["vocab_size"]
    made = {
        name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        for name, shape in weight_shapes(CONFIG).items()
    }
    head = torch.zeros(size, size)
    for before, after in {**SAID, LINE_END: BEGINS[opens]}.items():
        for text, logit in zip(after, LOGITS, strict=False):
            # The last norm makes each row of the identity sqrt(size) long.
            head[tokens.index(text), tokens.index(before)] = logit / size**0.5
    return {**made, "model.embed_tokens.weight": torch.eye(size), "lm_head.weight": head}


def write_directory(directory: Path, opens: str) -> Path:
    """The model in Hugging Face's layout."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    others = vocabulary()[tokenizer.get_vocab_size() :]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in others])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATES[opens],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(opens), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_gguf(file: Path, opens: str) -> Path:
    """The model as a GGUF file."""
    import gguf

    writer, tokens, size = gguf.GGUFWriter(file, "llama"), vocabulary(), CONFIG["vocab_size"]
    add_settings(writer, CONFIG)
    kind = gguf.TokenType
    kinds = [kind.NORMAL] * len(ALPHABET) + [kind.CONTROL] * len(SPECIAL)
    kinds += [kind.USER_DEFINED] * (len(tokens) - len(kinds))
    kinds += [kind.UNUSED] * (size - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *(f"[unused{i}]" for i in range(size - len(tokens)))])
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])  # llama.cpp needs one
    writer.add_eos_token_id(CONFIG["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATES[opens])
    named = named_by_gguf(CONFIG)
    for name, tensor in weights(opens).items():
        writer.add_tensor(named(name), tensor.numpy())
    write(writer)
    return file
