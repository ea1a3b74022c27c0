"""Renders chat templates as transformers does: a program that `isp.data.rendering` starts.

[Note: Bounds of a template] A chat template is a program that comes with a model or a data set.
Jinja's sandbox keeps it from files and from Python, not from endless loops, from strings of
terabytes or from powers that never end, most of which are one call into C that no thread can
interrupt. So templates run in a process of their own, whose CPU time and memory the kernel limits.
It imports nothing but the standard library and jinja2.

[Note: Marks] Which message a part of the text belongs to, and what stands in `{% generation %}`
blocks, is found by marks in the text, which are taken out of it: where a loop over messages begins
(`(`) and ends (`)`), where it takes up a message (its index), and around blocks (`g`, `e`).
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["render"]

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around a mark; Unicode keeps them for such internal use."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
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
    """Has `_Marks` told of each loop, and of each item that it takes up."""

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


class _PublicNamespace(Namespace):
    """A namespace without names that Python itself uses."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the name {name}")
        super().__setitem__(name, value)


class _Dict:
    """`dict` without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _mark(what: str) -> str:
    return f"{_OPEN}{what}{_CLOSE}"


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache
def _compiled(text: str) -> tuple[Template, _Marks]:
    """A template in transformers' environment. Source: its utils/chat_template_utils.py."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _PublicNamespace,
    }
    marks = next(x for x in environment.extensions.values() if isinstance(x, _Marks))
    tree = _MarkLoops(marks).visit(environment.parse(text))
    tree.set_environment(environment)
    code = environment.compile(tree)
    return Template.from_code(environment, code, environment.globals), marks


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any],
    marks: bool = False,
) -> tuple[str, list[tuple[int, str]]]:
    """The text of a conversation, and with `marks` where in it which stands: [Note: Marks]."""
    compiled, marking = _compiled(template)
    seen = [dict(_with_reasoning(message)) for message in messages]
    marking.begin(seen if marks else None)
    rendered = compiled.render(messages=seen, **variables)
    if not marks:
        return rendered, []
    first, *rest = rendered.split(_OPEN)
    text, found = [first], []
    end = len(first)
    for piece in rest:
        mark, _, after = piece.partition(_CLOSE)
        found.append((end, mark))
        text.append(after)
        end += len(after)
    return "".join(text), found


def _with_reasoning(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A message as templates know it: without null, and its reasoning under all of its names."""
    given = {name: value for name, value in message.items() if value is not None}
    found = next((given[name] for name in _REASONING if name in given), None)
    if found is not None:
        given = {"thinking": found, **given, "reasoning_content": found}
    yield from given.items()


def _answer(request: Mapping[str, Any], max_characters: int) -> dict[str, Any]:
    try:
        text, marks = render(**request)
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except TemplateError as error:
        return {"error": error.message or type(error).__name__}
    except RecursionError:
        return {"error": "it calls itself too often, or is nested too deeply"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # A template can make Python raise whatever it likes.
        return {"error": f"{type(error).__name__}: {error}"}
    if len(text) > max_characters:
        return {"error": f"it writes {len(text):,} characters, more than {max_characters:,}"}
    return {"text": text, "marks": marks}


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main(seconds: int, memory_bytes: int, max_characters: int) -> None:
    """Answer requests, a line of JSON each: `seconds` of CPU for one, `memory_bytes` for all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever started it ends it.
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory_bytes)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
        try:
            answer = json.dumps(_answer(json.loads(line), max_characters))
        except (MemoryError, RecursionError):
            answer = json.dumps({"error": "it needs too much memory"})
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
