"""The tokenizer that a GGUF file describes, rebuilt for the ``tokenizers`` library.

Two kinds are read: byte-level BPE ("gpt2"), which names how text is split before merging, and
SentencePiece ("llama"), whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from eecore.errors import ModelError
from eecore.files.json_fields import JsonFields
from eecore.files.tensors import shown_name
from eecore.models.text.tokenizer_files import library_error
from eecore.values import shown

if TYPE_CHECKING:
    from eecore.models.readers.gguf_file import GGUFFile

MAX_MERGES = 1 << 22
MAX_CHARACTERS = 1024
"""Characters of a SentencePiece token, at most: each way to cut it in two is looked up."""

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
FILLING_ENDS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
"""Fields of tokens that end a text filled in the middle, and their names where it has no field."""
END_TOKENS = frozenset(
    (
        "</s>",
        "<eos>",
        "[EOS]",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|tool_response>",
        "<turn|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[e~[",
    )
)
"""Names of tokens that end a text or a turn. They are control tokens whatever the file says, as in
llama.cpp: files have them as ordinary tokens by mistake."""
FILLING_TOKENS = {
    ("prefix_token_id", "fim_pre_token_id"): (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    ("suffix_token_id", "fim_suf_token_id"): (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    ("middle_token_id", "fim_mid_token_id"): (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
}
"""Fields of the marks of a text with a gap, and their names where a file has no such field."""
RENDERED_TOKENS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Names of tokens that are shown as text, whatever their type."""
TOKEN_IDS = (
    *ROLES.values(),
    *ENDS,
    *FILLING_ENDS,
    *(name for names in FILLING_TOKENS for name in names),
)
FIELDS = (
    "chat_template",
    "chat_templates",
    "huggingface.json",  # the same tokenizer in another format
    "ggml.model",
    "ggml.pre",
    "ggml.tokens",
    "ggml.token_type",
    "ggml.scores",
    "ggml.merges",
    "ggml.add_bos_token",
    "ggml.add_eos_token",
    "ggml.add_space_prefix",
    *(f"ggml.{name}" for name in TOKEN_IDS),
)
"""The known fields of ``tokenizer``."""
TEMPLATE = "tokenizer.chat_template"
TEMPLATES = "tokenizer.chat_templates"


