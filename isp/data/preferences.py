"""One answer to a prompt, or a preferred and another one, as lines of a .jsonl file have them."""

from itertools import takewhile
from typing import Any

import numpy as np

from isp.data.chat import ChatTemplate, Example
from isp.data.dataset import IGNORE_INDEX
from isp.data.documents import JsonLine
from isp.data.tokenizer import Tokenizer, begun
from isp.data.turns import read_beside, with_system

__all__ = ["is_text", "read_answers"]


def is_text(record: dict[str, Any]) -> bool:
    """Whether a line's answers are text, not messages."""
    return isinstance(record.get("chosen", record.get("completion")), str)


def read_answers(
    line: JsonLine,
    keys: tuple[str, ...],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    bos: tuple[int, ...] = (),
) -> list[Example]:
    """The examples of the answers under `keys` to one prompt; labels are the answer's tokens.

    Answers are texts, which end with eos, or lists of messages, and `prompt` what comes before
    them; of two, without it, that is what both begin with. `bos` begins texts. Raises ValueError
    naming the line.
    Source: the prompt-completion and preference formats of TRL.
    """
    record, where = line.record, line.where
    answers: list[Any] = [record.get(key) for key in keys]
    kind = str if is_text(record) else list
    asked = record.get("prompt", kind())
    for key, value in zip((*keys, "prompt"), (*answers, asked), strict=True):
        if not isinstance(value, kind) or not (value or key == "prompt"):
            alike = " and ".join(map(repr, ("prompt", *keys)))
            raise ValueError(
                f"{where}: {key!r} must be text that is not empty, or a list of messages; {alike}"
                f" are alike"
            )
    if len(keys) == 1 and not asked:
        raise ValueError(f"{where}: 'prompt' must not be empty beside 'completion'")
    if len(keys) == 1 and isinstance(record.get("label"), bool):
        raise ValueError(
            f"{where} has 'label', which is not read: leave out what is labeled false, and the key"
        )
    beside = read_beside(line)
    if kind is str:
        of_messages = ("system", "tools", "chat_template_kwargs")
        if found := [key for key in of_messages if record.get(key)]:
            raise ValueError(
                f"{where} has {found[0]!r}, which is for messages: write 'prompt' and answers as"
                " lists of messages, or what it says into 'prompt'"
            )
    elif asked:
        asked = with_system(asked, line)
    else:
        answers = [with_system(answer, line) for answer in answers]
    prompt = asked or _common(answers)
    whole: list[Any] = [asked + answer for answer in answers]
    if kind is str:
        before, *of_whole = (begun(tokenizer.encode(text), bos) for text in (prompt, *whole))
        texts = [np.append(tokens, tokenizer.eos_id) for tokens in of_whole]
    else:
        if template is None:
            raise ValueError(f"{where} has messages, but the first line of the file has text")
        more = beside._asdict()
        before = tokenizer.encode(template.prompt(prompt, where, **more))
        texts = [template.tokens(turns, where, num_prompt=len(prompt), **more) for turns in whole]
    return [_after(before, tokens, where) for tokens in texts]


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
        raise ValueError(f"{where}: an answer adds no tokens to the prompt")
    labels = np.asarray(tokens).astype(np.int32)
    labels[:first] = IGNORE_INDEX
    return Example(tokens, labels)
