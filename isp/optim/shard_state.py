"""The state of an optimizer as plain values, and whether two are of the same place."""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

from torch import Tensor

from isp.parallel.layout import ParameterLayout

__all__ = ["OptimizerState", "ShardState", "as_plain", "require_same_place"]


class ShardState(TypedDict):
    """The state of a parameter on this rank: `rows` of dim 0 of the local shard."""

    rows: list[int]
    """(start, stop)."""
    layout: dict[str, Any]
    """The fields of the local shard's `ParameterLayout`."""
    tensors: dict[str, Tensor]
    """The states of the update rule by name, and the `master` weights."""


class OptimizerState(TypedDict):
    """Plain numbers, lists and tensors; the tensors are the optimizer's own, not copies."""

    step: int
    """Updates made so far; skipped steps do not count."""
    parameters: dict[str, ShardState]
    """By the parameter's name, also where this rank has none of its rows."""


def as_plain(layout: ParameterLayout) -> dict[str, Any]:
    """The layout's fields as numbers, lists and strings."""
    fields = dataclasses.asdict(layout)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()} | {
        "reduce_over": layout.reduce_over.value,
        "cut_over": layout.cut_over.value,
    }


def require_same_place(name: str, saved: ShardState, own: ShardState) -> None:
    if saved["rows"] != own["rows"] or saved["layout"] != own["layout"]:
        raise ValueError(
            f"the state of {name} is for rows {saved['rows']} of {saved['layout']}, this rank"
            f" needs rows {own['rows']} of {own['layout']}: load it through the checkpoint"
        )
    shapes, needed = _shapes(saved), _shapes(own)
    if shapes != needed:
        raise ValueError(f"the state of {name} is {shapes}, the optimizer needs {needed}")


def _shapes(state: ShardState) -> dict[str, tuple[int, ...]]:
    return {kind: tuple(tensor.shape) for kind, tensor in state["tensors"].items()}
