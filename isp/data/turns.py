"""Reads rows of conversations, in the formats that data sets use, as messages for a template.

No key that could change the text or the loss is dropped silently. See
[Note: Keys of conversations] in docs/design/notes/data.md.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from isp.data.documents import JsonLine
from isp.data.rendering import REASONING, Named

__all__ = [
    "Arguments",
    "TemplateInputs",
    "read_talk",
    "read_template_inputs",
    "read_turns",
    "unnamed_keys",
    "with_system",
]

_ROLES = ("system", "user", "assistant", "tool")
_ASSISTANT = ("gpt", "chatgpt", "bing", "bard", "model")
_TOOL = ("observation", "function_response", "tool_response", "function", "ipython")
_ALIASES = {
    "human": "user",
    "developer": "system",  # OpenAI's newer name of the role
    **dict.fromkeys(_ASSISTANT, "assistant"),
    **dict.fromkeys(_TOOL, "tool"),
}
"""Other names of roles, each with the name in `_ROLES` that replaces it.

A name that the template itself compares roles with is not replaced. But a name of the assistant is
replaced if the template also knows `assistant`: Gemma's template compares roles with `model`, but
only after it has replaced `assistant` by it.
"""

_RENAMED = {"from": "role", "value": "content"}
"""ShareGPT's names of keys, with the names that replace them."""

_WEIGHTS = ("train", "training", "train_detail", "training_detail", "loss_weight")
"""Keys in which other programs say which messages, or parts of them, are trained."""

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Keys of rows with content other than text."""

_REFUSED = {
    **dict.fromkeys(_MEDIA, "only text is trained"),
    **dict.fromkeys(
        ("assistant_masks", "completion_mask", "loss_mask", "prompt_mask"),
        "give messages the weight 0 or 1, or write input_ids and labels",
    ),
    "functions": "write 'tools'",
    "weight": "rows have no weight: give one to messages, or to sources",
}
"""Keys of rows that other programs read and ISP does not, with the remedy for each."""

_SYSTEM = ("system_prompt", "system_message")
"""Names that other programs have for the key `system` of a row; an error says the name to use."""


class Arguments(dict[str, Any]):
    """Arguments of a tool call: a dict that prints as the JSON text that it was read from.

    It suits templates that read the items, and templates that write the arguments as text.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:  # A template that prints a whole call prints this.
        return repr(self._text)


class TemplateInputs(NamedTuple):
    """Inputs of the chat template that a row has in addition to its messages."""

    tools: Any
    """Value of the row's key `tools`; None if the row does not have it."""
    variables: Any
    """Value of the row's key `chat_template_kwargs`; None if the row does not have it."""


def read_talk(line: JsonLine) -> tuple[Any, TemplateInputs]:
    """Return the messages of a row with `messages` or `conversations`, and its other inputs.

    Raises ValueError, with the row and the key, for a row without messages, and for keys that
    `read_template_inputs` or `with_system` refuse.
    """
    record, where = line.record, line.where
    found = [key for key in ("messages", "conversations") if key in record]
    if not found:
        raise ValueError(f"{where} has no key 'messages', only {', '.join(map(repr, record))}")
    if len(found) > 1:
        raise ValueError(f"{where} has 'messages' and 'conversations': leave one of them out")
    inputs = read_template_inputs(line)
    return with_system(record[found[0]], line), inputs


def read_template_inputs(line: JsonLine) -> TemplateInputs:
    """Return `tools` and `chat_template_kwargs` of a row; `tools` may be JSON text, as in tables.

    Raises ValueError, with the row and the key, for keys that other programs read and ISP does not.
    """
    record = line.record
    for key, instead in _REFUSED.items():
        if key in record and _filled(record[key]) is not None:
            raise ValueError(f"{line.where} has {key!r}, which is not read: {instead}")
    tools = _filled(record.get("tools")) or None
    return TemplateInputs(tools, record.get("chat_template_kwargs"))


def _filled(value: Any) -> Any:
    """Return a value of a row, parsed if it is JSON text; None if it is empty.

    In a table, rows without tools or images have an empty value: "", [], "[]" or [null].
    """
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    is_null = isinstance(value, list) and all(x is None for x in value)
    return None if is_null or value in ("", {}) else value


