"""Attention in groups of heads, so that what lies inside exists for a group at a time.

B batch, S sequence (S' the tokens of this rank, before and behind linears; S'' those that they
compute), D hidden size, H query heads, K KV heads, d head size; h, k those of a group, all ranks'

    x [B, S', D] -> x + row(attention(rotate(column(norm(x)))))

    of each group  q [B, S'', h d] = n Wq^T, k and v likewise   rows of the column linear
                   exchange, attention, exchange                [B, S'', h, d]
                   y += heads Wo^T                              columns of the row linear

Both weights are there for all groups, and each row or column of their gradients is computed once
and delivered with the others. What travels for the next group, and what travels back of the one
before, hides behind the attention of a group; so parts of three groups are there at once where
heads are exchanged, and of one elsewhere. Kept is x alone; backward computes each group again, and
so needs no recompute around it ([Note: Kept input] in `isp.layers.parts`). The sum over groups is
in the dtype of the activations.

Activations move as in the linears themselves, once for all groups; msp gathers again in backward.

Source: UPipe (arXiv 2602.21196), which cuts the all-to-all of Ulysses so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.attention import AttentionMask, DistributedAttention
from isp.attention.exchange import Arrival
from isp.attention.heads import HeadPlan
from isp.autograd import Function, once_differentiable
from isp.comm.tag import Purpose, Tag
from isp.layers.linear import NeedsGrad, ParallelLinear, needs_grad
from isp.layers.norm import RMSNorm
from isp.layers.parts import SummedGradient, deliver, keep, kept
from isp.layers.rotary import apply_rotary
from isp.layers.weight_gradients import weight_gradient
from isp.parallel.head_groups import HeadGroup, HeadGroups
from isp.parallel.phase import Phase

__all__ = ["Core", "GroupedAttention"]

Rotary = tuple[Tensor, Tensor]


class Core(Protocol):
    """Where the heads that a rank has meet: a module, whose first call in a forward is seen."""

    attention: DistributedAttention

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: HeadPlan
    ) -> Tensor:
        """q [B, S, h, d], k and v [B, S, k, d] of `plan`, arrived -> [B, S, h, d]."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: HeadPlan
    ) -> Tensor:
        """The same, unseen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedAttention:
    """x + row(attention(rotate(column(norm(x))))) by `groups`; the row linear has no bias."""

    norm: RMSNorm
    column: ParallelLinear
    """To q, k and v, one behind the other."""
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    core: Core
    row: ParallelLinear
    heads: tuple[int, int]
    """Query and KV heads of this rank's features."""
    head_size: int
    groups: HeadGroups
    compiled: bool = False
    """Of the rotation."""

    def __call__(self, x: Tensor, rotary: Rotary, mask: AttentionMask) -> Tensor:
        """x [B, S', D] -> [B, S', D]; `mask` of the full sequence."""
        assert self.row.bias is None, "a group adds no bias of the row linear"
        weights = self.norm.weight, self.column.weight, self.row.weight
        x, node = keep(x, *weights, *self.optional)
        out: Tensor = _Groups.apply(x, *weights, *self.optional, _Call(self, rotary, mask, node))
        return out

    @property
    def optional(self) -> tuple[Tensor, ...]:
        """The parameters that not every such layer has."""
        norms = (norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None)
        return (*norms, *(() if self.column.bias is None else (self.column.bias,)))

    @property
    def plan(self) -> HeadPlan:
        """The heads of each rank in any group."""
        query, kv = self.heads
        number = self.groups.kv * self.groups.shares
        ranks = self.core.attention.channel.size
        return HeadPlan.of(query // number, kv // self.groups.kv, ranks)

    def rows_of_q(self, w: Tensor, group: HeadGroup) -> Tensor:
        """A group's part of w [(H + 2 K) d, ..]: a view [k, h / k, d, ..]."""
        (query, kv), d = self.heads, self.head_size
        rows = w[: query * d].unflatten(0, (kv, query // kv, d))
        of_kv: Tensor = rows.tensor_split(self.groups.kv)[group.kv]
        return of_kv.tensor_split(self.groups.shares, 1)[group.share]

    def rows_of_kv(self, w: Tensor, group: HeadGroup) -> Tensor:
        """A group's part of w [(H + 2 K) d, ..]: a view [2, k, d, ..]."""
        (query, kv), d = self.heads, self.head_size
        rows = w[query * d :].unflatten(0, (2, kv, d))
        found: Tensor = rows.tensor_split(self.groups.kv, 1)[group.kv]
        return found

    def columns(self, w: Tensor, group: HeadGroup) -> Tensor:
        """A group's part of w [D, H d]: a view [D, k, h / k, d]."""
        return self.rows_of_q(w.T, group).movedim(-1, 0)


class _Call(NamedTuple):
    layer: GroupedAttention
    rotary: Rotary
    mask: AttentionMask
    node: Any
    """Of the input."""


class _Groups(Function):
    """forward   out = x + move_y(sum of heads Wo^T), heads of move_x(norm(x))
    backward   of each group: its heads again, dWo, d(q, k, v), dWqkv, dn; dx = dout + norm'(dn)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *_, call = rest
        ctx.call = call
        layer: GroupedAttention = call.layer
        column, row = layer.column, layer.row
        with ExitStack() as uses:
            n = _moved(layer, layer.norm(x), Purpose.ACTIVATION)
            up = uses.enter_context(
                column.communicator.unshard(column, Phase.FORWARD, column.weight, column.bias)
            )

            @cache
            def down() -> Tensor:  # reached after the first attention, as it is declared
                use = row.communicator.unshard(row, Phase.FORWARD, row.weight)
                return uses.enter_context(use).weight

            way = _Forward(call, n, up.weight, up.bias, down)
            way.run()
            assert way.y is not None
            y = way.y
        arriving = row.moves.y(y, tag=Tag(Purpose.ACTIVATION, row.name, "y"))
        return x + arriving.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        layer, column, row = call.layer, call.layer.column, call.layer.row
        needs = needs_grad(ctx, len(ctx.needs_input_grad) - 1)
        x = kept(call.node)
        leaves = [x.detach().requires_grad_(), layer.norm.weight][: 1 + bool(needs[1])]
        with torch.enable_grad():
            normed = layer.norm(leaves[0])
        dy = row.moves.dy(dout, tag=Tag(Purpose.OUTPUT_GRADIENT, row.name, "dy"))
        n = _moved(layer, normed.detach(), Purpose.REGATHERED_ACTIVATION)
        with (
            row.communicator.unshard(row, Phase.BACKWARD, row.weight) as down,
            column.communicator.unshard(column, Phase.BACKWARD, column.weight, column.bias) as up,
        ):
            way = _Backward(call, n, up.weight, up.bias, dy.wait(), down.weight, needs)
            way.run()
        tag = Tag(Purpose.INPUT_GRADIENT, column.name, "dx")
        assert way.dn is not None
        dn = column.moves.dx(way.dn, tag=tag)
        d_column = deliver(column, way.d_column, needs[2])
        d_row = deliver(row, way.d_row, needs[3])
        optional = [norm.take() for norm in way.d_norms]
        if column.bias is not None:
            optional.append(deliver(column, way.d_bias, needs[-1], is_bias=True))
        dx, *d_norm = torch.autograd.grad(normed, leaves, dn.wait())
        return dx.add_(dout), d_norm[0] if d_norm else None, d_column, d_row, *optional, None


def _moved(layer: GroupedAttention, n: Tensor, purpose: Purpose) -> Tensor:
    return layer.column.moves.x(n, tag=Tag(purpose, layer.column.name, "x")).wait()


class _Steps:
    """The groups one after the other, each in three steps, between which its tensors travel."""

    def __init__(self, call: _Call, n: Tensor, up: Tensor, bias: Tensor | None) -> None:
        self.call, self.layer = call, call.layer
        self.n, self.up, self.bias = n, up, bias
        self.plan = self.layer.plan
        self.attention = self.layer.core.attention

    def run(self) -> None:
        """Steps of neighbouring groups overlap where anything travels."""
        groups = self.layer.groups.in_order()
        travels = self.attention.channel.size > 1
        if not travels:
            for group in groups:
                self.prepare(group)
                self.attend(group)
                self.finish(group)
            return
        self.prepare(groups[0])
        for i, group in enumerate(groups):
            if i + 1 < len(groups):
                self.prepare(groups[i + 1])
            self.attend(group)
            if i:
                self.finish(groups[i - 1])
        self.finish(groups[-1])

    def prepare(self, group: HeadGroup) -> None:
        """Compute what attention takes, and send it."""
        raise NotImplementedError

    def attend(self, group: HeadGroup) -> None:
        """Attend, and send what comes of it."""
        raise NotImplementedError

    def finish(self, group: HeadGroup) -> None:
        """Take up what has come back."""
        raise NotImplementedError

    def project(self, rows: Callable[[Tensor, HeadGroup], Tensor], group: HeadGroup) -> Tensor:
        """n through some rows of the column linear: [B, S'', h d]."""
        weight = rows(self.up, group).flatten(0, 2)
        bias = None if self.bias is None else rows(self.bias, group).flatten()
        return F.linear(self.n, weight, bias)

    def to_q(self, fused: Tensor) -> Tensor:
        """[B, S'', h d] -> q [B, S'', h, d], rotated."""
        q = fused.unflatten(-1, (-1, self.layer.head_size))
        return self._rotate(q if (norm := self.layer.q_norm) is None else norm(q))

    def to_kv(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S'', 2 k d] -> k, rotated, and v [B, S'', k, d]."""
        k, v = fused.unflatten(-1, (2, -1, self.layer.head_size)).unbind(2)
        k = k if (norm := self.layer.k_norm) is None else norm(k)
        return self._rotate(k), v

    def _rotate(self, x: Tensor) -> Tensor:
        return apply_rotary(x, *self.call.rotary, compiled=self.layer.compiled)

    def send(self, xs: Sequence[Tensor], label: str, *, back: bool = False) -> Arrival:
        """xs on their way to the ranks with their heads, or (`back`) with their tokens."""
        xs = tuple(xs)
        if (channel := self.attention.channel).size == 1:
            return lambda: xs
        length = xs[0].shape[1] * (1 if back else channel.size)
        heads = (self.plan.query if len(xs) == 1 else self.plan.kv,) * len(xs)
        exchange = self.attention.exchange(heads, length, label)
        return exchange.go_back(xs) if back else exchange.go_out(xs)


class _Forward(_Steps):
    """y = the sum of heads Wo^T; `down` gives Wo."""

    def __init__(
        self, call: _Call, n: Tensor, up: Tensor, bias: Tensor | None, down: Callable[[], Tensor]
    ) -> None:
        super().__init__(call, n, up, bias)
        self.down = down
        self.y: Tensor | None = None
        self.queries: dict[HeadGroup, Arrival] = {}
        self.keys: dict[int, Arrival] = {}
        self.heads: dict[HeadGroup, Arrival] = {}
        self.k, self.v = n, n
        """Those of the groups that attend now."""

    def prepare(self, group: HeadGroup) -> None:
        q = self.to_q(self.project(self.layer.rows_of_q, group))
        self.queries[group] = self.send((q,), "q")
        if group.is_first:
            kv = self.to_kv(self.project(self.layer.rows_of_kv, group))
            self.keys[group.kv] = self.send(kv, "kv")

    def attend(self, group: HeadGroup) -> None:
        core, first = self.layer.core, self.y is None and not self.heads
        (q,) = self.queries.pop(group)()
        if group.is_first:
            self.k, self.v = self.keys.pop(group.kv)()
        seen_once = core if first else core.forward
        out = seen_once(q, self.k, self.v, self.call.mask, self.plan)
        self.heads[group] = self.send((out,), "out", back=True)

    def finish(self, group: HeadGroup) -> None:
        (heads,) = self.heads.pop(group)()
        weight = self.layer.columns(self.down(), group).flatten(1)
        if self.y is None:
            self.y = F.linear(heads.flatten(2), weight)
        else:
            self.y.flatten(0, 1).addmm_(heads.flatten(2).flatten(0, 1), weight.T)


class _Found(NamedTuple):
    """What a group's attention and its gradient gave, on its way back."""

    heads: Arrival
    dq: Arrival
    dkv: Arrival | None
    """Of the last group that has these KV heads."""


class _Backward(_Steps):
    """The gradients of n and of the linears' weights, from that of y.

    The gradients of norms, rotation and attention are autograd's, of graphs that end where they
    begin ([Note: Not reentrant] in `isp.recompute`); the transfers lie between them.
    """

    def __init__(
        self,
        call: _Call,
        n: Tensor,
        up: Tensor,
        bias: Tensor | None,
        dy: Tensor,
        down: Tensor,
        needs: Sequence[NeedsGrad],
    ) -> None:
        super().__init__(call, n, up, bias)
        self.dy, self.down = dy, down
        _, _, needs_column, needs_row, *optional = needs
        wide = self.layer.column.communicator.gradient_dtype(dy.dtype)
        self.d_column = dy.new_empty(up.shape, dtype=wide) if needs_column else None
        self.d_row = dy.new_empty(down.shape, dtype=wide) if needs_row else None
        self.d_bias = None if bias is None or not optional[-1] else dy.new_empty(bias.shape)
        norms = [norm for norm in (self.layer.q_norm, self.layer.k_norm) if norm is not None]
        self.d_norms = [SummedGradient(need) for need in optional[: len(norms)]]
        self.dn: Tensor | None = None
        self.fused: dict[tuple[HeadGroup, str], tuple[Tensor, Sequence[Tensor]]] = {}
        """Outputs of the column linear, and q, or k and v, with the graph between them."""
        self.taken: dict[tuple[HeadGroup, str], Arrival] = {}
        self.found: dict[HeadGroup, _Found] = {}
        self.k, self.v = n, n
        self.dk, self.dv = SummedGradient(NeedsGrad.FLOW), SummedGradient(NeedsGrad.FLOW)

    def prepare(self, group: HeadGroup) -> None:
        fused = self.project(self.layer.rows_of_q, group).requires_grad_()
        with torch.enable_grad():
            q = self.to_q(fused)
        self._go(group, "q", fused, (q,))
        if group.is_first:
            fused = self.project(self.layer.rows_of_kv, group).requires_grad_()
            with torch.enable_grad():
                kv = self.to_kv(fused)
            self._go(group, "kv", fused, kv)
        dheads = self.dy @ self.layer.columns(self.down, group).flatten(1)
        dheads = dheads.unflatten(-1, (-1, self.layer.head_size))
        self.taken[group, "dout"] = self.send((dheads,), "dout")

    def _go(self, group: HeadGroup, label: str, fused: Tensor, xs: Sequence[Tensor]) -> None:
        self.fused[group, label] = fused, xs
        self.taken[group, label] = self.send([x.detach() for x in xs], label)

    def attend(self, group: HeadGroup) -> None:
        (q,) = _leaves(self.taken.pop((group, "q")))
        if group.is_first:
            self.k, self.v = _leaves(self.taken.pop((group, "kv")))
        (dout,) = self.taken.pop((group, "dout"))()
        with torch.enable_grad():
            out = self.layer.core.forward(q, self.k, self.v, self.call.mask, self.plan)
        dq, dk, dv = torch.autograd.grad(out, (q, self.k, self.v), dout)
        self.dk.add(dk)
        self.dv.add(dv)
        heads = self.send((out.detach(),), "out", back=True)
        dq_back, dkv_back = self.send((dq,), "dq", back=True), None
        if group.is_last:
            dkv = [sum_.take() for sum_ in (self.dk, self.dv)]
            dkv_back = self.send([d for d in dkv if d is not None], "dkv", back=True)
        self.found[group] = _Found(heads, dq_back, dkv_back)

    def finish(self, group: HeadGroup) -> None:
        found, layer = self.found.pop(group), self.layer
        (heads,) = found.heads()
        if self.d_row is not None:
            part = layer.columns(self.d_row, group)
            part.copy_(_product(self.dy, heads.flatten(2), part.dtype).view(part.shape))
        q_norms, k_norms = self._norms()
        self._through(group, "q", layer.rows_of_q, found.dq(), q_norms)
        if found.dkv is not None:
            first = group._replace(share=0, is_first=True, is_last=layer.groups.shares == 1)
            self._through(first, "kv", layer.rows_of_kv, found.dkv(), k_norms)

    def _norms(self) -> tuple[_Norms, _Norms]:
        """Of q and of k: the norm's weight with its gradient, if there is one and it is wanted."""
        waiting = list(self.d_norms)
        found: list[_Norms] = []
        for norm in (self.layer.q_norm, self.layer.k_norm):
            pair = None if norm is None else (norm.weight, waiting.pop(0))
            found.append([pair] if pair is not None and pair[1].want else [])
        return found[0], found[1]

    def _through(
        self,
        group: HeadGroup,
        label: str,
        rows: Callable[[Tensor, HeadGroup], Tensor],
        gradients: Sequence[Tensor],
        norms: _Norms,
    ) -> None:
        """Back through rotation, norm and the rows of the column linear."""
        fused, xs = self.fused.pop((group, label))
        leaves = [fused, *(weight for weight, _ in norms)]
        d_fused, *d_norms = torch.autograd.grad(xs, leaves, gradients)
        for (_, total), part in zip(norms, d_norms, strict=True):
            total.add(part)
        if self.d_column is not None:
            part = rows(self.d_column, group)
            part.copy_(_product(d_fused, self.n, part.dtype).view(part.shape))
        if self.d_bias is not None:
            part = rows(self.d_bias, group)
            part.copy_(d_fused.flatten(0, -2).sum(0).view(part.shape))
        weight = rows(self.up, group).flatten(0, 2)
        if self.dn is None:
            self.dn = d_fused @ weight
        else:
            self.dn.flatten(0, 1).addmm_(d_fused.flatten(0, 1), weight)


_Norms = list[tuple[Tensor, SummedGradient]]


def _leaves(arrive: Arrival) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in arrive())


def _product(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy^T x: dy [B, S, O], x [B, S, I] -> [O, I]."""
    return weight_gradient(dy.flatten(0, 1), x.flatten(0, 1), dtype=dtype)
