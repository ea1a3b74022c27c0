"""The declaration of a model to a communicator: its blocks, and the uses in each, in order.

Nothing depends on the names of modules, so any model can be declared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.phase import Phase
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.uses import Block, Chunks, Site, Use

__all__ = [
    "DeclaredBlock",
    "DeclaredUse",
    "WeightHolder",
    "as_chunks",
    "declared_uses",
    "parameters_of",
    "weight_names",
]


class WeightHolder(Protocol):
    """A layer with a sharded weight, as the communicator sees it."""

    name: str
    """Qualified name of the layer in the model."""
    layouts: dict[str, ParameterLayout]
    """How the weight and the bias are cut over ranks, by their names: `weight_name` and `bias`."""
    weight_name: str
    """Name of the weight in the module: usually `weight`."""

    @property
    def weight(self) -> nn.Parameter:
        """This rank's shard of the weight."""

    @property
    def bias(self) -> nn.Parameter | None:
        """This rank's shard of the bias; None: the layer has none."""


def parameters_of(layer: WeightHolder) -> tuple[ShardedParameter, ...]:
    """Return the shard of a layer's weight, and after it that of its bias if it has one."""
    found = {layer.weight_name: layer.weight, "bias": layer.bias}
    return tuple(
        ShardedParameter(f"{layer.name}.{name}", parameter, layer.layouts[name])
        for name, parameter in found.items()
        if parameter is not None
    )


@dataclass(frozen=True, eq=False)
class DeclaredUse:
    """A place that a forward passes: a layer that reads its weight, or a bare launch point."""

    use: Use
    """The use as the prefetch plan sees it, but without the names of its weight and bias, which
    `as_chunks` adds."""
    layer: WeightHolder | None = None
    """The layer whose weight is read here; None: a launch point without a weight."""
    at: nn.Module | None = None
    """The module in whose call this use happens, for code that records calls of modules; one call
    may contain several uses. None: a mixer of a traced model, whose call is that of a function, not
    of a module."""
    key: Hashable = None
    """The key with which the model calls `WPCommunicator.pass_by` here; for launch points only.
    If several uses have the same key, they are reached in order, one in each call with the key."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeclaredBlock:
    """A part of a model whose weights are gathered as one unit."""

    name: str
    module: nn.Module
    """The block, passed to the prerequisites of its gathers; see
    `ISPCommunicator.register_prerequisite_for_forward_prefetch_hooks`."""
    uses: tuple[DeclaredUse, ...]
    """The block's uses in forward order."""
    recomputed: bool = False
    """True if the block's activations are recomputed in backward."""
    input_kept: bool = True
    """True if the block's input is kept for its recompute; else earlier blocks are recomputed to
    get it."""


DeclaredChunks = tuple[tuple[DeclaredBlock, ...], ...]
"""The chunks of a model, each with its blocks in forward order."""


def declared_uses(
    declared: DeclaredChunks,
) -> Iterator[tuple[Site, DeclaredBlock, DeclaredUse]]:
    """Yield all uses in forward order, each with its place and block."""
    for c, chunk in enumerate(declared):
        for b, block in enumerate(chunk):
            for v, use in enumerate(block.uses):
                yield Site(Phase.FORWARD, c, b, v), block, use


def weight_names(declared: DeclaredChunks) -> dict[int, str]:
    """Return the name of each weight, by the `id` of its shard.

    A shared weight has the name of the first layer that reads it. Raises ValueError if two weights
    have the same name.
    """
    names: dict[int, str] = {}
    for _, _, use in declared_uses(declared):
        if use.layer is not None:
            names.setdefault(id(use.layer.weight), f"{use.layer.name}.{use.layer.weight_name}")
    for name, count in Counter(names.values()).items():
        if count > 1:
            raise ValueError(f"{count} weights are named {name}: call bind_names(model) first")
    return names


def as_chunks(declared: DeclaredChunks) -> Chunks:
    """Return the declaration in the form that `plan` takes: names in place of modules."""
    weights = weight_names(declared)

    def planned(v: DeclaredUse) -> Use:
        if v.layer is None:
            return v.use
        bias = None if v.layer.bias is None else f"{v.layer.name}.bias"
        return v.use._replace(weight=weights[id(v.layer.weight)], bias=bias)

    return tuple(
        tuple(
            Block(b.name, tuple(planned(v) for v in b.uses), b.recomputed, b.input_kept)
            for b in chunk
        )
        for chunk in declared
    )
