"""Replace a model's parameters by shards, and the forwards of linears and tables to match.

The model keeps its modules and names: `module.weight` becomes this rank's shard, and a wrapper of
the forward (`isp.models.forwards`) multiplies by the whole weight.

O out features, I in features
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.core.layers.embedding import look_up
from isp.core.layers.linear import Moves, Role, multiply
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.layout import ParameterLayout
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.models.forwards import ModuleForward
from isp.models.moe.load_balance import router_dtype
from isp.models.roles import (
    ParameterRole,
    holds_experts,
    is_decayed,
    is_transposed,
)
from isp.models.runtime.fused_linears import FusedRows
from isp.models.sharding.matrices import matrices_in
from isp.models.sharding.region import Entrance
from isp.models.sharding.tensor_plan import TensorPlan
from isp.models.tracing.position import Position
from isp.models.tracing.trace import ModelTrace
from isp.models.tracing.weight_reads import looked_up

__all__ = ["ShardedEmbedding", "ShardedLinear", "shard_parameters"]


class _ShardedModule:
    """A linear or table of the model as the communicator knows it: the holder of its weight."""

    weight_name = "weight"

    def __init__(self, module: nn.Module, name: str, layers: RankLayers, moves: Moves) -> None:
        self.module = module
        self.name = name
        self.communicator = layers.communicator
        self.moves = moves
        self._sends_nothing = moves == Moves() and not self.communicator.gathers_weights
        """True if neither weights nor activations are sent, so that without gradients the module's
        own forward computes the result."""
        self.layouts: dict[str, ParameterLayout] = {}
        """The layouts of weight and bias, by local name; `WeightHolders` sets this."""

    @property
    def weights(self) -> tuple[Self]:
        """The holders of the weights that a call of the module reads: only this object."""
        return (self,)

    @property
    def width(self) -> int:
        """The number of output features for a token, over all ranks."""
        of: Any = self.module
        if isinstance(of, nn.Embedding):
            return of.embedding_dim
        return int(of.nf if is_transposed(of) else of.out_features)

    @property
    def weight(self) -> nn.Parameter:
        """This rank's shard of the weight."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight


class ShardedLinear(_ShardedModule):
    """The holder of an `nn.Linear` [O, I] or a `Conv1D` of transformers [I, O].

    A column linear must be called with the input of its region, which `entrance` made. The output
    of a row linear is summed over ranks; its bias is added after the sum, or it would be added once
    for each rank. If other code reads the bias, it is whole on each rank, and is also added after
    the product.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        layers: RankLayers,
        plan: TensorPlan | None,
        entrance: Entrance | None,
        bias_is_whole: bool,
    ) -> None:
        """`entrance`: that of the region in which the linear is a column; None: it is no column.

        `plan`: the tensor-parallel plan; None: mode isp. `bias_is_whole`: True if each rank has the
        whole bias.
        """
        moves = Moves() if plan is None else plan.moves(name, layers.mode, layers.tensor)
        super().__init__(module, name, layers, moves)
        self.transposed = is_transposed(module)
        self._entrance = entrance
        self._bias_after_move = bias_is_whole or (plan is not None and plan.is_row(name))

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return the linear's forward on this rank; the wrapper `Wrap.COMPUTE`."""
        entrance, bias_after_move = self._entrance, self._bias_after_move
        is_local = self._sends_nothing and entrance is None

        def forward(x: Tensor) -> Tensor:
            if is_local and not torch.is_grad_enabled():
                # The weight is whole and no gradient is needed: the module's own forward is
                # fastest.
                own: Tensor = inner(x)
                return own
            if entrance is None:
                y = multiply(x, self.weight, self.bias, self)
            else:
                with entrance.column(x):
                    y = multiply(x, self.weight, self.bias, self)
            bias = self.module.bias if bias_after_move else None
            return y + bias.to(y.dtype) if isinstance(bias, Tensor) else y

        return forward

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias that the product adds; None: there is none, or the forward adds it later."""
        bias = None if self._bias_after_move else self.module.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        return bias


class ShardedEmbedding(_ShardedModule):
    """The holder of an `nn.Embedding`, or of a subclass; replaces the lookup in its forward.

    The rest of the forward runs unchanged: a subclass may scale the rows or compute the ids.
    """

    bias: nn.Parameter | None = None
    deterministic = False

    def __init__(
        self, module: nn.Module, name: str, layers: RankLayers, position: Position, moves: Moves
    ) -> None:
        """`position`: the current pass, which may name a function to call instead of the lookup."""
        super().__init__(module, name, layers, moves)
        self._position = position

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        """Return a forward in which the lookup is replaced; the wrapper `Wrap.COMPUTE`."""

        def look_up_own(ids: Tensor) -> Tensor:
            return look_up(ids, self.weight, self)

        # The forward must take any arguments, because OPT's table of positions takes more than ids.
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            instead = self._position.instead(self.name)
            is_local = self._sends_nothing and instead is None and not torch.is_grad_enabled()
            with nullcontext() if is_local else _Lookup(self.module, instead or look_up_own):
                y: Tensor = inner(*args, **kwargs)
            return y

        return forward

    @property
    def padding_idx(self) -> int:
        """The index into this table's gradient at which it stays zero (`padding_idx`); -1: none."""
        row = self.module.padding_idx
        if not isinstance(row, int):
            return -1
        if self.communicator.gathers_weights:
            # Backward computes the gradient of the whole table, so the index stays the same.
            return row
        # Backward computes only the gradient of the embeddings that this rank has: return the index
        # among these.
        ((start, stop),) = self.layouts["weight"].intervals()
        return row - start if start <= row < stop else -1


