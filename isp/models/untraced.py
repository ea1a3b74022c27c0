"""Why a model could not be traced, in a line: the place, its code, and the cause."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

__all__ = ["untraced"]

_OTHERS = Path(torch.__file__).parent, Path(__file__).parents[1]
"""Code that a model's code calls, or that calls it."""


def untraced(model: nn.Module, inside: nn.Module | None, error: Exception, tokens: int) -> str:
    """The message for an `error` of a model's code, in the forward of the module `inside`."""
    names = {id(module): name for name, module in model.named_modules()}
    place = type(model).__name__
    if inside is not None and names.get(id(inside)):
        place = f"{names[id(inside)]} ({type(inside).__name__}) of {place}"
    code, line, text = _code_of(error), "", ""
    if code is not None:
        line = code.line or ""
        text = f" ({Path(code.filename).name}:{code.lineno}: {line})"
    return (
        f"{place} could not be traced: {_cause(error, line)}{text}. The model is called with tokens"
        f" and positions [1, {tokens}] on the meta device"
    )


def _cause(error: Exception, line: str) -> str:
    if "NoneType" in str(error) and "mask" in line:
        return (
            "it reads an attention mask, and isp gives none: attention that chooses keys for each"
            " token (sparse attention) is supported where isp knows the indexer"
        )
    if "meta tensor" in str(error) or "data-independent" in str(error):
        return "what it does depends on the values of tensors, which a trace does not have"
    return f"{type(error).__name__}: {error}"


def _code_of(error: Exception) -> traceback.FrameSummary | None:
    """The innermost line of the model's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (f for f in reversed(frames) if not any(p in Path(f.filename).parents for p in _OTHERS))
    return next(own, None)
