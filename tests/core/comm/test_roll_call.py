"""Ranks that do not arrive at a collective, and what the other ranks report."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from isp.core.comm import CollectiveError, CollectiveTimeout, Mesh, RollCall
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis, Mode
from tests.ranks import run_ranks
from tests.toolkit import topology

SECONDS = 1
"""Timeout of a collective."""

Work = Callable[[Mesh], object]


def _gather(axis: Axis, label: str) -> Work:
    return lambda mesh: mesh[axis].all_gather(torch.ones(2), tag=Tag(tensor=label)).wait()


def _sleep(mesh: Mesh) -> None:
    # longer than the others wait; a rank that has ended would be reported differently
    time.sleep(4.5 * SECONDS)


def _said(rank: int, works: list[list[Work]]) -> str:
    """Return the error of a rank after its part of `works`; tensor groups are [0, 1] and [2, 3]."""
    mesh = Mesh(topology(len(works), mode=Mode.MTP, tensor=2), rank)
    for axis in (Axis.TENSOR, Axis.DATA):
        _gather(axis, "first")(mesh)
    roll_call = RollCall(mesh.host, mesh.opened, grace_seconds=SECONDS)
    mesh.set_timeout(SECONDS)
    begin = time.monotonic()
    try:
        with roll_call:
            for work in works[rank]:
                work(mesh)
    except (CollectiveTimeout, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    assert time.monotonic() - begin > 2 * SECONDS, "nothing has been waited for"
    return ""


def test_the_missing_rank_is_named() -> None:
    """Catches a hang whose report lacks the collective, the tensor or the rank that is missing."""
    wait = [_gather(Axis.TENSOR, "layers.0.wo.weight")]
    both = [_gather(Axis.TENSOR, "layers.0.wo.weight"), _gather(Axis.TENSOR, "never")]
    first, second = run_ranks(2, _said, [wait, [_sleep, *both]])
    assert second == first, "it finds what has been said, and a connection that is closed"
    assert first == (
        "CollectiveTimeout: rank 0: all_gather of layers.0.wo.weight in the tensor group [0, 1]"
        " (number 2 there) did not end in time: rank 1 did not arrive\n"
        "  rank 1 gave no sign in 1 s more: stuck outside of communication, or gone"
    )


def test_the_missing_rank_is_found_across_groups() -> None:
    """Catches ranks blamed although they wait themselves, and ranks whose reports differ."""
    chain = [
        [_gather(Axis.TENSOR, "x")],  # waits for rank 1, which waits for rank 3
        [_gather(Axis.DATA, "y"), _gather(Axis.TENSOR, "x")],
        [_gather(Axis.TENSOR, "x")],
        [_sleep],
    ]
    said = run_ranks(4, _said, chain)
    assert said[0] == said[1] == said[2]
    assert said[3] == ""
    assert "rank 3 gave no sign in 1 s more" in said[0]
    if "rank 0: all_gather of x in the tensor group [0, 1]" in said[0]:
        assert "(number 2 there) did not end in time: rank 1 did not arrive\n" in said[0]
        assert "rank 1 waited for all_gather of y in the data group [1, 3]" in said[0]


def _send(label: str, target: int) -> Work:
    return lambda mesh: mesh[Axis.TENSOR].send(torch.ones(2), target, tag=Tag(tensor=label)).wait()


def _receive(label: str, source: int) -> Work:
    return lambda mesh: mesh[Axis.TENSOR].recv(torch.empty(2), source, tag=Tag(tensor=label)).wait()


def test_a_missing_sender_is_named() -> None:
    """Catches a receive without a timeout, and one that counts a rank's collectives as its
    sends.
    """
    receives = [_receive("part 1", 1), _receive("part 2", 1)]
    sends = [_send("part 1", 0), _sleep, _gather(Axis.TENSOR, "never")]
    first, second = run_ranks(2, _said, [receives, sends])
    assert second == first
    assert first.startswith(
        "CollectiveTimeout: rank 0: recv of part 2 in the tensor line from rank 1 to rank 0"
        " (number 2 there) did not end in time: rank 1 did not arrive\n"
        "  rank 1 gave no sign in 1 s more"
    )


def _fail(rank: int) -> str:
    """Close the connections of rank 1, and return what rank 0 reports."""
    mesh = Mesh(topology(2, mode=Mode.MTP, tensor=2), rank)
    roll_call = RollCall(mesh.host, mesh.opened, grace_seconds=60)
    if rank == 1:
        dist.destroy_process_group(mesh[Axis.TENSOR].group)
        time.sleep(SECONDS)
        return ""
    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught, roll_call:
        _gather(Axis.TENSOR, "x")(mesh)
    assert time.monotonic() - begin < 10, "nobody has timed out: there is nothing to wait for"
    return str(caught.value)


def test_a_lost_connection_is_reported_at_once() -> None:
    """Catches a restart that is delayed while ranks wait for an answer of a dead one."""
    said, _ = run_ranks(2, _fail)
    assert said.startswith("all_gather of x in the tensor group [0, 1] (number 1 there): ")
