"""Chat templates: a conversation becomes the text that a model was trained on.

A template is a program that comes with a model, in jinja2's language. It runs in jinja2's sandbox
with what transformers gives it, and within bounds: how much it may do and how much text it may make
is counted while it runs (:mod:`eecore.models.text.template_work`), in calls that are put into its
syntax tree before it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from eecore.errors import ModelError, RequestError
from eecore.models.text.messages import Given, given_values
from eecore.models.text.template_filters import (
    FILTERS,
    METHODS,
    TESTS,
    Formatter,
    key,
    measured,
    percent,
    searched,
    settled,
)
from eecore.models.text.template_work import ITEM, WORK, TemplateLimit, Work, weigh, work_of

__all__ = ["ChatTemplate", "ChatTemplateError", "MessagesRefused"]

MOST_SOURCE = 256 << 10
"""Characters of a template; large ones of today have 40 thousand."""
MOST_NODES = 40_000
# Steps of what stands in a loop, a macro or a block: one for so many nodes of its syntax tree.
NODES_PER_STEP = 16
# Text of a template that is worth counting where it is written.
SHORT_TEXT = 16
MOST_DATE_FORMAT = 200
MARK = "(the answer goes on here) "
"""In the place where a message is to be continued."""
# What compiled templates add to calls in loops and blocks, for functions that take a context.
CONTEXT_ARGUMENTS = ("_loop_vars", "_block_vars")


class ChatTemplateError(ModelError):
    """The model has no chat template, or one that cannot be used."""


class MessagesRefused(RequestError):
    """The chat template refuses the messages, in its own words."""


class _Refusal(TemplateError):
    """What a template raises itself."""


class ChatTemplate:
    """A template, compiled.

    Args:
        source: in jinja2's language.
        name: what errors call it.

    Raises:
        ChatTemplateError: it is too large, or is no template.
    """

    def __init__(self, source: str, name: str = "chat_template") -> None:
        self.source = source
        self.name = name
        if len(source) > MOST_SOURCE:
            raise ChatTemplateError(
                f"{name}: expected at most {MOST_SOURCE} characters, got {len(source)}"
            )
        try:
            self._template = _compile(source)
        except TemplateLimit as error:
            raise ChatTemplateError(f"{name}: {error}") from None
        except Exception as error:  # of the parser, the compiler or Python's own
            raise ChatTemplateError(
                f"{name}: expected a template, got: {_in_words(error)}"
            ) from None

    def render(
        self, messages: Any, variables: Mapping[str, Any], *, continues: bool = False
    ) -> str:
        """The text of a conversation.

        Args:
            messages: of the conversation.
            variables: what the template also sees.
            continues: the text ends with that of the last message.

        Raises:
            RequestError: the messages are no conversation, or the last cannot be continued.
            MessagesRefused: the template says that they are none for its model.
            ChatTemplateError: the template fails, or does more than it may.
        """
        given = given_values(messages, variables)
        last = _marked(given.values["messages"]) if continues else ""
        try:
            text = self._render(given)
        except _Refusal as error:
            raise MessagesRefused(f"messages: {self.name} refuses them: {error}") from None
        except TemplateLimit as error:
            raise ChatTemplateError(f"{self.name}: {error}") from None
        except Exception as error:  # a program's own failures
            raise ChatTemplateError(f"{self.name}: {_in_words(error)}") from None
        return _before_mark(text, last) if continues else text

    def _render(self, given: Given) -> str:
        work = Work(given.num_messages, given.num_characters)
        context = self._template.new_context({**given.values, WORK: work})
        return "".join(self._template.root_render_func(context))


def _marked(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, at whose end there is a mark from now on."""
    field = "continue_final_message: expected a last message"
    last = messages[-1] if messages else {}
    if last.get("tool_calls"):
        raise RequestError(f"{field} without tool_calls, got some")
    if isinstance(last.get("content"), str):
        text = last["content"]
        last["content"] = text + MARK
        return str(text)
    parts = last.get("content") or []
    part = next((p for p in reversed(parts) if isinstance(p, dict) and "text" in p), {})
    if not isinstance(text := part.get("text"), str):
        raise RequestError(f"{field} with text, got none")
    part["text"] = text + MARK
    return text


def _before_mark(text: str, last: str) -> str:
    """The text of a conversation up to the mark in its last message.

    Where the template has trimmed the mark it would have trimmed the message.
    """
    mark = MARK.strip()
    before, found, after = text.rpartition(mark)
    if not found or last.strip() not in before:
        raise RequestError(
            "continue_final_message: expected a chat template that writes the last message whole"
        )
    return before if after.startswith(MARK[len(mark) :]) else before.rstrip()


def _in_words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself, or lies in itself, too deeply"
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    text = str(error)[:500]
    return text if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}"


