"""The tensor-parallel plan of a traced model: the linears that mtp, msp and fsp cut by features.

transformers says which linears are cut by their outputs ("colwise") and which by their inputs
("rowwise"). The trace shows which calls are in between, where a rank has its share of the features.

B batch, S' tokens of this rank, I in features
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os.path import commonprefix
from typing import NamedTuple

from torch import Tensor, nn

from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Tag
from isp.core.layers.linear import Moves, Role, moves_for
from isp.core.mesh import Mode
from isp.models.roles import ParameterRole, is_linear, is_transposed
from isp.models.tracing.trace import Call, Kind, ModelTrace

__all__ = ["LinearCut", "Region", "TensorPlan", "in_features", "tensor_plan"]


class LinearCut(NamedTuple):
    """The split of a linear over the tensor group."""

    role: Role
    whole: bool = False
    """True if each rank has all features between a column linear and its row linear: features are
    gathered after the column and split before the row."""
    alone: bool = False
    """True for a column linear whose features are gathered after it, because no row linear
    follows."""


_CUTS = {
    "colwise": LinearCut(Role.COLUMN),
    "rowwise": LinearCut(Role.ROW),
    "colwise_gather_output": LinearCut(Role.COLUMN, whole=True),
    "rowwise_split_input": LinearCut(Role.ROW, whole=True),
}
"""The cuts, by their names (styles) in the tensor-parallel plans of transformers."""


class Region(NamedTuple):
    """A module that begins with column linears and ends with a row linear.

    Inside, a rank has all tokens of the sequence and, unless `whole`, its share of the features.
    """

    module: str
    columns: tuple[str, ...]
    whole: bool
    """`LinearCut.whole` of the region's linears: True if each rank has all features inside."""
    attends: bool
    """True if attention is called inside of the region."""
    between: tuple[str, ...]
    """The modules that are called after the region's first column linear and before its row
    linear."""


class TensorPlan(NamedTuple):
    """The cuts of a model's linears by features; its table and head are cut by vocabulary.

    Convolutions and scans are outside of regions, where a rank has all features of its own tokens.
    """

    cuts: dict[str, LinearCut]
    """By linear that is cut, including the head, its cut; all other linears are whole on each
    rank."""
    regions: tuple[Region, ...]
    vectors: frozenset[str]
    """The names of parameters with one element for each head, which are cut like the heads."""
    table: str
    """The name of the embedding table of the tokens."""
    head: str
    """The name of the linear that computes the logits."""

    def head_parts(self, block: str | None, size: int) -> int:
        """Return over how many ranks the heads of a block's attention are split: `size` or 1."""
        apart = [r.module for r in self.regions if r.attends and not r.whole]
        return size if any(name.startswith(f"{block}.") for name in apart) else 1

    def sees_part(self, module: str) -> bool | None:
        """Return whether a module gets only a rank's share of the features; None outside of
        regions."""
        return next((not r.whole for r in self.regions if module in r.between), None)

    def is_row(self, linear: str) -> bool:
        """Return whether a linear is a row linear, whose output is summed over ranks."""
        cut = self.cuts.get(linear)
        return cut is not None and cut.role is Role.ROW

    def moves(self, linear: str, mode: Mode, tensor: Channel) -> Moves:
        """Return the collectives that a linear itself launches; the region's entrance launches
        others."""
        cut = self.cuts.get(linear)
        if cut is None or tensor.size == 1:
            return Moves()
        # `sequence_dim` is -2, because x is [B, S', I] or [B S', I].
        moves = moves_for(mode, cut.role, tensor, sequence_dim=-2)
        # Column linears in a region send nothing themselves: the region's entrance does it once for
        # all of them. The head, and column linears that no row linear follows, are in no region.
        if cut.role is Role.COLUMN and linear != self.head and not cut.alone:
            moves = Moves()
        if not cut.whole:
            return moves
        # A column linear that no row linear follows has to return all features of this rank's own
        # tokens. It computes this rank's share of the features for all tokens: exchange them.
        if cut.alone and mode.splits_sequence:
            y = partial(tensor.all_to_all, scatter=-2, gather=-1)
            return replace(moves, y=y, dy=partial(tensor.all_to_all, scatter=-1, gather=-2))
        # In a region with all features (`whole`), the column linear gathers the features, and the
        # row linear takes the rank's share of them.
        own, whole = partial(_own_features, tensor), partial(tensor.all_gather, dim=-1)
        if cut.role is Role.COLUMN:
            return replace(moves, y=whole, dy=own)
        return replace(moves, x=own, dx=whole)

    def check_sizes(self, model: nn.Module, trace: ModelTrace, size: int) -> None:
        """Raise ValueError unless `size` divides the features that are cut, and the heads.

        A row linear is cut along its in features, any other one along its out features. The
        vocabulary may be uneven. Heads and KV heads count only in blocks whose attention is split.
        """
        for name, cut in self.cuts.items():
            linear = model.get_submodule(name)
            features = (in_features if cut.role is Role.ROW else _out_features)(linear)
            # The head is cut by vocabulary, whose parts may be uneven.
            if name != self.head and features % size:
                raise ValueError(
                    f"parallel.tensor.size={size} must divide the {features} features along which"
                    f" {name} is sharded"
                )
        for call in trace.calls:
            if call.sizes is None:
                continue
            heads, kv_heads = call.sizes.num_heads, call.sizes.num_kv_heads
            parts = self.head_parts(call.block, size)
            if heads % parts or kv_heads % parts:
                raise ValueError(
                    f"parallel.tensor.size={size} must divide the {heads} heads and {kv_heads} KV"
                    f" heads of {call.block}: use a divisor of both, or isp"
                )


