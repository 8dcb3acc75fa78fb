"""Conversations as training data: the assistant's text in a chat template.

A template is a program, so its text is cut by comparison: the answer is what the template adds,
from the place where it asks for an answer, once it is given the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eecore.errors import TrainingError
from eecore.models import Tokenizer

Piece = tuple[list[int], bool]
END_OF_THOUGHTS = "</think>"


def chat_pieces(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    eos_token_id: int,
    *,
    train_on_input: bool = False,
    **variables: Any,
) -> list[Piece]:
    """The token ids of a conversation in pieces, each with whether the assistant says it.

    The pieces are encoded one by one, as a prompt and its answer are in use. An answer includes the
    token that ends it; the last one gets ``eos_token_id`` where the template has no such token.

    Args:
        tokenizer: the model's, with a chat template.
        messages: each with a ``role`` and a ``content``.
        train_on_input: whether all messages are learnt, or only the assistant's.
        **variables: further variables of the template (``tools``, ...).

    Raises:
        TrainingError: no message is the assistant's, or the answers cannot be told apart.
        RequestError: the messages are malformed.
        ModelError: there is no template, or it fails.
    """

    def text_of(count: int, *, asks: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=asks, **variables
        )

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    whole = text_of(len(messages))
    begun, pieces = 0, list[Piece]()
    if train_on_input:
        pieces, messages = [(ids_of(whole.rstrip()), True)], []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = text_of(index, asks=True) if index else ""
        said = _said(before, text_of(index + 1), whole)
        if said is None:
            raise TrainingError(
                f"messages[{index}]: expected a chat template that shows an answer after its "
                "prompt, got another text (train_on_input learns the whole conversation)"
            )
        pieces += [
            (ids_of(text), learnt)
            for text, learnt in ((whole[begun : len(before)], False), (said, True))
            if text
        ]
        begun = len(before) + len(said)
    if not pieces:
        raise TrainingError("messages: expected one of the assistant, got none")
    last = pieces[-1][0]
    if tokenizer.decode(last[-1:]):  # a special token, which ends an answer, has no text
        last.append(eos_token_id)
    return pieces


def _said(before: str, answered: str, whole: str) -> str | None:
    """The answer and its end, as the text of the whole conversation has them; None where they
    cannot be found.
    """
    if not answered.startswith(before):
        return None
    said = answered[len(before) :].rstrip()
    # Templates of models that think show the thoughts of the last answer only.
    for text in (said, said.rpartition(END_OF_THOUGHTS)[2].lstrip()):
        if text and whole.startswith(text, len(before)):
            return text
    return None