@dataclass(frozen=True)
class _Split:
    """How a byte-level tokenizer splits text before merging."""

    pattern: str | None = None
    """The splitting pattern; None: GPT-2's."""
    single_digits: bool = False
    """Whether digits are first split off one by one."""
    ignore_merges: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges say."""
    add_bos: bool = False
    """Whether a text begins with a beginning-of-sequence token unless the file says otherwise."""
    composes: bool = False
    """Whether text is first put into Unicode's NFC form."""


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """A splitting pattern like GPT-4's, with a pattern for the digits of a number, and the
    characters of words."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}|"
        rf" ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CASE}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CASE}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = _Split()
_SINGLE_DIGITS = _Split(single_digits=True)
_LLAMA3 = _Split(_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_GPT4 = _Split(_words(r"\p{N}{1,3}"))
_QWEN2 = _Split(_words(r"\p{N}"), composes=True)
_QWEN35 = _Split(_words(r"\p{N}", r"\p{L}\p{M}"), composes=True)

# How text is split, by the name in tokenizer.ggml.pre.
SPLITS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "dbrx": _GPT4,  # OLMo 2 and 3, Granite 4, Phi-4
    "smaug-bpe": _GPT4,  # SmolLM3
    "gpt-4o": _Split(_GPT4O),  # Phi-4-mini
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "tekken": _Split(_TEKKEN, ignore_merges=True, add_bos=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
}


def special_token_ids(file: GGUFFile, vocab_size: int) -> tuple[int | None, list[int]]:
    """The beginning-of-sequence id, and the ids that end generation: ids in the file's fields, then
    tokens in :data:`END_TOKENS`."""
    fields = file.fields_under(PREFIX)
    bos = _token_id(fields, "bos_token_id", vocab_size)
    tokens = fields.texts("tokens", (), most=vocab_size)
    types = fields.integers("token_type", default=(), most=vocab_size)
    return bos, _typed(fields, tokens, types, vocab_size)[1]


def _typed(
    fields: JsonFields, tokens: tuple[str, ...], types: tuple[int, ...], vocab_size: int
) -> tuple[tuple[int, ...], list[int]]:
    """The tokens' types, and the ids that end generation: llama.cpp knows both by names, since
    files have tokens of the wrong type."""
    named = {token: index for index, token in enumerate(tokens)}

    def first(names: Iterable[str]) -> int | None:
        return min((named[name] for name in names if name in named), default=None)

    given = {name: _token_id(fields, name, vocab_size) for name in (*ENDS, *FILLING_ENDS)}
    found = {name: first(FILLING_ENDS[name]) for name in FILLING_ENDS if given[name] is None}
    by_name = sorted(named[token] for token in END_TOKENS if token in named)
    ends = dict.fromkeys([*given.values(), *found.values(), *by_name])
    control = [*by_name, *found.values()]
    for given_by, names in FILLING_TOKENS.items():
        if not any(name in fields for name in given_by):
            control.append(first(names))
    kinds = dict(enumerate(types or (NORMAL,) * len(tokens)))
    kinds |= {index: CONTROL for index in control if index is not None}
    kinds |= {named[token]: USER_DEFINED for token in RENDERED_TOKENS if token in named}
    ending = {tokens[index] for index in ends if index is not None and index < len(tokens)}
    if {"<|return|>", "<|call|>"} <= ending or (
        "<|flush|>" in ending and ending & {"<|call|>", "<|calls|>"}
    ):
        _take_back(named.get("<|end|>"), USER_DEFINED, ends, kinds)
    if ending & {"<|tool_response>", "<|plamo:eos|>"}:
        _take_back(named.get("</s>"), NORMAL, ends, kinds)
    return tuple(kinds.values()), [index for index in ends if index is not None]


def _take_back(
    token: int | None, kind: int, ends: dict[int | None, None], kinds: dict[int, int]
) -> None:
    """Make a token that ends nothing of a token that ends texts in other vocabularies."""
    if token is not None:
        ends.pop(token, None)
        kinds[token] = kind


def build_tokenizer(file: GGUFFile, vocab_size: int) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and its tokenizer_config.json.

    Raises:
        UnsupportedModelError: the tokenizer's kind is not read.
        CheckpointError: the tokenizer is not whole, or has more than ``vocab_size`` tokens.
    """
    kind = file.fields.text("tokenizer.ggml.model", "nothing")
    if kind not in ("gpt2", "llama"):
        raise file.unsupported("tokenizer.ggml.model", "are gpt2, llama", shown_name(kind))
    vocabulary = _Vocabulary.of(file, kind, vocab_size)
    for name, value in file.unread("tokenizer.", FIELDS).items():
        if not name.startswith(f"{TEMPLATE}."):
            warnings.warn(
                f"{file.path}: {shown_name(name)}: expected a field that is read, got "
                f"{shown(value)}; it is not used",
                stacklevel=4,
            )
    try:
        return _built(file, vocabulary)
    except ModelError:
        raise
    except BaseException as error:  # the library raises plain Exception, or panics
        said = f"{file.path}: tokenizer.ggml: expected a tokenizer"
        raise library_error(error, said) from None


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file."""

    kind: str
    fields: JsonFields
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    """The type of each token."""

    @classmethod
    def of(cls, file: GGUFFile, kind: str, vocab_size: int) -> _Vocabulary:
        """The vocabulary of a file; a CheckpointError if its fields do not fit together."""
        fields = file.fields_under(PREFIX)
        tokens = fields.texts("tokens", most=vocab_size)
        types = fields.integers("token_type", default=(), most=vocab_size)
        if types and len(types) != len(tokens):
            raise fields.wrong("token_type", f"{len(tokens)}, one a token", len(types))
        return cls(kind, fields, tokens, _typed(fields, tokens, types, vocab_size)[0])

    def named(self, name: str) -> str | None:
        """The token whose id is in a field, if the file has the field."""
        index = _token_id(self.fields, name, len(self.tokens))
        return None if index is None else self.tokens[index]

    def bpe(self, merges: list[Any], **options: Any) -> Tokenizer:
        """A tokenizer of these tokens."""
        ids = {token: index for index, token in enumerate(self.tokens)}
        return Tokenizer(BPE(ids, merges, **options))


def _built(file: GGUFFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, dict[str, Any]]:
    if vocabulary.kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, vocabulary)
    else:
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    _add_whole_tokens(vocabulary, tokenizer)
    tokens = {role: vocabulary.named(name) for role, name in ROLES.items()}
    roles = {role: token for role, token in tokens.items() if token is not None}
    _surround(vocabulary.fields, tokenizer, roles, add_bos)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,  # null: none, also where a class of transformers has one
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.fields.integer(f"{file.architecture}.context_length"),
    }
    templates = _templates(file)
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    if templates:
        alone = list(templates) == ["default"]
        settings["chat_template"] = templates["default"] if alone else listed
    return tokenizer, settings


def _templates(file: GGUFFile) -> dict[str, str]:
    """Chat templates by name; ``tokenizer.chat_template`` is "default"."""
    prefix = f"{TEMPLATE}."
    names = [name for name in file.fields.names if name.startswith(prefix)]
    for name in file.fields.texts(TEMPLATES, ()):
        if name != "default" and prefix + name not in names:
            raise file.fields.wrong(TEMPLATES, f"a field {shown_name(prefix + name)}", "none")
    templates = {"default": file.fields.text(TEMPLATE)} if TEMPLATE in file.fields else {}
    return templates | {name.removeprefix(prefix): file.fields.text(name) for name in names}


def _byte_level(file: GGUFFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    kind = file.fields.text("tokenizer.ggml.pre", "nothing")
    split = SPLITS.get(kind)
    if split is None:
        known = f"are {', '.join(SPLITS)}"
        raise file.unsupported("tokenizer.ggml.pre", known, shown_name(kind))
    merges = vocabulary.fields.texts("merges", most=MAX_MERGES)
    for merge in merges:
        if " " not in merge:
            raise vocabulary.fields.wrong("merges", "pairs with a space between", merge)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = vocabulary.bpe(pairs, ignore_merges=split.ignore_merges)
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """BPE over characters, with bytes for characters that are no tokens, as in Llama 2."""
    fields, tokens = vocabulary.fields, vocabulary.tokens
    scores = fields.numbers("scores", most=len(tokens))
    if len(scores) != len(tokens):
        raise fields.wrong("scores", f"{len(tokens)}, one a token", len(scores))
    longest = max(map(len, tokens), default=0)
    if longest > MAX_CHARACTERS:
        raise fields.wrong("tokens", f"tokens of at most {MAX_CHARACTERS} characters", longest)
    unknown = vocabulary.named(ROLES["unk_token"])
    merges = _merges_of_scores(tokens, scores)
    tokenizer = vocabulary.bpe(merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces = [normalizers.Replace(" ", SPACE)]
    prefixed = fields.flag("add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, *spaces])
    strip = [decoders.Strip(" ", left=1)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(tokens: tuple[str, ...], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best-scored result first, then by ids."""
    ids = {token: index for index, token in enumerate(tokens)}
    places: list[int] = []  # ids of a token and its halves, flat: there are a million
    for made, token in enumerate(tokens):
        for cut in range(1, len(token)):
            right = ids.get(token[cut:])
            if right is not None and (left := ids.get(token[:cut])) is not None:
                places += (made, left, right)
    made, left, right = np.array(places, dtype=np.int64).reshape(-1, 3).T
    order = np.lexsort((right, left, -np.array(scores)[made]))
    halves = np.array(tokens, dtype=object)[np.stack((left, right))[:, order]]
    return list(zip(*halves.tolist(), strict=True))


