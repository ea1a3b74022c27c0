"""The variables by which torchrun tells a process that it is one of several ranks."""

from __future__ import annotations

import os

__all__ = ["rank_and_size"]


def rank_and_size() -> tuple[int, int] | None:
    """Return the rank of this process and the number of ranks, as torchrun has set them.

    None without RANK or WORLD_SIZE: other programs set one of the two for purposes of their own.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
