"""The loop over tokens: prompts in, text as it comes, until every document has an end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from isp.data.tokenizer import Tokenizer
from isp.evaluation.engine import Engine
from isp.evaluation.sampling import Sampler, SamplingConfig
from isp.evaluation.text import TextStream

__all__ = ["Ends", "GeneratedText", "Generation", "Speed"]


class Ends(NamedTuple):
    """What ends a document."""

    max_new_tokens: int
    tokens: frozenset[int] = frozenset()
    """No part of the text."""
    stops: tuple[str, ...] = ()
    """Texts; no part of it, either."""


class Finish(StrEnum):
    """Why a document has ended; vLLM's names."""

    STOP = "stop"
    """By a token or a text."""
    LENGTH = "length"
    """By the number of tokens."""


class GeneratedText(NamedTuple):
    """Some text of a document."""

    document: int
    text: str
    finish: Finish | None
    """None if more may follow."""


@dataclass
class Speed:
    """Tokens, and the seconds that they took."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    """Until the first tokens are chosen."""
    new_tokens: int = 0
    """Of all documents, without the first of each, which the prefill gives."""
    decode_seconds: float = 0.0

    def describe(self) -> str:
        """For people."""
        text = (
            f"prefill {self.prompt_tokens} tokens in {self.prefill_seconds:.2f} s"
            f" ({_rate(self.prompt_tokens, self.prefill_seconds)} tokens/s)"
        )
        if self.new_tokens:
            rate = _rate(self.new_tokens, self.decode_seconds)
            text += f", decoding {self.new_tokens} in {self.decode_seconds:.2f} s ({rate} tokens/s)"
        return text


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):,.1f}"


@dataclass
class Generation:
    """One batch of prompts that an engine continues; to be iterated once, on all ranks alike."""

    engine: Engine
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    sampling: SamplingConfig
    ends: Ends
    speed: Speed = field(default_factory=Speed)
    tokens: list[list[int]] = field(default_factory=list)
    """What was chosen for each document, with a token that ended it."""

    def __iter__(self) -> Iterator[GeneratedText]:
        """Text as it comes. A document that has ended is still computed until all have."""
        num, speed = len(self.prompts), self.speed
        sampler = Sampler(self.sampling, num)
        streams = [TextStream(self.tokenizer, self.ends.stops) for _ in range(num)]
        self.tokens = [[] for _ in range(num)]
        running = set(range(num))
        begin = time.perf_counter()
        capacity = max(map(len, self.prompts)) + self.ends.max_new_tokens
        logits = self.engine.prefill(self.prompts, capacity)
        speed.prompt_tokens = sum(map(len, self.prompts))
        while True:
            chosen = self.engine.agree(sampler(logits))
            values = chosen.tolist()  # waits for the device: what is printed, or ends, is known
            if not speed.prefill_seconds:
                speed.prefill_seconds, begin = time.perf_counter() - begin, time.perf_counter()
            else:
                speed.new_tokens += len(running)
                speed.decode_seconds = time.perf_counter() - begin
            for document in sorted(running):
                piece = self._piece(document, values[document], streams[document])
                if piece.text or piece.finish:
                    yield piece
                if piece.finish:
                    running.remove(document)
            if not running:
                return
            logits = self.engine.decode(chosen)

    def texts(self) -> list[str]:
        """All of the text of each document."""
        found = [""] * len(self.prompts)
        for piece in self:
            found[piece.document] += piece.text
        return found

    def _piece(self, document: int, token: int, stream: TextStream) -> GeneratedText:
        tokens = self.tokens[document]
        tokens.append(token)
        if token in self.ends.tokens:
            return GeneratedText(document, stream.finish(), Finish.STOP)
        text = stream.add(token)
        if not stream.stopped and len(tokens) == self.ends.max_new_tokens:
            text += stream.finish()
            return GeneratedText(document, text, Finish.STOP if stream.stopped else Finish.LENGTH)
        return GeneratedText(document, text, Finish.STOP if stream.stopped else None)
