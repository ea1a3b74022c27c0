"""Pairs of a preferred and another answer to one prompt, as lines of a .jsonl file have them."""

from itertools import takewhile
from typing import Any

import numpy as np

from isp.data.chat import ChatTemplate, Example
from isp.data.dataset import IGNORE_INDEX
from isp.data.documents import JsonLine
from isp.data.tokenizer import Tokenizer

__all__ = ["is_text_pair", "read_pair"]


def is_text_pair(record: dict[str, Any]) -> bool:
    """Whether a line's answers are text, not messages."""
    return isinstance(record.get("chosen"), str)


def read_pair(line: JsonLine, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[Example]:
    """The chosen example, then the rejected one; labels are the tokens of the answer.

    `chosen` and `rejected` are texts, which end with eos, or lists of messages, and `prompt` what
    comes before both; without it, that is what both begin with. Raises ValueError naming the line.
    Source: the preference format of TRL.
    """
    record, where = line.record, line.where
    answers: list[Any] = [record.get(key) for key in ("chosen", "rejected")]
    kind = str if is_text_pair(record) else list
    given = {"chosen": answers[0], "rejected": answers[1], "prompt": record.get("prompt", kind())}
    for key, value in given.items():
        if not isinstance(value, kind) or not (value or key == "prompt"):
            raise ValueError(
                f"{where}: {key!r} must be text that is not empty, or a list of messages; 'prompt',"
                f" 'chosen' and 'rejected' are alike"
            )
    prompt = given["prompt"] or _common(answers)
    own = prompt if record.get("prompt") else kind()
    whole: list[Any] = [own + answer for answer in answers]
    if kind is str:
        asked = tokenizer.encode(prompt)
        texts = [np.append(tokenizer.encode(text), tokenizer.eos_id) for text in whole]
    else:
        if template is None:
            raise ValueError(f"{where} has messages, and the first line of the file has text")
        beside = {"tools": record.get("tools"), "variables": record.get("chat_template_kwargs")}
        asked = tokenizer.encode(template.prompt(prompt, where, **beside))
        texts = [template.tokens(messages, where, **beside) for messages in whole]
    return [_after(asked, tokens, where) for tokens in texts]


def _common(answers: list[Any]) -> Any:
    """What both begin with; of messages, whole ones."""
    chosen, rejected = answers
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    return chosen[: sum(1 for _ in alike)]


def _after(prompt: Any, tokens: Any, where: str) -> Example:
    """The example of which nothing of the prompt is trained."""
    same = min(len(prompt), len(tokens))
    differ = np.flatnonzero(prompt[:same] != tokens[:same])
    first = max(1, int(differ[0]) if differ.size else same)
    if first >= len(tokens):
        raise ValueError(f"{where}: an answer has no token of its own behind the prompt")
    labels = np.asarray(tokens).astype(np.int32)
    labels[:first] = IGNORE_INDEX
    return Example(tokens, labels)