def with_system(messages: Any, line: JsonLine) -> Any:
    """Return `messages` with the row's `system` as first message, if the row has that key.

    It replaces an empty system message at the beginning; an equal one is kept. Raises ValueError if
    messages begin with a different system message, and for a `system` that is not text or has
    another name.
    """
    first = messages[0] if isinstance(messages, list) and messages else None
    first = first if isinstance(first, dict) else {}
    is_system = first.get("role", first.get("from")) in ("system", "developer")
    own = first.get("content", first.get("value")) if is_system else None
    for key in ("system", *_SYSTEM):
        text = line.record.get(key, "")
        if text in ("", own):  # It is empty, or the messages begin with it.
            continue
        if not isinstance(text, str):
            raise ValueError(f"{line.where} has a {key!r} that is not text")
        if key != "system":
            raise ValueError(f"{line.where} has {key!r}, which is not read: name it 'system'")
        if is_system and own not in (None, ""):
            raise ValueError(
                f"{line.where} has a 'system', and its messages begin with another system message:"
                " leave one of them out"
            )
        if isinstance(messages, list):  # `read_turns` refuses anything else
            rest = messages[1:] if is_system else messages
            messages, own = [{"role": "system", "content": text}, *rest], text
    return messages


def read_turns(messages: Any, named: Named, *, parses: bool = True) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`, with roles and keys that the template knows.

    `named`: names that are in the template. `parses`: turn arguments of tool calls from JSON text
    into `Arguments`, since most templates expect objects. Raises ValueError, with the message and
    the key, for roles, keys and values that ISP does not read.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' must be a list of at least one message")
    return [
        _read_turn(message, f"message {number}", named, parses)
        for number, message in enumerate(messages, start=1)
    ]


def unnamed_keys(turns: Sequence[Mapping[str, Any]], named: Named) -> set[str]:
    """Return the keys in messages that the template does not name, so does not read."""
    keys = {key for turn in turns for key in turn} - {"role", "content", "weight", "tool_calls"}
    # `render` passes reasoning under all of its names: the template needs to have only one.
    if not named.words.isdisjoint(REASONING):
        keys -= {*REASONING}
    return keys - named.words


def _read_turn(given: Any, where: str, named: Named, parses: bool) -> dict[str, Any]:
    """Return one message for `read_turns`; `where` is its number, for errors."""
    if not isinstance(given, dict):
        raise ValueError(
            f"{where} is a JSON {type(given).__name__}, not an object with 'role' and 'content'"
        )
    for theirs, ours in _RENAMED.items():
        if theirs in given and ours in given:
            raise ValueError(f"{where} has {ours!r} and {theirs!r}: leave one of them out")
    keys: dict[str, Any] = given
    turn = {_RENAMED.get(key, key): value for key, value in keys.items()}
    role = turn.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{where} has no 'role' that is text")
    where = f"{where} ({role})"
    _check_calls(turn, where, named)
    # LLaMA-Factory has a role for tool calls; the content is a call or a list of calls.
    if role == "function_call" and role not in named.roles:
        called = _from_json(turn.get("content"), where, "content")
        calls = called if isinstance(called, list) else [called]
        turn |= {"role": "assistant", "content": "", "tool_calls": [*map(_as_call, calls)]}
    elif role not in named.roles or (role in _ASSISTANT and "assistant" in named.roles):
        turn["role"] = _ALIASES.get(role, role)
        if turn["role"] not in _ROLES:
            raise ValueError(
                f"{where} has a role that is not known: use {', '.join(_ROLES[:-1])} or"
                f" {_ROLES[-1]}, or a chat template that compares a role with it"
                " (data.chat_template)"
            )
    if "function_call" in turn and "function_call" not in named.words:
        # The template does not read OpenAI's older key: convert it to `tool_calls`.
        called = turn.pop("function_call")
        turn |= {} if _filled(called) is None else {"tool_calls": [_as_call(called)]}
    if "tool_calls" in turn:
        turn["tool_calls"] = _read_calls(turn["tool_calls"], where, parses)
        if not turn["tool_calls"]:  # many templates test only whether the key exists
            del turn["tool_calls"]
    _check_weight(turn, where)
    content = turn.get("content")
    for part in content if isinstance(content, list) else ():
        _check_part(part, where)
    if not isinstance(content, str | list) and "tool_calls" not in turn:
        raise ValueError(f"{where} has no 'content' that is text")
    return turn


def _check_calls(turn: dict[str, Any], where: str, named: Named) -> None:
    """Raise ValueError if a message has tool calls in two places: two keys, or key and content."""
    keys = [key for key in ("tool_calls", "function_call") if _filled(turn.get(key)) is not None]
    if "function_call" in named.words:  # the template reads this key itself
        keys = [key for key in keys if key != "function_call"]
    if turn["role"] == "function_call" and "function_call" not in named.roles:
        keys.append("content")
    if len(keys) > 1:
        raise ValueError(
            f"{where} has tool calls in {keys[0]!r} and in {keys[1]!r}: leave one of them out"
        )


def _check_weight(turn: dict[str, Any], where: str) -> None:
    """Raise ValueError if the `weight` of a message is not allowed.

    Every message may have weight 0 or none; only one of the assistant may have weight 1. In tables
    a weight may be 0.0 or 1.0. Also raises ValueError for keys that hold a weight in other
    programs.
    """
    if key := next((key for key in _WEIGHTS if key in turn), None):
        raise ValueError(
            f"{where} has {key!r}, which is not read: write 'weight', 0 or 1, in messages of the"
            " assistant"
        )
    weight = turn.get("weight")
    if weight is None:
        return
    if type(weight) not in (int, float) or weight not in (0, 1):
        raise ValueError(
            f"{where} has the weight {weight!r}: write 0 to leave an assistant's message out of the"
            " loss, or leave the weight out"
        )
    if weight == 1 and turn["role"] != "assistant":
        raise ValueError(
            f"{where} has the weight 1, but the loss is computed only on messages of the role"
            " assistant: leave the weight out"
        )


def _check_part(part: Any, where: str) -> None:
    """Raise ValueError if a part of a message's content is not text, or has a weight."""
    if not isinstance(part, dict):
        return
    if key := next((key for key in ("weight", *_WEIGHTS) if key in part), None):
        raise ValueError(
            f"{where} has a part of its content with {key!r}: the loss is computed on whole"
            " messages: give the message a weight, or write input_ids and labels"
        )
    kind = part.get("type", "text")
    if kind != "text":
        raise ValueError(
            f"{where} has a part of its content of the type {kind!r}: only text is trained: leave"
            " the part out"
        )


def _read_calls(calls: Any, where: str, parses: bool) -> list[dict[str, Any]]:
    """Return the tool calls of a message, with `arguments` as `Arguments` if `parses`.

    Raises ValueError, with the message, for calls that are not a list of objects.
    """
    calls = _from_json(calls, where, "tool_calls") if isinstance(calls, str) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} has 'tool_calls' that are not a list of objects")
    return [_read_call(call, where, parses) for call in calls]


def _as_call(function: Any) -> Any:
    """Return a function call in OpenAI's present form, `{"type": "function", "function": ..}`."""
    is_call = not isinstance(function, dict) or "function" in function
    return function if is_call else {"type": "function", "function": function}


def _read_call(call: dict[str, Any], where: str, parses: bool) -> dict[str, Any]:
    """Return a tool call; `parses`: with `arguments` that are JSON text as `Arguments`.

    Raises ValueError, with the message, for arguments that are not a JSON object.
    """
    if isinstance(called := call.get("function"), dict):
        return {**call, "function": _read_call(called, where, parses)}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    arguments = _from_json(text, where, "arguments") if text.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where} has a tool call whose 'arguments' are not a JSON object: {text!r:.200}"
        )
    return {**call, "arguments": Arguments(arguments, text)} if parses else call


def _from_json(text: Any, where: str, key: str) -> Any:
    """Return the value of the JSON `text` under `key`; raise ValueError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where} has {key!r} that are not JSON ({error}): {text!r:.200}"
        ) from None
