"""Collectives as pending tensors, and the log of what they cost."""

from isp.comm import streams
from isp.comm.channel import Channel
from isp.comm.log import CommLog, CommTotals, DeviceClock, TimedTransfer
from isp.comm.mesh import RENDEZVOUS_FILE, Channels, Mesh, World, decided_by_rank_0, use_loopback
from isp.comm.pending import Pending
from isp.comm.roll_call import CollectiveTimeout, RollCall
from isp.comm.tag import CollectiveError, Purpose, Tag

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
