"""Files of tokenizers with parts of every kind, some of them changed, and texts for them.

The library raises an error for what it does not like. Nothing here keeps it busy or takes memory:
regular expressions have no repetition in another, and texts that would grow are eecore's to refuse.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from chat_templates import CONVERSATIONS
from eecore.errors import EecoreError
from eecore.models import Tokenizer
from mutate import mutated_bytes, mutated_json
from tiny_models import write_byte_tokenizer

LIMIT_S = 15.0
MEMORY = 2 << 30
FILES: dict[str, Any] = {}


def prepare() -> None:
    os.environ["RUST_BACKTRACE"] = "0"
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    FILES["folder"] = folder = Path(tempfile.mkdtemp(prefix="eecore-fuzz-"))
    write_byte_tokenizer(folder)
    names = ("tokenizer.json", "tokenizer_config.json")
    FILES["values"] = {name: json.loads((folder / name).read_text()) for name in names} | OLDER


STEPS: dict[str, list[Any]] = {
    "normalizer": [
        {"type": "NFKC"},
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Prepend", "prepend": "x"},
        {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "NFD"}]},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
         "strip_accents": None, "lowercase": True},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "\\s+|(a|b)+"}, "behavior": "Isolated",
         "invert": False},
        {"type": "Digits", "individual_digits": True},
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
        {"type": "Sequence",
         "pretokenizers": [{"type": "Whitespace"}, {"type": "BertPreTokenizer"}]},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "FixedLength", "length": 3},
    ],
    "decoder": [
        {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        {"type": "Replace", "pattern": {"String": "l"}, "content": "ll"},
        {"type": "BPEDecoder", "suffix": "</w>"},
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
         {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
         "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}},
        {"type": "BertProcessing", "sep": ["</s>", 257], "cls": ["<s>", 256]},
        {"type": "RobertaProcessing", "sep": ["</s>", 257], "cls": ["<s>", 256],
         "trim_offsets": True, "add_prefix_space": True},
        {"type": "Sequence", "processors": [{"type": "ByteLevel", "add_prefix_space": True,
         "trim_offsets": True, "use_regex": True}]},
    ],
    "model": [
        {"type": "WordLevel", "vocab": {"a": 0, "hello": 1, "u": 2}, "unk_token": "u"},
        {"type": "WordPiece", "vocab": {"a": 0, "h": 1, "##e": 2, "u": 3}, "unk_token": "u",
         "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        {"type": "Unigram", "unk_id": 0, "vocab": [["u", 0.0], ["a", -1.0], ["he", -2.0]],
         "byte_fallback": False},
        {"type": "BPE", "dropout": None, "unk_token": "u", "continuing_subword_prefix": None,
         "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True,
         "ignore_merges": False,
         "vocab": {"u": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
    ],
    "truncation": [
        {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5},
    ],
    "padding": [
        {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0,
         "pad_type_id": 0, "pad_token": "a"},
    ],
}  # fmt: skip


SETTINGS: dict[str, Any] = {
    "tokenizer_class": ["GPT2Tokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "T5Tokenizer"],
    "added_tokens_decoder": [{"258": {"content": "he", "lstrip": True, "special": True}}],
    "extra_special_tokens": [["<x>", {"content": "a"}], {"image_token": "<x>"}],
    "additional_special_tokens": [["<y>"]],
    "add_prefix_space": [True],
    "split_special_tokens": [True],
    "clean_up_tokenization_spaces": [True],
}
OLDER = {
    "special_tokens_map.json": {"pad_token": {"content": "b", "rstrip": True}},
    "added_tokens.json": {"<z>": 259},
}


def _changed(random: Random, whole: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer file with changed parts, some of them invalid."""
    changed = dict(whole)
    for _ in range(random.randint(1, 3)):
        name = random.choice([*STEPS, "added_tokens"])
        part = random.choice(STEPS.get(name, [whole["added_tokens"]]))
        changed[name] = mutated_json(random, part) if random.random() < 0.4 else part
    return changed


def one(random: Random) -> bool:
    folder: Path = FILES["folder"]
    for name, value in FILES["values"].items():
        changed = _changed(random, value) if name == "tokenizer.json" else value
        if name == "tokenizer_config.json":
            chosen = [each for each in SETTINGS if random.random() < 0.3]
            changed = {**value, **{each: random.choice(SETTINGS[each]) for each in chosen}}
        if random.random() < 0.3:
            changed = mutated_json(random, changed)
        data = json.dumps(changed).encode()
        if random.random() < 0.1:
            data = mutated_bytes(random, data)
        (folder / name).write_bytes(data)
    try:
        tokenizer = Tokenizer.from_directory(folder, random.choice([None, 260, 320]))
        assert tokenizer is not None
        for text in ("hello <s> ü🎉", "", " a" * 50, "\ud800"[: random.randrange(2)]):
            ids = tokenizer.encode(text, add_special_tokens=random.random() < 0.5)
            assert all(isinstance(token, int) for token in ids)
            assert isinstance(tokenizer.decode(ids), str)
            assert isinstance(tokenizer.decode_after(ids[:3], ids[3:]), str)
        tokenizer.decode([random.randrange(1 << 32)])
        tokenizer.apply_chat_template(CONVERSATIONS["one"])
    except EecoreError as error:
        refused = str(error)
    else:
        return True
    assert "MemoryError" not in refused
    return False
