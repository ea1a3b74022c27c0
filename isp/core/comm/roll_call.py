"""`RollCall`, which finds the ranks that are missing from a collective that timed out.

Ranks whose collectives time out write where they wait into the rendezvous store; ranks that write
nothing are missing. See [Note: Roll call] in docs/design/notes/communication.md.
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
    """A collective that did not end in time; the text names it and the missing ranks."""


class _Entry(NamedTuple):
    """A rank's entry in the store: the collective it waits in, and its launches by group."""

    collective: CollectiveCall
    launched: dict[str, int]

    def to_json(self) -> str:
        return json.dumps([list(self.collective), self.launched])

    @classmethod
    def from_json(cls, text: str) -> _Entry:
        collective, launched = json.loads(text)
        return cls(CollectiveCall(*collective), launched)

    def has_reached(self, collective: CollectiveCall) -> bool:
        """Return whether the rank had launched `collective`, in which other ranks waited."""
        return self.launched.get(collective.group, 0) >= collective.number


class RollCall:
    """A context that turns the timeout of a collective into a `CollectiveTimeout`.

    Its constructor is a collective over `host`, the channel of all ranks on CPU. `channels` is the
    list of this rank's channels, which may grow. `grace_seconds`: how long to wait for the entries
    of other ranks. Error texts name ranks by their world ranks.
    """

    def __init__(self, host: Channel, channels: Sequence[Channel], *, grace_seconds: float) -> None:
        self._rank, self._channels, self._grace_seconds = host.rank, channels, grace_seconds
        self._store: Store | None = None
        if host.group is not None:
            # Restarted ranks may get the store of an earlier start: a new prefix hides its entries.
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
        except (RuntimeError, ValueError):
            # The rank of the store has ended, and the store with it: let the first error be raised.
            return
        if verdict:
            raise CollectiveTimeout(verdict).with_traceback(trace) from None

    def _verdict(self, store: Store, error: CollectiveError) -> str:
        """Return the error text on which all ranks agree; empty if no rank has seen a timeout."""
        # From this rank's counts of launches, other ranks see whether it had reached the collective
        # in which they wait.
        collective, launched = error.collective, dict[str, int]()
        for channel in self._channels:
            launched |= channel.progress()
        # Write this rank's entry first, because other ranks may be waiting for it.
        store.set(str(self._rank), _Entry(collective, launched).to_json())
        # A lost connection means that another rank has ended, which may have written a verdict.
        if "timed out" not in str(error).lower():
            return store.get("verdict").decode() if store.check(["verdict"]) else ""
        entries: dict[int, _Entry] = {}
        end = time.monotonic() + self._grace_seconds
        while self._silent(store, collective, entries) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        text = self._describe(collective, entries, self._silent(store, collective, entries))
        verdict: bytes = store.compare_set("verdict", "", text)  # the first one written wins
        return verdict.decode()

    def _silent(
        self, store: Store, collective: CollectiveCall, entries: dict[int, _Entry]
    ) -> list[int]:
        """Return the ranks without an entry that `collective` waits for, directly or indirectly.

        For a rank that waits in another collective, the search continues with the ranks of that
        collective. Reads new entries from the store into `entries`.
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
            elif not entries[rank].has_reached(collective):  # the rank waits in another collective
                to_ask += entries[rank].collective.ranks
        return sorted(silent)

    def _describe(
        self, collective: CollectiveCall, entries: dict[int, _Entry], silent: list[int]
    ) -> str:
        """Return the error text: the collective, its missing ranks, and what they waited for."""
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
    """Return the `CollectiveError` in the chain of causes of `error`; None if there is none."""
    while error is not None and not isinstance(error, CollectiveError):
        error = error.__cause__
    return error
