"""Passkey prompts: a number (the key) hidden in filler text, and a question for it at the end.

Source of the sentences: Mohtashami and Jaggi 2023, "Landmark Attention".
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
    """A prompt, the key that it hides, and the answer."""

    key: str
    """The digits of the key."""
    prompt: str
    answer: str
    """Text that a model that has found the key writes after the prompt."""


class PasskeyPrompts:
    """Makes prompts with as many filler sentences as fit a given number of tokens.

    The number of tokens includes the answer. `encode` returns the tokens of a text.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], *, digits: int) -> None:
        self._encode = encode
        self.digits = digits
        # Cache the results of `_most_sentences`, which has to encode prompts to find them.
        self._sentences: dict[tuple[int, int], int] = {}
        """Number of sentences that fit, by length and index of the first sentence."""

    @property
    def shortest(self) -> int:
        """Number of tokens of a prompt without filler, answer included."""
        return len(self._encode("".join(_passkey("0" * self.digits, 0, 0, 0.0)[1:])))

    def draw(self, rng: random.Random, *, length: int, depth: float) -> Passkey:
        """Return a prompt with a random key and a random first sentence; otherwise as `make`."""
        key = "".join(rng.choices("0123456789", k=self.digits))
        return self.make(key, rng.randrange(len(_FILLER)), length=length, depth=depth)

    def make(self, key: str, first: int = 0, *, length: int, depth: float) -> Passkey:
        """Return the prompt with `key` at `depth`: 0 before all filler, 1 after all of it.

        Prompt and answer have at most `length` tokens. `first` is the index of the filler's first
        sentence. Raises ValueError if even a prompt without filler is too long.
        """
        count = self._sentences.get((length, first))
        if count is None:
            count = self._sentences[length, first] = self._most_sentences(length, first)
        while not self._fits(found := _passkey(key, first, count, depth), length):
            count -= 1  # `count` was found with a key of zeros; this key has more tokens
            if count < 0:
                raise ValueError(
                    f"a passkey prompt cannot have {length} tokens: even without filler it has"
                    f" about {self.shortest}: use more tokens, or fewer digits than {self.digits}"
                )
        return found

    def _most_sentences(self, length: int, first: int) -> int:
        """Return the number of filler sentences that fit with a key of zeros."""

        def are_too_many(count: int) -> bool:
            return not self._fits(_passkey("0" * self.digits, first, count, 0.0), length)

        return bisect_left(range(1, length + 1), True, key=are_too_many)

    def _fits(self, passkey: Passkey, length: int) -> bool:
        """Return True if prompt and answer have at most `length` tokens."""
        return len(self._encode(passkey.prompt + passkey.answer)) <= length


def _passkey(key: str, first: int, sentences: int, depth: float) -> Passkey:
    """Return the prompt with `sentences` filler sentences, and the key at `depth` among them."""
    before = round(depth * sentences)
    filler = [_FILLER[i % len(_FILLER)] for i in range(first, first + sentences)]
    needle = _NEEDLE.format(key=key)
    prompt = "".join([*filler[:before], needle, *filler[before:], _QUESTION])
    return Passkey(key, prompt, _ANSWER.format(key=key))
