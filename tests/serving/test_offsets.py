"""Where tokens begin in a text, and the bytes of each, where tokens are parts of characters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

import eecore
from eecore.models import Tokenizer
from eecore.models.text.tokenizer import BYTE_LEVEL
from eecore.serving.offsets import TextOffsets
from eecore.serving.served import ServedModel
from servers import Asker, asker, events
from tiny_models import write_model

LETTERS = {byte: letter for letter, byte in BYTE_LEVEL.items()}
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXT = "a\N{UNICORN FACE}\u4f60\u597d, \u00e9\ufffd ok"


def spelled(parts: Iterable[bytes]) -> Tokenizer:
    """A tokenizer whose tokens are strings of bytes in this order, in GPT-2's letters; and "a"."""
    written = ["".join(LETTERS[byte] for byte in part) for part in dict.fromkeys([*parts, b"a"])]
    backend = Backend(models.BPE({token: index for index, token in enumerate(written)}, []))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A tokenizer with bytes for text without a token, and no space before the first word."""
    pieces = [SPACE, "a", f"{SPACE}a", "\ufffd"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "</s>", *pieces]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def serving(tokenizer: Tokenizer | None) -> ServedModel:
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    nothing: Any = None
    return ServedModel(model, "tiny", nothing, nothing)


def offsets_of(tokenizer: Tokenizer, token_ids: list[int], **given: Any) -> list[int]:
    return list(map(TextOffsets(serving(tokenizer), **given).add, token_ids))


def places(text: str) -> list[int]:
    """The character of each byte of a text."""
    return [at for at, letter in enumerate(text) for _ in letter.encode()]


@st.composite
def cut_texts(draw: st.DrawFn) -> list[bytes]:
    """The bytes of a text, cut anywhere."""
    said = draw(st.text("a \u00e9\u4f60\u597d\ufffd\N{UNICORN FACE}", min_size=1, max_size=12))
    data = said.encode()
    cuts = sorted(draw(st.sets(st.integers(1, len(data)), max_size=8)) | {0, len(data)})
    return [data[a:b] for a, b in pairwise(cuts)]


@settings(max_examples=60, deadline=None)
@given(parts=cut_texts(), num_before=st.integers(0, 3))
def test_wherever_a_text_is_cut(parts: list[bytes], num_before: int) -> None:
    """A prompt may also end in the middle of a character."""
    tokenizer = spelled(parts)
    ids = [list(dict.fromkeys(parts)).index(part) for part in parts]
    assert [tokenizer.spelled_bytes(token) for token in ids] == parts
    served = serving(tokenizer)
    assert [served.token_bytes(token) for token in ids] == parts
    text = b"".join(parts).decode()
    starts = [len(b"".join(parts[:i])) for i in range(len(parts))]
    expected = [places(text)[start] for start in starts]
    assert offsets_of(tokenizer, ids) == expected
    assert offsets_of(tokenizer, ids, text=text) == expected
    rest = expected[num_before:]
    before = ids[: len(ids) - len(rest)]
    found = offsets_of(tokenizer, ids[len(before) :], before=before, begin=5)
    assert found == [5 + at - rest[0] for at in rest]


def test_bytes_of_tokens_in_sentencepieces_way(sentencepiece: Tokenizer) -> None:
    served = serving(sentencepiece)
    assert [served.token_bytes(byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    for token, text in (("</s>", "</s>"), ("\ufffd", "\ufffd"), (f"{SPACE}a", " a")):
        found = sentencepiece.token_id(token)
        assert found is not None
        assert served.token_bytes(found) == text.encode()


def test_special_tokens_and_the_space_before_the_first_word_have_no_place(
    sentencepiece: Tokenizer,
) -> None:
    end, word = sentencepiece.token_id("</s>"), sentencepiece.token_id(f"{SPACE}a")
    assert end is not None
    assert word is not None
    ids = [end, word, 0xF0, 0x9F, end, 0xA6, 0x84, end, word]
    for before, offsets in (
        ([], [0, 0, 1, 1, 2, 1, 1, 2, 2]),
        ([word], [0, 0, 2, 2, 3, 2, 2, 3, 3]),
    ):
        text = sentencepiece.decode_after(before, ids)
        assert text == "a\N{UNICORN FACE} a" if not before else text == " a\N{UNICORN FACE} a"
        found = offsets_of(sentencepiece, ids, before=before)
        assert [at for at, t in zip(found, ids, strict=True) if t != end] == [
            at for at, t in zip(offsets, ids, strict=True) if t != end
        ]
    assert offsets_of(sentencepiece, [end, word, end, word], text="</s> a a") == [0, 4, 6, 6]


def test_a_model_without_a_tokenizer() -> None:
    served = serving(None)
    assert [TextOffsets(served).add(5), served.token_bytes(5)] == [0, b"token_id:5"]


# Asked for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Asker:
    """A model whose tokens are bytes."""
    directory = write_model(tmp_path_factory.mktemp("offsets") / "tiny")
    return asker(eecore.load(directory, kv_cache_tokens=1024))


def parts_of(server: Asker, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The log-probabilities of an answer: one part of a whole one, several of a stream."""
    answer = server.post(path, {"max_tokens": 40, "guided_choice": [TEXT], **body})
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [answer.json()["choices"][0]["logprobs"]]
    choices = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
    return [choice["logprobs"] for choice in choices if choice["logprobs"]]


@pytest.mark.parametrize("exit", ["full", "lookup:5"])
@pytest.mark.parametrize("stream", [False, True])
def test_of_completions(server: Asker, stream: bool, exit: str) -> None:
    said = len(TEXT.encode())
    for fields, prompt in (({}, ""), ({"echo": True}, "x\u00e9")):
        body = {"prompt": "x\u00e9", "logprobs": 1, "stream": stream, "exit": exit, **fields}
        parts = parts_of(server, "/v1/completions", {**body, "add_special_tokens": False})
        found = [at for part in parts for at in part["text_offset"]]
        assert found[: said + len(prompt.encode())] == places(prompt + TEXT)
