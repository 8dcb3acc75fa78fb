"""Text to tokens and back, whole and as a stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from eecore.errors import CheckpointError
from eecore.models import Tokenizer
from tiny_models import write_byte_tokenizer

TEXTS = [
    "Hello, world",
    " leading and trailing ",
    "naïve café 你好 🎉👩‍👩‍👧 e\u0301",
    "tabs\tand\nnew lines\n\n  ",
    "def f(x):\n    return x ** 2",
    "",
]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Tokenizer:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Tokenizer:
    """A tokenizer like Llama-2's: a space before the text, bytes for unknown text, <s> first."""
    pieces = [SPACE, *"Helowrd,", f"{SPACE}w", f"{SPACE}H", "ll"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [(SPACE, "w"), (SPACE, "H"), ("l", "l")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(params=["byte_tokenizer", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_text_and_only_whole_characters(text: str, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(text)
    decoder = tokenizer.incremental()
    pieces = [decoder.add(token) for token in token_ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert decoder.finish() == ""


def test_what_follows_a_prompt_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    prompt, continued = sentencepiece.encode("Hello"), sentencepiece.encode("Hello world")
    new = continued[len(prompt) :]
    assert continued[: len(prompt)] == prompt
    assert sentencepiece.decode(new) == "world"
    assert sentencepiece.decode_after(prompt, new) == " world"
    assert sentencepiece.decode_after([], new) == "world"
    assert sentencepiece.decode_after(prompt[:1], new) == "world"  # <s> is no text


def test_bytes_that_never_become_a_character_are_given_at_the_end(tokenizer: Tokenizer) -> None:
    snowman = tokenizer.encode("H☃")
    decoder = tokenizer.incremental()
    assert "".join(decoder.add(token) for token in snowman[:-1]) == "H"
    assert set(decoder.finish()) == {"\N{REPLACEMENT CHARACTER}"}
    assert decoder.finish() == ""


def test_a_character_begun_in_the_prompt_is_finished(byte_tokenizer: Tokenizer) -> None:
    snowman = byte_tokenizer.encode("a☃")
    assert byte_tokenizer.decode_after(snowman[:-1], snowman[-1:]) == "☃"


def test_the_file_decides_about_the_beginning_token(
    sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    """As in transformers: with a tokenizer.json, its settings of add_bos_token have no say."""
    from transformers import AutoTokenizer

    assert sentencepiece.encode("Hello")[0] == 1
    assert sentencepiece.encode("Hello", add_special_tokens=False)[0] != 1
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for added in ({"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}):
        path.write_text(json.dumps({**settings, **added}))
        token_ids = AutoTokenizer.from_pretrained(tmp_path)("Hello").input_ids
        assert sentencepiece.encode("Hello") == token_ids
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert tokenizer is not None
        assert tokenizer.encode("Hello") == token_ids


def test_a_directory_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None
    (tmp_path / "tokenizer.model").touch()
    with pytest.warns(UserWarning, match=r"expected tokenizer.json, got tokenizer.model alone"):
        assert Tokenizer.from_directory(tmp_path) is None


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer.json: expected a tokenizer, got: "):
        Tokenizer.from_directory(tmp_path)


# Chat templates


MESSAGES = [{"role": "user", "content": "1 < 2 & “ü”"}]


def test_a_conversation_gets_no_tokens_around_it(sentencepiece: Tokenizer) -> None:
    sentencepiece.chat_template = "{{ messages[0].content }}"
    ids = sentencepiece.encode_chat([{"role": "user", "content": "Hello"}])
    assert ids == sentencepiece.encode("Hello", add_special_tokens=False)


def test_messages_become_a_prompt(byte_tokenizer: Tokenizer) -> None:
    prompt = "<|im_start|>user\n1 < 2 & “ü”<|im_end|>\n"
    apply = byte_tokenizer.apply_chat_template
    assert apply(MESSAGES) == prompt + "<|im_start|>assistant\n"
    assert apply(MESSAGES, add_generation_prompt=False) == prompt
    ids = byte_tokenizer.encode_chat(MESSAGES)
    assert ids == byte_tokenizer.encode(apply(MESSAGES), add_special_tokens=False)
    assert ids[0] == 258  # and no other token before it
    shorter = byte_tokenizer.encode_chat(MESSAGES, add_generation_prompt=False)
    assert ids[: len(shorter)] == shorter != ids


def test_templates_of_files_replace_all_others(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = ("default", "tool_use")
    settings["chat_template"] = [{"name": name, "template": "listed"} for name in names]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    listed = Tokenizer.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("filed")
    filed = Tokenizer.from_directory(tmp_path)
    assert listed is not None
    assert filed is not None
    assert (listed.chat_template, filed.chat_template) == ("listed", "filed")
    assert (listed.named_templates, filed.named_templates) == ({"tool_use": "listed"}, {})
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "filed"


# The real tokenizer


def test_the_real_tokenizer_is_that_of_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    oracle, tokenizer = AutoTokenizer.from_pretrained(smollm2), Tokenizer.from_directory(smollm2)
    assert tokenizer is not None
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert token_ids == oracle(text).input_ids
        assert tokenizer.decode_after([], token_ids) == tokenizer.decode(token_ids) == text
    chat = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    for messages in (MESSAGES, chat):
        for generate in (True, False):
            assert tokenizer.apply_chat_template(
                messages, add_generation_prompt=generate
            ) == oracle.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate
            )
