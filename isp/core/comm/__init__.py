"""Channels with asynchronous collectives, process groups of a mesh, and the communication log."""

from isp.core.comm import streams
from isp.core.comm.channel import Channel
from isp.core.comm.pending import Pending
from isp.core.comm.roll_call import CollectiveTimeout, RollCall
from isp.core.comm.tag import CollectiveError, Purpose, Tag
from isp.core.comm.transfer_log import CommLog, CommTotals, DeviceClock, TimedTransfer
from isp.core.comm.world import (
    RENDEZVOUS_FILE,
    Channels,
    Mesh,
    World,
    decided_by_rank_0,
    use_loopback,
)

__all__ = [
    "RENDEZVOUS_FILE",
    "Channel",
    "Channels",
    "CollectiveError",
    "CollectiveTimeout",
    "CommLog",
    "CommTotals",
    "DeviceClock",
    "Mesh",
    "Pending",
    "Purpose",
    "RollCall",
    "Tag",
    "TimedTransfer",
    "World",
    "decided_by_rank_0",
    "streams",
    "use_loopback",
]
