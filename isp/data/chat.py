"""`ChatTemplate`: conversations as tokens, with labels for those that the assistant writes.

Which tokens these are: see [Note: Assistant's tokens] in docs/design/notes/data.md.
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
from isp.utils.environment import require
from isp.utils.files import check_regular_files, read_limited

__all__ = ["ChatTemplate", "Example"]

_WAY_OUT = (
    "mark what the assistant writes with {% generation %} and {% endgeneration %} in a copy of the"
    " template, and name the copy with data.chat_template (--chat-template)"
)

Messages = Sequence[Mapping[str, Any]]
Tools = list[dict[str, Any]] | None
Variables = Mapping[str, Any] | None


class Example(NamedTuple):
    """Tokens and labels of an example for fine-tuning.

    The label of a trained token is the token itself, and -100 for others: labels are not shifted,
    as in data sets for transformers.
    """

    tokens: TokenArray  # [T]
    labels: TokenArray  # [T]


class ChatTemplate:
    """Renders and tokenizes conversations by the tokenizer's chat template, or that in `path`.

    `train_on` decides which tokens get labels. Raises ValueError if there is no template, or
    transformers is not installed.
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
        # After one of these tokens, the text of an assistant's message may differ from the
        # generation prompt: see `_Conversation.names`.
        names = {"<think>", *tokenizer.added_tokens()}
        self._names = re.compile("|".join(map(re.escape, sorted(names))))
        self._template(None)  # Raise now if there is no template, not at the first row.

    def example(
        self, messages: Messages, where: str, *, tools: Tools = None, variables: Variables = None
    ) -> Example:
        """Return the tokens and labels of a conversation; `where` is its place, for errors.

        `messages` have `role` and `content`. `tools` and `variables` are other inputs of the
        template. Raises ValueError for an invalid conversation, and one that the template refuses.
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
        """Return the tokens of a prompt (`num_prompt` messages) and its answer (the others).

        The caller trains the whole answer. Raises ValueError as `example` does, and for a message
        whose weight contradicts that.
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
        """Return keys of a conversation that the template does not read, for the log."""
        named = named_in(self._template(tools))
        found = {f"{key} of messages" for key in unnamed_keys(read_turns(messages, named), named)}
        inputs = {"tools": tools, **({} if variables is None else variables)}
        return found | {key for key, x in inputs.items() if x is not None} - named.words

    def prompt(
        self, messages: Messages, where: str, *, tools: Tools = None, variables: Variables = None
    ) -> str:
        """Return a conversation as text, with the template's generation prompt at its end.

        Raises ValueError as `example` does, and if the last message is the assistant's.
        """
        with _refused_at(where):
            chat = self._chat(messages, tools, variables)
            if chat.messages[-1]["role"] == "assistant":
                raise ValueError(
                    "its last message is the assistant's: leave it out, it is to be generated"
                )
            return chat.render(add_generation_prompt=True).text

    def turn_end(self) -> int | None:
        """Return the id of the token with which the assistant's turn ends; None if there is none.

        It is found in a short conversation; also None if the template refuses that.
        """
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            tokens, labels = self.example(talk, "")
        except ValueError:
            return None
        # The message may be followed by groups of special tokens, with white space between groups:
        # return the last token of the first group. Walk back from the end of the text; `begins` is
        # True where the next special token is the last of its group.
        found: int | None = None
        begins = True
        special = {self._tokenizer.token_id(name) for name in self._tokenizer.special_tokens()}
        for token in tokens[labels != IGNORE_INDEX].tolist()[::-1]:
            if token in special:
                found, begins = token if begins else found, False
            elif self._tokenizer.decode(np.array([token])).strip():
                break
            else:  # the token is white space
                begins = True
        return found

    def _chat(self, messages: Messages, tools: Tools, variables: Variables) -> _Conversation:
        """Return a conversation, after a check that the template writes all of it.

        Raises TemplateFailure or ValueError for messages or inputs that are invalid.
        """
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise TemplateFailure("'tools' is not a list of objects (JSON schemas)")
        variables = {} if variables is None else variables
        if not isinstance(variables, dict):
            raise TemplateFailure("'chat_template_kwargs' is not an object")
        template = self._template(tools)
        if reserved := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise TemplateFailure(f"'chat_template_kwargs' cannot have the key {min(reserved)}")
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
        """Return the text of the template; tokenizers may have another one for tools."""
        if self._given is not None:
            return self._given
        try:
            template: str = self._fast.get_chat_template(None, tools)
        except ValueError:  # transformers' text is about arguments for which ISP has no key
            raise ValueError(
                f"data.tokenizer={self._tokenizer.file} has no chat template (chat_template.jinja,"
                " or chat_template in tokenizer_config.json, next to it), which messages need: name"
                " a file with data.chat_template (--chat-template)"
            ) from None
        return template


