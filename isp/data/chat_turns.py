"""The assistant's part of a rendered conversation.

[Note: Assistant's tokens] A template marks what the assistant writes with `{% generation %}`. In
one that does not, a turn is all that the template writes of an assistant's message, without the
generation prompt, as far as the message begins with it; reasoning that the prompt begins is the
turn's. The last turn has the token that the template writes after all messages, too (Phi-3's end
of text). That is what TRL's training templates mark (TRL 1.16), except for `_HEADERS`. Where a
message stands in the text of the whole conversation is known from marks: [Note: Marks]. So a
template may render earlier turns differently, trim them or remove their reasoning: the loss is
computed on a turn as it is rendered. A message whose place is not known is refused.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from isp.data.rendering import Rendered, TemplateFailure, render
from isp.data.tokenizer import HFTokenizer

__all__ = ["Conversation", "Span", "TurnNotFound"]


def _before_reasoning(prompt: str) -> str:
    return prompt.partition("<think>")[0]


def _none_of(prompt: str) -> str:
    return ""


_HEADERS: Mapping[str, Callable[[str], str]] = {
    "55b2f4a2": str.rstrip,  # Qwen2.5: the line feed at its end is the turn's
    "563b1ce7": _none_of,  # DeepSeek V3: all of it is the turn's
    "56a1447a": _none_of,  # DeepSeek R1, distilled
    "6cd0e94d": _none_of,  # Muse Glimmer
    "a4c9919c": _none_of,  # gpt-oss
}
"""The part of the generation prompt that is not the turn's, where TRL has it otherwise.

By the first digits of the SHA-256 of the template; `tools/check_masks_with_trl.py --digests`.
"""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


class TurnNotFound(Exception):
    """An assistant's message whose tokens cannot be found."""


class _Places(NamedTuple):
    """Where in a text which of its parts stand."""

    messages: dict[int, list[Span]]
    """Of each message by its index; parts that are white space are left out."""
    blocks: list[Span]
    """Generation blocks."""
    tail: str
    """What follows the messages."""

    @classmethod
    def of(cls, rendered: Rendered) -> "_Places":
        """By [Note: Marks]."""
        text, messages, blocks = rendered.text, dict[int, list[Span]](), list[Span]()
        loops, owner, begin, last, opened = list[int | None](), None, 0, 0, list[int]()
        for place, mark in rendered.marks:
            if mark == "g":
                opened.append(place)
                continue
            if mark == "e":
                blocks.append((opened.pop(), place))
                continue
            if owner is not None and text[begin:place].strip():
                spans = messages.setdefault(owner, [])
                if spans and spans[-1][1] == begin:
                    begin = spans.pop()[0]
                spans.append((begin, place))
                last = place
            if mark == "(":
                loops.append(owner)
            else:
                owner = loops.pop() if mark == ")" else int(mark)
            begin = place
        return cls(messages, blocks, text[last:])


class Conversation(NamedTuple):
    """One conversation and the template that renders it."""

    tokenizer: HFTokenizer
    template: str
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    names: re.Pattern[str]
    """Where a generation prompt may go on otherwise than a message: a token's name."""
    last_only: bool = False
    """Whether the assistant's last message alone is trained."""

    def spans(self) -> tuple[str, list[Span], list[Span]]:
        """The text, what of it the assistant writes, and what has no loss all the same."""
        text, marked = self.render().text, self.render(marks=True)
        places = _Places.of(marked)
        if marked.text != text:
            raise TurnNotFound("the chat template changes what its loops and blocks write")
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        others = turns[:-1] if self.last_only else []
        left_out = [i for i in turns if i in others or self.messages[i].get("weight") == 0]
        is_marked = _GENERATION.search(_COMMENT.sub("", self.template)) is not None
        # What stands before the first turn, such as a system message, is in no turn's text.
        expected = left_out if is_marked else range(turns[0] if turns else 0, len(self.messages))
        for i in expected:
            parts = places.messages.get(i, [])
            if not parts or (i in turns and len(parts) > 1):
                raise TurnNotFound(
                    f"message {i + 1} has no place of its own in what the chat template renders"
                )
        if is_marked:
            return text, places.blocks, [part for i in left_out for part in places.messages[i]]
        turns = [i for i in turns if i not in left_out]
        return text, [self._turn(i, text, places.messages[i][0]) for i in turns], []

    def _turn(self, turn: int, text: str, span: Span) -> Span:
        """Return the turn without the generation prompt, and with what ends it."""
        start, end = span
        prompt = text[start : start + self._length_of_prompt(turn, text[start:end])]
        digest = hashlib.sha256(self.template.strip().encode()).hexdigest()[:8]
        start += len(_HEADERS.get(digest, _before_reasoning)(prompt))
        special = self.tokenizer.special_tokens()
        after = text[end:].strip()
        if turn == len(self.messages) - 1 and (not after or after in special):
            return start, len(text)
        if text[start:end].rstrip().endswith(special):
            return start, end
        # Where each role's token ends what is before it (GLM), that is the next message's.
        first = self.variables.get("bos_token")
        ends = [token for token in special if token != first and text.startswith(token, end)]
        return start, end + max(map(len, ends), default=0)

    def _length_of_prompt(self, turn: int, written: str) -> int:
        """The characters with which a message begins as the generation prompt before it does."""
        first = self.variables.get("bos_token", "")
        begin = len(written) - len(written.removeprefix(first).lstrip())
        refused = TemplateFailure("")
        for stop in (turn, len(self.messages)):
            try:
                prompt = self._prompt(stop).removeprefix(first).lstrip()
            except TemplateFailure as error:  # Some want a user's message, or one of the user last.
                refused = error
                continue
            cuts = {len(prompt), *(m.start() for m in self.names.finditer(prompt))} - {0}
            found = [cut for cut in cuts if written.startswith(prompt[:cut], begin)]
            if not prompt or found:
                return begin + max(found) if found else 0
        reason = str(refused) and f" ({refused})"
        raise TurnNotFound(
            f"message {turn + 1}: the chat template does not begin it as the generation prompt"
            f" does{reason}"
        )

    def _prompt(self, stop: int) -> str:
        """The generation prompt after the first messages."""
        text = self.render(stop).text
        asked = self.render(stop, marks=True, add_generation_prompt=True)
        if asked.text.startswith(text):
            return asked.text[len(text) :]
        return _Places.of(asked).tail

    def render(
        self, stop: int | None = None, *, marks: bool = False, add_generation_prompt: bool = False
    ) -> Rendered:
        """The first `stop` messages as text, with [Note: Marks] if `marks`."""
        variables = {**self.variables, "add_generation_prompt": add_generation_prompt}
        messages = [{k: m[k] for k in m if k != "weight"} for m in self.messages[:stop]]
        return render(self.template, messages, variables=variables, marks=marks)
