"""What the files beside tokenizer.json say, compared with transformers' AutoTokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from eecore.errors import ModelError
from eecore.models import Tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
FLAGS = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}
FLAGS["single_word"] = False
TEXTS = (
    "a <call> b <|im_end|> c",
    "<s>hey  he<call>he 12  34 don't .",
    " Caf\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT}<x>\n\nhe , he",
)


def byte_level() -> Backend:
    """Byte-level BPE with other steps than the classes of transformers make."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        letter: index for index, letter in enumerate([*letters, "he", "Ġhe", "12", "Ġa", "ey"])
    }
    merges = [("h", "e"), ("Ġ", "he"), ("1", "2"), ("Ġ", "a")]
    backend = Backend(models.BPE(vocab, merges, ignore_merges=True))
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def pieces() -> Backend:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [SPACE, *"abche", "he", f"{SPACE}he"]
    merges = [("h", "e"), (SPACE, "he")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def unigram() -> Backend:
    words = ["<pad>", "</s>", "<unk>", SPACE, *"abcehyond't.,12", f"{SPACE}he", "ey"]
    backend = Backend(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], 2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    backend.decoder = decoders.Metaspace(SPACE)
    return backend


MARKS = ("<s>", "</s>", "<call>")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
EXTRA, OLDER = "extra_special_tokens", "additional_special_tokens"
TYPED = {"__type": "AddedToken", "content": "<x>", "lstrip": True}


def listed(*tokens: str, at: int = 260, **flags: bool) -> dict[str, Any]:
    """added_tokens_decoder with tokens of these flags, at ids with gaps."""
    given = {str(at + 3 * i): {"content": t, **FLAGS, **flags} for i, t in enumerate(tokens)}
    return FAST | {"added_tokens_decoder": given}


CASES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "new token": (byte_level, "llama", listed(*MARKS, "<|im_end|>", "<x>"), {}),
    "rstrip": (byte_level, "llama", listed(*MARKS, rstrip=True, special=False), {}),
    "new role": (byte_level, "llama", FAST | {"eos_token": "<|im_end|>"}, {}),
    "typed role": (byte_level, "llama", FAST | {"eos_token": TYPED}, {}),
    "list": (byte_level, "llama", FAST | {OLDER: ["<|im_end|>", "<call>"]}, {}),
    "own role": (byte_level, "llama", FAST | {EXTRA: {"image_token": "<x>"}}, {}),
    "map": (byte_level, "llama", FAST, {MAP: {"eos_token": "<|im_end|>", EXTRA: ["<x>"]}}),
    "added": (byte_level, "llama", FAST | {"eos_token": "<x>"}, {ADDED: {"<x>": 9, "he ": 8}}),
    "passed over": (byte_level, "llama", listed(*MARKS), {ADDED: {"<x>": 9}, MAP: {OLDER: ["he"]}}),
    "split": (byte_level, "llama", FAST | {"split_special_tokens": True}, {}),
    "no prefix": (byte_level, "llama", FAST | {"add_prefix_space": True}, {}),
    "prefix": (
        byte_level,
        "llama",
        {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
        {},
    ),
    "bytes": (byte_level, "llama", {"tokenizer_class": "LlamaTokenizer"}, {}),
    "bytes of Qwen2": (byte_level, "qwen2", {"tokenizer_class": "LlamaTokenizerFast"}, {}),
    "Llama": (pieces, "llama", {"tokenizer_class": "LlamaTokenizer", "legacy": True}, {}),
    "Code Llama": (
        pieces,
        "llama",
        {"tokenizer_class": "CodeLlamaTokenizer", "add_prefix_space": False},
        {},
    ),
    "Gemma": (pieces, "gemma3_text", {}, {}),
    "Qwen2": (byte_level, "qwen2", FAST, {}),
    "Mistral": (pieces, "mistral", {"tokenizer_class": "LlamaTokenizer"}, {}),
    "unknown": (pieces, "llama", {"tokenizer_class": "OwnTokenizer", "auto_map": {}}, {}),
    "T5": (unigram, "t5", {"tokenizer_class": "T5Tokenizer", "extra_ids": 3}, {}),
    "clean-up": (unigram, "t5", FAST | {"clean_up_tokenization_spaces": True}, {}),
}
CONTENTS = ("<s>", "</s>", "<call>", "<|im_end|>", "<x>", "he", "12", "<unk>", "new word")
WORDS = (*CONTENTS, " a", " ", "Caf", "e\N{COMBINING ACUTE ACCENT}", "\n", "don't", " .", "!")
SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens")
CLASSES = {
    byte_level: ("GPT2Tokenizer", "Qwen2TokenizerFast", "GPTNeoXTokenizerFast", "LlamaTokenizer"),
    pieces: ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer"),
    unigram: ("T5TokenizerFast",),
}
KINDS = {byte_level: ("llama", "qwen2", "qwen3"), pieces: ("llama", "mistral", "gemma2", "phi3")}


def random_case(seed: int) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    draw = random.Random(seed)

    def some(values: tuple[Any, ...], share: float) -> list[Any]:
        return [value for value in values if draw.random() < share]

    def flags(*names: str) -> dict[str, bool]:
        return {name: draw.random() < 0.5 for name in names}

    def token(**typed: str) -> Any:
        content, names = draw.choice(CONTENTS), some(tuple(FLAGS), 0.4 if typed else 0.0)
        return draw.choice([content, {**typed, "content": content, **flags(*names)}])

    make = draw.choice(list(CLASSES))
    typed = {"__type": "AddedToken"}
    roles = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "prefix_token")
    settings = {role: token(**typed) for role in some(roles, 0.25)}
    settings |= {name: [token(**typed), token(**typed)] for name in some((EXTRA, OLDER), 0.15)}
    if draw.random() < 0.1:
        settings[EXTRA] = {"odd": token(**typed)}
    settings |= flags(*some((*SWITCHES, "clean_up_tokenization_spaces"), 0.2))
    classes = ("PreTrainedTokenizerFast", draw.choice(CLASSES[make]), "OwnTokenizer")
    if draw.random() < 0.9:
        settings["tokenizer_class"] = draw.choice(classes)
    if draw.random() < 0.4:
        ids = draw.sample(range(255, 280), draw.randrange(5))
        names = some(tuple(FLAGS), 0.8)
        added = {str(index): {"content": draw.choice(CONTENTS), **flags(*names)} for index in ids}
        settings["added_tokens_decoder"] = added
    older = {role: token() for role in some(roles[:5], 0.3)}
    more = draw.choice(([token(), draw.choice(CONTENTS)], {"odd": draw.choice(CONTENTS)}))
    older |= dict.fromkeys(some((EXTRA,), 0.3), more)
    files = {MAP: older, ADDED: {draw.choice(CONTENTS): draw.randrange(255, 290)}}
    kind = draw.choice(KINDS.get(make, ("t5", "llama")))
    return make, kind, settings, {name: files[name] for name in some((MAP, ADDED), 0.35)}


