"""Dispatch of tokens to experts that are spread over ranks, and the sum of their results.

[Note: Launch and wait] A transfer consists of two autograd functions: the first launches it and
returns the buffer that it fills, the second waits for it. Backward reaches them in the opposite
order: there the second launches the transfer of the gradient and the first waits for it. Autograd
runs first what was recorded last. So while the experts compute one part of the tokens, in forward
and in backward, the next part is in flight; and all parts are in flight while something else is
computed between `dispatch` and the rest of the exchange. In isp mode the rest is recorded in an
inner graph [Note: A graph inside], which a recompute records again, while the nodes of the first
`dispatch` stay: the old and the new nodes find their transfers in `Sent.under_way`.

[Note: Every rank takes part] A rank that receives no token still has the node through which
gradients are sent, because all ranks must launch the same transfers in backward. That node saves a
tensor even if neither tokens nor weights have a gradient: a recompute, with its transfers, begins
when a saved tensor is read, and ends after the last one.

N tokens of a rank, k experts of each token, D hidden size, E experts; R = N k rows that a rank
sends, one for each token and expert, sorted by expert; M rows that it receives
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
    """Raise ValueError if the model's experts cannot be spread over ranks as `of` asks."""
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
    """A module that runs the code of another one, without its hooks, for some of its experts."""

    def __init__(self, module: nn.Module, num_experts: int, own: slice) -> None:
        """`own`: the experts of `num_experts` whose weights `module` has when it is called."""
        super().__init__()
        self.module, self._code, self._own = module, module.forward, own
        self._num_experts = num_experts
        self._vectors = [
            name
            for name, p in module.named_parameters(recurse=False)
            if p.dim() < 3 and len(p) == num_experts
        ]
        """Parameters with a row for each expert, such as biases, of which each rank has all."""
        self._counts = [
            key
            for key, value in vars(module).items()
            if type(value) is int and value == num_experts and "expert" in key
        ]
        """Attributes that hold the number of experts, known by value and name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as if it had only its own experts."""
        for key in self._counts:
            setattr(self.module, key, self._own.stop - self._own.start)  # as its weights have
        own = {name: getattr(self.module, name)[self._own] for name in self._vectors}
        try:
            with reparametrized(self.module, own):
                return self._code(*args, **kwargs)
        finally:
            for key in self._counts:  # restored, because the model's own code may read it
                setattr(self.module, key, self._num_experts)


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function from tokens [M, D], expert indices [M, 1] and routing weights [M, 1] to the weighted
results [M, D]."""


def on_other_tokens(code: Callable[..., Tensor], given: Any, place: int) -> Compute:
    """Return `code` as a function of other tokens, expert indices and routing weights.

    `given`: args and kwargs of the original call, of which leaf 0 is the tokens, leaf 1 the indices
    and leaf `place` the routing weights; the rest is passed as it is.
    """
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
    """The route of the rows of one part of the tokens, to their experts and back."""

    channel: Channel
    tag: Tag
    order: Tensor
    """[R], the index of each row among the N k entries of the tokens' expert indices."""
    token: Tensor
    """[R], the token of each row."""
    of_token: Tensor
    """[N, k], the rows of each token, from its lowest expert to its highest."""
    sent: list[int]
    """The number of rows sent to each rank."""
    received: list[int]
    """The number of rows received from each rank."""
    numbers: Tensor
    """[M, 1], the expert of each received row, numbered within this rank's experts."""
    under_way: list[Pending] = field(default_factory=list)
    """The transfers in flight, in the order in which they are waited for."""

    def launch(self, rows: Iterable[Tensor], what: str, *, back: bool = False) -> list[Tensor]:
        """Launch the transfer of rows to their experts, or `back`; return the buffers it fills.

        Each tensor is [R, ..] -> [M, ..], or [M, ..] -> [R, ..] back. `what` names it in the log.
        """
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
    """Tokens in flight to their experts, in parts."""

    parts: list[tuple[Tensor, ...]]
    """For each part, the buffers of received tokens [M, D] and routing weights [M, 1]."""
    routes: list[_Route]
    """The route of each part."""
    num_tokens: int
    """The number of tokens that the experts were called with, without padding."""

    @property
    def under_way(self) -> list[list[Pending]]:
        """For each part, the list of its transfers in flight."""
        return [route.under_way for route in self.routes]


