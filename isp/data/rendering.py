"""`render`: renders chat templates as transformers does, and finds where messages are in the text.

Marks in the text show it, which are removed after. See [Note: Marks] in docs/design/notes/data.md.
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
"""Halves of surrogate pairs, which JSON can escape, and the delimiters of marks [Note: Marks]."""
_SHOWN_CHARACTERS = 300
"""Number of characters to which an error of a template is cut."""

_MOST_SECONDS = 20.0
"""Time limit of a rendering; a conversation of a million tokens takes less than a second."""
_MOST_BYTES = 2**30
"""Memory limit of a rendering."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Delimiters of a mark: noncharacters, which Unicode reserves for internal use in programs."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that data sets have for reasoning in a message. Templates read the first, gpt-oss's the
second."""


class _Marks(Extension):
    """Jinja extension that adds `{% generation %}`, and writes marks into the rendered text.

    A mark is a short string between two noncharacters. It shows where a loop over messages, one
    message, or a generation block begins or ends in the text; `render` removes it afterwards. One
    object serves all renderings of a template, so `begin` has to be called before each, and says
    whether marks are written. See [Note: Marks] in docs/design/notes/data.md.
    """

    tags = {"generation"}  # noqa: RUF012
    messages: Sequence[Any] | None = None

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a generation block: return a node that calls `_block` with the block's body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def begin(self, messages: Sequence[Any] | None) -> None:
        """Prepare for a rendering; call it before each.

        `messages`: the messages that are rendered, so that marks show where each is in the text;
        None: write no marks.
        """
        self.messages = messages
        # One bool for each template loop that is running, the innermost last: True if an item of
        # the loop so far was a message.
        self._loops: list[bool] = []

    def _block(self, caller: Macro) -> str:
        """Return the text of a generation block, with marks where it begins and ends.

        The template calls it where the block is; `caller` renders the block's body.
        """
        text = caller()
        return text if self.messages is None else f"{_mark('g')}{text}{_mark('e')}"

    def _enter(self) -> str:
        """Note that a loop of the template begins; called before each loop.

        Returns "", so it writes no mark: only an item shows whether the loop is over messages.
        """
        self._loops.append(False)
        return ""

    def _take(self, item: object) -> str:
        """Return the text to write before an item of a loop; called for each item.

        For a message it is the mark with the message's index; for the first message of a loop, the
        mark of the loop's begin comes before that. For other items it is "".
        """
        # Compare by identity: two messages may be equal.
        found = (i for i, message in enumerate(self.messages or ()) if message is item)
        if (index := next(found, None)) is None:
            return ""
        begin, self._loops[-1] = "" if self._loops[-1] else _mark("("), True
        return begin + _mark(str(index))

    def _leave(self) -> str:
        """Note that a loop of the template has ended; called after each loop.

        Returns the mark of the loop's end, or "" if none of its items was a message.
        """
        return _mark(")") if self._loops.pop() else ""


class _MarkLoops(NodeTransformer):
    """Changes a parsed template so that its loops write marks.

    Each loop calls methods of `_Marks` before it, for each item, and after it.
    """

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        """Return the nodes that replace the loop `node`: `_enter`, the loop, and `_leave`.

        In the loop's body, `_take` is called first for each item.
        """
        self.generic_visit(node)  # also change the loops inside of this one
        if isinstance(node.target, nodes.Name):
            item = nodes.Name(node.target.name, "load")
            node.body.insert(0, self._output("_take", item))
        return [self._output("_enter"), node, self._output("_leave")]

    def _output(self, method: str, *arguments: nodes.Expr) -> nodes.Output:
        """Return a node that calls a method of `_Marks`, and writes its result into the text."""
        return nodes.Output([self._marks.call_method(method, list(arguments))])


def _mark(what: str) -> str:
    """Return the text of the mark `what` (`(`, `)`, `g`, `e` or an index) with its delimiters."""
    return f"{_OPEN}{what}{_CLOSE}"


def _raise_exception(message: object) -> None:
    """Raise TemplateError; templates call it to refuse a conversation."""
    raise TemplateError(str(message))


class Named(NamedTuple):
    """Names in the code of a template, which show what it reads."""

    roles: frozenset[str]
    """Strings that the template compares with a role."""
    words: frozenset[str]
    """Names of variables and attributes, and strings in expressions."""


@lru_cache
def named_in(template: str) -> Named:
    """Return the names in a template; none if it cannot be parsed, since `render` will raise."""
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
    """Return all strings in a template's expression, also if it consists of one string."""
    found = (node, *node.find_all(nodes.Const))
    return {x.value for x in found if isinstance(x, nodes.Const) and isinstance(x.value, str)}


def _is_role(node: nodes.Expr) -> bool:
    """Return True if an expression reads a role: `role`, `message.role` or `message['role']`."""
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    return isinstance(node, nodes.Name) and node.name == "role"


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment as in transformers, utils/chat_template_utils.py, plus marks."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols]
    )


@lru_cache
def _compiled(text: str) -> tuple[Template, _Marks]:
    """Return the compiled template, and the extension that writes marks in its renderings."""
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
    """A template is invalid, or refuses a conversation; the text of the error is one line."""


class Rendered(NamedTuple):
    """A conversation as text, without the marks."""

    text: str
    marks: list[tuple[int, str]]
    """Each mark (where a loop, a message or a generation block begins or ends) with the index in
    `text` at which it was; empty if no marks were asked for. See [Note: Marks]."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any],
    marks: bool = False,
) -> Rendered:
    """Return the text of a conversation, and if `marks`, where its messages are.

    The template runs in Jinja's sandbox, without access to files or Python's attributes, and within
    limits of time and memory. Raises TemplateFailure if it fails or refuses the conversation.
    """
    seen = [_with_reasoning(message) for message in messages]
    try:
        # An error then reads: the chat template cannot render the conversation: it takes more ..
        with limited("it", seconds=_MOST_SECONDS, most_bytes=_MOST_BYTES):
            rendered = _rendered(template, seen, variables, marks=marks)
    except TemplateFailure:
        raise
    except ValueError as error:
        raise _failure(str(error)) from None
    # Remove the marks; `end` is the length of the text so far, without marks.
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
    """Return the text of a conversation; if `marks`, with the marks still in it.

    Raises TemplateFailure or MemoryError.
    """
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
    except Exception as error:  # an expression in a template can raise any exception of Python
        raise _failure(f"{type(error).__name__}: {error}") from None


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message, with its reasoning under all keys that templates read."""
    found = next((message[name] for name in REASONING if name in message), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def _failure(text: str) -> TemplateFailure:
    """Return a TemplateFailure with `text` as one short line, without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    cut = line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
    return TemplateFailure(cut)
