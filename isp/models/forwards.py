"""Forwards of a model's modules on a rank: the module's own code inside wrappers, in one order.

After a model is traced, only `Forwards` replaces forwards of its modules. Before the trace,
`set_forward` replaces a forward of transformers that cannot run on a part of the sequence; the
trace sees the replacement as the module's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum, auto
from typing import Any

from torch import nn

__all__ = ["Forwards", "ModuleForward", "Wrap", "Wrapper", "replaced_forward", "set_forward"]

ModuleForward = Callable[..., Any]
Wrapper = Callable[[ModuleForward], ModuleForward]
"""A function that takes a forward and returns one that calls it."""


class Wrap(IntEnum):
    """The kinds of wrappers of a module's forward, from the outermost to the innermost.

    `Forwards` installs them in this order, whatever the order in which they are added.
    """

    BLOCK = auto()
    """Runs a block in a pass of its own, recomputes it in backward, or leaves it out on other
    pipeline stages."""
    TILES = auto()
    """Runs a module, with all regions and experts inside of it, once for each tile of tokens."""
    AHEAD = auto()
    """Returns the module's output if it was computed before the call, without entering `REGION`
    again."""
    REGION = auto()
    """Replaces the input of a tensor-parallel region: in msp and fsp by the input of all ranks,
    gathered; in mtp by a view whose gradient is all-reduced."""
    CALL = auto()
    """Counts a call of the trace. May call a substitute of the module, or return the kept result
    of the call in a recompute."""
    COMPUTE = auto()
    """Computes from shards in place of the module's own code, or calls that code with other
    arguments."""


class Forwards:
    """The wrappers of a model's modules, collected while the model is built and installed once.

    `install` sets each `module.forward` to the module's own code inside its wrappers, in the order
    of `Wrap`, whatever the order in which they were added.
    """

    def __init__(self) -> None:
        self._wrappers: dict[nn.Module, dict[Wrap, Wrapper]] = {}
        self._installed = False

    def add(self, module: nn.Module, wrap: Wrap, wrapper: Wrapper) -> None:
        """Add a wrapper to a module, which has at most one of each kind."""
        assert not self._installed, "forwards are installed already"
        own = self._wrappers.setdefault(module, {})
        assert wrap not in own, f"{type(module).__name__} has two wrappers {wrap.name}"
        own[wrap] = wrapper

    def install(self) -> None:
        """Replace the forward of each module that has wrappers; call it once."""
        assert not self._installed, "forwards are installed already"
        self._installed = True
        for module, wrappers in self._wrappers.items():
            forward = module.forward
            # Apply the innermost wrapper first: each further one is put around the result.
            for wrap in sorted(wrappers, reverse=True):
                forward = wrappers[wrap](forward)
            set_forward(module, forward)


def set_forward(module: nn.Module, forward: ModuleForward) -> None:
    """Replace the forward of one module; other modules of its class keep theirs."""
    module.forward = forward


@contextmanager
def replaced_forward(module: nn.Module, forward: ModuleForward) -> Iterator[None]:
    """Replace the module's forward in this context, for a trial run."""
    before = module.__dict__.get("forward")
    set_forward(module, forward)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            set_forward(module, before)
