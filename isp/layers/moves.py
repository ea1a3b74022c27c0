"""The travels of a linear's six tensors, by mode.

A linear has x, w, y going forward and dy, dx, dw going backward.

    mode   column linear                                row linear
    mtp    dx: all-reduce                               y: all-reduce
    msp    x: all-gather on S, kept; dx: r.-scatter     y: reduce-scatter on S; dy: all-gather
    fsp    as msp; x is gathered again in backward      as msp
    isp    w: all-gather; dw: reduce-scatter            the same

The moves of w and dw belong to the communicator (`isp.weights`); those of the activations are here.

Source: Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022), InternEvo (Chen et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

from torch import Tensor

from isp.comm import Channel, Pending
from isp.comm.cargo import UNNAMED, Cargo
from isp.parallel import Mode

__all__ = ["SEQUENCE_DIM", "Move", "Moves", "Role", "moves_for", "stay"]

SEQUENCE_DIM = 1
"""S in [B, S, D]."""


class Role(Enum):
    """The split of a linear's features: `COLUMN` splits its outputs, `ROW` its inputs."""

    COLUMN = auto()
    ROW = auto()


class Move(Protocol):
    """Sets a tensor on its way."""

    def __call__(self, x: Tensor, *, cargo: Cargo) -> Pending: ...


def stay(x: Tensor, *, cargo: Cargo = UNNAMED) -> Pending:
    """The move that goes nowhere."""
    return Pending.ready(x)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The moves of the four activations of a linear."""

    x: Move = stay
    """The input, before it is multiplied."""
    y: Move = stay
    """The output."""
    dy: Move = stay
    """The gradient of the output; the dual of `y`."""
    dx: Move = stay
    """The gradient of the input; the dual of `x`."""
    regather_x: bool = False
    """Save x as it came, and move it again in backward."""


def moves_for(
    mode: Mode, role: Role, tensor: Channel, *, sequence_dim: int = SEQUENCE_DIM
) -> Moves:
    """The row of the mode table for a linear of `role`, over the tensor group."""
    if tensor.size == 1:
        return Moves()
    gather = partial(tensor.all_gather, dim=sequence_dim)
    reduce_scatter = partial(tensor.reduce_scatter, dim=sequence_dim)
    match mode, role:
        case Mode.ISP, _:
            return Moves()
        case Mode.MTP, Role.COLUMN:
            return Moves(dx=tensor.all_reduce)
        case Mode.MTP, Role.ROW:
            return Moves(y=tensor.all_reduce)
        case Mode.MSP | Mode.FSP, Role.COLUMN:
            return Moves(x=gather, dx=reduce_scatter, regather_x=mode is Mode.FSP)
        case Mode.MSP | Mode.FSP, Role.ROW:
            return Moves(y=reduce_scatter, dy=gather)
    raise AssertionError((mode, role))
