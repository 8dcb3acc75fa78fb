"""Chat templates: what transformers renders, and an error of ours for what has no end."""

from __future__ import annotations

import enum
import resource
import sys
import time
from datetime import datetime
from typing import Any

import pytest

from chat_templates import CONVERSATIONS, HOSTILE, TEMPLATES, TOOLS, long_conversation
from eecore.errors import EecoreError, ModelError, RequestError
from eecore.models.chat_template import ChatTemplate, ChatTemplateError, MessagesRefused

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LATEST_S = 20.0


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


FEATURES = [
    "{{ {'b': 1, 'a': [1.5, none, true, 'ü<>&']}|tojson }}",
    "{{ {'b': 1, 'a': [1, 2]}|tojson(indent=2, sort_keys=true) }}",
    "{{ {'b': 'ü🎉', 'a': [1, 2]}|tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}"
    "{% endif %}{{ i }}{% else %}none{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ loop.index }}{{ a }}{{ b }}{{ loop.length }}"
    "{% endfor %}",
    "{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
    "{% set x = 1 %}{% generation %}said{% set x = 2 %}{% endgeneration %}{{ x }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1) }}{{ m(1, 3, 4) }}{% call m(5) %}inner{% endcall %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.next() }}",
    "{% set j = joiner(', ') %}{% for i in [1, 2] %}{{ j() }}{{ i }}{% endfor %}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x | trim %} a {% endset %}{{ x }}|",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% block x %}in{% endblock %}{{ self.x() }}",
    "{{ 'a' ~ 1 ~ none ~ nothing ~ [1, 'a'] }}{{ 'a' if false }}{{ nothing }}{{ 1.0 }}{{ true }}",
    "{{ 1 < 2 < 3 }}{{ 1 in [1] }}{{ 'a' not in {'a': 1} }}"
    "{{ 'b' in 'abc' }}{{ (1, 2) == (1, 2) }}",
    "{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 10 }}{{ -7 % 3 }}{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 'a' + 'b' }}",
    "{{ '%s-%05.1f-%%' % ('a', 1.25) }}{{ '{}{x!r:>6}'.format(1, x='a') }}{{ '%s'|format('a') }}",
    "{{ messages|map(attribute='role')|join(', ') }}"
    "{{ [3, 1, 2]|sort|list }}{{ [1, 1]|unique|list }}",
    "{{ range(7)|batch(3, 0)|list }}{{ range(7)|slice(3)|map('list')|list }}{{ [1, 2]|sum }}",
    "{{ [{'a': 1}, {'a': 2}]|selectattr('a', 'gt', 1)|list }}{{ [1, none]|reject('none')|list }}",
    "{{ [{'a': 1}, {'a': 1}]|groupby('a')|list }}"
    "{{ {'b': 1, 'a': 2}|dictsort }}{{ {'a': 1}|items|list }}",
    "{{ ' a '|trim }}{{ 'ab'|first }}{{ 'ab'|last }}"
    "{{ 'ab'|list }}{{ 'ab'|reverse }}{{ 'a b'|title }}",
    "{{ 'a\\nb'|indent(2, first=true) }}{{ 'a'|center(5) }}|{{ 'aa'|replace('a', 'b', 1) }}",
    "{{ '12'|int + 1 }}{{ 'x'|int(7) }}{{ 'ff'|int(base=16) }}"
    "{{ '1.5'|float }}{{ 2.567|round(1) }}",
    "{{ '<a>'|e }}{{ '<a>'|safe }}{{ ('<'|safe) + '<' }}"
    "{{ 'abc'|length }}{{ 5|abs }}{{ [1, 2]|max }}",
    "{{ nothing|default('d') }}{{ ''|default('d', true) }}{{ 'Ab'|lower|upper|capitalize }}",
    "{{ 'a,b'.split(',') }}{{ 'a'.join(['1', '2']) }}{{ 'x'.ljust(3) }}|{{ 'ab'.startswith('a') }}",
    "{{ 'a b  c'.split() }}{{ 'a b c'.rsplit(' ', 1) }}"
    "{{ 'a\\nb'.splitlines() }}{{ 'a'.zfill(3) }}",
    "{{ {'a': 1}.items()|list }}{{ {'a': 1}.get('b', 2) }}"
    "{{ {'a': 1}.keys()|list }}{{ dict(a=1) }}",
    "{{ messages[0]['content'][1:3] }}{{ messages[-1:] }}{{ 'abc'[::-1] }}{{ [1, 2, 3][:2] }}",
    "{% set ns = namespace(a=1) %}{% for i in [1, 2] %}"
    "{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
    "{{ 1 is defined }}{{ nothing is undefined }}"
    "{{ 'a' is string }}{{ {} is mapping }}{{ 4 is even }}"
    "{{ none is none }}{{ 9 is divisibleby(3) }}"
    "{{ [] is sequence }}{{ 1 is eq(1) }}{{ 1 is sameas(1) }}",
    "    {% if true %}\nx\n    {% endif %}\n\n{#- a comment -#}   y\n",
    "{% raw %}{{ x }}{% endraw %}{{ '\\n' }}{{ \"it's\" }}",
    "{{ messages|tojson }}{{ messages }}{{ bos_token }}"
    "{{ add_generation_prompt }}{{ tools is none }}",
]


@pytest.mark.parametrize("template", FEATURES)
def test_what_templates_may_use(template: str) -> None:
    messages = CONVERSATIONS["turns"]
    assert render(template, messages) == of_transformers(template, messages)


def test_a_template_is_told_the_time() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}") == datetime.now().strftime("%Y-%m-%d")


def test_long_conversations_have_room() -> None:
    messages = long_conversation(2500)
    for source in TEMPLATES.values():
        assert len(render(source, messages)) > sum(len(m["content"].strip()) for m in messages)


def test_counting_costs_little() -> None:
    """Below a millisecond for a conversation of usual length."""
    messages = long_conversation(10)
    for source in TEMPLATES.values():
        of_transformers(source, messages, tools=TOOLS)
        ours, theirs = ChatTemplate(source), []
        settings = {"add_generation_prompt": True, "tools": TOOLS, "documents": None, **SPECIAL}
        times: list[float] = []
        for _ in range(20):
            started = time.perf_counter()
            ours.render(messages, settings)
            middle = time.perf_counter()
            of_transformers(source, messages, tools=TOOLS)
            times.append(middle - started)
            theirs.append(time.perf_counter() - middle)
        assert min(times) < min(theirs) + 1e-3


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
    started = time.process_time()
    with pytest.raises(ChatTemplateError) as caught:
        render(HOSTILE[name])
    assert time.process_time() - started < LATEST_S
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
