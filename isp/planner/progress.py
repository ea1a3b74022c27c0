"""How far a plan is, for who waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

__all__ = ["SearchProgress", "silent"]

T = TypeVar("T")


class SearchProgress(Protocol):
    """Shows how many of its items have been worked on while they are taken one by one."""

    def __call__(self, items: Sequence[T], what: str) -> Iterable[T]:
        """`items`, of which `what` says in words what is done with them."""


def silent(items: Sequence[T], what: str) -> Iterable[T]:
    """`items`, with nothing shown."""
    return items
