"""Passkey prompts: a number hidden somewhere in text that says nothing, and asked for at its end.

Source: Mohtashami and Jaggi 2023, "Landmark Attention", whose sentences these are.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Passkey", "PasskeyPrompts"]

_FILLER = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
_QUESTION = "What is the pass key? The pass key is"
_ANSWER = " {key}."


class Passkey(NamedTuple):
    """One prompt."""

    key: str
    prompt: str
    answer: str
    """What should follow."""


class PasskeyPrompts:
    """Prompts that are, with their answer, as long as they can be within so many tokens.

    `encode` gives the tokens of a text.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], *, digits: int) -> None:
        self._encode = encode
        self.digits = digits
        self._sentences: dict[tuple[int, int], int] = {}

    @property
    def shortest(self) -> int:
        """Tokens of a prompt without filler, with its answer."""
        return len(self._encode("".join(_passkey("0" * self.digits, 0, 0, 0.0)[1:])))

    def draw(self, rng: random.Random, *, length: int, depth: float) -> Passkey:
        """A prompt with some key, whose filler begins with some sentence; see `make`."""
        key = "".join(rng.choices("0123456789", k=self.digits))
        return self.make(key, rng.randrange(len(_FILLER)), length=length, depth=depth)

    def make(self, key: str, first: int = 0, *, length: int, depth: float) -> Passkey:
        """The prompt with `key` behind the part `depth` of its filler; within `length` tokens.

        `first`: the number of the sentence with which the filler begins. Raises ValueError if not
        even a prompt without filler is within `length`.
        """
        count = self._sentences.get((length, first))
        if count is None:
            count = self._sentences[length, first] = self._most_sentences(length, first)
        while not self._fits(found := _passkey(key, first, count, depth), length):
            count -= 1  # this key has more tokens
            if count < 0:
                raise ValueError(
                    f"a passkey prompt cannot have {length} tokens: even without filler it has"
                    f" about {self.shortest}: use more tokens, or fewer digits than {self.digits}"
                )
        return found

    def _most_sentences(self, length: int, first: int) -> int:
        """Sentences of filler that fit."""

        def are_too_many(count: int) -> bool:
            return not self._fits(_passkey("0" * self.digits, first, count, 0.0), length)

        return bisect_left(range(1, length + 1), True, key=are_too_many)

    def _fits(self, passkey: Passkey, length: int) -> bool:
        return len(self._encode(passkey.prompt + passkey.answer)) <= length


def _passkey(key: str, first: int, sentences: int, depth: float) -> Passkey:
    before = round(depth * sentences)
    filler = [_FILLER[i % len(_FILLER)] for i in range(first, first + sentences)]
    needle = _NEEDLE.format(key=key)
    prompt = "".join([*filler[:before], needle, *filler[before:], _QUESTION])
    return Passkey(key, prompt, _ANSWER.format(key=key))
