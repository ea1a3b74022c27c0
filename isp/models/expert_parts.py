"""Experts that are gathered in groups, of which few are whole at once; no token travels.

A rank's shard of the weights has its part of every group (`ParameterLayout.run`).
The module's own code is called once for each group, with the rows that go to its experts, so that
one group computes while the next one is gathered; in backward they come in the opposite order.

[Note: Kept at the turn] In a recomputed block the last group is there as its recompute ends, and is
the first that backward reads. The others are gathered once more: the limit holds in between, too.

[Note: In no plan] A plan keeps what it gathers for a recompute until the block's backward ends, and
brings a layer at a time, so groups are in none. Their first is gathered as the block begins, or
where a recompute of a whole block comes to what lies before the experts.

N tokens, k experts a token goes to, D hidden size; R = N k rows, a token for one of its experts,
sorted by expert
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isp.autograd import Function, once_differentiable
from isp.layers.linear import NeedsGrad
from isp.models.calls import weights_among
from isp.models.expert_exchange import (
    Compute,
    ExpertExchange,
    ExpertSubset,
    on_other_tokens,
    sum_by_token,
)
from isp.models.experts import CalledExperts, ExpertPlace, ExpertWeight
from isp.parallel.layout import ParameterLayout
from isp.parallel.partition import chunk_range
from isp.parallel.phase import Phase
from isp.weights.parameter import ShardedParameter
from isp.weights.transfers import DeclaredWeight
from isp.weights.wp import WPCommunicator

__all__ = ["ExpertGroups"]


class ExpertGroups:
    """A module that holds experts, whose weights are read group by group."""

    weights: tuple[ExpertWeight, ...] = ()
    """Those that a plan has."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: WPCommunicator,
        *,
        block: nn.Module,
        layouts: Mapping[str, ParameterLayout],
        called: Callable[[], object],
        place: Callable[[], ExpertPlace],
        exchange: ExpertExchange | None,
    ) -> None:
        """`block`: given to the prerequisites of gathers. `layouts`: of the weights, by name.
        `exchange`: the ranks that have other experts.
        """
        assert communicator.parts is not None
        self.communicator, self.parts, self._exchange = communicator, communicator.parts, exchange
        runs = {local: layout.of_runs for local, layout in layouts.items()}
        self._sizes = [run.global_shape[0] for run in next(iter(runs.values()))]
        begins = accumulate(self._sizes, initial=0 if exchange is None else exchange.own.start)
        whole = next(iter(layouts.values())).global_shape[0]
        self.groups = [
            _Group(
                self, module, name, place,
                partial(ExpertSubset, num_experts=whole, own=slice(begin, begin + size)),
            )
            for begin, size in zip(begins, self._sizes, strict=False)
        ]  # fmt: skip
        for number, group in enumerate(self.groups):
            group.shards = tuple(
                _shard(f"{name}.{w.weight_name}", w.weight, runs[w.weight_name], number)
                for w in group.weights
            )
            group.declared = DeclaredWeight(f"{name}[{number}]", block, group.shards)
        module.register_forward_pre_hook(lambda *_: called() and None)
        module.forward = self._forward

    def begin_at(self, module: nn.Module, *, recomputing: bool) -> None:
        """Gather the first group as `module` is called, also `recomputing` [Note: In no plan]."""

        def begin(*_: object) -> None:
            if self.parts.overlap and (recomputing or not self.communicator.is_recomputing):
                self.parts.gather(self.groups[0].declared)

        module.register_forward_pre_hook(begin)

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        calls = [_routed(group, *args, **kwargs) for group in self.groups]
        given, compute = calls[0][0], partial(self._by_group, [call for _, call in calls])
        if self._exchange is None:
            return compute(*given)
        return self._exchange(compute, self._exchange.dispatch(*given), None)

    def _by_group(
        self, calls: Sequence[Compute], tokens: Tensor, numbers: Tensor, weights: Tensor
    ) -> Tensor:
        """The sum of what its experts give for each token, [N, D]; `calls`: of the groups.

        The host waits once, for the numbers of rows.
        """
        last = sum(self._sizes) - 1  # transformers numbers by one more what goes to no expert
        weights = weights.masked_fill(numbers > last, 0).flatten()
        flat = numbers.clamp(max=last).flatten().long()
        order = flat.argsort(stable=True)
        token = order // numbers.shape[1]
        begin, results = 0, []
        for call, size, rows in zip(calls, self._sizes, self._rows(flat, order), strict=True):
            local = (flat[rows] - begin).unsqueeze(1)
            x = tokens[rows // numbers.shape[1]]
            results.append(call(x, local, weights[rows].unsqueeze(1)).to(tokens.dtype))
            begin += size
        of_token = token.argsort(stable=True).view(numbers.shape)
        out: Tensor = _Sum.apply(torch.cat(results), token, of_token)
        return out

    def _rows(self, flat: Tensor, order: Tensor) -> Sequence[Tensor]:
        """The entries of `order` of each group; on the meta device, equally many."""
        count, num_experts = len(self._sizes), sum(self._sizes)
        rows = [len(chunk_range(len(flat), count, i)) for i in range(count)]
        if not flat.is_meta:
            of_each = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
            rows = torch.stack([x.sum() for x in of_each.split(self._sizes)]).tolist()
        found: Sequence[Tensor] = order.split(rows)
        return found


def _shard(
    name: str, parameter: nn.Parameter, runs: Sequence[ParameterLayout], number: int
) -> ShardedParameter:
    """The part of a weight that the `number`-th group has."""
    begin = sum(run.local_shape[0] for run in runs[:number])
    rows = slice(begin, begin + runs[number].local_shape[0])
    return ShardedParameter(name, parameter, runs[number], rows=rows)


def _routed(
    code: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> tuple[tuple[Tensor, Tensor, Tensor], Compute]:
    """Tokens [N, D], numbers of experts [N, k] and weights [N, k] of a call of `code`, and the same
    call with others.
    """
    leaves, (tokens, numbers) = tree_leaves((args, kwargs)), args[:2]
    place = weights_among(leaves, numbers)
    assert place is not None, "the trace knows"
    given = tokens, numbers, leaves[place]
    return given, on_other_tokens(code, (args, kwargs), place)


class _Group(CalledExperts):
    """Some of a module's experts, which are gathered together."""

    shards: tuple[ShardedParameter, ...]
    """Of its weights."""
    declared: DeclaredWeight

    def __init__(
        self,
        experts: ExpertGroups,
        module: nn.Module,
        name: str,
        place: Callable[[], ExpertPlace],
        call: Callable[[nn.Module], nn.Module],
    ) -> None:
        super().__init__(module, name, experts.communicator, place, call)
        self._experts = experts

    @contextmanager
    def whole(self, phase: Phase) -> Iterator[Sequence[Tensor]]:
        """The whole weights of the group, while the next one is gathered."""
        groups, parts = self._experts.groups, self._experts.parts
        number, last = groups.index(self), len(groups) - 1
        full = parts.read(self.declared)
        following = number + (-1 if phase is Phase.BACKWARD else 1)
        if parts.overlap and 0 <= following <= last:
            parts.gather(groups[following].declared)
        try:
            yield full
        finally:
            if phase is not Phase.RECOMPUTE or number < last:  # [Note: Kept at the turn]
                parts.free(self.declared)

    def compute(self, given: Any, tensors: Sequence[Tensor], full: Sequence[Tensor]) -> Tensor:
        if not len(tensors[0]):  # no token; code may not run without any
            return tensors[0].clone()
        return super().compute(given, tensors, full)

    def deliver(self, weight: ExpertWeight, dw: Tensor | None, needs: NeedsGrad) -> Tensor | None:
        if not needs:
            return None
        shard = self.shards[self.weights.index(weight)]
        if dw is None:  # the other ranks wait for this one's part
            dw = weight.weight.new_zeros(shard.layout.global_shape)
        returned = needs is NeedsGrad.VALUE
        found = self._experts.parts.reduce(shard, dw, returned=returned)
        if found is None:
            return None
        grad = torch.zeros_like(weight.weight, dtype=found.dtype)
        grad[shard.rows] = found
        return grad


class _Sum(Function):
    """forward   rows [R, D] by token, in the order of experts: [N, D]
    backward  the gradient of each row is that of its token
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return sum_by_token(rows, of_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return dy[token], None, None