def _own_features(tensor: Channel, x: Tensor, *, tag: Tag) -> Pending:
    """Return this rank's share of the features of x [.., I], which all ranks have whole."""
    return Pending.ready(x.chunk(tensor.size, -1)[tensor.rank].contiguous())


def in_features(linear: nn.Module) -> int:
    """Return the in features of an `nn.Linear` or of a `Conv1D` of transformers (GPT-2)."""
    return linear.get_parameter("weight").shape[int(not is_transposed(linear))]


def _out_features(linear: nn.Module) -> int:
    """Return the out features of an `nn.Linear` or of a `Conv1D` of transformers (GPT-2)."""
    return linear.get_parameter("weight").shape[int(is_transposed(linear))]


def tensor_plan(model: nn.Module, trace: ModelTrace, styles: Mapping[str, str]) -> TensorPlan:
    """Return the tensor-parallel plan of a traced `model`, made from that of transformers.

    `styles`: the plan of transformers, styles in `_CUTS` by names of modules with `*` for each
    number. Raises ValueError if the plan cuts nothing, does not cut the linears around attention,
    or leaves out a linear or a vector inside of a region that it cuts; or if the model has dropout
    or a second embedding table.
    """
    cuts, regions = dict[str, LinearCut](), list[Region]()
    for block, calls in trace.calls_in.items():
        of_block, of_linears = _regions(block, calls, trace, styles)
        regions += of_block
        cuts |= of_linears
    if not cuts:
        raise ValueError(
            "it has no tensor-parallel plan, or none of the linear layers in its plan is called"
        )
    tables, last = trace.tables, trace.calls[-1]
    if len(tables) > 1:
        raise ValueError(f"{tables[1]} is a second embedding table, and the plan does not shard it")
    if last.kind is not Kind.LINEAR or last.block is not None:
        raise ValueError("its forward does not end with the linear layer that computes the logits")
    if _out_features(model.get_submodule(last.module)) != trace.vocab_size:
        raise ValueError(f"its logits are not the whole output of {last.module}")
    # The head is cut by vocabulary, even if the plan of transformers has another style for it.
    cuts[last.module] = LinearCut(Role.COLUMN)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} applies dropout {module.p:g}, which would differ between ranks"
            )
        inside = next((r for r in regions if name.startswith(f"{r.module}.")), None)
        if inside is None or not is_linear(module) or name not in trace.called:
            continue
        # Each linear inside of a region must be one of its column linears or its row linear. Any
        # other linear would get only a share of its input features, or return all features where
        # the next linear expects a share.
        if name not in cuts or cuts[name].alone:
            raise ValueError(f"the plan does not shard {name}, which is inside {inside.module}")
    vectors = frozenset(_own_vectors(regions, trace, styles))
    return TensorPlan(cuts, tuple(regions), vectors, tables[0], last.module)


