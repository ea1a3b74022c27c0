"""Checkpoints that any layout can load, published as a whole or not at all."""

from isp.checkpoint.agreement import CheckpointError
from isp.checkpoint.checkpointer import Checkpointer, CheckpointInfo
from isp.checkpoint.folder import CheckpointFolder
from isp.checkpoint.plain import Plain
from isp.checkpoint.report import Verdict, inspect, verify
from isp.checkpoint.state import Resumed, TrainState

__all__ = [
    "CheckpointError",
    "CheckpointFolder",
    "CheckpointInfo",
    "Checkpointer",
    "Plain",
    "Resumed",
    "TrainState",
    "Verdict",
    "inspect",
    "verify",
]