class ExpertExchange:
    """The exchange of tokens between ranks that each have some of the experts of a layer.

    Source: GShard (arXiv 2006.16668), without a capacity limit: no token is dropped.
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
        """`bounds`: rank i has experts `bounds[i]` up to, not including, `bounds[i + 1]`.

        `alike`: the ranks that have the same tokens, of which each sends its share.
        `num_chunks`: the number of parts into which tokens are divided to overlap transfers.
        """
        self.ranks, self.bounds, self.alike = ranks, bounds, alike
        self.num_chunks = num_chunks
        self._tag = Tag(Purpose.EXPERTS, name)

    @property
    def own(self) -> slice:
        """The range of this rank's experts."""
        return slice(*self.bounds[self.ranks.rank : self.ranks.rank + 2])

    def dispatch(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Sent:
        """Launch the transfer of tokens [N, D] to experts `numbers` [N, k] with `weights` [N, k].

        The CPU waits for the device once, for the numbers of rows.
        """
        # Padded, so that each of the ranks with the same tokens sends as many.
        count, pad = len(tokens), (0, 0, 0, -len(tokens) % self.alike.size)
        tokens, numbers, weights = (
            scatter_to_sequence_parallel_region(F.pad(x, pad) if pad[-1] else x, self.alike)
            for x in (tokens, numbers, weights)
        )
        # transformers uses index E for an entry that goes to no expert: send it with weight 0.
        last = self.bounds[-1] - 1
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
        """Return for each token that was `sent` the sum of its experts' results, [N, D].

        `compute` is called with the rows that this rank received, and their experts numbered within
        this rank's. `parameters`: all parameters that it reads.
        """
        routes, back = sent.routes, []
        for route, buffers in zip(routes, sent.parts, strict=True):
            x, w = _Arrive.apply(*buffers, route)
            if len(x):
                y = compute(x, route.numbers, w)
            else:  # [Note: Every rank takes part]; empty, but connected to all inputs
                y = joined(x * w, *parameters) * torch.ones_like(w)
            back.append(_Return.apply(y.to(x.dtype), route))
        sums = [_Combine.apply(rows, route) for rows, route in zip(back, routes, strict=True)]
        out = sums[0] if len(sums) == 1 else torch.cat(sums)
        every = gather_from_sequence_parallel_region(
            out, self.alike, tensor_parallel_output_grad=False
        )
        return every if len(every) == sent.num_tokens else every[: sent.num_tokens]

    def _routes(self, parts: Sequence[Tensor]) -> list[_Route]:
        """Return the route of each part of the tokens, given its expert indices [N, k]."""
        num_experts, size = self.bounds[-1], self.ranks.size
        flat = [part.flatten().long() for part in parts]
        counts = torch.stack(
            [x.new_zeros(num_experts).scatter_add_(0, x, torch.ones_like(x)) for x in flat]
        )
        every = counts.new_empty(size, *counts.shape)  # [ranks, parts, E]
        tag = self._tag._replace(tensor="counts")
        self.ranks.all_gather_into(every, counts.unsqueeze(0), tag=tag).wait()
        # Rows from each rank to each: differences of running sums at the bounds between ranks.
        sums = every.cumsum(-1)
        sums = torch.cat([sums.new_zeros(*sums.shape[:-1], 1), sums], -1)[..., self.bounds].diff()
        rows = sums.tolist() if not sums.is_meta else _even(parts, size)  # the CPU's one wait
        return [
            self._route(part, every[:, i, self.own], [of_rank[i] for of_rank in rows])
            for i, part in enumerate(parts)
        ]

    def _route(self, numbers: Tensor, own: Tensor, rows: list[list[int]]) -> _Route:
        """Return the route of tokens with expert indices `numbers` [N, k].

        `own` [ranks, e]: rows from each rank for each expert of this rank. `rows`: rows from each
        rank to each.
        """
        me, k = self.ranks.rank, numbers.shape[1]
        order = numbers.flatten().argsort(stable=True)  # by expert, then by token
        token = order // k
        received = [of_rank[me] for of_rank in rows]
        # Received rows are sorted by rank, and those of a rank by expert.
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
    """Return rows from each rank to each, for each part, spread evenly: for the meta device."""
    ranges = [[len(chunk_range(x.numel(), size, i)) for i in range(size)] for x in parts]
    return [ranges] * size


def _wait(under_way: list[Pending], count: int = 1) -> list[Tensor]:
    """Wait for the first `count` transfers in flight; return their buffers."""
    return [under_way.pop(0).wait() for _ in range(count)]


def _sum_by_token(rows: Tensor, of_token: Tensor) -> Tensor:
    """Sum the rows of each token in the order of experts: [R, D] -> [N, D].

    This is the order in which a single process adds them up.
    """
    total = rows[of_token[:, 0]]
    for column in of_token.unbind(1)[1:]:
        total += rows[column]
    return total


class _Dispatch(Function):
    """forward   launches tokens [N, D] and weights [N, k] to their experts: [M, D], [M, 1]
    backward  waits for their gradients, and sums those of each token
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
    backward  launches their gradients back to the tokens' ranks
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
    """forward   launches the results of experts back to the tokens' ranks: [M, D] -> [R, D]
    backward  waits for their gradient
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
    """forward   waits for the rows and sums those of each token: [R, D] -> [N, D]
    backward  launches their gradient to the experts
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
