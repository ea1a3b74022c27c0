"""`DispatchExperts`: send tokens to the ranks that have their experts, and the results back.

Each transfer is launched by one autograd node and waited for by another, so that it overlaps with
compute in forward and in backward. See [Note: Launch and wait] in docs/design/notes/experts.md. A
rank without tokens takes part in all transfers. See [Note: Every rank takes part] in
docs/design/notes/experts.md.

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
from isp.core.mesh.phase import Phase
from isp.core.tensors import tensors_in
from isp.core.torch_private import TreeSpec, reparametrized, tree_flatten, tree_unflatten
from isp.core.weights.wp_communicator import WPCommunicator
from isp.models.forwards import ModuleForward
from isp.models.moe.ahead import ComputedAhead
from isp.models.moe.whole_weights import ShardedExperts
from isp.models.roles import ParameterRole
from isp.models.tracing.calls import weights_among
from isp.models.tracing.trace import Kind, ModelTrace

__all__ = ["DispatchExperts", "ExpertExchange", "check_spread"]


def check_spread(
    name: str, trace: ModelTrace, config: Mapping[str, Any], expert: ExpertConfig
) -> None:
    """Raise ValueError if the experts of a model cannot be spread over ranks as `expert` says.

    `name`: the class of the model; `config`: its config.json.
    """
    if expert.size == 1:
        return
    key = f"parallel.expert.size={expert.size}"
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


class DispatchExperts(ShardedExperts):
    """Computes some experts of a module, for the tokens of all ranks that share its experts.

    In mode isp the stacks of these experts are gathered over the ranks that have the same experts.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: WPCommunicator,
        exchange: ExpertExchange,
        ahead: ComputedAhead | None = None,
    ) -> None:
        """`exchange`: the exchange with the ranks that have the other experts."""
        super().__init__(module, name, communicator, ahead)
        self._exchange = exchange
        num_experts = exchange.bounds[-1]
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
        """Attributes with the number of experts, recognized by value and name; the module's own
        code may read them."""

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        self.own_code = inner
        return self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Send tokens to the ranks of their experts, compute the received ones, return the sums.

        The arguments are those of the module's own forward.
        """
        # Adapters pass the factors of all experts [E, .., ..] (see `expert_adapters`): keep those
        # of this rank's experts.
        if factors := kwargs.get("factors"):
            own = {n: tuple(x[self._exchange.own] for x in pair) for n, pair in factors.items()}
            kwargs = {**kwargs, "factors": own}
        leaves, spec = tree_flatten((args, kwargs))
        tokens, numbers = leaves[:2]
        place = weights_among(leaves, numbers)
        assert place is not None, "check_spread requires routing weights"
        sent = self._exchange.dispatch(tokens, numbers, leaves[place])
        if self.ahead is not None:
            self.ahead.compute(tokens)
        # These tensors have been sent: free them. The received ones take their places in the call.
        leaves[0] = leaves[place] = None
        return self.on_whole(self._compute_received, sent, leaves, place, spec)

    def _compute_received(
        self, sent: Sent, leaves: list[Any], place: int, spec: TreeSpec
    ) -> Tensor:
        """Compute the tokens that this rank receives, send results back, and return this rank's
        sums.

        `leaves` and `spec`: the arguments of the call, flattened, without the tokens (leaf 0) and
        routing weights (leaf `place`) that were sent.
        """

        def compute(x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
            now = [*leaves]
            now[0], now[1], now[place] = x, numbers.to(leaves[1].dtype), weights
            args, kwargs = tree_unflatten(now, spec)
            return self.run_own(self._own_experts, args, kwargs)

        read = [*self.module.parameters(), *tensors_in(leaves)]
        # `saves` is True if weights are gathered: the recompute of a block then runs up to
        # `_Leave`, which comes after the exchange.
        return self._exchange(compute, sent, read, self.communicator.gathers_weights)

    def _own_experts(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own code as if the module had only the experts of this rank."""
        own, num_experts = self._exchange.own, self._exchange.bounds[-1]
        for key in self._counts:
            # The module now has only this rank's experts, and its code may loop over their
            # number.
            setattr(self.module, key, own.stop - own.start)
        vectors = {name: getattr(self.module, name)[own] for name in self._vectors}
        try:
            with reparametrized(self.module, vectors):
                return self.own_code(*args, **kwargs)
        finally:
            for key in self._counts:
                # Set the number of all experts again, because code outside of the experts may read
                # it.
                setattr(self.module, key, num_experts)


