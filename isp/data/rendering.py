"""Chat templates rendered in a process with limits: [Note: Bounds of a template]."""

import json
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Rendered", "Renderer", "TemplateFailure"]

_WORKER = Path(__file__).with_name("jinja_worker.py")
_MEMORY_BYTES = 1 << 30
_MAX_CHARACTERS = 1 << 24
"""Of a rendered conversation."""
_NO_CHARACTER = re.compile(r"[\ud800-\udfff\ufdd0\ufdd1]")
"""Half of a surrogate pair, which JSON can escape, and what [Note: Marks] uses."""
_SHOWN_CHARACTERS = 300
"""Of a template's error."""


class TemplateFailure(ValueError):
    """What is wrong with a template, or why it refuses a conversation: a printable line."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marks: list[tuple[int, str]]
    """Places in it, and what stands there: [Note: Marks]."""


class Renderer:
    """A process that renders chat templates; it begins with the first of them.

    `seconds`: of CPU time for one conversation.
    """

    def __init__(self, *, seconds: int = 10) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        marks: bool = False,
    ) -> Rendered:
        """The text of a conversation.

        Raises TemplateFailure, also where the template takes too much time or memory.
        """
        request = {
            "template": template,
            "messages": messages,
            "variables": variables,
            "marks": marks,
        }
        try:
            line = json.dumps(request)
        except RecursionError:
            raise TemplateFailure("the conversation is nested too deeply") from None
        reply = self._ask(line)
        if "error" in reply:
            raise TemplateFailure(_printable(reply["error"]))
        if found := _NO_CHARACTER.search(reply["text"]):
            raise TemplateFailure(f"it contains U+{ord(found[0]):04X}, which is no character")
        return Rendered(reply["text"], [(place, mark) for place, mark in reply["marks"]])

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(line, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            reply: dict[str, Any] = json.loads(answer)
            return reply
        self._process = None
        code = process.wait()
        if code == -signal.SIGXCPU:
            raise TemplateFailure(f"it takes more than {self._seconds} seconds of CPU time")
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise TemplateFailure(f"the process that renders it ended with {name}")

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            limits = map(str, (self._seconds, _MEMORY_BYTES, _MAX_CHARACTERS))
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _printable(text: str) -> str:
    """One line without what a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