def written(
    directory: Path, backend: Backend, kind: str, settings: dict[str, Any], files: dict[str, Any]
) -> None:
    if isinstance(backend.model, models.BPE):
        backend.add_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
        end = ("</s>", backend.token_to_id("</s>"))
        backend.post_processor = TemplateProcessing("$A </s>", special_tokens=[end])
    backend.add_tokens([AddedToken("<call>", normalized=False)])
    backend.save(str(directory / "tokenizer.json"))
    every = {"config.json": {"model_type": kind}, "tokenizer_config.json": settings, **files}
    for name, value in every.items():
        (directory / name).write_text(json.dumps(value))


def check(directory: Path, texts: Iterable[str]) -> None:
    """Compare texts' ids, and their texts, with those of AutoTokenizer."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.from_directory(directory)
    assert ours is not None
    assert ours.special_tokens == theirs.special_tokens_map
    for text in texts:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        bare = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == bare
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded
            assert ours.decode_after([], ids, skip_special_tokens=skip) == decoded


@pytest.mark.parametrize("name", CASES)
def test_the_ids_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make, kind, settings, files = CASES[name]
    written(tmp_path, make(), kind, settings, files)
    check(tmp_path, TEXTS)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_so_they_are_with_random_settings(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        directory = tmp_path / str(seed)
        directory.mkdir()
        make, kind, settings, files = random_case(seed)
        written(directory, make(), kind, settings, files)
        draw = random.Random(seed)
        check(directory, ["".join(draw.choices(WORDS, k=9)) for _ in range(4)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tokenizer_class": "BertTokenizer"}, "tokenizer_class: expected one that takes"),
        ({"tokenizer_class": "T5Tokenizer"}, "got T5Tokenizer with BPE"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "added_tokens_decoder: expected an"),
        (
            {"added_tokens_decoder": {"7": {"content": "y", "lstrip": 1}}},
            "added_tokens_decoder.7.lstrip: expected true or false, got 1",
        ),
        ({"split_special_tokens": "yes"}, "split_special_tokens: expected true or false"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    written(tmp_path, byte_level(), "llama", settings, {})
    with pytest.raises(ModelError, match=f"tokenizer_config.json: .*{said}"):
        Tokenizer.from_directory(tmp_path)
