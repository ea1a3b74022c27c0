"""The variables by which torchrun tells a process that it is one of several ranks."""

from __future__ import annotations

import os

__all__ = ["launched", "rank_and_size"]


def launched() -> bool:
    """Return True if torchrun, or a launcher with its variables, has started this process."""
    # Both: other programs set one of the two for purposes of their own.
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) if it was not launched."""
    if not launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
