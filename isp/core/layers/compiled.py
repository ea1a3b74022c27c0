"""Compiles small tensor functions into one kernel each by `torch.compile` (`model.compile`).

Forward and backward of an autograd function are compiled separately, with dynamic sizes and
without timing choices. See [Note: Compiled] in docs/design/notes/layers.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["CompileWhen", "compiles", "lazily_compiled", "widened"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

CompileWhen = bool | Literal["auto"]
"""When to compile: True, False, or `auto` (on CUDA, if `torch.compile` works there)."""

_OPTIONS: dict[str, Any] = {"deterministic": True, "compile_threads": 1}
"""Options of the compiler: `deterministic` forbids choices by timing [Note: Compiled]; one thread,
because a pool of processes takes longer to start than a few small kernels to compile."""


def lazily_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return a version of `function` that is compiled at its first call.

    It computes without gradients and takes positional arguments only.
    """

    @cache
    def kernel() -> Callable[..., R]:  # at the first call, as loading the compiler takes seconds
        # Not `fullgraph`: after too many kinds of tensors it would raise and end the run; without
        # it, further kinds run uncompiled. Tests check that the usual kinds compile.
        return torch.compile(function, dynamic=True, options=dict(_OPTIONS))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "pass all arguments by position: keyword arguments are not passed on"
        # Detached, because a tensor that requires a gradient, or a parameter, compiles again.
        plain = (x.detach() if isinstance(x, Tensor) else x for x in args)
        with torch.no_grad():
            return kernel()(*plain)

    return call


def widened(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cache
def compiles(when: CompileWhen, device: torch.device) -> bool:
    """Return True if functions on `device` are compiled.

    If `torch.compile` does not work on `device`, `auto` logs that once and returns False, and
    `when=True` raises ValueError.
    """
    if when is False or device.type == "meta" or (when == "auto" and device.type != "cuda"):
        return False
    fault = _fault_on(device)
    if not fault:
        return True
    compiler = "triton and a C compiler" if device.type == "cuda" else "a C++ compiler"
    if when is True:
        raise ValueError(
            f"model.compile=true: torch.compile does not work here ({fault}): install"
            f" {compiler}, or use model.compile=false"
        )
    logger.warning(
        "rotations, activations and losses are not compiled, as torch.compile does not work here"
        " (%s): install %s, or set model.compile=false",
        fault,
        compiler,
    )
    return False


@cache
def _fault_on(device: torch.device) -> str:
    """Compile and run a small function; return the error on one line, or "" if there is none."""
    try:
        _probe(torch.zeros(2, 4, device=device))
    # Every exception is caught: `torch.compile` calls other compilers, which may raise any.
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line[:200]}"
    return ""


@lazily_compiled
def _probe(x: Tensor) -> Tensor:
    """Compute something, to find out if the compiler works."""
    return x.sum(-1).exp()
