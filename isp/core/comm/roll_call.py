"""`RollCall`: which ranks did not come to a collective, asked once it has failed.

[Note: Roll call] While all goes well, nothing is exchanged: a channel counts what it launches. A
rank whose collective timed out writes into the store through which the ranks once met where it
waited, and how far each of its channels had come; so do the others that wait, here or in other
groups, for the same one in the end. A rank that has not written after `grace_seconds` hangs outside
of communication, or is gone. The first verdict is the verdict of all ranks: who loses a connection
because another rank has ended finds it there.

This is for gloo, where a wait raises. On NCCL the wait is the device's, and torch's watchdog ends
the process.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import torch

from isp.core.comm.channel import Channel
from isp.core.comm.tag import CollectiveCall, CollectiveError, Tag
from isp.core.torch_private import PrefixStore, Store, default_store

__all__ = ["CollectiveTimeout", "RollCall"]

_POLL_SECONDS = 0.05


class CollectiveTimeout(RuntimeError):
    """A collective did not end in time; the text says which, and who did not come to it."""


class _Entry(NamedTuple):
    """A rank's note: where it waited, and how much it had launched in each group."""

    collective: CollectiveCall
    launched: dict[str, int]

    def to_json(self) -> str:
        return json.dumps([list(self.collective), self.launched])

    @classmethod
    def from_json(cls, text: str) -> _Entry:
        collective, launched = json.loads(text)
        return cls(CollectiveCall(*collective), launched)

    def has_reached(self, collective: CollectiveCall) -> bool:
        """Whether the rank had launched the collective that others waited in."""
        return self.launched.get(collective.group, 0) >= collective.number


class RollCall:
    """While entered, turns the time-out of a collective into a `CollectiveTimeout`.

    Making one is a collective over `host`, all ranks on CPU. `channels` are those of this rank, in
    a list that may grow. The names of ranks are those of the world.
    """

    def __init__(self, host: Channel, channels: Sequence[Channel], *, grace_seconds: float) -> None:
        self._rank, self._channels, self._grace_seconds = host.rank, channels, grace_seconds
        self._store: Store | None = None
        if host.group is not None:
            # Restarted ranks may find the store of those before them.
            token = torch.tensor([secrets.randbits(62)])
            host.broadcast_(token, tag=Tag(tensor="roll call")).wait()
            name = f"roll_call/{token.item()}"
            self._store = PrefixStore(name, default_store())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._store is None or error is None or (found := _communication_error(error)) is None:
            return
        try:
            verdict = self._verdict(self._store, found)
        except (RuntimeError, ValueError):  # the store has gone with the rank that kept it
            return
        if verdict:
            raise CollectiveTimeout(verdict).with_traceback(trace) from None

    def _verdict(self, store: Store, error: CollectiveError) -> str:
        """The fate of the collective; empty if no rank has seen a time-out."""
        collective, launched = error.collective, dict[str, int]()
        for channel in self._channels:
            launched |= channel.progress()
        store.set(str(self._rank), _Entry(collective, launched).to_json())
        if "timed out" not in str(error).lower():
            return store.get("verdict").decode() if store.check(["verdict"]) else ""
        entries: dict[int, _Entry] = {}
        end = time.monotonic() + self._grace_seconds
        while self._silent(store, collective, entries) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        text = self._describe(collective, entries, self._silent(store, collective, entries))
        verdict: bytes = store.compare_set("verdict", "", text)
        return verdict.decode()

    def _silent(
        self, store: Store, collective: CollectiveCall, entries: dict[int, _Entry]
    ) -> list[int]:
        """The ranks without a sign for which those in `collective` wait, or wait for one that does.

        Reads what they have written into `entries`.
        """
        asked, silent = {self._rank}, []
        to_ask = [rank for rank in collective.ranks if rank != self._rank]
        while to_ask:
            rank = to_ask.pop()
            if rank in asked:
                continue
            asked.add(rank)
            if rank not in entries and store.check([str(rank)]):
                entries[rank] = _Entry.from_json(store.get(str(rank)).decode())
            if rank not in entries:
                silent.append(rank)
            elif not entries[rank].has_reached(collective):
                to_ask += entries[rank].collective.ranks
        return sorted(silent)

    def _describe(
        self, collective: CollectiveCall, entries: dict[int, _Entry], silent: list[int]
    ) -> str:
        others = [rank for rank in collective.ranks if rank != self._rank]
        missing = [r for r in others if r not in entries or not entries[r].has_reached(collective)]
        head = f"rank {self._rank}: {collective} did not end in time"
        if not missing:
            return (
                f"{head}, though all ranks have arrived: the network is stuck, or slower than"
                f" comm.train_timeout_seconds allows"
            )
        lines = [f"{head}: {_ranks(missing)} did not arrive"]
        elsewhere = [rank for rank in missing if rank in entries]
        lines += [f"rank {rank} waited for {entries[rank].collective}" for rank in elsewhere[:8]]
        if silent:
            lines.append(
                f"{_ranks(silent)} gave no sign in {self._grace_seconds:g} s more: stuck outside of"
                f" communication, or gone"
            )
        return "\n  ".join(lines)


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def _communication_error(error: BaseException | None) -> CollectiveError | None:
    """The failed transfer behind `error`."""
    while error is not None and not isinstance(error, CollectiveError):
        error = error.__cause__
    return error
