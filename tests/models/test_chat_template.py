"""Chat templates: transformers' text, and an error for templates without an end."""

from __future__ import annotations

import enum
import threading
from typing import Any

import pytest

from chat_templates import (
    CONVERSATIONS,
    FEATURES,
    REFUSED,
    TEMPLATES,
    TOOLS,
)
from costly_guides import COSTS
from eecore.bounded_process import Workers
from eecore.errors import EecoreError, ModelError, RequestError
from eecore.models.text import chat_template
from eecore.models.text import messages as messages_given
from eecore.models.text.chat_template import ChatTemplate, ChatTemplateError, MessagesRefused

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, messages: Any = None, **variables: Any) -> str:
    given = CONVERSATIONS["one"] if messages is None else messages
    settings = {"add_generation_prompt": True, "tools": None, "documents": None, **SPECIAL}
    return ChatTemplate(template).render(given, {**settings, **variables})


def of_transformers(template: str, messages: Any, **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    settings = {"add_generation_prompt": True, **SPECIAL, **variables}
    rendered, _ = render_jinja_template([messages], chat_template=template, **settings)
    return str(rendered[0])


LAST = "<s>{{ messages[-1]['content'] }} <|parse|>"
CONTENTS = ["Hello", " a\nb\n", "", "{{ bos_token }}", [{"type": "text", "text": "ü"}], None]


@pytest.mark.parametrize("content", CONTENTS)
def test_the_last_message_between_two_texts_is_as_in_transformers(content: Any) -> None:
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": content}]
    expected = of_transformers(LAST, messages, tools=None, documents=None)
    assert render(LAST, messages) == expected


def test_the_last_message_between_two_texts_needs_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template.WORKERS, "ask", lambda *_: pytest.fail("asked"))
    assert render(LAST, [{"role": "user", "content": "Hi"}]) == "<s>Hi <|parse|>"


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_models_give_the_text_of_transformers(
    template: str, conversation: str, tools: Any
) -> None:
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    for variables in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}):
        expected = of_transformers(source, messages, tools=tools, **variables)
        assert render(source, messages, tools=tools, **variables) == expected
        assert len(expected) > 20


BEGUN = ["It is", " It is", "It is ", "It is\n\n", "ü", "<think>\nhm\n</think>\n\nIt is", "Hello"]


@pytest.mark.parametrize("content", BEGUN)
@pytest.mark.parametrize("template", [*TEMPLATES, "plain"])
def test_a_message_that_goes_on_ends_as_in_transformers(template: str, content: str) -> None:
    source = TEMPLATES.get(template, "{% for m in messages %}<{{ m.content }}>{% endfor %}")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    settings: dict[str, Any] = {"add_generation_prompt": False, "tools": None, "documents": None}
    expected = of_transformers(
        source, messages, continue_final_message=True, add_generation_prompt=False
    )
    ours = ChatTemplate(source).render(messages, {**settings, **SPECIAL}, continues=True)
    assert ours == expected
    assert ours.rstrip().endswith(content.strip())


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "expected a last message with text, got none"),
        ([{"role": "assistant", "content": None}], "with text, got none"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "with text, got none"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "without tool_calls"),
        ([{"role": "assistant", "content": "abcdef"}], "writes the last message whole"),
        (
            [{"role": "assistant", "content": "a"}, {"role": "user", "content": "abcdef"}],
            "writes the last message whole",
        ),
    ],
)
def test_messages_that_cannot_go_on(messages: Any, said: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content[:5] }}{% endfor %}")
    with pytest.raises(RequestError, match=f"continue_final_message: .*{said}"):
        template.render(messages, {}, continues=True)


@pytest.mark.parametrize("template", FEATURES)
def test_what_templates_may_use(template: str) -> None:
    messages = CONVERSATIONS["turns"]
    assert render(template, messages) == of_transformers(template, messages)


@pytest.mark.parametrize("name", REFUSED)
def test_what_fails_is_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render(REFUSED[name])
    assert str(caught.value).startswith("chat_template: ")
    assert len(str(caught.value)) < 1500


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates can call stand-ins; the time limit is short, so that tests do not wait."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.1)
    monkeypatch.setattr(chat_template, "WORKERS", Workers("costly_templates"))


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("cost", COSTS)
def test_what_costs_too_much_is_refused(cost: str) -> None:
    said = "model: expected to take at most 0.1 s and 256 MiB, got more"
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate(f"{{{{ {cost}() }}}}", "model").render(CONVERSATIONS["one"], {})
    assert render("{{ 1 + 1 }}") == "2"


