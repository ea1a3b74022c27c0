"""`DryChannel`, a channel without ranks: what would travel is said, and nothing does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from isp.comm.cargo import Cargo
from isp.comm.channel import Channel
from isp.comm.pending import Pending

__all__ = ["DryChannel", "Listener", "Trip"]


class Trip(NamedTuple):
    """One collective of a rank, as `Transfer` records it."""

    kind: str
    channel: str
    cargo: Cargo
    sent_bytes: int


class Listener(Protocol):
    """A listener to what dry channels do."""

    def launched(self, trip: Trip) -> Callable[[], object]:
        """A transfer sets off; what is returned is called when it is waited for."""


class DryChannel(Channel):
    """Rank `rank` of `size`, without a process group: for tensors on the meta device.

    Code that runs over it does all that it does over a real one, and what arrives has the right
    shape and no contents.
    """

    def __init__(
        self, name: str, size: int, rank: int, listener: Listener, *, sum_locally: bool = False
    ) -> None:
        super().__init__(None, name=name, sum_locally=sum_locally)
        self.size = size
        self.rank = rank
        self.listener = listener

    def _launch(
        self,
        kind: str,
        cargo: Cargo,
        sent_bytes: int,
        start: Callable[[], dist.Work],
        result: Callable[[], Tensor],
        keep: tuple[Tensor, ...],
        pair: tuple[int, ...] = (),
    ) -> Pending:
        arrive = self.listener.launched(Trip(kind, self.name, cargo, sent_bytes))

        def wait() -> Tensor:
            arrive()
            return result()

        return Pending(wait, keep=keep)
