"""Chat templates, rendered as transformers does, and the places of messages in the text.

[Note: Marks] Which message a part of the text belongs to, and what stands in `{% generation %}`
blocks, is found by marks in the text, which are taken out of it: where a loop over messages begins
(`(`) and ends (`)`), where it takes up a message (its index), and around blocks (`g`, `e`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from isp.utils.limits import limited

__all__ = ["REASONING", "Named", "Rendered", "TemplateFailure", "named_in", "render"]

_NO_CHARACTER = re.compile(r"[\ud800-\udfff\ufdd0\ufdd1]")
"""Half of a surrogate pair, which JSON can escape, and what [Note: Marks] uses."""
_SHOWN_CHARACTERS = 300
"""Of a template's error."""

_MOST_SECONDS = 20.0
"""Limit of one rendering: a conversation of a million tokens takes less than one."""
_MOST_BYTES = 2**30
"""Limit of the memory that one rendering takes."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around a mark; Unicode keeps them for such internal use."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names that reasoning goes by; templates read the first, gpt-oss the second."""


class _Marks(Extension):
    """Generation blocks, and [Note: Marks] where `messages` are set."""

    tags = {"generation"}  # noqa: RUF012
    messages: Sequence[Any] | None = None

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def begin(self, messages: Sequence[Any] | None) -> None:
        """Begin a rendering of these messages, or one without marks."""
        self.messages = messages
        self._loops: list[bool] = []

    def _block(self, caller: Macro) -> str:
        text = caller()
        return text if self.messages is None else f"{_mark('g')}{text}{_mark('e')}"

    def _enter(self) -> str:
        self._loops.append(False)
        return ""

    def _take(self, item: object) -> str:
        found = (i for i, message in enumerate(self.messages or ()) if message is item)
        if (index := next(found, None)) is None:
            return ""
        begin, self._loops[-1] = "" if self._loops[-1] else _mark("("), True
        return begin + _mark(str(index))

    def _leave(self) -> str:
        return _mark(")") if self._loops.pop() else ""


class _MarkLoops(NodeTransformer):
    """Calls `_Marks` at the bounds of each loop, and for each item."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        if isinstance(node.target, nodes.Name):
            item = nodes.Name(node.target.name, "load")
            node.body.insert(0, self._output("_take", item))
        return [self._output("_enter"), node, self._output("_leave")]

    def _output(self, method: str, *arguments: nodes.Expr) -> nodes.Output:
        return nodes.Output([self._marks.call_method(method, list(arguments))])


def _mark(what: str) -> str:
    return f"{_OPEN}{what}{_CLOSE}"


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


class Named(NamedTuple):
    """Names in a template."""

    roles: frozenset[str]
    """Texts that it compares a role with."""
    words: frozenset[str]
    """Variables, attributes, and texts in expressions."""


@lru_cache
def named_in(template: str) -> Named:
    """Return the names in a template; none in one that cannot be parsed, which `render` refuses."""
    try:
        tree = _environment().parse(template)
    except (TemplateSyntaxError, RecursionError):
        return Named(frozenset(), frozenset())
    roles = set[str]()
    for compared in tree.find_all(nodes.Compare):
        sides = [compared.expr, *(operand.expr for operand in compared.ops)]
        others = [side for side in sides if not _is_role(side)]
        if len(others) < len(sides):
            roles.update(*map(_texts, others))
    words = _texts(tree) | {node.name for node in tree.find_all(nodes.Name)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return Named(frozenset(roles), frozenset(words))


def _texts(node: nodes.Node) -> set[str]:
    """Return the texts in an expression, or the one that it is."""
    found = (node, *node.find_all(nodes.Const))
    return {x.value for x in found if isinstance(x, nodes.Const) and isinstance(x.value, str)}


def _is_role(node: nodes.Expr) -> bool:
    """Tell whether an expression is `role`, `message.role` or `message['role']`."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    return isinstance(node, nodes.Name) and node.name == "role"


def _environment() -> ImmutableSandboxedEnvironment:
    """Return transformers' environment. Source: its utils/chat_template_utils.py."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols]
    )


@lru_cache
def _compiled(text: str) -> tuple[Template, _Marks]:
    """Return a template that can be rendered, and its marks."""
    environment = _environment()
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(str(form)),
    }
    marks = next(x for x in environment.extensions.values() if isinstance(x, _Marks))
    tree = _MarkLoops(marks).visit(environment.parse(text))
    tree.set_environment(environment)
    code = environment.compile(tree)
    return Template.from_code(environment, code, environment.globals), marks


class TemplateFailure(ValueError):
    """What is wrong with a template, or why it refuses a conversation: a printable line."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marks: list[tuple[int, str]]
    """Places in it, and what stands there: [Note: Marks]."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any],
    marks: bool = False,
) -> Rendered:
    """The text of a conversation, with [Note: Marks] if `marks`.

    Raises TemplateFailure. Jinja's sandbox keeps a template from files and from Python.
    """
    seen = [_with_reasoning(message) for message in messages]
    try:
        with limited("it", seconds=_MOST_SECONDS, most_bytes=_MOST_BYTES):
            rendered = _rendered(template, seen, variables, marks=marks)
    except TemplateFailure:
        raise
    except ValueError as error:
        raise _failure(str(error)) from None
    first, *rest = rendered.split(_OPEN) if marks else [rendered]
    text, found, end = [first], [], len(first)
    for piece in rest:
        mark, _, after = piece.partition(_CLOSE)
        found.append((end, mark))
        text.append(after)
        end += len(after)
    if odd := _NO_CHARACTER.search("".join(text)):
        raise _failure(f"it contains U+{ord(odd[0]):04X}, which is not a character")
    return Rendered("".join(text), found)


def _rendered(
    template: str, messages: Sequence[Any], variables: Mapping[str, Any], *, marks: bool
) -> str:
    """The text of `render` with its marks.  Raises TemplateFailure, or MemoryError."""
    try:
        compiled, marking = _compiled(template)
        marking.begin(messages if marks else None)
        return compiled.render(messages=messages, **variables)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        raise _failure(f"line {error.lineno}: {error.message}") from None
    except TemplateError as error:
        raise _failure(error.message or type(error).__name__) from None
    except RecursionError:
        raise _failure("it recurses too deeply") from None
    except Exception as error:  # A template can make Python raise whatever it likes.
        raise _failure(f"{type(error).__name__}: {error}") from None


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates know it: with its reasoning under all of its names."""
    found = next((message[name] for name in REASONING if name in message), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def _failure(text: str) -> TemplateFailure:
    """One line without what a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    cut = line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
    return TemplateFailure(cut)
