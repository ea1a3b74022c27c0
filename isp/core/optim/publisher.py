"""`Publisher`: the rows that each rank of a zero1 group has updated, brought to all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from torch import Tensor, nn

from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Purpose
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES, Bucket, copy_all, grouped
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = ["Publisher"]


class WeightBucket(Bucket):
    """Parameters whose rows are brought to all ranks of a channel, at most once at a time."""

    def __init__(self, members: list[ShardedParameter], channel: Channel) -> None:
        super().__init__(Purpose.PUBLISHED_WEIGHT, members, channel, channel.size)
        for member in members:
            if not member.parameter.is_contiguous():
                raise ValueError(f"{member.name} must be contiguous to be published by rows")
        self._flats = [member.parameter.detach().view(-1) for member in members]

    def launch(self) -> Pending:
        """Set this rank's rows on their way to the others, and theirs to here."""
        assert self.pending is None or self.pending.waited
        sent = self._flats[0].new_empty(sum(self.widths))  # [L]
        rank, slots = self.channel.rank, sent.split(self.widths)
        owned = (
            flat[rank * width : (rank + 1) * width]  # fewer at the end: padding is never read
            for flat, width in zip(self._flats, self.widths, strict=True)
        )
        copy_all((slot[: own.numel()], own) for slot, own in zip(slots, owned, strict=True))
        gathered = sent.new_empty(self.parts, sent.numel())  # [p, L]
        pending = self.channel.all_gather_into(gathered, sent, tag=self.tag)
        self.pending = pending.then(self._unpack)
        return self.pending

    def _unpack(self, gathered: Tensor) -> Tensor:
        copy_all(
            pair
            for flat, slots in zip(self._flats, gathered.split(self.widths, dim=1), strict=True)
            for pair in _rows_of_all(flat, slots)
        )
        return gathered


def _rows_of_all(flat: Tensor, slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The elements of a parameter, out of slots [p, width]."""
    if width := slots.shape[1]:
        num_full, rest = divmod(flat.numel(), width)
        yield flat[: num_full * width].view(num_full, width), slots[:num_full]
        if rest:
            yield flat[num_full * width :], slots[num_full, :rest]


class Publisher:
    """Brings the rows that each rank owns into the parameters of all ranks of `channel`.

    Buckets of about `bucket_bytes` of parameters, in order of declaration: what the next forward
    pass needs first travels first.
    """

    def __init__(
        self,
        parameters: Iterable[ShardedParameter],
        channel: Channel,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        order = {item: i for i, item in enumerate(parameters if channel.size > 1 else ())}
        found = grouped(
            order,
            lambda item: (item.parameter.dtype, item.parameter.device),
            lambda item: item.parameter.nbytes,
            bucket_bytes,
        )
        found.sort(key=lambda members: order[members[0]])
        self.buckets = [WeightBucket(members, channel) for members in found]
        self._bucket_of = {item.parameter: b for b in self.buckets for item in b.members}

    def launch(self) -> list[Pending]:
        """Start all transfers; a parameter must not be used before its own has been waited for."""
        return [bucket.launch() for bucket in self.buckets]

    def launch_updated(self, left: Collection[ShardedParameter]) -> None:
        """Start the transfers that are not under way, but for those of what is `left` to update."""
        for bucket in self.buckets:
            if bucket.pending is None and not any(item in left for item in bucket.members):
                bucket.launch()

    def wait_for(self, parameter: nn.Parameter) -> None:
        """Wait until `parameter` is up to date; free if it is."""
        for wait in self.waits_for([parameter]):
            wait()

    def waits_for(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """As `wait_for`, once for each bucket that these are in."""
        of = self._bucket_of  # none in a channel of one rank
        return [bucket.wait for bucket in dict.fromkeys(of[p] for p in parameters if p in of)]

    def wait(self) -> None:
        """Wait for all transfers."""
        for bucket in self.buckets:
            bucket.wait()
