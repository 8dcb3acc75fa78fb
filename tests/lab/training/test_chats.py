"""Conversations as training data: the assistant's tokens, by several kinds of template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eecore.errors import ModelError, TrainingError
from eecore.lab.training import collate, read_data
from eecore.lab.training.chats import chat_pieces
from eecore.models import Tokenizer
from tiny_models import write_byte_tokenizer

END = 257

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (  # Llama 2's way: nothing asks for an answer, which ends with a special token
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKS = (  # Qwen3's way: thoughts are shown of the last answer alone
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content }}"
    "\n</think>\n\n{% endif %}{{ said }}{{ m.calls or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO_TURNS = [
    {"role": "system", "content": "Short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Yes, Hello"},
]


def with_template(directory: Path, template: str | None) -> Tokenizer:
    """A tokenizer of bytes with a chat template."""
    write_byte_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = template
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    found = Tokenizer.from_directory(directory)
    assert found is not None
    return found


def texts(tokenizer: Tokenizer, messages: list[dict[str, Any]], **variables: Any) -> list[str]:
    """The learnt texts, with special tokens written out."""
    pieces = chat_pieces(tokenizer, messages, END, **variables)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids, learnt in pieces if learnt]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, TWO_TURNS, ["Hello<|im_end|>", "Yes, Hello<|im_end|>"]),
        (CHATML, TWO_TURNS[:4], ["Hello<|im_end|>"]),  # what follows the last answer is of no use
        (BRACKETS, TWO_TURNS[1:], [" Hello </s>", " Yes, Hello </s>"]),
        (ENDLESS, TWO_TURNS, ["Hello", "Yes, Hello</s>"]),
        (CHATML, [{"role": "assistant", "content": "Me"}], ["<|im_start|>assistant\nMe<|im_end|>"]),
        (
            THINKS,
            [
                *TWO_TURNS[1:2],
                {"role": "assistant", "content": "<think>\nHmm\n</think>\n\nHello"},
                *TWO_TURNS[3:],
            ],
            ["Hello<|im_end|>", "<think>\n\n</think>\n\nYes, Hello<|im_end|>"],
        ),
        (
            THINKS,
            [
                TWO_TURNS[1],
                {"role": "assistant", "content": "", "calls": "CALL"},
                {"role": "tool", "content": "waved"},
                {"role": "assistant", "content": "Done"},
            ],
            ["CALL<|im_end|>", "<think>\n\n</think>\n\nDone<|im_end|>"],
        ),
        (
            TOOLS,
            [
                TWO_TURNS[1],
                {"role": "assistant", "content": None, "tool_calls": [{"name": "wave"}]},
                {"role": "tool", "content": "waved"},
                {"role": "assistant", "content": "Done"},
            ],
            ['CALL {"name": "wave"}<|im_end|>', "Done<|im_end|>"],
        ),
    ],
)
def test_what_the_assistant_says_is_learnt(
    tmp_path: Path, template: str, messages: Any, expected: list[str]
) -> None:
    assert texts(with_template(tmp_path, template), messages) == expected


def test_a_prompt_is_encoded_as_the_model_is_asked(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    (asked, _), _ = chat_pieces(tokenizer, TWO_TURNS[:3], END)
    assert asked == tokenizer.encode_chat(TWO_TURNS[:2])


def test_all_messages_are_learnt_when_asked(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, ENDLESS)
    whole = tokenizer.apply_chat_template(TWO_TURNS, add_generation_prompt=False).strip()
    assert texts(tokenizer, TWO_TURNS, train_on_input=True) == [f"{whole}</s>"]


def test_conversations_are_read_beside_pairs(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, TOOLS)
    lines = [
        {"messages": TWO_TURNS, "id": 3, "tools": [{"name": "wave"}]},
        {"input": "a", "target": "bc"},
        {"messages": TWO_TURNS[1:3], "tools": None},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    options: dict[str, Any] = {"context": 512, "eos_token_id": END}
    data = read_data([path], tokenizer, **options)
    answers = "Hello<|im_end|>", "Yes, Hello<|im_end|>"
    learnt = [[*tokenizer.encode("".join(answers))], [*tokenizer.encode("bc"), END]]
    learnt.append([*tokenizer.encode(answers[0])])
    for index, expected in enumerate(learnt):
        batch = collate(data, [index])
        assert batch.targets.tokens.tolist() == expected
        # Each is predicted from the token before it.
        tokens = data.sequence(index)[0]
        assert tokens[batch.targets.positions + 1].tolist() == expected
        assert batch.inputs["input_ids"][0].tolist() == tokens[:-1].tolist()
    assert data.num_learnt.tolist() == [len(each) for each in learnt]
    assert '[{"name": "wave"}]' in tokenizer.decode(data.sequence(0)[0].tolist())
    assert data.for_decoders
    assert data.digest() != read_data([path], tokenizer, train_on_input=True, **options).digest()
    # All but the first token of each.
    everything = read_data([path], tokenizer, train_on_input=True, **options)
    assert everything.num_learnt.tolist() == (everything.lengths - 1).tolist()


def test_a_long_conversation_is_refused_or_cut(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TWO_TURNS}))
    options: dict[str, Any] = {"eos_token_id": END, "truncate_inputs": True}
    length = int(read_data([path], tokenizer, context=512, eos_token_id=END).lengths)
    with pytest.raises(
        TrainingError, match=rf"1: expected at most context=40 tokens, got {length}"
    ):
        read_data([path], tokenizer, context=40, eos_token_id=END)
    cut = read_data([path], tokenizer, context=40, **options)
    assert int(cut.lengths) == 40
    assert tokenizer.decode(collate(cut, [0]).targets.tokens.tolist()) == "Hel"
    with pytest.raises(TrainingError, match="1: expected an answer within context=37 tokens, got"):
        read_data([path], tokenizer, context=37, **options)


@pytest.mark.parametrize(
    ("template", "line", "message"),
    [
        (CHATML, {"messages": []}, r'jsonl:1: expected .*\{"messages": \[...\]\} or .*none empty'),
        (CHATML, {"messages": "Hi"}, "jsonl:1: expected .* got"),
        (CHATML, {"messages": TWO_TURNS, "text": "a"}, "jsonl:1: expected .* got"),
        (CHATML, {"messages": ["Hi"]}, r"jsonl:1: messages\[0\]: expected an object with a role"),
        (
            CHATML,
            {"messages": [{"content": "a", "x": 1}]},
            r"jsonl:1: messages\[0\].role: expected",
        ),
        (CHATML, {"messages": TWO_TURNS[:2]}, "jsonl:1: messages: expected one of the assistant,"),
        (
            "{{ raise_exception('no system') }}",
            {"messages": TWO_TURNS},
            "jsonl:1: messages: .* refuses them: no system",
        ),
        (  # the prompt of an answer is not what stands before it in the conversation
            CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"),
            {"messages": TWO_TURNS},
            r"jsonl:1: messages\[2\]: expected a chat template that shows .*train_on_input",
        ),
    ],
)
def test_bad_conversations_are_named(
    tmp_path: Path, template: str, line: Any, message: str
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(TrainingError, match=message):
        read_data([path], with_template(tmp_path, template), context=512, eos_token_id=END)


def test_without_a_template_the_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TWO_TURNS}))
    with pytest.raises(ModelError, match="chat_template"):
        read_data([path], with_template(tmp_path, None), context=512, eos_token_id=END)
