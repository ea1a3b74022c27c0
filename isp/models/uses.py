"""A traced model as a communicator takes it: the places where a forward reads weights, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from torch import nn

from isp.models.experts import ExpertWeight
from isp.models.fused import FusedLinears
from isp.models.swap import SwappedLinear
from isp.models.tiles import Holder
from isp.models.trace import Call, Kind, ModelTrace
from isp.parallel.config import LaunchPoint
from isp.weights.declare import DeclaredUse, WeightHolder
from isp.weights.trace import Passes

__all__ = ["parts_of", "uses_of"]


def parts_of(trace: ModelTrace) -> Iterator[tuple[str, list[Call]]]:
    """The parts of a model that are gathered as units, with their calls, in order.

    The blocks by their names, and each call outside of them by its module's.
    """
    for block, calls in groupby(trace.calls, key=lambda call: call.block):
        if block is None:
            yield from ((call.module, [call]) for call in calls)
        else:
            yield block, list(calls)


def uses_of(
    model: nn.Module,
    calls: Sequence[Call],
    holders: Mapping[str, Holder],
    points: Mapping[tuple[str, int], nn.Module],
    forward_only: Collection[str],
    tiled: Collection[str],
) -> Iterator[DeclaredUse]:
    """The uses of a part of `model`, which makes these `calls`.

    `holders`: of weights, by module; experts that have none are whole. `points`: what is called
    where a block mixes tokens, by block and number of the call. `forward_only`: linears whose
    weights backward does not read. `tiled`: modules that are computed in tiles.
    """
    latest: str | None = None
    for use, call in _uses_of(model, calls, holders, points, forward_only):
        outer = next((name for name in tiled if call.module.startswith(f"{name}.")), None)
        if outer is not None:
            use = replace(
                use,
                at=model.get_submodule(outer),
                in_recompute=False,
                with_previous=latest == outer,
            )
        latest = outer
        yield use


def _uses_of(
    model: nn.Module,
    calls: Sequence[Call],
    holders: Mapping[str, Holder],
    points: Mapping[tuple[str, int], nn.Module],
    forward_only: Collection[str],
) -> Iterator[tuple[DeclaredUse, Call]]:
    reached = [i for i, call in enumerate(calls) if _reads_anew(call, holders)]
    named = _launch_points(calls, reached)
    for index in reached:
        call, launch_point = calls[index], named.get(index)
        name, holder = _name(call), holders.get(call.module)
        at = points[call.module, index] if call.kind.mixes else model.get_submodule(call.module)
        if isinstance(holder, FusedLinears):
            name = holder.name.removeprefix(f"{call.block}.")
        for number, weight in enumerate((None,) if holder is None else holder.weights):
            inner = f".{weight.weight_name}" if isinstance(weight, ExpertWeight) else ""
            use = DeclaredUse(
                name=f"{name}{inner}",
                layer=weight,
                at=at,
                launch_point=None if number else launch_point,
                weight_in_backward=call.kind is not Kind.TABLE and call.module not in forward_only,
                with_previous=number > 0,
                passes=Passes() if weight is None else _passes(weight, call),
            )
            yield use, call


def _reads_anew(call: Call, holders: Mapping[str, object]) -> bool:
    """Whether a call reads weights that no call before it has brought."""
    holder = holders.get(call.module)
    return not isinstance(holder, FusedLinears) or holder.first == call.module


def _passes(weight: WeightHolder, call: Call) -> Passes:
    """What a linear is given is written and read; of a table, the rows.

    Of experts, what each is given, for as many as a token goes to.
    """
    if isinstance(weight, ExpertWeight):
        return Passes(between=2 * min(weight.weight.shape[1:]) * (call.route or 0))
    rows, columns = weight.layouts["weight"].global_shape
    turned = isinstance(weight, SwappedLinear) and weight.transposed
    return Passes(between=2 * (rows if turned else columns))


def _name(call: Call) -> str:
    if call.kind in (Kind.CONVOLUTION, Kind.SCAN):
        return str(call.kind)
    if call.kind is not Kind.ATTENTION:
        return call.module.removeprefix(f"{call.block}.")
    window = None if call.sizes is None else call.sizes.window
    return "attn" if window is None else f"attn of {window} tokens"


def _launch_points(calls: Sequence[Call], reached: Sequence[int]) -> dict[int, LaunchPoint]:
    """The places of a block that the configuration has names for; none outside of blocks."""
    mixing = [index for index in reached if calls[index].kind.mixes]
    if not mixing:
        return {}
    points = {mixing[0]: LaunchPoint.ATTN}
    if mixing[0] > 0:
        points[0] = LaunchPoint.WQKV
    behind = (index for index in reached if index > mixing[0] and index not in mixing)
    for point, index in zip((LaunchPoint.WO, LaunchPoint.W1), behind, strict=False):
        points[index] = point
    return points
