"""Forwards of a model's modules on a rank: the module's own code inside wrappers, in one order.

Once a model is traced, only `Forwards` replaces the forward of one of its modules. Before that,
`set_forward` does where transformers' own code cannot run on a part of the sequence: the trace
then sees that forward as the module's own code.
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
    """The wrappers of a module's forward, from the outermost to the innermost.

    Their order decides what each of them encloses, so it is given here and nowhere else.
    """

    BLOCK = auto()
    """Runs a block in a pass of its own, recomputes it in backward, or leaves it out on other
    pipeline stages."""
    TILES = auto()
    """Runs a module once for each tile of tokens, with the regions and experts inside of it."""
    AHEAD = auto()
    """Returns what was computed before the call of the module, with its region."""
    REGION = auto()
    """Replaces the input of a tensor-parallel region (in msp and fsp by the gathered one)."""
    CALL = auto()
    """Counts a call of the trace, and may take its kept result in a recompute, or call another
    function."""
    COMPUTE = auto()
    """Computes from shards in place of the module's own code, or calls that with other
    arguments."""


class Forwards:
    """The wrappers of a model's modules, collected while it is built and installed once.

    Afterwards `module.forward` is the module's own code inside its wrappers, in the order of
    `Wrap`, whatever the order in which they were added.
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
            for wrap in sorted(wrappers, reverse=True):  # from the innermost
                forward = wrappers[wrap](forward)
            set_forward(module, forward)


def set_forward(module: nn.Module, forward: ModuleForward) -> None:
    """Replace the forward of this instance; its class keeps its own."""
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
