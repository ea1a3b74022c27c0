"""Conversations to tokens by a tokenizer's chat template, and the assistant's tokens among them.

Tokens are found by the characters they stand for, since transformers' own mask leaves out all but
the first of the tokens of a character that ends a block.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isp.config.data import BYTE_TOKENIZER, TrainOn
from isp.data.chat_turns import Conversation, Span, TurnNotFound
from isp.data.dataset import IGNORE_INDEX
from isp.data.rendering import Rendered, TemplateFailure, named_in
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
                text, left_out = _without_weights(chat).text, list[Span]()
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

    def _chat(self, messages: Messages, tools: Tools, variables: Variables) -> Conversation:
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
        chat = Conversation(
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


def _written(chat: Conversation, given: Sequence[Mapping[str, Any]]) -> Conversation:
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
    chat: Conversation, text: str, with_mark: Callable[[dict[str, Any], str], dict[str, Any]]
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


def _without_weights(chat: Conversation) -> Rendered:
    """The text of a conversation that is trained as a whole; ValueError if it says otherwise."""
    for number, message in enumerate(chat.messages, start=1):
        if message.get("weight") == 0:
            raise ValueError(
                f"message {number} has the weight 0, and data.train_on=all trains every token: use"
                " data.train_on=assistant"
            )
    return chat.render()


def _covered(encoding: Encoding, spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
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
    except TurnNotFound as error:
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
