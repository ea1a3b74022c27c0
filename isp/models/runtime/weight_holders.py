"""`WeightHolders`: a model's parameters on a rank, and the modules that read them whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.layers.linear import Moves, Role, moves_for
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.config import LaunchPoint
from isp.core.weights.declare import DeclaredBlock, DeclaredUse, WeightHolder
from isp.core.weights.uses import Use
from isp.models.moe.ahead import ComputedAhead
from isp.models.moe.dispatch import ExpertExchange
from isp.models.moe.gather import ExpertWeight, ShardedExperts
from isp.models.roles import ParameterRole, expert_stacks
from isp.models.runtime.call_follower import CallFollower
from isp.models.runtime.fused_linears import FusedLinears, groups_of, rows_of
from isp.models.runtime.sharded_modules import ShardedEmbedding, ShardedLinear, shard_parameters
from isp.models.runtime.tiles import Holder
from isp.models.sharding.pipeline_split import Stage
from isp.models.sharding.region import Entrance
from isp.models.sharding.tensor_plan import TensorPlan, in_features
from isp.models.tracing.calls import Call, Kind

__all__ = ["WeightHolders"]


class WeightHolders:
    """The weights of a traced model on a rank, in the modules that have them."""

    def __init__(
        self,
        model: nn.Module,
        layers: RankLayers,
        follower: CallFollower,
        plan: TensorPlan | None,
        stages: Iterable[Stage],
    ) -> None:
        """`model`: its parameters become shards, in place, and its calls go through `follower`.

        `plan`: of the modes that split features; None: of isp. `stages`: those that the rank has;
        nothing of others is there.
        """
        self.model, self.follower, self.layers = model, follower, layers
        self._plan = plan
        self.entrances: dict[str, Entrance] = {}
        """Those of the plan's regions, by column."""
        self._of: dict[str, Holder] = {}
        """By module."""
        trace = follower.trace
        own = frozenset[str]().union(*(stage.parameters for stage in stages))
        groups = groups_of(model, trace) if plan is None else ()
        rows = rows_of(model, groups)
        self.named = tuple(shard_parameters(model, trace, layers, plan, own, rows))
        """The parameters, each once, with their names in the model."""
        self._enter_regions()
        self._fuse(groups)
        self._swap()
        self._give_layouts()
        follower.follow(model, self._of)

    def linear(self, name: str) -> ShardedLinear:
        """The holder of a linear that is not fused with others."""
        found = self._of[name]
        assert isinstance(found, ShardedLinear)
        return found

    def zeros_of(self, names: Iterable[str]) -> dict[str, Callable[[Tensor], Tensor]]:
        """Zeros in place of what these linears and tables give."""
        found = dict[str, Callable[[Tensor], Tensor]]()
        for name in names:
            holder = self._of[name]
            assert isinstance(holder, ShardedLinear | ShardedEmbedding)
            found[name] = partial(_zeros, holder.width, self.layers.dtype)
        return found

    def parts(self) -> dict[str, nn.Module]:
        """The blocks, and what has parameters outside of them.

        The whole model is among them if it has some that lie in no module that is called.
        """
        model, trace = self.model, self.follower.trace
        parts = {block: model.get_submodule(block) for block in trace.blocks}
        inside = tuple(f"{block}." for block in parts)
        for name, module in model.named_modules():
            outside = name not in parts and not name.startswith(inside)
            if outside and any(True for _ in module.parameters(recurse=False)):
                called = name in trace.called
                parts[name if called else ""] = module if called else model
        return parts

    def weight_blocks(
        self, stage: Stage | None = None, *, head_in_backward: bool = False
    ) -> tuple[DeclaredBlock, ...]:
        """The weights gathered in a forward, in order; of one stage, or of the whole model.

        `head_in_backward`: whether backward reads that of the head.
        """
        follower, holders = self.follower, self._gathered
        trace, blocks = follower.trace, follower.blocks
        unused = (name.rpartition(".")[0] for name in trace.unused)
        forward_only = {*unused, "" if head_in_backward or trace.head is None else trace.head}
        return tuple(
            DeclaredBlock(
                name=name,
                module=self.model.get_submodule(name),
                uses=tuple(_uses_of(self.model, calls, holders, follower, forward_only)),
                recomputed=blocks.recomputed.get(name, False),
                input_kept=blocks.input_kept.get(name, True),
            )
            for name, calls in trace.parts()
            if stage is None or name in stage.parts
        )

    @property
    def _gathered(self) -> Mapping[str, Holder]:
        """Those that are gathered, or that a plan of features cuts.

        Experts are not, where such a plan leaves them whole, or each lies on one rank as a whole.
        """
        if self._plan is None and not self.layers.experts_stay:
            return self._of
        return {n: h for n, h in self._of.items() if not isinstance(h, ShardedExperts)}

    def _enter_regions(self) -> None:
        tensor = self.layers.tensor
        for region in () if self._plan is None or tensor.size == 1 else self._plan.regions:
            module = self.model.get_submodule(region.module)
            width = in_features(self.model.get_submodule(region.columns[0]))
            mode = self.layers.mode
            entrance = Entrance(region.module, module, width, mode, tensor, region.attends)
            self.entrances |= dict.fromkeys(region.columns, entrance)

    def _fuse(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Let linears of a group be computed as one."""
        named = {item.name: item for item in self.named}
        for group in groups:
            weight, bias = (named.get(f"{group[0]}.{local}") for local in ("weight", "bias"))
            if weight is None or weight.whole is None:  # of another stage
                continue
            linears = {name: self.model.get_submodule(name) for name in group}
            called = partial(self.follower.arrive, Kind.LINEAR)
            whole = weight.whole, None if bias is None else bias.whole
            fused = FusedLinears(linears, self.layers.communicator, called, *whole)
            self._of |= dict.fromkeys(group, fused)

    def _swap(self) -> None:
        """Let other linears, tables and experts read their shards as whole values."""
        follower, layers, plan = self.follower, self.layers, self._plan
        own = {None, *follower.blocks.input_kept}
        here = (call for call in follower.trace.calls if call.block in own)
        for (kind, name), call in {(call.kind, call.module): call for call in here}.items():
            if name in self._of or kind.mixes:
                continue
            module, called = self.model.get_submodule(name), partial(follower.arrive, kind, name)
            if kind is Kind.LINEAR:
                entrance, role = self.entrances.get(name), follower.trace.roles.get(f"{name}.bias")
                self._of[name] = ShardedLinear(
                    module, name, layers, called, plan, entrance, role is ParameterRole.VECTOR
                )
            elif kind is Kind.TABLE:
                moves = Moves() if plan is None else moves_for(layers.mode, Role.ROW, layers.tensor)
                self._of[name] = ShardedEmbedding(module, name, layers, called, moves)
            else:
                self._of[name] = self._experts(call, module, called)

    def _experts(
        self, call: Call, module: nn.Module, called: Callable[[], object]
    ) -> ShardedExperts:
        name, communicator = call.module, self.layers.communicator
        exchange = self._exchange(name, module)
        travels = communicator.gathers_weights or exchange is not None
        what = self.follower.ahead_of(call) if travels else None
        ahead = None
        if what is not None:
            ahead_module = self.model.get_submodule(what.module)
            ahead = ComputedAhead(ahead_module, what, self.follower.under_way)
        place = self.follower.place
        return ShardedExperts(module, name, communicator, called, place, exchange, ahead)

    def _exchange(self, name: str, module: nn.Module) -> ExpertExchange | None:
        """Between the ranks that share these experts; None: no token travels."""
        layers = self.layers
        if layers.expert.size == 1:
            return None
        weight = next(iter(expert_stacks(module).values()))
        layout = next(item.layout for item in self.named if item.parameter is weight)
        return ExpertExchange(
            name,
            layers.expert,
            layers.expert_bounds(layout.global_shape[0]),
            alike=Channel.solo() if layers.mode.splits_sequence else layers.tensor,
            num_chunks=layers.expert_chunks,
        )

    def _give_layouts(self) -> None:
        layouts = {item.parameter: item.layout for item in self.named}
        for weight in (w for holder in self._of.values() for w in holder.weights):
            if not isinstance(weight, FusedLinears):
                own = {weight.weight_name: weight.weight, "bias": weight.bias}
                weight.layouts = {
                    local: layouts[parameter].of_group
                    for local, parameter in own.items()
                    if parameter in layouts
                }


def _zeros(width: int, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Of the shape that a linear or table of this width would give."""
    if x.is_floating_point():
        return x.new_zeros(*x.shape[:-1], width)
    return torch.zeros(*x.shape, width, dtype=dtype, device=x.device)


# -- a model as a communicator takes it: where a forward reads weights, in order -----------------


def _uses_of(
    model: nn.Module,
    calls: Sequence[Call],
    holders: Mapping[str, Holder],
    follower: CallFollower,
    forward_only: Collection[str],
) -> Iterator[DeclaredUse]:
    """The uses of a part of `model`, which makes these `calls`.

    `holders`: of weights, by module; experts that have none are whole. `forward_only`: linears
    whose weights backward does not read.
    """

    def turn(index: int) -> float:
        """When weights are read: of experts, after what is computed ahead [Note: Computed ahead].

        In tiles all weights are read together.
        """
        call = calls[index]
        own = call.module in holders and follower.tile_of(call.module) is None
        ahead = follower.ahead_of(call) if own else None
        inside = () if ahead is None else (c.module.startswith(f"{ahead.module}.") for c in calls)
        return max((i + 0.5 for i, within in enumerate(inside) if within), default=index)

    of = {i: holders.get(call.module) for i, call in enumerate(calls)}
    # Of fused linears the first brings the weights of all.
    later = {i for i, h in of.items() if isinstance(h, FusedLinears) and h.first != calls[i].module}
    reached = sorted((i for i in of if i not in later), key=turn)
    named, latest = _launch_points(calls, reached), None
    for index in reached:
        call, launch_point = calls[index], named.get(index)
        name, holder = _name(call), of[index]
        if isinstance(holder, FusedLinears):
            name = holder.name.removeprefix(f"{call.block}.")
        outer = follower.tile_of(call.module)
        at = model.get_submodule(outer or call.module)
        if call.kind.mixes:
            at = follower.points[call.module, index]
        for number, weight in enumerate((None,) if holder is None else holder.weights):
            inner = f".{weight.weight_name}" if isinstance(weight, ExpertWeight) else ""
            use = Use(
                f"{name}{inner}",
                launch_point=None if number else launch_point,
                weight_in_backward=call.kind is not Kind.TABLE and call.module not in forward_only,
                with_previous=number > 0 if outer is None else latest == outer,
                passes=0 if weight is None else _passes(weight, call),
                in_recompute=outer is None,
            )
            yield DeclaredUse(use, weight, at)
            latest = outer


def _passes(weight: WeightHolder, call: Call) -> int:
    """Numbers of a token: what a linear is given is written and read; of a table, the rows.

    Of experts, what each is given, for as many as a token goes to.
    """
    if isinstance(weight, ExpertWeight):
        return 2 * min(weight.weight.shape[1:]) * (call.route or 0)
    rows, columns = weight.layouts["weight"].global_shape
    turned = isinstance(weight, ShardedLinear) and weight.transposed
    return 2 * (rows if turned else columns)


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