# -- the exchange --------------------------------------------------------------------------------

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function from tokens [M, D], expert indices [M, 1] and routing weights [M, 1] to the weighted
results [M, D]."""


@dataclass(eq=False)
class _Route:
    """The transfers of one part of the tokens: rows to their experts, and results back.

    The autograd nodes of the part share this object. It holds no tensors except those in flight: in
    a recomputed block it lives until backward, as the nodes of the first forward do, and would keep
    the memory of all tensors that it held.
    """

    channel: Channel
    tag: Tag
    sent: list[int]
    """For each rank, how many rows are sent to it: one for each token and expert there."""
    received: list[int]
    """For each rank, how many rows are received from it, for experts of this rank."""
    in_flight: list[Pending] = field(default_factory=list)
    """The transfers in flight, in the order in which they are waited for."""

    def launch(self, rows: Iterable[Tensor], what: str, *, back: bool = False) -> list[Tensor]:
        """Launch the transfer of `rows` to experts, or `back` to tokens; return the buffers it
        fills.

        Each tensor is [R, ..] -> [M, ..], or [M, ..] -> [R, ..] back. `what`: the name of the
        transfer in the log. Wait for the buffers with `wait`.
        """
        there, here = (self.received, self.sent) if back else (self.sent, self.received)
        tag = self.tag._replace(tensor=what)
        buffers = []
        for x in rows:
            buffer = x.new_empty(sum(here), *x.shape[1:])
            self.in_flight.append(
                self.channel.all_to_all_into(
                    buffer, x.contiguous(), out_rows=here, in_rows=there, tag=tag
                )
            )
            buffers.append(buffer)
        return buffers

    def wait(self) -> list[Tensor]:
        """Wait for all transfers in flight; return the buffers that they filled."""
        in_flight, self.in_flight = self.in_flight, []
        return [transfer.wait() for transfer in in_flight]


class _Part(NamedTuple):
    """Some of this rank's N tokens on their way to experts.

    There is a row [D] for each token and each of its k experts: R = N k rows are sent, and M rows
    are received for the experts of this rank.
    """

    route: _Route
    entry: Tensor
    """For each row that is sent, the index of its token and expert in the flattened expert
    indices [N, k]; [R]."""
    token: Tensor
    """For each row that is sent, the index of its token, [R]."""
    of_token: Tensor
    """For each token, the indices of its k rows, from the lowest expert to the highest; [N, k]."""
    numbers: Tensor
    """The expert of each received row, as an index into this rank's experts, [M, 1]."""
    buffers: tuple[Tensor, ...] = ()
    """The buffers for received tokens [M, D] and routing weights [M, 1], after the launch."""


class Sent(NamedTuple):
    """The tokens that `ExpertExchange.dispatch` has sent to their experts."""

    parts: list[_Part]
    num_tokens: int
    """The number of tokens that the experts were called with, without padding."""


