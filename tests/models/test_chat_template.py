"""Chat templates: what transformers renders, and an error of ours for what has no end."""

from __future__ import annotations

import enum
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from chat_templates import CONVERSATIONS, FEATURES, HOSTILE, TEMPLATES, TOOLS, long_conversation
from eecore.errors import EecoreError, ModelError, RequestError
from eecore.models.text.chat_template import ChatTemplate, ChatTemplateError, MessagesRefused

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# More than without counting: about a millisecond.
MAX_CALLS = 5000


def render(template: str, messages: Any = None, **variables: Any) -> str:
    given = CONVERSATIONS["one"] if messages is None else messages
    settings = {"add_generation_prompt": True, "tools": None, "documents": None, **SPECIAL}
    return ChatTemplate(template).render(given, {**settings, **variables})


def of_transformers(template: str, messages: Any, **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    settings = {"add_generation_prompt": True, **SPECIAL, **variables}
    rendered, _ = render_jinja_template([messages], chat_template=template, **settings)
    return str(rendered[0])


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


def test_lines_of_blocks_leave_nothing_behind() -> None:
    source = "{% for m in messages %}\n  {% if m %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(source).render(messages, {}) == "a\nb\n"


@pytest.mark.parametrize("template", ["{{ false|sum('a') }}", "{{ 0|join(',', attribute='a') }}"])
def test_what_is_no_list_has_no_attributes_of_items(template: str) -> None:
    with pytest.raises(ModelError, match=r"TypeError: '(bool|int)' object is not iterable"):
        render(template, [{"role": "user", "content": "x"}])


def test_a_template_is_told_the_time() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}") == datetime.now().strftime("%Y-%m-%d")


def test_long_conversations_have_room() -> None:
    messages = long_conversation(2500)
    for source in TEMPLATES.values():
        assert len(render(source, messages)) > sum(len(m["content"].strip()) for m in messages)


def calls_of(run: Callable[[], object]) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def seen(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def test_counting_costs_little() -> None:
    """Few calls more than without it, in a conversation of usual length."""
    messages = long_conversation(10)
    for name, source in TEMPLATES.items():
        ours = ChatTemplate(source)
        settings = {"add_generation_prompt": True, "tools": TOOLS, "documents": None, **SPECIAL}
        runs = (
            lambda: ours.render(messages, settings),  # noqa: B023
            lambda: of_transformers(source, messages, tools=TOOLS),  # noqa: B023
        )
        for run in runs:  # what is compiled once is
            run()
        counting, plain = map(calls_of, runs)
        assert counting < plain + MAX_CALLS, name


@pytest.fixture
def little_memory() -> Any:
    """Half a gigabyte more than there is now, and no more."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 29), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("little_memory")
def test_what_has_no_end_is_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render(HOSTILE[name])
    assert str(caught.value).startswith("chat_template: ")
    assert "MemoryError" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_errors_name_the_template_and_the_limit() -> None:
    for source, said in (
        ("{{ 'a' * 10**9 }}", r"model: expected at most \d+ characters"),
        ("{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}", "steps"),
        ("a" * (1 << 20), "model: expected at most 262144 characters, got 1048576"),
        ("{% if %}", "model: expected a template, got: line 1: Expected an expression"),
        ("{{ messages.foo.bar }}", "UndefinedError|has no attribute"),
    ):
        with pytest.raises(ModelError, match=said):
            ChatTemplate(source, "model").render(CONVERSATIONS["one"], {})


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
