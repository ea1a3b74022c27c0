"""Text out of tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isp.data.tokenizer import Tokenizer

__all__ = ["TextStream"]

_INCOMPLETE = "\ufffd"
"""What the beginning of a letter is decoded to."""


class TextStream:
    """The text of tokens that come one by one.

    What may go on into another letter, or into one of the `stops`, is held back until it is known.
    A stop string is no part of the text, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._begin = self._decoded = 0
        self._held = ""
        self.stopped = False
        """Whether a stop string has come."""

    def add(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._tokens.append(token)
        before = self._text(self._begin, self._decoded)
        whole = self._text(self._begin, len(self._tokens))
        if whole.endswith(_INCOMPLETE):
            return ""
        # Decoded with those before, too: the text of some tokens depends on them.
        self._begin, self._decoded = self._decoded, len(self._tokens)
        return self._certain(whole[len(before) :])

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        before = self._text(self._begin, self._decoded)
        rest = self._text(self._begin, len(self._tokens))[len(before) :]
        certain = self._certain(rest)
        held, self._held = self._held, ""
        return certain if self.stopped else certain + held

    def _text(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(np.array(self._tokens[begin:end], dtype=np.int64))

    def _certain(self, new: str) -> str:
        text, self._held = self._held + new, ""
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that are the beginning of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