def _written(chat: _Conversation, given: Sequence[Mapping[str, Any]]) -> _Conversation:
    """Return `chat`, after a check that the template writes its system messages and tool calls.

    `given`: the messages as in the data, where arguments of tool calls may be JSON text. In `chat`
    they are objects. If the template fails with objects, `given` is rendered instead: DeepSeek's
    template joins arguments with `+`, which fails for objects. Raises ValueError if the template
    leaves out a system message or a tool call.
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
        # Some templates (Kimi K2's) write the id of a tool call and not its name. So a call counts
        # as lost only if its id and arguments are not written either. If the template fails with
        # the replaced values, the result for names stands.
        with suppress(TemplateFailure):
            found = _lost(chat, text, _with_id_and_arguments)
            lost = [what for what in lost if what in found]
    if lost:
        raise ValueError(
            f"{lost[0]} does not appear in the rendered conversation: name another template with"
            " data.chat_template (--chat-template)"
        )
    return chat


def _lost(
    chat: _Conversation, text: str, with_mark: Callable[[dict[str, Any], str], dict[str, Any]]
) -> list[str]:
    """Return the system messages and tool calls that the template leaves out, as texts for errors.

    Each is given a unique word (a mark) before the conversation is rendered: the content of a
    system message is replaced by it, and `with_mark` puts it into a tool call. What is left out is
    what has a mark that is not in the rendered text. A search for the names or ids of calls would
    not show it, since these are also in the list of tools and in the results of calls.
    """
    marked, marks = list[Mapping[str, Any]](), dict[str, str]()
    for number, message in enumerate(chat.messages, start=1):
        content, calls = message.get("content"), list[dict[str, Any]]()
        if message["role"] == "system" and isinstance(content, str) and content.strip() not in text:
            mark = f"isp{len(marks):06}"
            marks[mark], message = f"message {number} (system)", {**message, "content": mark}
        for i, call in enumerate(message.get("tool_calls", [])):
            mark = f"isp{len(marks):06}"  # Mistral's templates need ids of nine letters and digits
            marks[mark] = f"message {number}: tool call {i + 1}"
            calls.append(with_mark(call, mark))
        marked.append({**message, "tool_calls": calls} if calls else message)
    if not marks:
        return []
    text = chat._replace(messages=marked).render().text
    return [what for mark, what in marks.items() if mark not in text]


def _with_name(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a copy of a tool call with the unique word `mark` as the name of its function."""
    if "function" in call:
        return {**call, "function": {**call["function"], "name": mark}}
    return {**call, "name": mark}


