"""Checkpoints that any layout can load, published as a whole or not at all."""

from isp.checkpoint.agreement import CheckpointError
from isp.checkpoint.checkpointer import Checkpointer, CheckpointInfo
from isp.checkpoint.report import inspect, verify
from isp.checkpoint.state import Resumed, TrainState

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpointer",
    "Resumed",
    "TrainState",
    "inspect",
    "verify",
]