class ExpertExchange:
    """Exchanges tokens between ranks that each have some of the experts of a block.

    Source: GShard (arXiv 2006.16668), without a capacity limit: no token is dropped.
    """

    def __init__(
        self,
        name: str,
        ranks: Channel,
        bounds: Sequence[int],
        *,
        same_tokens: Channel,
        num_chunks: int,
    ) -> None:
        """`bounds`: rank i has experts `bounds[i]` up to, not including, `bounds[i + 1]`.

        `same_tokens`: the ranks that have the same tokens as this one; each of them sends a part.
        `num_chunks`: the number of parts into which tokens are divided to overlap transfers.
        """
        self.ranks, self.bounds, self.same_tokens = ranks, bounds, same_tokens
        self.num_chunks = num_chunks
        self._tag = Tag(Purpose.EXPERTS, name)

    @property
    def own(self) -> slice:
        """The range of this rank's experts."""
        return slice(*self.bounds[self.ranks.rank : self.ranks.rank + 2])

    def dispatch(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Sent:
        """Launch the transfer of tokens [N, D] to the ranks of their experts.

        `numbers` [N, k]: the indices of each token's experts; `weights` [N, k]: their routing
        weights. The CPU waits for the device once, to read how many rows every rank sends to every
        other rank.
        """
        # Pad, because each of the ranks with the same tokens must send equally many.
        count, pad = len(tokens), (0, 0, 0, -len(tokens) % self.same_tokens.size)
        tokens, numbers, weights = (
            scatter_to_sequence_parallel_region(F.pad(x, pad) if pad[-1] else x, self.same_tokens)
            for x in (tokens, numbers, weights)
        )
        # transformers uses index E for an entry that goes to no expert: send it with weight 0.
        last = self.bounds[-1] - 1
        weights = weights.masked_fill(numbers > last, 0)
        numbers = numbers.clamp(max=last)
        ranges = [chunk_range(len(tokens), self.num_chunks, i) for i in range(self.num_chunks)]
        cuts = [slice(part.start, part.stop) for part in ranges]
        parts = self._routes([numbers[cut] for cut in cuts])
        sent = [
            part._replace(buffers=_Dispatch.apply(tokens[cut], weights[cut], part))
            for cut, part in zip(cuts, parts, strict=True)
        ]
        return Sent(sent, count)

    def __call__(self, compute: Compute, sent: Sent, read: Sequence[Tensor], saves: bool) -> Tensor:
        """Return for each token that was `sent` the sum of its experts' results, [N, D].

        `compute`: computes the rows that this rank received. `read`: all other tensors that
        `compute` reads, which may need gradients. `saves`: True if the recompute of a block goes on
        after this exchange anyway, so that `_Combine` may save tensors for backward.
        """
        try:
            sums = self._sums(compute, sent.parts, read, saves)
        except BaseException:
            # A recompute ends with an exception, as soon as it has restored its last tensor. The
            # results of earlier parts are in flight then, and only this code can wait for them and
            # free their buffers. After an error of the model's code, do not wait: other ranks
            # may have launched nothing, so waiting would hang.
            if self.ranks.log.phase is Phase.RECOMPUTE:
                for part in sent.parts:
                    part.route.wait()
            raise
        out = sums[0] if len(sums) == 1 else torch.cat(sums)
        every = gather_from_sequence_parallel_region(
            out, self.same_tokens, tensor_parallel_output_grad=False
        )
        return every if len(every) == sent.num_tokens else every[: sent.num_tokens]

    def _sums(
        self,
        compute: Compute,
        parts: Sequence[_Part],
        read: Sequence[Tensor],
        saves: bool,
    ) -> list[Tensor]:
        """Return the sums [N, D] of each part of the tokens.

        All results are sent back before the first part is summed, so that transfers overlap.
        """
        back = []
        for part in parts:
            x, w = _Arrive.apply(*part.buffers, part.route)
            if len(x):
                y = compute(x, part.numbers, w)
            else:
                # [Note: Every rank takes part]: this rank received nothing, so y is empty. Its
                # graph must still lead to all inputs, so that backward meets the transfers of other
                # ranks.
                y = joined(x * w, *read) * torch.ones_like(w)
            back.append(_Return.apply(y.to(x.dtype), part.route))
        return [_Combine.apply(rows, part, saves) for rows, part in zip(back, parts, strict=True)]

    def _routes(self, parts: Sequence[Tensor]) -> list[_Part]:
        """Return what is sent for each part of the tokens, given its expert indices [N, k].

        Nothing is launched yet, but all ranks of the expert group exchange their counts here.
        """
        num_experts, size = self.bounds[-1], self.ranks.size
        flat = [part.flatten().long() for part in parts]
        counts = torch.stack(
            [x.new_zeros(num_experts).scatter_add_(0, x, torch.ones_like(x)) for x in flat]
        )
        every = counts.new_empty(size, *counts.shape)  # [ranks, parts, E]
        tag = self._tag._replace(tensor="counts")
        self.ranks.all_gather_into(every, counts.unsqueeze(0), tag=tag).wait()
        # `sums` becomes the number of rows that each rank sends to each other rank. Experts of a
        # rank are consecutive, so it is the difference of running sums over experts at the bounds
        # of the rank.
        sums = every.cumsum(-1)
        sums = torch.cat([sums.new_zeros(*sums.shape[:-1], 1), sums], -1)[..., self.bounds].diff()
        # Here, and only here, the CPU waits for the device.
        rows = sums.tolist() if not sums.is_meta else _even(parts, size)
        return [
            self._part(part, every[:, i, self.own], [of_rank[i] for of_rank in rows])
            for i, part in enumerate(parts)
        ]

    def _part(self, numbers: Tensor, own: Tensor, rows: list[list[int]]) -> _Part:
        """Return the part of the tokens with expert indices `numbers` [N, k].

        `own` [ranks, this rank's experts]: the number of rows that each rank sends to each of these
        experts. `rows`: the number of rows that each rank sends to each rank.
        """
        me, k = self.ranks.rank, numbers.shape[1]
        # Sort rows, one for each token and expert, by expert, and rows of one expert by token.
        entry = numbers.flatten().argsort(stable=True)
        # Index i of the flattened `numbers` belongs to token i // k.
        token = entry // k
        received = [of_rank[me] for of_rank in rows]
        # Received rows are sorted by rank, and those of a rank by expert.
        local = torch.arange(own.shape[1], device=own.device).repeat(len(own))
        return _Part(
            _Route(self.ranks, self._tag, rows[me], received),
            entry,
            token,
            token.argsort(stable=True).view(-1, k),
            local.repeat_interleave(own.flatten(), output_size=sum(received)).unsqueeze(1),
        )


def _even(parts: Sequence[Tensor], size: int) -> list[list[list[int]]]:
    """Return how many rows each rank sends to each rank for each of `parts`, spread evenly.

    For the meta device, where counts have no values.
    """
    ranges = [[len(chunk_range(x.numel(), size, i)) for i in range(size)] for x in parts]
    return [ranges] * size


def _sum_by_token(rows: Tensor, of_token: Tensor) -> Tensor:
    """Sum the rows of each token in the order of experts: [R, D] -> [N, D].

    A single process adds them in this order, so the bits are the same.
    """
    total = rows[of_token[:, 0]]
    for column in of_token.unbind(1)[1:]:
        total += rows[column]
    return total


class _Dispatch(Function):
    """The autograd node that launches the transfer of tokens to their experts.

    forward   launches tokens [N, D] and routing weights [N, k]: buffers [M, D], [M, 1]
    backward  waits for the gradients of both, and sums those of each token
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, part: _Part) -> tuple[Tensor, ...]:
        ctx.save_for_backward(part.entry, part.of_token)
        ctx.route, ctx.shape = part.route, weights.shape
        rows = x[part.token], weights.flatten()[part.entry].unsqueeze(1)
        return tuple(part.route.launch(rows, "dispatch"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        entry, of_token = ctx.saved_tensors
        dx, dw = ctx.route.wait()
        of_weights = torch.empty_like(dw[:, 0]).index_copy_(0, entry, dw[:, 0])
        return _sum_by_token(dx, of_token), of_weights.view(ctx.shape), None


class _Arrive(Function):
    """The autograd node that waits for the tokens that this rank receives.

    forward   waits for the rows that `_Dispatch` launched
    backward  launches their gradients back to the tokens' ranks
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, route: _Route) -> tuple[Tensor, ...]:
        ctx.route = route
        route.wait()
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dw: Tensor) -> tuple[Tensor | None, ...]:
        ctx.route.launch((dx, dw), "dispatch.grad", back=True)
        return dx, dw, None


class _Return(Function):
    """The autograd node that launches the transfer of results back to the tokens' ranks.

    forward   launches the results of experts: [M, D] -> buffer [R, D]
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
        return *ctx.route.wait(), None


class _Combine(Function):
    """The autograd node that waits for the results of experts and sums those of each token.

    forward   waits for the rows and sums those of each token: [R, D] -> [N, D]
    backward  launches their gradient to the experts

    Backward needs the index of each row's token [R]. A recompute runs up to its last saved tensor,
    so saving the indices here would make it transfer the results again. They are saved only if
    `saves`: the recompute runs beyond this node in any case. Otherwise `ctx` keeps them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: _Part, saves: bool) -> Tensor:
        ctx.route, ctx.token = part.route, None if saves else part.token
        ctx.save_for_backward(part.token if saves else None)
        part.route.wait()
        return _sum_by_token(rows, part.of_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        rows = dy[ctx.token if saved is None else saved]
        ctx.route.launch((rows,), "combine.grad")
        return rows, None, None
