"""Flat buckets of gradients, each summed over its ranks by one collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from isp.comm import Channel, Pending
from isp.comm.cargo import Cargo, Purpose
from isp.layers.module import NamedParameter
from isp.parallel import Axis

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "BucketManager",
    "Channels",
    "master_dtype",
]

DEFAULT_BUCKET_BYTES = 25 * 2**20


class Channels(Protocol):
    """Lookup of a channel for every axis asked for: a `Mesh`, or a dict."""

    def __getitem__(self, axis: Axis, /) -> Channel: ...


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of main gradients and master weights of a parameter: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(eq=False)
class _Bucket:
    """Gradients that travel together."""

    flat: Tensor
    channel: Channel
    cargo: Cargo
    parameters: frozenset[nn.Parameter]
    awaited: set[nn.Parameter]
    pending: Pending | None = field(default=None, init=False)
    """The reduction, from its launch until the next `reset`."""


class BucketManager:
    """Main gradients as views into flat buckets, which are summed over the replicas.

    A bucket holds parameters that are reduced over the same axis, about `bucket_bytes` of them, in
    reverse order of declaration: the order in which a backward pass produces their gradients. It
    may travel once all of them are `mark_ready`, and the rest goes in `finish`.

    [Note: Launch order] Buckets are launched strictly in their order, whatever order they become
    ready in: the ranks' readiness may differ (a parameter that one of them did not use), and
    collectives that meet in different orders deadlock or add up different things.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        channels: Channels,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 0:
            raise ValueError(
                f"bucket_bytes={bucket_bytes} must be at least 0 (0: one parameter a bucket)"
            )
        self._buckets: list[_Bucket] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._launched = 0
        for members in _grouped(list(parameters), bucket_bytes):
            self._open(members, channels)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        """Memory that the buckets take."""
        return sum(bucket.flat.nbytes for bucket in self._buckets)

    def view(self, parameter: nn.Parameter) -> Tensor:
        """The place of the gradient of `parameter` in its bucket, of the parameter's shape."""
        return self._views[parameter]

    def is_ready(self, parameter: nn.Parameter) -> bool:
        """Whether `mark_ready` has been called: the gradient may be travelling, hands off."""
        return parameter not in self._bucket_of[parameter].awaited

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """The gradient is final; launches every bucket whose turn it is [Note: Launch order]."""
        self._bucket_of[parameter].awaited.discard(parameter)
        while self._launched < len(self) and not self._buckets[self._launched].awaited:
            self._launch_next()

    def finish(self) -> None:
        """Launch what has not been launched, ready or not, and wait until all sums are there."""
        while self._launched < len(self):
            self._buckets[self._launched].awaited.clear()
            self._launch_next()
        self.wait()

    def wait(self) -> None:
        """Wait for the reductions in flight."""
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()

    def reset(self) -> None:
        """Await every gradient anew; the values stay."""
        self.wait()
        self._launched = 0
        for bucket in self._buckets:
            bucket.pending = None
            bucket.awaited = set(bucket.parameters)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.pending = bucket.channel.all_reduce_(bucket.flat, cargo=bucket.cargo)

    def _open(self, members: list[NamedParameter], channels: Channels) -> None:
        first = members[0]
        flat = torch.zeros(
            sum(m.parameter.numel() for m in members),
            dtype=master_dtype(first.parameter.dtype),
            device=first.parameter.device,
        )
        what = f"gradients {first.name} .. {members[-1].name}"
        bucket = _Bucket(
            flat=flat,
            channel=channels[first.layout.reduce_over],
            cargo=Cargo(Purpose.REPLICA_GRADIENT, tensor=what),
            parameters=frozenset(m.parameter for m in members),
            awaited={m.parameter for m in members},
        )
        sizes = [m.parameter.numel() for m in members]
        for member, part in zip(members, flat.split(sizes), strict=True):
            self._views[member.parameter] = part.view(member.parameter.shape)
            self._bucket_of[member.parameter] = bucket
        self._buckets.append(bucket)


def _grouped(parameters: list[NamedParameter], bucket_bytes: int) -> list[list[NamedParameter]]:
    """Members of each bucket; buckets in the order in which their last gradients come."""
    open_buckets: dict[tuple[Axis, torch.dtype, torch.device], list[NamedParameter]] = {}
    num_bytes: dict[tuple[Axis, torch.dtype, torch.device], int] = {}
    closed: list[list[NamedParameter]] = []
    for item in reversed(parameters):
        dtype = master_dtype(item.parameter.dtype)
        key = (item.layout.reduce_over, dtype, item.parameter.device)
        open_buckets.setdefault(key, []).append(item)
        num_bytes[key] = num_bytes.get(key, 0) + item.parameter.numel() * dtype.itemsize
        if num_bytes[key] >= bucket_bytes:
            closed.append(open_buckets.pop(key))
            del num_bytes[key]
    place = {item.parameter: i for i, item in enumerate(reversed(parameters))}
    rest = sorted(open_buckets.values(), key=lambda members: place[members[-1].parameter])
    return closed + rest
