"""Compilation of small tensor functions into one kernel each, by `torch.compile` (`model.compile`).

[Note: Compiled] Forward and backward of an autograd function are compiled separately, so the
function decides what is saved between them, compiled or not. Sizes and strides are symbols: a new
length does not recompile, a new dtype or a size that becomes 1 does. No order of a sum is chosen by
timing, so all ranks and all starts compute the same bits. These differ from the plain layers' in
rounding: values that those round to the model's dtype in between stay float32 here.
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
"""When to compile: True, False, or `auto` (on CUDA, if a compiler works)."""

_OPTIONS: dict[str, Any] = {"deterministic": True, "compile_threads": 1}
"""Compiler options: no choice by timing [Note: Compiled], and no pool of compiling processes,
which would take longer to start than a few small kernels to compile."""


def lazily_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which computes without gradients, compiled at its first call."""

    @cache
    def kernel() -> Callable[..., R]:  # a function, so that only a user of it loads the compiler
        # Not `fullgraph`: after too many kinds of tensors it would raise and end the run, while
        # without it further kinds run uncompiled. Tests check that the usual kinds compile.
        return torch.compile(function, dynamic=True, options=dict(_OPTIONS))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "tensors and numbers in order"
        # Detached: a tensor that requires a gradient, or is a parameter, would compile again.
        plain = (x.detach() if isinstance(x, Tensor) else x for x in args)
        with torch.no_grad():
            return kernel()(*plain)

    return call


def widened(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cache
def compiles(when: CompileWhen, device: torch.device) -> bool:
    """Return whether functions on `device` are compiled.

    If `torch.compile` does not work there, `auto` logs that once and returns False, and True
    raises ValueError.
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
    """Compile a small function and return the error, on one line; empty if it works."""
    try:
        _probe(torch.zeros(2, 4, device=device))
    except Exception as error:  # an external compiler may raise anything
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line[:200]}"
    return ""


@lazily_compiled
def _probe(x: Tensor) -> Tensor:
    return x.sum(-1).exp()
