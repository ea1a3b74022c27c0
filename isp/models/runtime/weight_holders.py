"""`WeightHolders`: a rank's shards of a model's parameters, and the holders that read them.

A holder is a linear, an embedding, a module with experts, or a group of fused linears as the
communicator knows it: it has shards, and its forward reads whole weights.
"""

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
from isp.models.forwards import Forwards, Wrap, Wrapper
from isp.models.moe.ahead import ComputedAhead
from isp.models.moe.dispatch import DispatchExperts, ExpertExchange
from isp.models.moe.gather import GatherExperts
from isp.models.moe.whole_weights import ExpertWeight, ShardedExperts
from isp.models.roles import ParameterRole, expert_stacks
from isp.models.runtime.blocks import Blocks
from isp.models.runtime.fused_linears import FusedLinears, groups_of, rows_of
from isp.models.runtime.sharded_modules import ShardedEmbedding, ShardedLinear, shard_parameters
from isp.models.runtime.tiles import Holder, TiledModule
from isp.models.sharding.pipeline_split import Stage
from isp.models.sharding.region import Entrance
from isp.models.sharding.tensor_plan import TensorPlan, in_features
from isp.models.tracing.calls import Ahead, Call, Kind
from isp.models.tracing.position import Position, mixing_key
from isp.models.tracing.trace import ModelTrace

__all__ = ["WeightHolders"]