def _compile(source: str) -> Template:
    tree = ENVIRONMENT.parse(source)
    number = sum(1 for _ in tree.find_all(nodes.Node))
    if number > MOST_NODES:
        raise TemplateLimit(f"expected at most {MOST_NODES} parts of a template, got {number}")
    code = ENVIRONMENT.compile(_Counting(ENVIRONMENT).visit(tree))
    return Template.from_code(ENVIRONMENT, code, ENVIRONMENT.make_globals(None))


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's part: kept as is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Counting(NodeTransformer):
    """Puts the counting into a syntax tree: calls of filters that no template can name."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def _filtered(self, name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
        made = nodes.Filter(node, name, list(args), [], None, None)
        made.set_lineno(node.lineno)
        made.set_environment(self._environment)
        return made

    def _cost(self, body: list[nodes.Node]) -> nodes.Expr:
        parts = sum(1 for node in body for _ in node.find_all(nodes.Node))
        return self._filtered("@step", nodes.Const(1 + parts // NODES_PER_STEP))

    def _counted(self, body: list[nodes.Node]) -> list[nodes.Node]:
        return [nodes.ExprStmt(self._cost(body)), *body]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            node.test = nodes.And(self._cost([node.test]), node.test)
        node.body = self._counted(node.body)
        return self.generic_visit(node)

    def visit_Macro(self, node: Any) -> nodes.Node:
        node.body = self._counted(node.body)
        return self.generic_visit(node)

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._output(child) for child in node.nodes]
        return node

    def _output(self, child: nodes.Expr) -> nodes.Expr:
        if not isinstance(child, nodes.TemplateData):
            return self._filtered("@written", child)
        if len(child.data) <= SHORT_TEXT:
            return child
        return self._filtered("@written", nodes.Const(child.data))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        return self._filtered("@joined", first, *rest)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._read("@measured", node.expr)
        for operand in node.ops:
            name = "@searched" if operand.op in ("in", "notin") else "@measured"
            operand.expr = self._read(name, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._filtered("@settled", node)
        node.arg = self._read("@key", node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._read("@key", node.key)
        return node

    def _read(self, name: str, node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else self._filtered(name, node)

    def _refused(self, node: nodes.Node) -> nodes.Node:
        name = type(node).__name__.lower()
        raise TemplateSyntaxError(f"{name}: expected a template without it", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refused
    visit_ScopedEvalContextModifier = _refused  # {% autoescape %}


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of templates: what they may call is named, what it may cost is counted."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # would run parts of a template to compile it
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self.filters = {**FILTERS, **COUNTING}
        self.tests = dict(TESTS)
        self.globals = dict(GLOBALS)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """As ``map`` does, with a name that may be any text."""
        if name not in FILTERS:
            raise TemplateError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        return _StringFormat(value.__self__, is_map=value.__name__ == "format_map")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work = work_of(context)
        work.step()
        if operator == "%" and isinstance(left, str):
            return settled(work, percent(work, left, right))
        _ask(work, operator, left, right)
        return settled(work, super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        work = work_of(context)
        work.step(4 + (len(args) + len(kwargs)) // 8)
        if isinstance(obj, LoopContext | Macro | BlockReference | Joiner):
            work.step(4)
            return context.call(obj, *args, **kwargs)
        for name in CONTEXT_ARGUMENTS:
            kwargs.pop(name, None)
        if isinstance(obj, _StringFormat):
            return obj(self, work, *args, **kwargs)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, LoopContext | Cycler):
            return context.call(obj, *(measured(work, arg) for arg in args), **kwargs)
        if owner is None and any(obj is known for known in GLOBALS.values()):
            for arg in (*args, *kwargs.values()):
                work.scan(weigh(work, arg))
            return settled(work, obj(*args, **kwargs))
        for kind in type(owner).__mro__:
            bounded = METHODS.get((kind, getattr(obj, "__name__", "")))
            if bounded is not None:
                return settled(work, bounded(work, obj, *args, **kwargs))
        return self._refuse(obj)

    def _refuse(self, obj: Any) -> Any:
        if not callable(obj):
            raise TypeError(f"{type(obj).__name__!r} object is not callable")
        name = getattr(obj, "__name__", type(obj).__name__)
        raise SecurityError(f"{name} is not safely callable")


class _StringFormat:
    """``text.format`` or ``text.format_map`` of a template."""

    def __init__(self, text: str, *, is_map: bool) -> None:
        self._text = text
        self._is_map = is_map

    def __call__(self, environment: Any, work: Work, *args: Any, **kwargs: Any) -> str:
        if self._is_map:
            (kwargs,), args = args, ()
        work.scan(len(self._text))
        return Formatter(environment, work).vformat(str(self._text), args, kwargs)


def _ask(work: Work, operator: str, left: Any, right: Any) -> None:
    """Before an operator makes more than it is given."""
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(many, "__len__"):
                unit = 1 if isinstance(many, str) else ITEM
                work.expect(unit * len(many) * max(0, times))
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        work.expect(len(left) + len(right) * (1 if type(left) is type(right) else 6))
    if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
        product = max(0, right) if operator == "**" else 1
        added = right.bit_length() if operator == "*" else 0
        work.bits(left.bit_length() * product + added)


def _of_work(function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def counting(context: Context, value: Any, *args: Any) -> Any:
        return function(context.parent[WORK], value, *args)

    return counting


def _step(work: Work, count: int) -> bool:
    work.step(count)
    return True


def _joined(work: Work, *values: Any) -> str:
    texts = [work.written(value) for value in values]
    work.make(sum(map(len, texts)))
    return "".join(texts)


COUNTING = {
    "@step": _of_work(_step),
    "@written": _of_work(Work.written),
    "@joined": _of_work(_joined),
    "@measured": _of_work(measured),
    "@searched": _of_work(searched),
    "@key": _of_work(key),
    "@settled": _of_work(settled),
}


def _raise_exception(message: str) -> None:
    raise _Refusal(str(message)[:1000])


def _strftime_now(form: str) -> str:
    if len(form) > MOST_DATE_FORMAT:
        raise TemplateLimit(f"expected a date of {MOST_DATE_FORMAT} characters at most, got more")
    return datetime.now().strftime(form)


GLOBALS: dict[str, Any] = {
    "range": safe_range,
    "dict": dict,
    "namespace": Namespace,
    "cycler": Cycler,
    "joiner": Joiner,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
ENVIRONMENT = _ChatEnvironment()
