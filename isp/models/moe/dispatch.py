"""Experts that are spread over ranks: a token travels to those that it is routed to, and back.

[Note: Launch and wait] A transfer is two autograd functions: the first launches it and returns the
buffer that it fills, the second waits for it. Backward comes to them in the opposite order: there
the second launches the gradient's way back and the first waits for it. Autograd runs first what
was recorded last. So while the experts compute a part of the tokens, forward and backward, the next
part is on its way; and all parts are while something else is computed between `dispatch` and the
rest of the exchange. In isp mode the rest lies in a graph inside [Note: A graph inside], which a
recompute makes anew, and what `dispatch` has recorded stays: `Sent.under_way` is where both meet.

[Note: Every rank takes part] A rank that receives no token still has the node through which
gradients travel: ranks must launch the same transfers in backward, too. That node saves a tensor,
also where neither tokens nor weights have a gradient: a recompute, with its transfers, begins
where a saved tensor is asked for, and ends behind the last one.

N tokens of a rank, k experts a token goes to, D hidden size, E experts; R = N k rows that a rank
sends, a token for one of its experts, sorted by expert; M rows that it receives
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.autograd import Function, joined, once_differentiable
from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Purpose, Tag
from isp.core.megatron.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from isp.core.mesh.config import ExpertConfig
from isp.core.mesh.partition import chunk_range
from isp.core.torch_private import reparametrized, tree_flatten, tree_unflatten
from isp.models.roles import ParameterRole
from isp.models.tracing.trace import Kind, ModelTrace

__all__ = [
    "Compute",
    "ExpertExchange",
    "ExpertSubset",
    "Sent",
    "check_spread",
    "on_other_tokens",
]


def check_spread(name: str, trace: ModelTrace, config: Mapping[str, Any], of: ExpertConfig) -> None:
    """Raise ValueError if tokens of a model cannot be sent to ranks that share its experts."""
    if of.size == 1:
        return
    key = f"parallel.expert.size={of.size}"
    if not trace.elements(ParameterRole.EXPERT):
        raise ValueError(f"{key} needs experts that isp can shard, and {name} has none: use 1")
    if config.get("zero_expert_num"):
        raise ValueError(
            f"{key}: {name} also sends tokens to experts without weights: use 1, which gathers all"
            f" experts of a layer at once"
        )
    for call in (call for call in trace.calls if call.kind is Kind.EXPERTS):
        if not call.weighs:
            raise ValueError(
                f"{key}: {call.module} is called without routing weights [N, k] next to the expert"
                f" indices, so it cannot be called with a subset of the tokens: use 1"
            )


class ExpertSubset(nn.Module):
    """Calls the code of a module's class, and none of its hooks, for some of its experts."""

    def __init__(self, module: nn.Module, num_experts: int, own: slice) -> None:
        """`own`: those of its `num_experts` whose weights it is given."""
        super().__init__()
        self.module, self._code, self._own = module, module.forward, own
        self._num_experts = num_experts
        self._vectors = [
            name
            for name, p in module.named_parameters(recurse=False)
            if p.dim() < 3 and len(p) == num_experts
        ]
        """Parameters that have a row for each expert."""
        self._counts = [
            key
            for key, value in vars(module).items()
            if type(value) is int and value == num_experts and "expert" in key
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for key in self._counts:
            setattr(self.module, key, self._own.stop - self._own.start)  # as its weights have
        own = {name: getattr(self.module, name)[self._own] for name in self._vectors}
        try:
            with reparametrized(self.module, own):
                return self._code(*args, **kwargs)
        finally:
            for key in self._counts:  # the model's own code may read it
                setattr(self.module, key, self._num_experts)


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of tokens [M, D], numbers of experts [M, 1] and their weights [M, 1]: the weighted results."""


def on_other_tokens(code: Callable[..., Tensor], given: Any, place: int) -> Compute:
    """`code`, called as with `given` (args and kwargs), whose leaf `place` is the weights."""
    leaves, spec = tree_flatten(given)
    dtype = leaves[1].dtype

    def compute(x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        now = [*leaves]
        now[0], now[1], now[place] = x, numbers.to(dtype), weights
        args, kwargs = tree_unflatten(now, spec)
        return code(*args, **kwargs)

    return compute


@dataclass(eq=False)
class _Route:
    """The way of the rows of one part of the tokens."""

    channel: Channel
    tag: Tag
    order: Tensor
    """[R], of each row the number of its entry among the N k of the tokens."""
    token: Tensor
    """[R], its token."""
    of_token: Tensor
    """[N, k], the rows of each token, from the lowest expert to the highest."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    numbers: Tensor
    """[M, 1], the experts of the received rows, among those of this rank."""
    under_way: list[Pending] = field(default_factory=list)
    """In the order in which they are waited for."""

    def launch(self, rows: Iterable[Tensor], what: str, *, back: bool = False) -> list[Tensor]:
        """Send rows to their experts, or `back`; gives what will be received."""
        there, here = (self.received, self.sent) if back else (self.sent, self.received)
        tag = self.tag._replace(tensor=what)
        buffers = []
        for x in rows:
            buffer = x.new_empty(sum(here), *x.shape[1:])
            self.under_way.append(
                self.channel.all_to_all_into(
                    buffer, x.contiguous(), out_rows=here, in_rows=there, tag=tag
                )
            )
            buffers.append(buffer)
        return buffers


class Sent(NamedTuple):
    """Tokens that are on their way to their experts, in parts."""

    parts: list[tuple[Tensor, ...]]
    """What arrives: tokens [M, D] and weights [M, 1]."""
    routes: list[_Route]
    num_tokens: int
    """Those that were given: without padding."""

    @property
    def under_way(self) -> list[list[Pending]]:
        """What is under way of each part."""
        return [route.under_way for route in self.routes]


class ExpertExchange:
    """The ranks that share the experts of a layer, each with some of them.

    Source: GShard (arXiv 2006.16668), without a capacity: no token is dropped.
    """

    def __init__(
        self,
        name: str,
        ranks: Channel,
        bounds: Sequence[int],
        *,
        alike: Channel,
        num_chunks: int,
    ) -> None:
        """`bounds`: rank i has the experts from `bounds[i]` to `bounds[i + 1]`. `alike`: the ranks
        that are given the same tokens, of which each sends its share."""
        self.ranks, self.bounds, self.alike = ranks, bounds, alike
        self.num_chunks = num_chunks
        self._tag = Tag(Purpose.EXPERTS, name)

    @property
    def own(self) -> slice:
        """The experts of this rank."""
        return slice(*self.bounds[self.ranks.rank : self.ranks.rank + 2])

    def dispatch(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Sent:
        """Send tokens [N, D] to experts, by numbers [N, k] of these and their weights [N, k].

        The host waits once, for the numbers of rows.
        """
        count, pad = len(tokens), (0, 0, 0, -len(tokens) % self.alike.size)
        tokens, numbers, weights = (
            scatter_to_sequence_parallel_region(F.pad(x, pad) if pad[-1] else x, self.alike)
            for x in (tokens, numbers, weights)
        )
        last = self.bounds[-1] - 1  # transformers numbers by E what goes to no expert
        weights = weights.masked_fill(numbers > last, 0)
        numbers = numbers.clamp(max=last)
        parts = [chunk_range(len(tokens), self.num_chunks, i) for i in range(self.num_chunks)]
        cuts = [slice(part.start, part.stop) for part in parts]
        routes = self._routes([numbers[cut] for cut in cuts])
        launched = [
            _Dispatch.apply(tokens[cut], weights[cut], route)
            for cut, route in zip(cuts, routes, strict=True)
        ]
        return Sent(launched, routes, count)

    def __call__(self, compute: Compute, sent: Sent, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The sum of what its experts give for each token that was `sent`, [N, D].

        `compute` is called with rows that other ranks sent, and their experts numbered among this
        rank's. `parameters` are what it reads.
        """
        routes, back = sent.routes, []
        for route, buffers in zip(routes, sent.parts, strict=True):
            x, w = _Arrive.apply(*buffers, route)
            if len(x):
                y = compute(x, route.numbers, w)
            else:  # [Note: Every rank takes part]
                y = joined(x * w, *parameters) * torch.ones_like(w)
            back.append(_Return.apply(y.to(x.dtype), route))
        sums = [_Combine.apply(rows, route) for rows, route in zip(back, routes, strict=True)]
        out = sums[0] if len(sums) == 1 else torch.cat(sums)
        every = gather_from_sequence_parallel_region(
            out, self.alike, tensor_parallel_output_grad=False
        )
        return every if len(every) == sent.num_tokens else every[: sent.num_tokens]

    def _routes(self, parts: Sequence[Tensor]) -> list[_Route]:
        """The ways of parts of the tokens, whose experts are numbers [N, k]."""
        num_experts, size = self.bounds[-1], self.ranks.size
        flat = [part.flatten().long() for part in parts]
        counts = torch.stack(
            [x.new_zeros(num_experts).scatter_add_(0, x, torch.ones_like(x)) for x in flat]
        )
        every = counts.new_empty(size, *counts.shape)  # [ranks, parts, E]
        tag = self._tag._replace(tensor="counts")
        self.ranks.all_gather_into(every, counts.unsqueeze(0), tag=tag).wait()
        sums = every.cumsum(-1)
        sums = torch.cat([sums.new_zeros(*sums.shape[:-1], 1), sums], -1)[..., self.bounds].diff()
        rows = sums.tolist() if not sums.is_meta else _even(parts, size)  # the host's one wait
        return [
            self._route(part, every[:, i, self.own], [of_rank[i] for of_rank in rows])
            for i, part in enumerate(parts)
        ]

    def _route(self, numbers: Tensor, own: Tensor, rows: list[list[int]]) -> _Route:
        """`own` [ranks, e]: rows from each rank for each expert of this one; `rows`: from each rank
        to each."""
        me, k = self.ranks.rank, numbers.shape[1]
        order = numbers.flatten().argsort(stable=True)
        token = order // k
        received = [of_rank[me] for of_rank in rows]
        local = torch.arange(own.shape[1], device=own.device).repeat(len(own))
        return _Route(
            self.ranks,
            self._tag,
            order,
            token,
            token.argsort(stable=True).view(-1, k),
            rows[me],
            received,
            local.repeat_interleave(own.flatten(), output_size=sum(received)).unsqueeze(1),
        )


def _even(parts: Sequence[Tensor], size: int) -> list[list[list[int]]]:
    """Rows of each part from each rank to each, on the meta device: equally many."""
    ranges = [[len(chunk_range(x.numel(), size, i)) for i in range(size)] for x in parts]
    return [ranges] * size


def _wait(under_way: list[Pending], count: int = 1) -> list[Tensor]:
    """Wait for the first `count` transfers; return what they bring."""
    return [under_way.pop(0).wait() for _ in range(count)]


def _sum_by_token(rows: Tensor, of_token: Tensor) -> Tensor:
    """[R, D] -> [N, D], in the order of experts, as one process adds up."""
    total = rows[of_token[:, 0]]
    for column in of_token.unbind(1)[1:]:
        total += rows[column]
    return total


class _Dispatch(Function):
    """forward   tokens [N, D] and weights [N, k] to their experts, under way: [M, D], [M, 1]
    backward  waits for their gradients, and sums those of tokens
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, route: _Route) -> tuple[Tensor, ...]:
        ctx.save_for_backward(route.order, route.of_token)
        ctx.under_way, ctx.shape = route.under_way, weights.shape
        rows = x[route.token], weights.flatten()[route.order].unsqueeze(1)
        return tuple(route.launch(rows, "dispatch"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        order, of_token = ctx.saved_tensors
        dx, dw = _wait(ctx.under_way, 2)
        of_weights = torch.empty_like(dw[:, 0]).index_copy_(0, order, dw[:, 0])
        return _sum_by_token(dx, of_token), of_weights.view(ctx.shape), None


class _Arrive(Function):
    """forward   waits for dispatched rows
    backward  sends their gradients back
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, route: _Route) -> tuple[Tensor, ...]:
        ctx.route = route
        _wait(route.under_way, 2)
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dw: Tensor) -> tuple[Tensor | None, ...]:
        ctx.route.launch((dx, dw), "dispatch.grad", back=True)
        return dx, dw, None


class _Return(Function):
    """forward   what experts gave back to where the tokens came from, under way: [M, D] -> [R, D]
    backward  waits for its gradient
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        (rows,) = route.launch((y,), "combine", back=True)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_wait(ctx.route.under_way), None


class _Combine(Function):
    """forward   waits for the rows and sums those of a token: [R, D] -> [N, D]
    backward  sends the gradient to the experts
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        _wait(route.under_way)
        return _sum_by_token(rows, route.of_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows = dy[ctx.route.token]
        ctx.route.launch((rows,), "combine.grad")
        return rows, None
