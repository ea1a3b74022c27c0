"""The tensor-parallel plan of a traced model: what mtp, msp and fsp cut of it.

transformers says which linears are cut by their outputs ("colwise") and which by their inputs
("rowwise"). A trace says what lies between the two, where a rank has its share of the features.
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
    """Whether features are whole on every rank between a column and its row: gathered behind the
    one, taken apart before the other."""
    alone: bool = False
    """Of a column whose features are gathered behind it, without a row: what follows is whole."""


_CUTS = {
    "colwise": LinearCut(Role.COLUMN),
    "rowwise": LinearCut(Role.ROW),
    "colwise_gather_output": LinearCut(Role.COLUMN, whole=True),
    "rowwise_split_input": LinearCut(Role.ROW, whole=True),
}
"""By the names that transformers has for them."""


class Region(NamedTuple):
    """A module that columns begin and a row ends; a rank has all tokens of its sequence there."""

    module: str
    columns: tuple[str, ...]
    whole: bool
    """As of its cuts."""
    attends: bool
    between: tuple[str, ...]
    """What is called behind the first column and before the row, beside linears."""


class TensorPlan(NamedTuple):
    """The cuts of a model, but for its first table and its head, which are cut by vocabulary.

    Convolutions and scans lie outside of regions: they mix the tokens that a rank has between them,
    all features of each.
    """

    cuts: dict[str, LinearCut]
    """By linear, the head's among them; others are whole on every rank."""
    regions: tuple[Region, ...]
    vectors: frozenset[str]
    """Parameters of the regions' own modules, an element for each head, which are cut as these."""
    table: str
    head: str

    def head_parts(self, block: str | None, size: int) -> int:
        """The ranks, of `size`, over which the heads of a block's attention are split."""
        apart = [r.module for r in self.regions if r.attends and not r.whole]
        return size if any(name.startswith(f"{block}.") for name in apart) else 1

    def sees_part(self, module: str) -> bool | None:
        """Whether a module's vectors see a part of the features; None: it is in no region."""
        return next((not r.whole for r in self.regions if module in r.between), None)

    def is_row(self, linear: str) -> bool:
        """Whether a linear's output is a sum over ranks."""
        cut = self.cuts.get(linear)
        return cut is not None and cut.role is Role.ROW

    def moves(self, linear: str, mode: Mode, tensor: Channel) -> Moves:
        """The collectives of a linear; what its region's entrance does is none of them."""
        cut = self.cuts.get(linear)
        if cut is None or tensor.size == 1:
            return Moves()
        moves = moves_for(mode, cut.role, tensor, sequence_dim=-2)  # of [B, S', I] or [B S', I]
        if cut.role is Role.COLUMN and linear != self.head and not cut.alone:
            moves = Moves()
        if not cut.whole:
            return moves
        if cut.alone and mode.splits_sequence:
            y = partial(tensor.all_to_all, scatter=-2, gather=-1)
            return replace(moves, y=y, dy=partial(tensor.all_to_all, scatter=-1, gather=-2))
        own, whole = partial(_own_features, tensor), partial(tensor.all_gather, dim=-1)
        if cut.role is Role.COLUMN:
            return replace(moves, y=whole, dy=own)
        return replace(moves, x=own, dx=whole)

    def check_sizes(self, model: nn.Module, trace: ModelTrace, size: int) -> None:
        """Raise ValueError if heads or features do not divide by `size` ranks."""
        for name, cut in self.cuts.items():
            linear = model.get_submodule(name)
            features = (in_features if cut.role is Role.ROW else _out_features)(linear)
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
    """This rank's features of x [.., I], which all ranks have."""
    return Pending.ready(x.chunk(tensor.size, -1)[tensor.rank].contiguous())


def in_features(linear: nn.Module) -> int:
    """Of a linear, torch's own or GPT-2's."""
    return linear.get_parameter("weight").shape[int(not is_transposed(linear))]


def _out_features(linear: nn.Module) -> int:
    return linear.get_parameter("weight").shape[int(is_transposed(linear))]


def tensor_plan(model: nn.Module, trace: ModelTrace, styles: Mapping[str, str]) -> TensorPlan:
    """The plan of a traced `model` by `styles`, whose keys are modules with `*` for a number.

    Raises ValueError if it says nothing of attention, leaves out what lies among what it cuts, or
    cuts nothing.
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
    cuts[last.module] = LinearCut(Role.COLUMN)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} applies dropout {module.p:g}, which would differ between ranks"
            )
        inside = next((r for r in regions if name.startswith(f"{r.module}.")), None)
        if inside is None or not is_linear(module) or name not in trace.called:
            continue
        if name not in cuts or cuts[name].alone:
            raise ValueError(f"the plan does not shard {name}, which is inside {inside.module}")
    vectors = frozenset(_own_vectors(regions, trace, styles))
    return TensorPlan(cuts, tuple(regions), vectors, tables[0], last.module)


def _own_vectors(
    regions: Iterable[Region], trace: ModelTrace, styles: Mapping[str, str]
) -> Iterator[str]:
    """Vectors that lie in a region beside the modules called there: no call shows who reads one.

    Raises ValueError for one that the plan does not cut.
    """
    for name, role in trace.roles.items():
        owner = name.rpartition(".")[0]
        region = next((r for r in regions if f"{owner}.".startswith(f"{r.module}.")), None)
        if role is not ParameterRole.VECTOR or region is None:
            continue
        if owner in trace.called and owner != region.module:
            continue
        if region.whole or styles.get(_pattern(name)) != "colwise":
            raise ValueError(f"the plan does not shard {name}, which is inside {region.module}")
        yield name


def _pattern(name: str) -> str:
    """The name as plans have it, with `*` for a number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _regions(
    block: str, calls: Sequence[Call], trace: ModelTrace, styles: Mapping[str, str]
) -> tuple[list[Region], dict[str, LinearCut]]:
    """The regions of a block, in order, and all cuts of it.

    Columns begin a region if a row of their kind follows, with features apart or whole.
    """
    cuts, regions = dict[str, LinearCut](), list[Region]()
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
        inside = calls[min(columns.values(), default=place) : place]
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
    """That of columns and their row, with the `calls` between the first and the last."""
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