def _add_whole_tokens(vocabulary: _Vocabulary, tokenizer: Tokenizer) -> None:
    """Add tokens that are never split: control tokens, which are special, and user-defined ones."""
    unknown = UNKNOWN if vocabulary.kind == "llama" else CONTROL
    kinds = dict(zip(vocabulary.tokens, vocabulary.types, strict=False))

    def made(wanted: tuple[int, ...], special: bool) -> list[AddedToken]:
        tokens = (token for token, kind in kinds.items() if kind in wanted)
        return [AddedToken(token, special=special, normalized=False) for token in tokens]

    # All in one call: each call rebuilds the search for them, and Gemma has thousands.
    tokenizer.add_special_tokens(made((CONTROL, unknown), special=True))
    tokenizer.add_tokens(made((USER_DEFINED,), special=False))


def _token_id(fields: JsonFields, name: str, count: int) -> int | None:
    """The id below ``count`` in a field; None if the file does not have the field."""
    token_id: int | None = fields.integer(name, 0, count - 1, None)
    return token_id


def _surround(
    fields: JsonFields, tokenizer: Tokenizer, roles: dict[str, str], add_bos: bool
) -> None:
    """Add beginning and end tokens around a text, if the file asks for them."""
    wanted = {
        "bos_token": fields.flag("add_bos_token", add_bos),
        "eos_token": fields.flag("add_eos_token", False),
    }
    around = {role: [roles[role]] if add and role in roles else [] for role, add in wanted.items()}
    if any(around.values()):
        special = {token for tokens in around.values() for token in tokens}
        tokenizer.post_processor = TemplateProcessing(
            single=[*around["bos_token"], "$A", *around["eos_token"]],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in special],
        )