@pytest.mark.usefixtures("costly")
def test_a_template_that_has_ended_its_process_harms_no_other_rendering() -> None:
    """Other renderings wait while the process is ended, and then get their texts."""
    assert render("{{ messages[0].content }}") == CONVERSATIONS["one"][0]["content"]
    found: list[str] = []

    def other() -> None:
        found.extend(render("{{ 1 + 1 }}") for _ in range(20))

    threads = [threading.Thread(target=other) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        with pytest.raises(ChatTemplateError, match="expected to take at most"):
            render("{{ spin() }}")
    for thread in threads:
        thread.join()
    assert found == ["2"] * 80


def test_templates_open_no_files() -> None:
    """Not even a template outside the sandbox can: files of codecs are read on first use."""
    with pytest.raises(ChatTemplateError):
        render("{{ 'a'.encode('cp1140') }}")


def test_no_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "WORKERS", Workers("eecore.nothing"))
    with pytest.raises(ChatTemplateError, match="expected a process to render it in, got: its pro"):
        render("x")


def test_errors_name_the_template_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CHARACTERS", 100)
    for source, said in (
        ("{{ 'a' * 99999 }}", r"model: expected at most \d+ characters, got more"),
        ("a" * (1 << 20), "model: expected at most 131072 characters, got 1048576"),
        ("{% if %}", "model: expected a template, got: line 1: Expected an expression"),
        ("{{ messages.foo.bar }}", "UndefinedError|has no attribute"),
    ):
        with pytest.raises(ModelError, match=said):
            ChatTemplate(source, "model").render(CONVERSATIONS["one"], {})


def test_conversations_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_given, "MAX_MESSAGES", 20)
    monkeypatch.setattr(messages_given, "MAX_CHARACTERS", 1000)
    short = [{"role": "user", "content": "x"}]
    assert render("{{ messages|length }}", short * 20) == "20"
    with pytest.raises(RequestError, match="messages: expected at most 20, got more"):
        render("x", short * 21)
    with pytest.raises(RequestError, match=r"messages\[1\]: expected at most 1000 characters"):
        render("x", [*short, {"role": "user", "content": "x" * 1000}])
    with pytest.raises(RequestError, match="tools: expected at most 1000 characters"):
        render("x", short, tools=["x" * 1000])


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(MessagesRefused, match=r"chat_template refuses them: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    assert issubclass(MessagesRefused, RequestError)


class Name(str, enum.Enum):
    USER = "user"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "messages: expected a list of objects with a role and a content, got str"),
        (5, "got int"),
        ({"role": "user", "content": "x"}, "got dict"),
        (["hello"], r"messages\[0\]: expected an object with a role and a content, got str"),
        ([{"content": "x"}], r"messages\[0\].role: expected text, got nothing"),
        ([{"role": 5, "content": "x"}], r"messages\[0\].role: expected text, got int"),
        ([{"role": "user"}], r"messages\[0\].content: expected text, got nothing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: expected text or a list"),
        ([{"role": "user", "content": {"a": 1}}], "got dict"),
        ([{"role": "user", "content": [5]}], r"messages\[0\].content\[0\]: expected text or"),
        ([{"role": "user", "content": object()}], "expected text, numbers, lists or objects"),
        ([{"role": "user", "content": "x", "more": b"x"}], "got bytes"),
        (
            [{"role": "user", "content": "x", "more": {(1,): 1}}],
            "expected text as names, got tuple",
        ),
        ([{"role": "user", "content": "x", "more": print}], "got builtin_function_or_method"),
    ],
)
def test_messages_that_are_no_conversation(messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        render("{{ messages }}", messages)


def test_what_lies_in_itself_is_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["again"] = message
    with pytest.raises(RequestError, match=r"messages\[0\]: expected at most 64"):
        render("{{ messages }}", [message])


def test_messages_are_made_plain_and_never_changed() -> None:
    messages = ({"role": Name.USER, "content": "x", "n": True, "parts": (1, 2)},)
    assert render("{{ messages }}", messages) == str(
        [{"role": "user", "content": "x", "n": True, "parts": [1, 2]}]
    )
    with pytest.raises(RequestError, match="tools: expected text, numbers"):
        render("x", tools=[print])


def test_interrupts_pass() -> None:
    class Interrupting(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        render("x", [Interrupting(role="user", content="x")])
    assert issubclass(ChatTemplateError, EecoreError)
