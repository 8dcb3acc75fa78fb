"""What the files beside a tokenizer.json say about its tokens, read as by AutoTokenizer.

Most classes of transformers take tokenizer.json as it is; those in :data:`REBUILT` make its steps
themselves. Tokens that only the other files name are then added.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.processors import TemplateProcessing

from eecore.errors import CheckpointError, UnsupportedModelError
from eecore.files.json_fields import JsonFields

ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
EXTRA, OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
ADDED = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
CLEAN_UP = (
    "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)
"""The flags that remove spaces before punctuation, and that do so for BPE too."""
MAX_GAPS = 1 << 12
"""Tokens <extra_id_0>, ... of T5, at most."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2Tokenizer splits a text before merging."""
_PIECES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_BYTES = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_FILLING = {"prefix": "PRE", "middle": "MID", "suffix": "SUF", "eot": "EOT"}
REBUILT = {
    "LlamaTokenizer": _PIECES,
    "CodeLlamaTokenizer": _PIECES
    | {f"{role}_token": f"{SPACE}<{name}>" for role, name in _FILLING.items()}
    | {"fill_token": "<FILL_ME>"},
    "GemmaTokenizer": {f"{role}_token": f"<{role}>" for role in "unk bos eos pad mask".split()},
    "GPT2Tokenizer": _BYTES,
    "GPTNeoXTokenizer": _BYTES | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
"""Classes of transformers that make the steps of a tokenizer themselves, and the tokens of roles
that no file names."""
OTHERS = frozenset(
    """Albert Bart Barthez Bert BigBird Blenderbot CLIP Camembert Cohere DPRQuestionEncoder Deberta
    DebertaV2 Esmc Funnel Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert MBart MBart50
    MPNet MarkupLM MobileBert Mvp Nllb Nougat OpenAIGPT Pegasus Qwen3_5 Reformer RemBert RoFormer
    Roberta SeamlessM4T Siglip2 Splinter Udop VideoPrism Whisper XGLM XLMRoberta XLNet""".split()
)
"""Other such classes, without Tokenizer at the end of their names."""
AS_IT_IS = "TokenizersBackend"
OF_TYPE = (
    dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer")
    | dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer")
    | dict.fromkeys(("t5", "mt5"), "T5Tokenizer")
    | dict.fromkeys(("mistral", "mistral3", "ministral", "ministral3", "phi3"), AS_IT_IS)
    | dict.fromkeys(("olmo2", "olmo3", "granite", "granitemoehybrid"), AS_IT_IS)
)
"""The class of a model_type."""

Token = AddedToken | str


def with_tokens(
    directory: Path, fields: JsonFields, content: bytes, kept: Tokenizer
) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer with what the other files say, and role to token.

    Args:
        fields: tokenizer_config.json.
        content: tokenizer.json.
        kept: the tokenizer of tokenizer.json.

    Raises:
        CheckpointError: a file cannot be read, or one of its fields has the wrong type.
        UnsupportedModelError: transformers makes a tokenizer of another kind.
    """
    name = _class_name(directory, fields, content, kept)
    named, extra, added = _read(fields, directory, name, kept.get_added_tokens_decoder())
    roles = {role: str(token) for role, token in named.items()}
    backend = _rebuilt(name, kept, fields, roles) if name in REBUILT else kept
    there = backend.get_added_tokens_decoder().values()
    contents = {token.content for token in (*there, *added)}
    named_alone = (each for each in (*named.values(), *extra) if str(each) not in contents)
    new: list[Token] = [*added, *named_alone]
    tokens = [AddedToken(each, special=True) if isinstance(each, str) else each for each in new]
    for token in tokens:
        token.special |= token.content in roles.values()
    if name == "Qwen2Tokenizer":
        special = dict.fromkeys([*roles.values(), *map(str, extra)])
        tokens += [AddedToken(each, special=True) for each in special]
    if not set(map(repr, tokens)) <= set(map(repr, there)):
        backend.add_tokens(tokens)
    begin, end = roles.get("bos_token"), roles.get("eos_token")
    if name == "T5Tokenizer" and end is not None:
        pair = ("</s>", backend.token_to_id(end))
        backend.post_processor = TemplateProcessing("$A </s>", special_tokens=[pair])
    if name == "CodeLlamaTokenizer" and begin is not None:
        pair = (begin, backend.token_to_id(begin))
        backend.post_processor = TemplateProcessing([begin, "$A"], special_tokens=[pair])
    backend.encode_special_tokens = fields.flag("split_special_tokens", False)
    return backend, roles


def roles_of(fields: JsonFields) -> dict[str, str]:
    """Role to token, as chat templates see them, of a tokenizer_config.json alone."""
    return {role: str(token) for role, token in _read(fields)[0].items()}


def cleans_up(backend: Tokenizer, wanted: bool, forced: bool) -> bool:
    """Whether spaces before punctuation are removed from decoded text."""
    return wanted and (forced or not isinstance(backend.model, models.BPE))


def _class_name(directory: Path, fields: JsonFields, content: bytes, kept: Tokenizer) -> str:
    """The class that AutoTokenizer chooses, without Fast at its end."""
    config = JsonFields.read_if_there(directory / "config.json", CheckpointError)
    kind = config.text("model_type", "")
    own = OF_TYPE.get(kind)
    declared: str | None = fields.text("tokenizer_class", config.text("tokenizer_class", None))
    name = (declared or own or AS_IT_IS).removesuffix("Fast")
    if "auto_map" not in fields and declared is not None:
        if name == "LlamaTokenizer" and b'"ByteLevel"' in content and kind != "qwen2":
            name = AS_IT_IS
        elif own == AS_IT_IS or kind == "qwen2":
            name = str(own)
    model = models.Unigram if name == "T5Tokenizer" else models.BPE
    fits = name not in REBUILT or isinstance(kept.model, model)
    if not fits or name.removesuffix("Tokenizer") in OTHERS:
        raise UnsupportedModelError(
            f"{fields.where}: tokenizer_class: expected one that takes tokenizer.json as it is "
            f"(PreTrainedTokenizerFast) or {', '.join(REBUILT)} with a model of its kind, got "
            f"{name} with {type(kept.model).__name__}"
        )
    return name


def _rebuilt(name: str, kept: Tokenizer, fields: JsonFields, roles: dict[str, str]) -> Tokenizer:
    """A tokenizer with the model and post-processor of another, and the steps of a class."""
    made, llama = Tokenizer(kept.model), name.endswith("LlamaTokenizer")
    prefixed = fields.flag("add_prefix_space", llama)
    made.post_processor = None if name == "GPTNeoXTokenizer" else kept.post_processor
    if name == "T5Tokenizer":
        old: Any = kept.normalizer
        steps: Any = old if isinstance(old, normalizers.Sequence) else [old]
        charsmaps = (step for step in steps if isinstance(step, normalizers.Precompiled))
        made.normalizer = next(charsmaps, None)
        made.pre_tokenizer = Steps([WhitespaceSplit(), Metaspace(SPACE, "always", split=True)])
        made.decoder = decoders.Metaspace(SPACE, "always", split=True)
        return made
    model, pieces = made.model, llama or name == "GemmaTokenizer"
    model.dropout, model.ignore_merges = None, False
    model.fuse_unk = model.byte_fallback = pieces
    knows_unknown = name in ("GemmaTokenizer", "CodeLlamaTokenizer")
    model.unk_token = roles.get("unk_token") if knows_unknown else None
    made.decoder = decoders.ByteLevel()
    if pieces:
        strips = llama and (prefixed or name == "CodeLlamaTokenizer")
        strip = [decoders.Strip(" ", left=1)] if strips else []
        made.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    if llama:
        legacy = name == "LlamaTokenizer" and fields.flag("legacy", False)
        scheme = ("always" if legacy else "first") if prefixed else "never"
        made.pre_tokenizer = Metaspace(SPACE, scheme, split=False)
    elif pieces:
        made.normalizer = normalizers.Replace(" ", SPACE)
        made.pre_tokenizer = Split(" ", "merged_with_previous")
    else:
        made.normalizer = None if name == "GPT2Tokenizer" else normalizers.NFC()
        made.pre_tokenizer = ByteLevel(prefixed)
        if name == "Qwen2Tokenizer":
            to_bytes = ByteLevel(prefixed, use_regex=False)
            made.pre_tokenizer = Steps([Split(Regex(WORDS), "isolated"), to_bytes])
    return made


def _read(
    fields: JsonFields,
    directory: Path | None = None,
    name: str = AS_IT_IS,
    there: Mapping[int, AddedToken] | None = None,
) -> tuple[dict[str, Token], list[Token], list[AddedToken]]:
    """Role to token, special tokens without a role, and tokens that are never split, in the order
    of their ids.

    Args:
        fields: tokenizer_config.json.
        directory: where older files are.
        name: the tokenizer's class.
        there: the added tokens of tokenizer.json.
    """
    given = fields.values
    if OLDER_EXTRA in given and not given.get(EXTRA):
        given[EXTRA] = given.pop(OLDER_EXTRA)
    own: dict[str, Token] = {}
    for role, value in fields.values.items():
        if _is_own(role, value) and isinstance(value, str):
            own[role] = given.pop(role)
    own |= _take_roles(fields, given)
    added: list[tuple[int, AddedToken]] = []
    if ADDED in given:  # then transformers reads no older file
        by_id = fields.inner(ADDED) or fields.replaced({})
        for index in by_id.names:
            if not index.isdecimal():
                raise fields.wrong(ADDED, "an object of ids and tokens", by_id.values)
            added.append((int(index), _added(by_id, index)))
    elif directory is not None:
        older = JsonFields.read_if_there(directory / "special_tokens_map.json", CheckpointError)
        for role, value in older.values.items():
            if role in (EXTRA, OLDER_EXTRA) and older.has_list(role):
                before = (given.get(role) or []) if role == EXTRA else []
                new = (token for token in _list(older, role) if token not in before)
                given[role] = [*before, *new]
            elif role in ROLES or _is_own(role, value):
                given[role] = None if value is None else _token(older, role, special=True)
        own |= _take_roles(older, given)
        special = {str(given[role]) for role in ROLES if given.get(role)}
        special |= set(map(str, given.get(EXTRA) or []))
        numbered = JsonFields.read_if_there(directory / "added_tokens.json", CheckpointError)
        for content in numbered.names:
            flags = {"special": content in special, "normalized": content not in special}
            added.append((numbered.integer(content, 0), AddedToken(content, **flags)))
        added += (there or {}).items()
    if name == "T5Tokenizer" and EXTRA not in given:
        given[EXTRA] = given.get(OLDER_EXTRA) or []
        if not any("<extra_id_" in str(token) for token in given[EXTRA]):
            gaps = range(fields.integer("extra_ids", 0, MAX_GAPS, 100))
            given[EXTRA] = [*given[EXTRA], *(f"<extra_id_{index}>" for index in gaps)]
    defaults, named = REBUILT.get(name, {}), dict[str, Token]()
    values = fields.replaced(given)
    for role in dict.fromkeys([*ROLES, *defaults, *given]):
        if (role in ROLES and role in values) or _is_own(role, given.get(role)):
            named[role] = _token(values, role)
        elif role in defaults and role not in given:
            named[role] = defaults[role]
    ids = dict(added)
    extra = _list(values, EXTRA if EXTRA in given else OLDER_EXTRA)
    return named | own, extra, [ids[index] for index in sorted(ids)]


def _is_own(role: str, value: Any) -> bool:
    """Whether a field is a token for a role of the model's own; add_bos_token is none."""
    is_token = isinstance(value, (str, dict, AddedToken))
    return is_token and role.endswith("_token") and role not in ROLES


def _take_roles(fields: JsonFields, given: dict[str, Any]) -> dict[str, Token]:
    """A model's own roles and tokens, where extra tokens are an object."""
    inner = fields.inner(EXTRA) if fields.has_inner(EXTRA) else None
    if inner is None:
        return {}
    given.pop(EXTRA, None)
    return {role: _token(inner, role) for role in inner.names}


def _list(fields: JsonFields, name: str) -> list[Token]:
    """Tokens in a list; an object without a type is a special token."""
    items = fields.entries(name) or fields.replaced({})
    typed = (isinstance(value, dict) and "__type" in value for value in items.values.values())
    pairs = zip(items.names, typed, strict=True)
    return [_token(items, each, special=None if kind else True) for each, kind in pairs]


def _token(fields: JsonFields, name: str, *, special: bool | None = None) -> Token:
    if fields.has_inner(name):
        return _added(fields, name, special=special)
    value = fields.values.get(name)
    token: Token = value if isinstance(value, AddedToken) else fields.text(name)
    return token


def _added(fields: JsonFields, name: str, *, special: bool | None = None) -> AddedToken:
    """A token with flags; ``special`` counts before the flag of that name. One that is not said to
    be normalized is so unless it is, or becomes, special."""
    part = fields.inner(name) or fields.replaced({})
    flags = {flag: part.flag(flag) for flag in FLAGS if flag in part}
    if special is not None:
        flags["special"] = special
    return AddedToken(part.text("content"), **flags)
