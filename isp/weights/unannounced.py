"""Plans for who does not call `ISPCommunicator.begin`.

[Note: Unannounced] Nobody says when weights change if nobody calls `begin`, and not every write can
be seen [Note: Versions]. So what is gathered ahead then lives no longer than the pass that it was
gathered for: a forward that is at any but the next place of the plan is another pass. The plan is
given up, what is there is dropped, and the layers gather for themselves until the next forward from
the start.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from isp.weights.trace import Action, ActionKind

if TYPE_CHECKING:
    from isp.weights.communicator import ISPCommunicator

__all__ = ["UnannouncedPasses"]


class UnannouncedPasses:
    """Begins a pass, one forward and one backward of all chunks, whenever its first visit comes."""

    def __init__(
        self, communicator: ISPCommunicator, keys: Sequence[Hashable], num_chunks: int
    ) -> None:
        self._communicator = communicator
        self._keys = keys
        """Of all visits, in forward order."""
        forward = (Action(ActionKind.FORWARD, 0, c) for c in range(num_chunks))
        backward = (Action(ActionKind.BACKWARD, 0, c) for c in reversed(range(num_chunks)))
        self._actions = (*forward, *backward)

    def __call__(self, key: Hashable) -> None:
        """A forward has come to `key`, which is not the next visit of the plan."""
        if key not in self._keys:  # a layer that nobody has declared is in no plan
            return
        self._communicator.drain()
        if key == self._keys[0]:
            self._communicator.follow(self._actions)
