"""Conversations to tokens by a tokenizer's chat template, and the assistant's tokens among them.

Tokens are found by the characters they stand for, since transformers' own mask leaves out all but
the first of the tokens of a character that ends a block.

[Note: Assistant's tokens] A template marks what the assistant writes with `{% generation %}`. In
one that does not, a turn is all that the template writes of an assistant's message, without the
generation prompt, as far as the message begins with it; reasoning that the prompt begins is the
turn's. The last turn has the token that the template writes after all messages, too (Phi-3's end
of text). That is what TRL's training templates mark (TRL 1.16), except for `_HEADERS`. Where a
message stands in the text of the whole conversation is known from marks: [Note: Marks]. So a
template may render earlier turns differently, trim them or remove their reasoning: the loss is
computed on a turn as it is rendered. A message whose place is not known is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isp.config.data import BYTE_TOKENIZER, TrainOn
from isp.data.dataset import IGNORE_INDEX
from isp.data.rendering import Rendered, TemplateFailure, named_in, render
from isp.data.tokenizer import Encoding, HFTokenizer, TokenArray, Tokenizer
from isp.data.turns import Arguments, read_turns, unnamed_keys
from isp.utils.files import check_regular_files, read_limited
from isp.utils.packages import require

__all__ = ["ChatTemplate", "Example"]

_WAY_OUT = (
    "mark what the assistant writes with {% generation %} and {% endgeneration %} in a copy of the"
    " template, and name the copy with data.chat_template (--chat-template)"
)

Messages = Sequence[Mapping[str, Any]]
Tools = list[dict[str, Any]] | None
Variables = Mapping[str, Any] | None


class Example(NamedTuple):
    """Tokens, and of each its label: itself where it is trained, else -100.

    Labels are not shifted, as in the datasets of Hugging Face.
    """

    tokens: TokenArray  # [T]
    labels: TokenArray  # [T]


class ChatTemplate:
    """The template of a tokenizer's folder, or that of the file `path`.

    `train_on`: the tokens of a conversation that get labels.
    Raises ValueError or FileNotFoundError where there is none, or transformers is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        path: str | None = None,
        *,
        train_on: TrainOn = TrainOn.ASSISTANT,
    ) -> None:
        if not isinstance(tokenizer, HFTokenizer):
            raise ValueError(
                f"data.tokenizer={BYTE_TOKENIZER} has no chat template, which messages need: name"
                " the folder of a Hugging Face tokenizer"
            )
        self._tokenizer, self._train_on = tokenizer, train_on
        self._fast = _load(tokenizer.file)
        self._given = None if path is None else _read(Path(path).expanduser())
        names = {"<think>", *tokenizer.added_tokens()}
        self._names = re.compile("|".join(map(re.escape, sorted(names))))
        self._template(None)

    def example(
        self, messages: Messages, where: str, *, tools: Tools = None, variables: Variables = None
    ) -> Example:
        """A conversation of `role` and `content`; `where` names its place in messages.

        `tools` and `variables` are what the template sees besides.
        Raises ValueError for what is not a conversation, or is refused by the template.
        """
        with _refused_at(where):
            chat = self._chat(messages, tools, variables)
            if self._train_on is TrainOn.ALL:
                text, left_out = _without_weights(chat).text, list[_Span]()
                spans = [(0, len(text))]
            else:
                text, spans, left_out = chat.spans()
            encoding = self._tokenizer.encode_with_offsets(text)
        trained = _covered(encoding, spans) & ~_covered(encoding, left_out)
        labels = np.where(trained, encoding.tokens, IGNORE_INDEX)
        return Example(encoding.tokens, labels.astype(np.int32))

    def tokens(
        self,
        messages: Messages,
        where: str,
        *,
        num_prompt: int,
        tools: Tools = None,
        variables: Variables = None,
    ) -> TokenArray:
        """Return the tokens of `num_prompt` messages and an answer, which is trained as a whole.

        Raises ValueError as `example` does, and for a weight that says otherwise.
        """
        with _refused_at(where):
            chat = self._chat(messages, tools, variables)
            for number, message in enumerate(chat.messages, start=1):
                is_answer = number > num_prompt and message["role"] == "assistant"
                if message.get("weight", is_answer) != is_answer:
                    raise ValueError(
                        f"message {number} has the weight {message['weight']}, but the loss is"
                        " computed on the answer, all of it: leave the weight out, or write"
                        " 'messages'"
                    )
            text = chat.render().text
            return self._tokenizer.encode(text)

    def unnamed(
        self, messages: Messages, *, tools: Tools = None, variables: Variables = None
    ) -> set[str]:
        """Return what of a conversation the template does not name, in words."""
        named = named_in(self._template(tools))
        found = {f"{key} of messages" for key in unnamed_keys(read_turns(messages, named), named)}
        beside = {"tools": tools, **({} if variables is None else variables)}
        return found | {key for key, x in beside.items() if x is not None} - named.words

    def prompt(
        self, messages: Messages, where: str, *, tools: Tools = None, variables: Variables = None
    ) -> str:
        """A conversation as text, with the generation prompt at its end: the assistant is next.

        Raises ValueError as `example` does, and where the assistant has spoken last.
        """
        with _refused_at(where):
            chat = self._chat(messages, tools, variables)
            if chat.messages[-1]["role"] == "assistant":
                raise ValueError(
                    "its last message is the assistant's: leave it out, it is to be generated"
                )
            return chat.render(add_generation_prompt=True).text

    def turn_end(self) -> int | None:
        """The token that ends the assistant's turn; None if none does, or it is not known."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            tokens, labels = self.example(talk, "")
        except ValueError:
            return None
        found: int | None = None  # the last of the special tokens right behind the message
        begins = True
        special = {self._tokenizer.token_id(name) for name in self._tokenizer.special_tokens()}
        for token in tokens[labels != IGNORE_INDEX].tolist()[::-1]:
            if token in special:
                found, begins = token if begins else found, False
            elif self._tokenizer.decode(np.array([token])).strip():
                break
            else:  # white space
                begins = True
        return found

    def _chat(self, messages: Messages, tools: Tools, variables: Variables) -> _Conversation:
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise TemplateFailure("'tools' is not a list of objects (JSON schemas)")
        variables = {} if variables is None else variables
        if not isinstance(variables, dict):
            raise TemplateFailure("'chat_template_kwargs' is not an object")
        template = self._template(tools)
        if reserved := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise TemplateFailure(f"its variables cannot have the name {min(reserved)}")
        named = named_in(template)
        chat = _Conversation(
            self._tokenizer,
            template,
            read_turns(messages, named),
            {
                "documents": None,
                **self._fast.special_tokens_map,
                **variables,
                "tools": tools,
                "add_generation_prompt": False,
            },
            self._names,
            self._train_on is TrainOn.LAST,
        )
        return _written(chat, read_turns(messages, named, parses=False))

    def _template(self, tools: Tools) -> str:
        if self._given is not None:
            return self._given
        try:
            template: str = self._fast.get_chat_template(None, tools)
        except ValueError:  # Its own message speaks of arguments that nobody here can give.
            raise ValueError(
                f"data.tokenizer={self._tokenizer.file} has no chat template (chat_template.jinja,"
                " or chat_template in tokenizer_config.json, beside it), which messages need: name"
                " a file with data.chat_template (--chat-template)"
            ) from None
        return template


def _written(chat: _Conversation, given: Sequence[Mapping[str, Any]]) -> _Conversation:
    """Return a conversation that the template writes as a whole; ValueError if it does not.

    `given`: its messages, with arguments as text where they were given so. Some templates
    (DeepSeek's) add texts by `+`, which fails with objects.
    """
    if not any("tool_calls" in m or m["role"] == "system" for m in chat.messages):
        return chat
    try:
        text = chat.render().text
    except TemplateFailure as failure:
        try:
            chat = chat._replace(messages=given)
            text = chat.render().text
        except TemplateFailure:
            raise failure from None
    lost = _lost(chat, text, _with_name)
    if any("tool call" in what for what in lost):
        # Some templates (Kimi K2's) write the id in place of the name. A template that refuses
        # another id or other arguments has not been seen to write the call.
        with suppress(TemplateFailure):
            found = _lost(chat, text, _with_id_and_arguments)
            lost = [what for what in lost if what in found]
    if lost:
        raise ValueError(
            f"{lost[0]} is not in what the chat template writes: name another template with"
            " data.chat_template (--chat-template)"
        )
    return chat


def _lost(
    chat: _Conversation, text: str, with_mark: Callable[[dict[str, Any], str], dict[str, Any]]
) -> list[str]:
    """Return which system messages, and tool calls `with_mark`, the template does not write.

    Marks are found nowhere else: a list of tools has the names of their calls, and results have
    their ids.
    """
    marked, marks = list[Mapping[str, Any]](), dict[str, str]()
    for number, message in enumerate(chat.messages, start=1):
        content, calls = message.get("content"), list[dict[str, Any]]()
        if message["role"] == "system" and isinstance(content, str) and content.strip() not in text:
            mark = f"isp{len(marks):06}"
            marks[mark], message = f"message {number} (system)", {**message, "content": mark}
        for i, call in enumerate(message.get("tool_calls", [])):
            mark = f"isp{len(marks):06}"  # nine letters and digits, as Mistral's ids
            marks[mark] = f"message {number}: tool call {i + 1}"
            calls.append(with_mark(call, mark))
        marked.append({**message, "tool_calls": calls} if calls else message)
    if not marks:
        return []
    text = chat._replace(messages=marked).render().text
    return [what for mark, what in marks.items() if mark not in text]


def _with_name(call: dict[str, Any], mark: str) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": {**call["function"], "name": mark}}
    return {**call, "name": mark}


def _with_id_and_arguments(call: dict[str, Any], mark: str) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        call = {**call, "function": _with_id_and_arguments(function, mark)}
    if "id" in call:
        call = {**call, "id": mark}
    if "arguments" not in call:
        return call
    given = call["arguments"]
    values = json.loads(given or "{}") if isinstance(given, str) else given
    if not isinstance(values, dict):
        return call
    values = {key: mark if isinstance(x, str) else x for key, x in values.items()} | {mark: mark}
    text = json.dumps(values)
    return {**call, "arguments": text if isinstance(given, str) else Arguments(values, text)}


def _without_weights(chat: _Conversation) -> Rendered:
    """The text of a conversation that is trained as a whole; ValueError if it says otherwise."""
    for number, message in enumerate(chat.messages, start=1):
        if message.get("weight") == 0:
            raise ValueError(
                f"message {number} has the weight 0, and data.train_on=all trains every token: use"
                " data.train_on=assistant"
            )
    return chat.render()


def _covered(encoding: Encoding, spans: Sequence[_Span]) -> npt.NDArray[np.bool_]:
    """The tokens [T] that stand for a character of one of `spans`."""
    # Some tokenizers leave white space out of a token's place: it begins where the last one ended.
    starts = np.minimum(encoding.starts, np.append(0, encoding.ends[:-1])[: len(encoding.starts)])
    covered = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        covered |= (encoding.ends > start) & (starts < end)
    return covered


@contextmanager
def _refused_at(where: str) -> Iterator[None]:
    """Begin errors about a conversation with its place."""
    try:
        yield
    except TemplateFailure as error:
        fault = f"the chat template cannot render the conversation: {error}"
        raise ValueError(f"{where}: {fault}") from None
    except _TurnNotFound as error:
        raise ValueError(f"{where}, {error}: {_WAY_OUT}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _load(file: Path) -> Any:
    """transformers' tokenizer of a folder; ValueError where the package is missing."""
    require(f"the chat template of data.tokenizer={file}", "transformers")
    from transformers import PreTrainedTokenizerFast

    try:
        check_regular_files(file.parent)
        return PreTrainedTokenizerFast.from_pretrained(file.parent, local_files_only=True)
    except Exception as error:  # It raises whatever the files make it do.
        raise ValueError(
            f"data.tokenizer={file}: transformers cannot open its folder: {error}"
        ) from None


def _read(path: Path) -> str:
    try:
        return read_limited(path).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"data.chat_template={path} cannot be read: {error}") from None


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

_Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


class _TurnNotFound(Exception):
    """An assistant's message whose tokens cannot be found."""


class _Places(NamedTuple):
    """Where in a text which of its parts stand."""

    messages: dict[int, list[_Span]]
    """Of each message by its index; parts that are white space are left out."""
    blocks: list[_Span]
    """Generation blocks."""
    tail: str
    """What follows the messages."""

    @classmethod
    def of(cls, rendered: Rendered) -> _Places:
        """By [Note: Marks]."""
        text, messages, blocks = rendered.text, dict[int, list[_Span]](), list[_Span]()
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


class _Conversation(NamedTuple):
    """One conversation and the template that renders it."""

    tokenizer: HFTokenizer
    template: str
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    names: re.Pattern[str]
    """Where a generation prompt may go on otherwise than a message: a token's name."""
    last_only: bool = False
    """Whether the assistant's last message alone is trained."""

    def spans(self) -> tuple[str, list[_Span], list[_Span]]:
        """The text, what of it the assistant writes, and what has no loss all the same."""
        text, marked = self.render().text, self.render(marks=True)
        places = _Places.of(marked)
        if marked.text != text:
            raise _TurnNotFound("the chat template changes what its loops and blocks write")
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        others = turns[:-1] if self.last_only else []
        left_out = [i for i in turns if i in others or self.messages[i].get("weight") == 0]
        is_marked = _GENERATION.search(_COMMENT.sub("", self.template)) is not None
        # What stands before the first turn, such as a system message, is in no turn's text.
        expected = left_out if is_marked else range(turns[0] if turns else 0, len(self.messages))
        for i in expected:
            parts = places.messages.get(i, [])
            if not parts or (i in turns and len(parts) > 1):
                raise _TurnNotFound(
                    f"message {i + 1} has no place of its own in what the chat template renders"
                )
        if is_marked:
            return text, places.blocks, [part for i in left_out for part in places.messages[i]]
        turns = [i for i in turns if i not in left_out]
        return text, [self._turn(i, text, places.messages[i][0]) for i in turns], []

    def _turn(self, turn: int, text: str, span: _Span) -> _Span:
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
        raise _TurnNotFound(
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
