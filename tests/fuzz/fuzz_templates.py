"""Chat templates from a grammar, and conversations.

What is rendered is what jinja2 renders in this process, so no template is one that jinja2 cannot
bear. A loop has five rounds at most; nothing calls itself; there is no product, power or large
number; arguments of filters and methods, and values that are assigned, are short constants. Only
stand-ins cost too much. Limits are those of tests: an input that meets them costs a tenth of a
second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from random import Random
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chat_templates import CONVERSATIONS, FEATURES, REFUSED, TEMPLATES, TOOLS
from costly_guides import COSTS
from eecore.bounded_process import Workers
from eecore.errors import ModelError, RequestError
from eecore.models.text import chat_template
from eecore.models.text.chat_template import ChatTemplate, MessagesRefused
from eecore.template_process import _GenerationBlock
from mutate import WILD, mutated_bytes, mutated_json

LIMIT_S = 15.0
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
NUMBERS = ["0", "1", "2", "-1", "3.5", "7"]
TEXTS = [
    "''", "'a'", "'ü🎉'", "'%s'", "'{}'", "'%9d'", "'{:9}'", "'<b>'", "'a b\\nc'", "'role'",
    "'%(a)s'", "'{0.__class__}'", "'\\t'", "'12'", "'user'", "'ß'",
]  # fmt: skip
NAMES = [
    "messages", "messages[0]", "messages[-1].content", "messages[0].role", "tools", "bos_token",
    "x", "y", "ns.x", "ns", "nothing", "loop.index", "loop", "loop.last", "loop.previtem", "true",
    "none", "range", "self", "caller", "varargs", "namespace", "dict",
]  # fmt: skip
FILTERS = [
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e",
    "filesizeformat", "first", "float", "forceescape", "format", "groupby", "indent", "int",
    "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "sum",
    "title", "tojson", "trim", "truncate", "unique", "upper", "wordcount",
]  # fmt: skip
UNKNOWN = ["urlize", "pprint", "xmlattr", "striptags", "lipsum", "@step"]
TESTS = ["defined", "undefined", "none", "string", "mapping", "iterable", "number", "sequence"]
METHODS = [
    "split", "strip", "upper", "join", "replace", "center", "zfill", "expandtabs", "format",
    "format_map", "startswith", "count", "items", "get", "keys", "values", "copy", "index", "ljust",
    "rsplit", "splitlines", "append", "update", "encode", "pop", "__class__", "is_integer", "next",
    "cycle", "changed", "title", "find", "partition",
]  # fmt: skip
OPERATORS = [
    "+", "-", "/", "//", "%", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or",
]  # fmt: skip
PARTS: dict[str, Any] = {}


def prepare() -> None:
    """Set small limits."""
    chat_template.SECONDS, chat_template.CHARACTERS = 0.1, 1 << 18
    chat_template.WORKERS = Workers("costly_templates")
    PARTS["oracle"] = _oracle()


def one(random: Random) -> bool:
    source, messages = _source(random), _messages(random)
    variables: dict[str, Any] = {**SPECIAL, "tools": random.choice([None, TOOLS])}
    if random.random() < 0.1:
        variables["documents"] = random.choice(WILD)
    try:
        rendered = ChatTemplate(source).render(messages, variables)
    except MessagesRefused:
        return True
    except (ModelError, RequestError) as error:
        refused = str(error)
    else:
        expected = _oracle_of(source, messages, variables)
        assert _without_places(rendered) == _without_places(expected), source
        return True
    assert "MemoryError" not in refused, source
    assert len(refused) < 2000
    return False


def _without_places(text: str) -> str:
    """A text without objects' addresses, which are random and which filters may change."""
    return re.sub("0x[0-9a-f]*", "0x", text, flags=re.IGNORECASE)


