"""Small functions of tensors of which `torch.compile` makes one kernel each (`model.compile`).

[Note: Compiled] Forward and backward of an autograd function are compiled each by itself, so what
is kept between them is what the function says, compiled or not. Sizes and strides are symbols:
another length compiles nothing new, another dtype does, or a size that becomes 1. No order of a
sum is chosen by timing, so every rank, and every start, computes the same. It is not what the plain
layers compute to the last bit: what they round to the model's dtype in between stays float32 here.
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
"""True, False, or `auto`: on CUDA."""

_OPTIONS: dict[str, Any] = {"deterministic": True, "compile_threads": 1}
"""As [Note: Compiled] says; and a few small kernels need no pool of processes that compile."""


def lazily_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of tensors, without gradients, compiled when it is first called."""

    @cache
    def kernel() -> Callable[..., R]:  # here: the compiler is imported by those who use it
        # Not `fullgraph`, which would end a run that has met too many kinds of tensors: what is
        # not compiled for is then computed as it stands. That nothing else is not is tested.
        return torch.compile(function, dynamic=True, options=dict(_OPTIONS))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "tensors and numbers in order"
        # whether a tensor requires a gradient, or is a parameter, would compile another kernel
        plain = (x.detach() if isinstance(x, Tensor) else x for x in args)
        with torch.no_grad():
            return kernel()(*plain)

    return call


def widened(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cache
def compiles(when: CompileWhen, device: torch.device) -> bool:
    """Whether what is computed on `device` is to be compiled.

    Where a compiler is missing, `auto` says so once and computes as written; for True that is a
    ValueError.
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
    """What keeps `torch.compile` from working, found by trying; empty: nothing."""
    try:
        _probe(torch.zeros(2, 4, device=device))
    except Exception as error:  # of a compiler that runs outside, anything
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line[:200]}"
    return ""


@lazily_compiled
def _probe(x: Tensor) -> Tensor:
    return x.sum(-1).exp()