def _with_id_and_arguments(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a copy of a tool call with the unique word `mark` as its id and in its arguments.

    All text arguments become `mark`, and an argument of that name is added. Arguments that were
    JSON text stay JSON text, and an object stays an object.
    """
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
    """Return the text of a conversation of which all is trained; raise ValueError for weight 0."""
    for number, message in enumerate(chat.messages, start=1):
        if message.get("weight") == 0:
            raise ValueError(
                f"message {number} has the weight 0, and data.train_on=all trains every token: use"
                " data.train_on=assistant"
            )
    return chat.render()


def _covered(encoding: Encoding, spans: Sequence[_Span]) -> npt.NDArray[np.bool_]:
    """Return a mask [T] of the tokens that encode a character of one of `spans`.

    Tokens and characters are compared by their ranges in the text: all tokens of a character
    count. transformers' own mask leaves out all but the first token of a character at the end of a
    generation block.
    """
    # Some tokenizers leave white space before a token out of its range. Extend the range to the end
    # of the token before.
    starts = np.minimum(encoding.starts, np.append(0, encoding.ends[:-1])[: len(encoding.starts)])
    covered = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        covered |= (encoding.ends > start) & (starts < end)
    return covered


@contextmanager
def _refused_at(where: str) -> Iterator[None]:
    """Context that turns errors about a conversation into ValueErrors that begin with `where`."""
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
    """Return transformers' tokenizer of the folder with `file`, which has the chat templates.

    Raises ValueError if transformers is not installed or cannot open the folder.
    """
    require(f"the chat template of data.tokenizer={file}", "transformers")
    from transformers import PreTrainedTokenizerFast

    try:
        check_regular_files(file.parent)
        return PreTrainedTokenizerFast.from_pretrained(file.parent, local_files_only=True)
    except Exception as error:  # for damaged files transformers raises exceptions of many types
        raise ValueError(
            f"data.tokenizer={file}: transformers cannot open its folder: {error}"
        ) from None


def _read(path: Path) -> str:
    """Return the text of the template in a file; raise ValueError if it cannot be read."""
    try:
        return read_limited(path).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"data.chat_template={path} cannot be read: {error}") from None


def _before_reasoning(prompt: str) -> str:
    """Return the part of a generation prompt that is not trained: all text before `<think>`.

    `<think>` itself belongs to the assistant's turn.
    """
    return prompt.partition("<think>")[0]


def _none_of(prompt: str) -> str:
    """Return "", the part of a generation prompt that is not trained: all of it is trained."""
    return ""


_HEADERS: Mapping[str, Callable[[str], str]] = {
    "55b2f4a2": str.rstrip,  # of Qwen2.5: the prompt's last line feed is trained
    "563b1ce7": _none_of,  # template of DeepSeek V3
    "56a1447a": _none_of,  # template of DeepSeek R1, distilled
    "6cd0e94d": _none_of,  # template of Muse Glimmer
    "a4c9919c": _none_of,  # template of gpt-oss
}
"""Templates for which not `_before_reasoning`, but another function decides where a turn begins.

Keys are the first digits of the SHA-256 of the template, as `tools/check_masks_with_trl.py
--digests` prints them. A function returns the part of a generation prompt that is not trained, so
that labels are those of the template's training variant in TRL.
"""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_Span = tuple[int, int]
"""Range of characters [start, end) of a rendered conversation."""


class _TurnNotFound(Exception):
    """It cannot be found which tokens an assistant's message has."""


class _Places(NamedTuple):
    """The places of messages and generation blocks in a rendered conversation."""

    messages: dict[int, list[_Span]]
    """Spans of each message, by its index; without spans of white space only."""
    blocks: list[_Span]
    """The parts of the text that the template has in `{% generation %}` blocks."""
    tail: str
    """Text after the last message."""

    @classmethod
    def of(cls, rendered: Rendered) -> _Places:
        """Return the spans of messages and generation blocks in a rendered conversation.

        They are found by the marks that the rendering has written: where loops over messages, their
        messages and generation blocks begin and end. See [Note: Marks] in
        docs/design/notes/data.md.
        """
        # Walk through the marks. `owner` is the message that wrote the text from `begin` on.
        # `loops`: for each open loop, the message that wrote the text before it. `last` is the end
        # of the last message.
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
                if spans and spans[-1][1] == begin:  # Without a gap, extend the span before.
                    begin = spans.pop()[0]
                spans.append((begin, place))
                last = place
            if mark == "(":
                loops.append(owner)
            else:  # after a loop, text belongs again to the message that had it before the loop
                owner = loops.pop() if mark == ")" else int(mark)
            begin = place
        return cls(messages, blocks, text[last:])


class _Conversation(NamedTuple):
    """A conversation, with the tokenizer and the template that render it."""

    tokenizer: HFTokenizer
    template: str
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    names: re.Pattern[str]
    """Pattern of the names of added tokens. A message has to begin as the generation prompt does,
    but only up to one of these names: after it, the two may differ."""
    last_only: bool = False
    """True if only the last message of the assistant is trained."""

    def spans(self) -> tuple[str, list[_Span], list[_Span]]:
        """Return the text, the spans that are trained, and spans inside these that are not.

        Trained are the assistant's turns or, if the template has them, generation blocks; not
        trained are messages with weight 0, and all but the last if `last_only`. Raises
        _TurnNotFound if it cannot be found where a message is.
        """
        text, marked = self.render().text, self.render(marks=True)
        places = _Places.of(marked)
        if marked.text != text:
            raise _TurnNotFound(
                "the messages cannot be found in the rendered conversation, because the chat"
                " template changes the text that its loops and generation blocks have written"
            )
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        others = turns[:-1] if self.last_only else []
        left_out = [i for i in turns if i in others or self.messages[i].get("weight") == 0]
        is_marked = _GENERATION.search(_COMMENT.sub("", self.template)) is not None
        # `expected`: messages whose place has to be found. If generation blocks show what is
        # trained, only the assistant's messages to be left out of the loss. Else all messages from
        # the assistant's first on: the text of a message that is not found would count as part of
        # the assistant's message before it.
        expected = left_out if is_marked else range(turns[0] if turns else 0, len(self.messages))
        for i in expected:
            parts = places.messages.get(i, [])
            if not parts or (i in turns and len(parts) > 1):
                raise _TurnNotFound(
                    f"message {i + 1} does not appear in one piece in the rendered conversation"
                )
        if is_marked:
            return text, places.blocks, [part for i in left_out for part in places.messages[i]]
        turns = [i for i in turns if i not in left_out]
        return text, [self._turn(i, text, places.messages[i][0]) for i in turns], []

    def _turn(self, turn: int, text: str, span: _Span) -> _Span:
        """Return the trained span of message `turn` in `text`, given the `span` of the message.

        It is without the generation prompt, and with the token that ends the turn.
        """
        start, end = span
        prompt = text[start : start + self._length_of_prompt(turn, text[start:end])]
        digest = hashlib.sha256(self.template.strip().encode()).hexdigest()[:8]
        start += len(_HEADERS.get(digest, _before_reasoning)(prompt))
        special = self.tokenizer.special_tokens()
        after = text[end:].strip()
        # The last turn also gets the end of text that some templates write after all messages.
        if turn == len(self.messages) - 1 and (not after or after in special):
            return start, len(text)
        if text[start:end].rstrip().endswith(special):
            return start, end
        # In some templates (GLM's) the token that begins the next message also ends this turn:
        # extend the turn by a special token that follows it.
        first = self.variables.get("bos_token")
        ends = [token for token in special if token != first and text.startswith(token, end)]
        return start, end + max(map(len, ends), default=0)

    def _length_of_prompt(self, turn: int, written: str) -> int:
        """Return with how many characters of the generation prompt a message begins.

        `written` is the rendered text of message `turn`, the assistant's. Raises _TurnNotFound if
        it does not begin with the generation prompt.
        """
        first = self.variables.get("bos_token", "")
        begin = len(written) - len(written.removeprefix(first).lstrip())
        refused = TemplateFailure("")
        # Try the generation prompt that follows the messages before this turn. If the template
        # refuses to render only these messages, or the turn does not begin with that prompt, try
        # the prompt that follows all messages.
        for stop in (turn, len(self.messages)):
            try:
                prompt = self._prompt(stop).removeprefix(first).lstrip()
            except TemplateFailure as error:  # Some templates require a user's message before it.
                refused = error
                continue
            cuts = {len(prompt), *(m.start() for m in self.names.finditer(prompt))} - {0}
            found = [cut for cut in cuts if written.startswith(prompt[:cut], begin)]
            if not prompt or found:
                return begin + max(found) if found else 0
        reason = str(refused) and f" ({refused})"
        raise _TurnNotFound(
            f"message {turn + 1}: the chat template renders it with a beginning that is not its"
            f" generation prompt, so it cannot be found where the answer begins{reason}"
        )

    def _prompt(self, stop: int) -> str:
        """Return the generation prompt that the template writes after the first `stop` messages."""
        text = self.render(stop).text
        asked = self.render(stop, marks=True, add_generation_prompt=True)
        if asked.text.startswith(text):
            return asked.text[len(text) :]
        # With a generation prompt, this template also renders the messages themselves in another
        # way, so `text` is not a prefix: return what follows the last message.
        return _Places.of(asked).tail

    def render(
        self, stop: int | None = None, *, marks: bool = False, add_generation_prompt: bool = False
    ) -> Rendered:
        """Return the first `stop` messages, or all, as text.

        If `marks`, the result also has the marks that show where messages are in the text.
        """
        variables = {**self.variables, "add_generation_prompt": add_generation_prompt}
        messages = [{k: m[k] for k in m if k != "weight"} for m in self.messages[:stop]]
        return render(self.template, messages, variables=variables, marks=marks)
