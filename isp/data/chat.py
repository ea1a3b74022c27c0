"""Conversations to tokens by a tokenizer's chat template, and which of them the assistant writes.

[Note: Assistant's tokens] A template says with `{% generation %}` blocks what the assistant writes.
Of one that does not, it is what a turn adds to the conversation before it: rendered up to a turn,
with the prompt that asks for one, and up to its end, the conversation must begin as the whole does,
or the template is refused. What follows the special token that ends a turn (ChatML's line feed) is
not the assistant's; neither is the header of a turn, unless the template knows no such prompt.
transformers renders; tokens are found by the characters they stand for, since its own mask leaves
out all but the first of the tokens of a character that ends a block.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isp.data.config import BYTE_TOKENIZER
from isp.data.dataset import IGNORE_INDEX
from isp.data.tokenizer import Encoding, HFTokenizer, TokenArray, Tokenizer

__all__ = ["ChatTemplate", "Example"]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_WAY_OUT = (
    "mark what the assistant writes with {% generation %} and {% endgeneration %} in a copy of the"
    " template, and name the copy with data.chat_template (--chat-template)"
)

_Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


class Example(NamedTuple):
    """Tokens, and of each its label: itself where it is trained, else -100.

    Labels are not shifted, as in the datasets of Hugging Face.
    """

    tokens: TokenArray  # [T]
    labels: TokenArray  # [T]


class ChatTemplate:
    """The template of a tokenizer's folder, or that of the file `path`.

    Raises ValueError or FileNotFoundError where there is none, or transformers is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, path: str | None = None) -> None:
        if not isinstance(tokenizer, HFTokenizer):
            raise ValueError(
                f"data.tokenizer={BYTE_TOKENIZER} has no chat template, which messages need: name"
                " the folder of a Hugging Face tokenizer"
            )
        self._tokenizer = tokenizer
        self._special_tokens = tokenizer.special_tokens()
        self._fast = _load(tokenizer.file)
        self._given = None if path is None else _read(Path(path).expanduser())
        self._template(None)

    def example(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Example:
        """A conversation of `role` and `content`; `where` names its place in messages.

        `tools` and `variables` are what the template sees besides.
        Raises ValueError for what is not a conversation, or is refused by the template.
        """
        _check_messages(messages, where)
        chat = _Rendering(self, messages, tools, variables or {}, where)
        text, spans = chat.spans()
        encoding = self._tokenizer.encode_with_offsets(text)
        labels = np.where(_covered(encoding, spans), encoding.tokens, IGNORE_INDEX)
        return Example(encoding.tokens, labels.astype(np.int32))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[_Span] | None]:
        """The text of a conversation, and its generation blocks if the template has any."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._template(tools)
        marked = _GENERATION.search(template) is not None
        render: Any = render_jinja_template  # Its hints say that it gives a text.
        texts, spans = render(
            # As apply_chat_template: templates know missing keys, but few know null.
            [[{k: v for k, v in message.items() if v is not None} for message in messages]],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=add_generation_prompt,
            **{**self._fast.special_tokens_map, **variables},
        )
        return texts[0], spans[0] if marked else None

    def without_line_end(self, turn: str) -> str:
        """A turn up to the special token that ends it, if only white space follows."""
        stripped = turn.rstrip()
        return stripped if stripped.endswith(self._special_tokens) else turn

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
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


class _Rendering(NamedTuple):
    """One conversation and the template that renders it."""

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: Mapping[str, Any]
    where: str

    def spans(self) -> tuple[str, list[_Span]]:
        """The text, and what of it the assistant writes: [Note: Assistant's tokens]."""
        text, marked = self._render(len(self.messages))
        if marked is not None:
            return text, marked
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return text, [self._turn(text, turn) for turn in turns]

    def _turn(self, text: str, turn: int) -> _Span:
        before = self._render(turn, add_generation_prompt=True)[0]
        until = self._render(turn + 1)[0]
        if not (text.startswith(until) and until.startswith(before)):
            raise ValueError(
                f"{self.where}: the chat template renders a conversation up to message {turn + 1}"
                f" otherwise than the beginning of the whole, so it cannot be told which tokens"
                f" the assistant writes: {_WAY_OUT}"
            )
        return len(before), len(before) + len(self.template.without_line_end(until[len(before) :]))

    def _render(
        self, stop: int, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[_Span] | None]:
        from jinja2.exceptions import TemplateError

        try:
            return self.template.render(
                self.messages[:stop],
                tools=self.tools,
                variables=self.variables,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            part = "" if stop == len(self.messages) else f" up to message {stop}"
            raise ValueError(
                f"{self.where}: the chat template cannot render the conversation{part}: {error}"
            ) from None


def _covered(encoding: Encoding, spans: Sequence[_Span]) -> npt.NDArray[np.bool_]:
    """The tokens [T] that stand for a character of one of `spans`."""
    # Some tokenizers leave white space out of a token's place: it begins where the last one ended.
    starts = np.minimum(encoding.starts, np.append(0, encoding.ends[:-1])[: len(encoding.starts)])
    covered = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        covered |= (encoding.ends > start) & (starts < end)
    return covered


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' must be a list of at least one message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ValueError(
                f"{where}: message {number} is a JSON {type(message).__name__}, not an object with"
                " 'role' and 'content'"
            )
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {number} has no 'role' that is text")
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise ValueError(
                f"{where}: message {number} ({message['role']}) has no 'content' that is text"
            )


def _load(file: Path) -> Any:
    """transformers' tokenizer of a folder; ValueError where the package is missing."""
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(
            f"data.tokenizer={file}: messages need the transformers package for its chat template:"
            " bash tools/setup_env.sh hf (or pip install transformers jinja2)"
        ) from error
    try:
        return PreTrainedTokenizerFast.from_pretrained(file.parent, local_files_only=True)
    except Exception as error:  # It raises whatever the files make it do.
        raise ValueError(
            f"data.tokenizer={file}: transformers cannot open its folder: {error}"
        ) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.chat_template={path} cannot be read: {error}") from None