class _Lookup(TorchFunctionMode):
    """A torch function mode in which lookups in one table call `instead` with the ids."""

    def __init__(self, table: nn.Module, instead: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._table, self._instead = table, instead

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        ids = looked_up(self._table, func, args, kwargs)
        return func(*args, **(kwargs or {})) if ids is None else self._instead(ids)


def shard_parameters(
    model: nn.Module,
    trace: ModelTrace,
    layers: RankLayers,
    plan: TensorPlan | None,
    own: frozenset[str],
    rows: Mapping[str, FusedRows],
) -> Iterator[ShardedParameter]:
    """Replace each parameter by this rank's shard in all modules that have it; yield the shards.

    `own`: names of the parameters that the rank has. The others become NaN with the memory of one
    element: code before the blocks runs on every pipeline stage and may read them, but its results
    are not used. `rows`: by name of a parameter, its rows in a fused parameter. Buffers are moved
    to the device when the iterator ends.
    """
    # `uses`: by id of a parameter, the modules that have it, each with the parameter's name there.
    uses: dict[int, list[tuple[nn.Module, str]]] = {}
    # By the name of a fused parameter, this rank's shard of it.
    wholes: dict[str, ShardedParameter] = {}
    for module in model.modules():
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(id(parameter), []).append((module, local))
    # Compute this before the loop, which empties `uses` and replaces the parameters.
    matrices = {
        name: matrices_in(model, trace, name, len(uses[id(p)]))
        for name, p in model.named_parameters()
    }
    decayed = {name for name in matrices if is_decayed(model, name)}
    for name in matrices:
        parameter = model.get_parameter(name)
        if name not in own:
            nan = torch.full((), torch.nan, device=layers.device, dtype=layers.dtype)
            nothing = nn.Parameter(nan.expand(parameter.shape), requires_grad=False)
            for module, local in uses.pop(id(parameter)):
                setattr(module, local, nothing)
            del parameter
            continue
        layout, whole = _layout(model, name, parameter, trace, layers, plan), None
        if (among := rows.get(name)) is not None:
            whole = wholes.get(among.whole) or _whole(among, parameter, layers)
            wholes[whole.name] = whole
            layout = replace(layout, rows_before=among.rows_before, rows_after=among.rows_after)
        layout = replace(layout, matrices=matrices[name], decays=name in decayed)
        dtype = router_dtype(model, trace, name, layers.dtype)
        part = _own_part(parameter, layout, layers, whole, dtype)
        shard = nn.Parameter(part, requires_grad=parameter.requires_grad)
        for module, local in uses.pop(id(parameter)):
            setattr(module, local, shard)
        # This is the last reference to the whole parameter, so whole weights are freed one by one.
        del parameter
        yield ShardedParameter(name, shard, layout, whole)
    for prefix, module in model.named_modules():
        for local, buffer in module.named_buffers(recurse=False):
            if layers.device.type != "meta":
                dtype = router_dtype(model, trace, f"{prefix}.{local}", buffer.dtype)
                setattr(module, local, buffer.to(layers.device, dtype))


def _layout(
    model: nn.Module,
    name: str,
    parameter: nn.Parameter,
    trace: ModelTrace,
    layers: RankLayers,
    plan: TensorPlan | None,
) -> ParameterLayout:
    """Return the `ParameterLayout`: how the parameter is cut, or that each rank has all of it.

    Without a `plan` (mode isp) weights are cut by rows over the weight group, and embedding tables
    by hidden features if `embed_split_hidden` is set. With a plan, they are cut as the plan says.
    """
    shape = tuple(parameter.shape)
    owner, _, local = name.rpartition(".")
    module, role = model.get_submodule(owner), trace.roles[name]
    # Stacks of experts are cut between experts or within them.
    if role is ParameterRole.EXPERT and (plan is None or layers.experts_stay):
        return layers.expert_layout(shape)
    if plan is None:
        if not role.is_cut:
            return layers.replicated_layout(shape)
        is_table = any(parameter is model.get_submodule(name).weight for name in trace.tables)
        return layers.sharded_layout(shape, dim=int(is_table and layers.embed_split_hidden))
    # The parameter is a bias of experts: each rank has all of it, but only the rank's own experts
    # give it gradients.
    if layers.experts_stay and holds_experts(module):
        return layers.replicated_layout(shape, sees_part=True)
    if parameter is model.get_submodule(plan.table).weight or name in plan.vectors:
        return layers.sharded_layout(shape, dim=0)
    cut = plan.cuts.get(owner)
    # The bias of a row linear is added after the sum over ranks, so each rank has all of it.
    if cut is None or (cut.role is Role.ROW and local == "bias"):
        return layers.replicated_layout(shape, sees_part=plan.sees_part(owner))
    turned = local == "weight" and is_transposed(module)
    # Row linears are cut by input features, column linears by output features. An nn.Linear has a
    # weight [O, I], a Conv1D [I, O].
    return layers.sharded_layout(shape, dim=int((cut.role is Role.ROW) != turned))


def _whole(among: FusedRows, parameter: nn.Parameter, layers: RankLayers) -> ShardedParameter:
    """Make the rank's shard of a fused parameter, without values.

    `parameter`: one of those that are fused; `among`: the place of its rows in the fused one.
    """
    shape = among.rows_before + parameter.shape[0] + among.rows_after, *parameter.shape[1:]
    layout = layers.sharded_layout(shape, dim=0)
    shard = torch.empty(layout.local_shape, device=layers.device, dtype=layers.dtype)
    return ShardedParameter(
        among.whole, nn.Parameter(shard, requires_grad=parameter.requires_grad), layout
    )


def _own_part(
    parameter: nn.Parameter,
    layout: ParameterLayout,
    layers: RankLayers,
    whole: ShardedParameter | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return a tensor for this rank's shard of `parameter`, with its values if it has any.

    `whole`: the fused parameter in whose memory the shard is; None: the shard gets new memory.
    """
    if whole is None:
        part = torch.empty(layout.local_shape, device=layers.device, dtype=dtype)
    else:
        # `start`, `stop`: the rank's rows, as indices into this parameter. `first`: the rank's
        # first row, as an index into the fused parameter.
        ((start, stop),), ((first, _),) = layout.intervals(), whole.layout.intervals()
        begin = max(layout.rows_before + start - first, 0)
        part = whole.parameter.detach()[begin : begin + stop - start]
    if not (parameter.is_meta or part.is_meta):
        part.copy_(layout.shard(parameter.detach()))
    return part
