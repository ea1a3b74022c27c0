"""Collectives as pending tensors, and the log of what they cost."""

from isp.comm.channel import Channel
from isp.comm.link import Link
from isp.comm.log import CommLog, CommTotals, DeviceClock, Transfer
from isp.comm.mesh import Mesh, World
from isp.comm.pending import Pending

__all__ = [
    "Channel",
    "CommLog",
    "CommTotals",
    "DeviceClock",
    "Link",
    "Mesh",
    "Pending",
    "Transfer",
    "World",
]