class WeightHolders:
    """The shards of a traced model on a rank, and the holders through which forwards read them.

    `__init__` changes the model in place: its parameters become shards, and its modules get the
    wrappers that count calls and that compute from the shards.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: ModelTrace,
        layers: RankLayers,
        *,
        position: Position,
        blocks: Blocks,
        forwards: Forwards,
        plan: TensorPlan | None,
        stages: Iterable[Stage],
        tile_tokens: int,
    ) -> None:
        """Shard `model` in place, and add its wrappers to `forwards`.

        `plan`: the tensor-parallel plan, for modes that split features; None: mode isp. `stages`:
        the pipeline stages of the rank; parameters of other stages take no memory. `tile_tokens`:
        tokens of a tile; 0: no tiles.
        """
        self.model, self.trace, self.layers = model, trace, layers
        self.position, self._blocks, self._forwards = position, blocks, forwards
        self._plan, self._tile_tokens = plan, tile_tokens
        self._tiled = trace.by_token if tile_tokens else {}
        """By module that runs in tiles, the structure of its output."""
        self._called_in_blocks = frozenset(c.module for c in trace.calls if c.block is not None)
        self._called_outside = frozenset(trace.called_at)
        self.entrances: dict[str, Entrance] = {}
        """By column linear, the entrance of the region that it is in."""
        self._holders: dict[str, Holder] = {}
        """By name of a module, its holder; fused linears have the same holder."""
        own = frozenset[str]().union(*(stage.parameters for stage in stages))
        # A tensor-parallel plan cuts each linear over all ranks. Fused linears would be cut as one
        # parameter, and a rank could then have a part of only some of them: do not fuse.
        groups = groups_of(model, trace) if plan is None else ()
        rows = rows_of(model, groups)
        self.named = tuple(shard_parameters(model, trace, layers, plan, own, rows))
        """The shards of the rank's parameters, each once, with their names in the model."""
        # The order matters: `_hold_others` needs the entrances and must skip fused linears;
        # `_cut_into_tiles` needs the holders of all modules.
        self._enter_regions()
        self._fuse(groups)
        self._hold_others()
        self._cut_into_tiles()
        for block in trace.blocks:
            module = model.get_submodule(block)
            forwards.add(module, Wrap.BLOCK, blocks.wrapper(block, module))
        self._give_layouts()

    def linear(self, name: str) -> ShardedLinear:
        """Return the holder of a linear that is not fused with others."""
        found = self._holders[name]
        assert isinstance(found, ShardedLinear)
        return found

    def zeros_of(self, names: Iterable[str]) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return by name functions to call in place of linears and tables, which return zeros."""
        found = dict[str, Callable[[Tensor], Tensor]]()
        for name in names:
            holder = self._holders[name]
            assert isinstance(holder, ShardedLinear | ShardedEmbedding)
            found[name] = partial(_zeros, holder.width, self.layers.dtype)
        return found

    def parts(self) -> dict[str, nn.Module]:
        """Return by name the blocks, and the modules outside of blocks that have parameters.

        If a module has parameters that other code reads, but is not called itself, the whole model
        is returned in its place, under the name "".
        """
        model, trace = self.model, self.trace
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
        """Return the declaration of the sharded weights that a forward reads, in order, by blocks.

        In mode isp it is the argument of `ISPCommunicator.declare`.

        `stage`: the pipeline stage; None: the whole model. `head_in_backward`: True if backward
        reads the weight of the head.
        """
        trace, blocks = self.trace, self._blocks
        # `forward_only`: modules whose weights backward does not read. These are indexers, which
        # run without a graph, and the head, because the loss computes its gradients in forward.
        # Backward reads the head's weight only if per-token results need gradients.
        unused = (name.rpartition(".")[0] for name in trace.unused)
        forward_only = {*unused, "" if head_in_backward or trace.head is None else trace.head}
        return tuple(
            DeclaredBlock(
                name=name,
                module=self.model.get_submodule(name),
                uses=tuple(self._uses_of(calls, forward_only)),
                recomputed=blocks.recomputed.get(name, False),
                input_kept=blocks.input_kept.get(name, True),
            )
            for name, calls in trace.parts()
            if stage is None or name in stage.parts
        )

    @property
    def _gathered(self) -> Mapping[str, Holder]:
        """By name of a module, the holders whose weights `weight_blocks` declares.

        Experts are left out if there is a tensor-parallel plan, or if each expert stays on one
        rank, because then their weights are not gathered.
        """
        if self._plan is None and not self.layers.experts_stay:
            return self._holders
        return {n: h for n, h in self._holders.items() if not isinstance(h, ShardedExperts)}

    def _enter_regions(self) -> None:
        """Make the entrances of the plan's regions, if features are split over several ranks."""
        tensor = self.layers.tensor
        for region in () if self._plan is None or tensor.size == 1 else self._plan.regions:
            width = in_features(self.model.get_submodule(region.columns[0]))
            entrance = Entrance(region.module, width, self.layers.mode, tensor, region.attends)
            self._forwards.add(self.model.get_submodule(region.module), Wrap.REGION, entrance.wrap)
            self.entrances |= dict.fromkeys(region.columns, entrance)

    def _fuse(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Give the linears of each group one holder, which computes them together."""
        named = {item.name: item for item in self.named}
        for group in groups:
            weight, bias = (named.get(f"{group[0]}.{local}") for local in ("weight", "bias"))
            if weight is None or weight.whole is None:
                # This rank has no shard of the group, because its block belongs to another stage.
                continue
            linears = {name: self.model.get_submodule(name) for name in group}
            # `whole`: the fused shards. The parameters of the linears are views of them.
            whole = weight.whole, None if bias is None else bias.whole
            fused = FusedLinears(linears, self.layers.communicator, *whole)
            self._holders |= dict.fromkeys(group, fused)
            for name in group:
                self._wrap(Kind.LINEAR, name, fused.wrapper(name))

    def _hold_others(self) -> None:
        """Give a holder to each called linear, table and module with experts that has none yet."""
        layers, plan, trace = self.layers, self._plan, self.trace
        # Blocks of other stages do not run and get no holders. Modules outside of blocks (None) get
        # one on each stage, since each stage runs the model's own forward.
        own = {None, *self._blocks.input_kept}
        here = (call for call in trace.calls if call.block in own)
        # A module that is called several times has one holder.
        for (kind, name), call in {(call.kind, call.module): call for call in here}.items():
            if name in self._holders or kind.mixes:
                continue
            module = self.model.get_submodule(name)
            holder: Holder
            if kind is Kind.LINEAR:
                entrance, role = self.entrances.get(name), trace.roles.get(f"{name}.bias")
                whole_bias = role is ParameterRole.VECTOR
                holder = ShardedLinear(module, name, layers, plan, entrance, whole_bias)
            elif kind is Kind.TABLE:
                moves = Moves() if plan is None else moves_for(layers.mode, Role.ROW, layers.tensor)
                holder = ShardedEmbedding(module, name, layers, self.position, moves)
            else:
                holder = self._experts(call, module)
            self._holders[name] = holder
            self._wrap(kind, name, holder.wrap)

    def _wrap(self, kind: Kind, name: str, compute: Wrapper) -> None:
        """Add the wrappers `CALL` and `COMPUTE` of a linear, a table or experts."""
        module, add = self.model.get_submodule(name), self._forwards.add
        # Experts that stay on their rank do not call `unshard`, which would advance the prefetch
        # plan, so the wrapper advances it. In a tiled module, `TiledModule` does so once for all
        # tiles.
        stay = kind is Kind.EXPERTS and self.layers.experts_stay and self._tile_of(name) is None
        called = self.position.called(
            kind,
            name,
            reads_shard=not stay,
            # A linear may be called both in blocks and outside of them. Tables are not substituted
            # here: `ShardedEmbedding` replaces only the lookup, as a table's forward may do more.
            substituted=kind is Kind.LINEAR and name in self._called_outside,
            kept=self._blocks.between_linears and name in self._called_in_blocks,
        )
        add(module, Wrap.CALL, called)
        add(module, Wrap.COMPUTE, compute)

    def _cut_into_tiles(self) -> None:
        """Make the modules that compute each token independently run in tiles of tokens."""
        own = [call for call in self.trace.calls if call.block in self._blocks.input_kept]
        for name, output in self._tiled.items():
            calls = tuple(call for call in own if call.module.startswith(f"{name}."))
            if calls:
                module = self.model.get_submodule(name)
                inside = dict.fromkeys(
                    self._holders[c.module] for c in calls if c.module in self._holders
                )
                tiled = TiledModule(
                    name,
                    module,
                    output,
                    calls,
                    [*inside],
                    self._tile_tokens,
                    self.layers,
                    self.position,
                )
                self._forwards.add(module, Wrap.TILES, tiled.wrap)

    def _tile_of(self, module: str) -> str | None:
        """Return the name of the tiled module that is or contains `module`; None: there is none."""
        return next((name for name in self._tiled if f"{module}.".startswith(f"{name}.")), None)

    def _ahead_of(self, call: Call) -> Ahead | None:
        """Return the module that is computed together with the experts of `call`, before its own
        call.

        Returns None if there is no such module, if module and experts are not in the same tiled
        module, or if everything between linears is recomputed.
        """
        if call.ahead is None or self._blocks.between_linears:
            return None
        within = self._tile_of(call.module) == self._tile_of(call.ahead.module)
        return call.ahead if within else None

    def _experts(self, call: Call, module: nn.Module) -> ShardedExperts:
        """Make the holder of the experts of `call`.

        It has their exchange of tokens, and the module that is computed while they transfer.
        """
        name, communicator = call.module, self.layers.communicator
        exchange = self._exchange(name, module)
        # Computing ahead hides transfers, of weights or of tokens; without any there is no gain.
        travels = communicator.gathers_weights or exchange is not None
        what = self._ahead_of(call) if travels else None
        ahead = None
        if what is not None:
            ahead_module = self.model.get_submodule(what.module)
            ahead = ComputedAhead(ahead_module, what, self.position)
            self._forwards.add(ahead_module, Wrap.AHEAD, ahead.wrap)
        if exchange is None:
            return GatherExperts(module, name, communicator, ahead)
        return DispatchExperts(module, name, communicator, exchange, ahead)

    def _exchange(self, name: str, module: nn.Module) -> ExpertExchange | None:
        """Make the exchange of tokens between the ranks that share the experts `name`.

        Returns None if the experts are not spread over ranks.
        """
        layers = self.layers
        if layers.expert.size == 1:
            return None
        # The first dim of each stack [E, .., ..] is the number of experts.
        weight = next(iter(expert_stacks(module).values()))
        layout = next(item.layout for item in self.named if item.parameter is weight)
        return ExpertExchange(
            name,
            layers.expert,
            layers.expert_bounds(layout.global_shape[0]),
            # In mtp all tensor ranks have the same tokens, and each sends its share of them.
            same_tokens=Channel.solo() if layers.mode.splits_sequence else layers.tensor,
            num_chunks=layers.expert_chunks,
        )

    def _give_layouts(self) -> None:
        """Set `layouts` of the holders' weights; fused linears have theirs already."""
        layouts = {item.parameter: item.layout for item in self.named}
        for weight in (w for holder in self._holders.values() for w in holder.weights):
            if not isinstance(weight, FusedLinears):
                own = {weight.weight_name: weight.weight, "bias": weight.bias}
                weight.layouts = {
                    local: layouts[parameter].of_group
                    for local, parameter in own.items()
                    if parameter in layouts
                }

    def _uses_of(
        self, calls: Sequence[Call], forward_only: Collection[str]
    ) -> Iterator[DeclaredUse]:
        """Yield the declared uses of a block, or of a part outside of blocks, in order.

        `calls`: the calls that the part makes. `forward_only`: linears whose weights backward does
        not read.
        """
        # Experts whose weights are not gathered have no holder here.
        holders = self._gathered

        def turn(index: int) -> float:
            """Return a sort key for the call with this index, in the order of reading weights.

            With [Note: Computed ahead], a module that is called after experts is computed before
            their code runs, so it reads its weights first. The key of the experts is then that of
            the module's last call plus a half. In a tiled module all weights are read together, in
            the order of the calls.
            """
            call = calls[index]
            own = call.module in holders and self._tile_of(call.module) is None
            ahead = self._ahead_of(call) if own else None
            inside = (
                () if ahead is None else (c.module.startswith(f"{ahead.module}.") for c in calls)
            )
            return max((i + 0.5 for i, within in enumerate(inside) if within), default=index)

        holder_at = {i: holders.get(call.module) for i, call in enumerate(calls)}
        # The first of several fused linears reads the weights of all; the other calls read none.
        later = {
            i
            for i, h in holder_at.items()
            if isinstance(h, FusedLinears) and h.first != calls[i].module
        }
        reached = sorted((i for i in holder_at if i not in later), key=turn)
        named, latest = _launch_points(calls, reached), None
        for index in reached:
            call, launch_point = calls[index], named.get(index)
            name, holder = _name(call), holder_at[index]
            if isinstance(holder, FusedLinears):
                name = holder.name.removeprefix(f"{call.block}.")
            outer = self._tile_of(call.module)
            # `at`, `key`: where recorders hook in. That is the call of a module, or for a mixer,
            # which has no module, its key in `Position`.
            at = None if call.kind.mixes else self.model.get_submodule(outer or call.module)
            key = mixing_key(call.module, index) if call.kind.mixes else call.module
            for number, weight in enumerate((None,) if holder is None else holder.weights):
                inner = f".{weight.weight_name}" if isinstance(weight, ExpertWeight) else ""
                use = Use(
                    f"{name}{inner}",
                    # Only the first use of a call can be the launch point.
                    launch_point=None if number else launch_point,
                    weight_in_backward=call.kind is not Kind.TABLE
                    and call.module not in forward_only,
                    with_previous=number > 0 if outer is None else latest == outer,
                    passes=0 if weight is None else _passes(weight, call),
                    in_recompute=outer is None,
                )
                yield DeclaredUse(use, weight, at, None if weight is not None else key)
                latest = outer


def _zeros(width: int, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return zeros in the output shape of a linear or table with `width` features, for input x."""
    if x.is_floating_point():
        # The module is a linear: x of a table would be token ids.
        return x.new_zeros(*x.shape[:-1], width)
    return torch.zeros(*x.shape, width, dtype=dtype, device=x.device)


def _passes(weight: WeightHolder, call: Call) -> int:
    """Return the elements that one token writes and reads at a use of `weight`, for `Use.passes`.

    Each of these elements counts twice, as it is written and read: the input of a linear; the row
    that is looked up in a table; the input of each expert that a token is routed to.
    """
    if isinstance(weight, ExpertWeight):
        # Models store the two dims of an expert in either order: count the smaller one.
        return 2 * min(weight.weight.shape[1:]) * (call.route or 0)
    rows, columns = weight.layouts["weight"].global_shape
    turned = isinstance(weight, ShardedLinear) and weight.transposed
    return 2 * (rows if turned else columns)


def _name(call: Call) -> str:
    """Return the name of a call within its block, as the plan and logs print it."""
    if call.kind in (Kind.CONVOLUTION, Kind.SCAN):
        return str(call.kind)
    if call.kind is not Kind.ATTENTION:
        return call.module.removeprefix(f"{call.block}.")
    window = None if call.sizes is None else call.sizes.window
    return "attn" if window is None else f"attn of {window} tokens"


def _launch_points(calls: Sequence[Call], reached: Sequence[int]) -> dict[int, LaunchPoint]:
    """Return the launch points of a block, by index of the call; empty outside of blocks.

    `wqkv` is the first call, `attn` the first call that mixes tokens, `wo` and `w1` are the next
    two calls that mix none. `reached`: the indices of calls that are uses, in order.
    """
    mixing = [index for index in reached if calls[index].kind.mixes]
    if not mixing:
        # The calls are outside of the blocks, or in a block that mixes no tokens.
        return {}
    points = {mixing[0]: LaunchPoint.ATTN}
    if mixing[0] > 0:
        points[0] = LaunchPoint.WQKV
    after = (index for index in reached if index > mixing[0] and index not in mixing)
    for point, index in zip((LaunchPoint.WO, LaunchPoint.W1), after, strict=False):
        points[index] = point
    return points