def _oracle() -> ImmutableSandboxedEnvironment:
    """jinja2 as transformers sets it up."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options: dict[str, Any] = {"separators": separators, "sort_keys": sort_keys}
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _oracle_of(source: str, messages: Any, variables: dict[str, Any]) -> str:
    values = {"tools": None, **variables, "messages": messages}
    return str(PARTS["oracle"].from_string(source).render(**json.loads(json.dumps(values))))


def _source(random: Random) -> str:
    choice = random.random()
    if choice < 0.05:
        costly = [f"{{{{ {cost}() }}}}" for cost in COSTS]
        return random.choice([*REFUSED.values(), *costly])
    if choice < 0.2:
        whole = random.choice([*TEMPLATES.values(), *REFUSED.values()])
        mutated = mutated_bytes(random, whole.encode("utf-8", "replace"))
        return re.sub(r"\d{4,}", "2024", mutated.decode("utf-8", "replace"))
    if choice < 0.25:
        return random.choice(list(TEMPLATES.values())) + _body(random, 2)
    if choice < 0.6:
        return _plain_body(random, 3)
    return "{% set ns = namespace(x=" + _constant(random) + ") %}" + _body(random, 3)


def _body(random: Random, depth: int) -> str:
    return "".join(_statement(random, depth) for _ in range(random.randint(1, 3)))


def _plain_body(random: Random, depth: int) -> str:
    """Nested features of the templates that models ship."""
    parts = [random.choice(FEATURES) for _ in range(random.randint(1, 2))]
    if depth:
        inner = _plain_body(random, depth - 1)
        around = random.choice(
            [
                "{% for message in messages %}IN{% if loop.last %}{{ message.role }}{% endif %}"
                "{% endfor %}",
                "{% if messages[0].role == 'user' %}IN{% else %}{{ messages|length }}{% endif %}",
                "{% macro f(x) %}IN{{ x|upper }}{% endmacro %}{{ f('a') }}{{ f(x='b') }}",
                "{% set y %}IN{% endset %}{{ y|trim|length }}{{ y[:20] }}{{ y ~ 1 }}",
                "{% filter replace('a', 'b') %}IN{% endfilter %}",
                "{% generation %}IN{% endgeneration %}",
                "{% for i in range(3) if i != 1 %}IN{{ loop.revindex }}{% endfor %}",
                "{% with x = messages[-1].content|trim %}IN{{ x }}{% endwith %}",
            ]
        )
        parts.insert(random.randrange(len(parts) + 1), around.replace("IN", inner))
    if random.random() < 0.2:
        parts.append(_statement(random, 1))
    return "".join(parts)


def _statement(random: Random, depth: int) -> str:
    expression = _expression(random, 3)
    if depth <= 0 or random.random() < 0.35:
        return random.choice(["{{ %s }}", "{{- %s -}}", "text {{ %s }}\n"]) % expression
    body: Callable[[], str] = lambda: _body(random, depth - 1)  # noqa: E731
    kind = random.randrange(13)
    if kind < 3:
        over = random.choice([f"({expression})[:3]", "messages[:5]", "range(3)", "[1, [2]]"])
        condition = random.choice(["", "", " if " + _expression(random, 2)])
        end = random.choice(["", "{% break %}", "{% continue %}"])
        otherwise = random.choice(["", "{% else %}" + body()])
        start = "{% for x in " + over + condition + " %}"
        return start + body() + end + otherwise + "{% endfor %}"
    if kind == 3:
        return "{% if " + expression + " %}" + body() + "{% else %}" + body() + "{% endif %}"
    if kind == 4:
        return "{% set " + random.choice(["x", "y", "ns.x"]) + f" = {_constant(random)} %}}"
    macro = f"m{depth}"  # its body has macros of lower numbers alone
    if kind in (5, 6, 7):
        inner = random.choice(["", "{{ caller() }}"])
        made = "{% macro " + macro + "(a, x=2) %}" + body() + inner + "{% endmacro %}"
        return made + "{{ " + macro + f"({expression}) }}}}"
    if kind == 8:
        return "{% filter " + random.choice(FILTERS) + " %}" + body() + "{% endfilter %}"
    if kind == 9:
        return (
            "{% set z %}"
            + body()
            + "{% endset %}{{ z }}{% with y = 1 %}"
            + body()
            + "{% endwith %}"
        )
    if kind == 10:
        return "{% generation %}" + body() + "{% endgeneration %}"
    if kind == 11:
        return "{% call " + macro + f"({expression}) %}}" + body() + "{% endcall %}"
    return random.choice(
        ["{% include x %}", "{# no #}", "{% raw %}{{ x }}{% endraw %}", "{{ raise_exception(x) }}"]
    )


def _constant(random: Random) -> str:
    return random.choice(random.choice([NUMBERS, TEXTS]))


def _atom(random: Random) -> str:
    return random.choice(random.choice([NUMBERS, TEXTS, NAMES]))


def _expression(random: Random, depth: int) -> str:
    if depth <= 0 or random.random() < 0.2:
        return _atom(random)
    inner: Callable[[], str] = lambda: _expression(random, depth - 1)  # noqa: E731
    kind = random.randrange(13)
    if kind < 3:
        return f"({inner()} {random.choice(OPERATORS)} {inner()})"
    if kind < 6:
        given = ", ".join(_argument(random) for _ in range(random.choice([0, 0, 1, 1, 2])))
        name = random.choice(UNKNOWN if random.random() < 0.02 else FILTERS)
        return f"({inner()}|{name}({given}))"
    if kind == 6:
        given = ", ".join(_constant(random) for _ in range(random.choice([0, 1, 1, 2])))
        return f"({inner()}).{random.choice(METHODS)}({given})"
    if kind == 7:
        return f"({inner()})[{random.choice([inner(), '1:', ':-1', '::-1', '::2'])}]"
    if kind == 8:
        return random.choice(["[{}, {}]", "({}, {})", "{{'a': {}, {}: 1}}"]).format(
            inner(), inner()
        )
    if kind == 9:
        return f"({inner()} is {random.choice(TESTS)})"
    if kind == 10:
        return f"({inner()} if {inner()} else {inner()})"
    if kind == 11:
        return f"{random.choice(['cycler', 'dict', 'namespace', 'self.b'])}({inner()})"
    return f"range({random.choice(NUMBERS)})"


def _argument(random: Random) -> str:
    names = ["attribute='role'", "width=9", "indent=2", "sort_keys=true", "'role'", "'equalto'"]
    return random.choice([*names, _constant(random), f"'{random.choice(FILTERS)}'"])


def _messages(random: Random) -> Any:
    messages: Any = random.choice(list(CONVERSATIONS.values()))
    if random.random() < 0.1:
        return mutated_json(random, messages)
    return random.choice(WILD) if random.random() < 0.03 else messages
