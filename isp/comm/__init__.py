"""Collectives as pending tensors, and the log of what they cost."""

from isp.comm import streams
from isp.comm.cargo import Cargo, CollectiveError, Purpose
from isp.comm.channel import Channel
from isp.comm.log import CommLog, CommTotals, DeviceClock, Transfer
from isp.comm.mesh import Mesh, World
from isp.comm.pending import Link, Pending
from isp.comm.roll_call import CollectiveTimeout, RollCall

__all__ = [
    "Cargo",
    "Channel",
    "CollectiveError",
    "CollectiveTimeout",
    "CommLog",
    "CommTotals",
    "DeviceClock",
    "Link",
    "Mesh",
    "Pending",
    "Purpose",
    "RollCall",
    "Transfer",
    "World",
    "streams",
]