def _own_vectors(
    regions: Iterable[Region], trace: ModelTrace, styles: Mapping[str, str]
) -> Iterator[str]:
    """Yield the vectors in regions that no called submodule owns, such as attention sinks.

    The region's own code reads these vectors, and the trace does not show how: so they must have
    one element for each head. Raises ValueError for a vector that the plan does not cut.
    """
    for name, role in trace.roles.items():
        owner = name.rpartition(".")[0]
        region = next((r for r in regions if f"{owner}.".startswith(f"{r.module}.")), None)
        if role is not ParameterRole.VECTOR or region is None:
            continue
        # Skip the vector of a called module, such as a norm of q: `check_shares` compares the
        # output of that module instead.
        if owner in trace.called and owner != region.module:
            continue
        if region.whole or styles.get(_pattern(name)) != "colwise":
            raise ValueError(f"the plan does not shard {name}, which is inside {region.module}")
        yield name


def _pattern(name: str) -> str:
    """Return a module's name as plans of transformers write it, with `*` for each number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _regions(
    block: str, calls: Sequence[Call], trace: ModelTrace, styles: Mapping[str, str]
) -> tuple[list[Region], dict[str, LinearCut]]:
    """Return the regions of a block, in order, and the cuts of all of its linears.

    Column linears and the next row linear with the same `LinearCut.whole` make a region. Column
    linears whose features are gathered may also be without a row linear (`LinearCut.alone`). Raises
    ValueError for other column linears that no row linear follows, and for attention outside of the
    regions.
    """
    cuts, regions = dict[str, LinearCut](), list[Region]()
    # `begun`: by `LinearCut.whole`, the column linears that no row linear has followed yet, each
    # with the index of its call.
    begun: dict[bool, dict[str, int]] = {False: {}, True: {}}
    attentions = sum(call.kind is Kind.ATTENTION for call in calls)
    for place, call in enumerate(calls):
        cut = _CUTS.get(styles.get(_pattern(call.module), ""))
        if call.kind is not Kind.LINEAR or cut is None:
            continue
        cuts[call.module] = cut
        columns = begun[cut.whole]
        if cut.role is Role.COLUMN:
            columns[call.module] = place
            continue
        # This is a row linear: it ends the region of all column linears before it.
        inside = calls[min(columns.values(), default=place) : place]
        # `attentions` ends as the number of calls of attention outside of regions, where a rank has
        # all heads.
        attentions -= sum(call.kind is Kind.ATTENTION for call in inside)
        regions.append(_region(block, (*columns, call.module), cut.whole, inside, trace))
        columns.clear()
    if attentions:
        raise ValueError(f"the plan does not shard the attention projections of {block}")
    if begun[False]:
        raise ValueError(
            f"the plan has no row-parallel layer after {next(iter(begun[False]))} in {block}"
        )
    return regions, cuts | {name: cuts[name]._replace(alone=True) for name in begun[True]}


def _region(
    block: str, linears: tuple[str, ...], whole: bool, calls: Sequence[Call], trace: ModelTrace
) -> Region:
    """Return the region of some column linears and their row linear, which is the last of
    `linears`.

    `calls`: the calls from the first column linear up to the row linear.

    Raises ValueError if the linears are not in one module inside of the block, or if a call in
    between is a convolution or scan.
    """
    parents = [name.split(".")[:-1] for name in linears]
    module = ".".join(commonprefix(parents))  # noqa: RUF071  of lists, name by name
    if len(linears) < 2 or not module.startswith(f"{block}."):
        raise ValueError(
            f"the plan shards {', '.join(linears)}, which are not column-parallel layers followed"
            f" by a row-parallel one in one module"
        )
    for call in calls:
        if call.kind.mixes and call.kind is not Kind.ATTENTION:
            raise ValueError(f"the plan shards {module}, which mixes tokens with a {call.kind}")
    first, *_, row = linears
    order = {name: place for place, name in enumerate(trace.called)}
    between = tuple(
        name
        for name in trace.called
        if name.startswith(f"{module}.") and order[first] < order[name] < order[row]
    )
    attends = any(call.kind is Kind.ATTENTION for call in calls)
    return Region(module, linears[:-1], whole, attends, between)
