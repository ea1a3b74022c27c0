"""Check before ranks start that a model's code can run on one rank's share of the features.

The model runs whole and on the shares of a few ranks, without weights; between column and row
linears, a rank's features must be its share of those in the whole run. See [Note: Shares] in
docs/design/notes/models.md.

I features between a column and a row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isp.core.attention.local import LocalAttention
from isp.core.attention.mask import AttentionMask
from isp.core.comm.channel import DryChannel
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh import Mode
from isp.core.weights.wp_communicator import LocalWeights
from isp.models.forwards import replaced_forward
from isp.models.runtime.stage_module import StageModule
from isp.models.sharding.region import OnlyColumnsRead
from isp.models.sharding.tensor_plan import TensorPlan
from isp.models.tracing.probe import Forward, ProbeRun, local_calls, without_weights
from isp.models.tracing.recorder import identity_experts
from isp.models.tracing.trace import ModelTrace

__all__ = ["check_shares", "run_with_a_share"]


def run_with_a_share(
    build: Callable[[RankLayers, LocalAttention], StageModule],
    shape: nn.Module,
    trace: ModelTrace,
    plan: TensorPlan,
    size: int,
) -> None:
    """Run the model for one of `size` tensor ranks on meta tensors, to check shapes and heads.

    `build`: makes the stage module of the traced model `shape`. The mode is always msp, because in
    it the number of tokens inside a region differs from the number outside, so code that confuses
    the two fails. Raises ValueError, or an error of the model's code, if the model does not run on
    a rank's share of the features.
    """
    # `tensor` is a channel that acts as rank 0 of `size` ranks and sends nothing.
    tensor, tokens = DryChannel("tensor", size, 0), 8 * size
    layers = RankLayers(
        mode=Mode.MSP,
        tensor=tensor,
        weight=tensor,
        communicator=LocalWeights(),
        device=torch.device("meta"),
        dtype=torch.float32,
    )
    # `attend` compares each call of attention with the next traced one.
    attentions = (call for call in trace.calls if call.sizes is not None)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        """Raise ValueError unless q, k and v have all tokens and the rank's share of the heads."""
        call = next(attentions)
        assert call.sizes is not None
        parts = plan.head_parts(call.block, size)
        heads, kv_heads = call.sizes.num_heads // parts, call.sizes.num_kv_heads // parts
        expected = [(tokens, heads), (tokens, kv_heads), (tokens, kv_heads)]
        found = [tuple(x.shape[1:3]) for x in (q, k, v)]
        if found != expected or (sinks is not None and len(sinks) != heads):
            raise ValueError(f"{call.block} calls attention with heads of other ranks")
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    # `build` copies `shape`: the copy has these forwards, inside of the wrappers that count calls.
    with identity_experts(shape):
        chunk = build(layers, attend)
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    reads = OnlyColumnsRead(tuple(chunk.holders.entrances.values()))
    with reads, torch.no_grad():
        chunk.logits(chunk(ids, ids, None))


def check_shares(
    shape: nn.Module,
    buffers: Iterable[Tensor],
    trace: ModelTrace,
    forward: Forward,
    plan: TensorPlan,
    size: int,
    run: ProbeRun,
) -> None:
    """Raise ValueError, naming the module, if the features of a rank need those of other ranks.

    shape, buffers and forward are the arguments of `isp.models.tracing.probe.check_local`, and
    `run` its result; `size`: the number of tensor ranks. See [Note: Shares].
    """
    model = without_weights(shape, buffers, trace.roles, training=run.training)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(trace.vocab_size, (1, run.tokens), generator=random)
    positions = torch.arange(run.tokens)[None]
    vectors = {name: model.get_parameter(name) for name in plan.vectors}
    with local_calls(model, gradients=True), ExitStack() as stack:
        shares = _Shares(model, plan, size, stack)
        whole = forward(model, ids, positions)
        # A few ranks suffice, because wrong code is wrong on each rank.
        for rank in sorted({0, 1, size - 1}):
            shares.begin(rank)
            for name, vector in vectors.items():
                owner, _, local = name.rpartition(".")
                # The vector has one element for each head, so a rank gets the elements of its
                # heads.
                own = nn.Parameter(vector.chunk(size)[rank], requires_grad=False)
                setattr(model.get_submodule(owner), local, own)
            if shares.differ(whole, forward(model, ids, positions)):
                raise ValueError(
                    f"code after {plan.head} computes over all {whole.shape[-1]} logits of a token,"
                    f" of which a rank has a part"
                )
        # Raise errors of gradients last, because an error in forward, which also changes gradients,
        # says more.
        if shares.of_gradients:
            raise ValueError(shares.of_gradients)


class _Given(NamedTuple):
    """The record of a row linear's call in the run with all features (the whole run)."""

    x: Tensor
    """The input of the linear, [.., I]."""
    gradients: tuple[Tensor | None, ...]
    """The gradients of a fixed weighted sum of x with respect to the outputs of the column linears
    that were called before this row linear."""
    y: Tensor
    """The output of the linear."""


class _Shares:
    """Replaces column and row linears, to run a model with all features and then with a share.

    The first forward is the whole run; `begin` starts the run of a rank.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, size: int, stack: ExitStack) -> None:
        """Replace forwards of `model` until `stack` closes; `size`: the number of tensor ranks."""
        self._model, self._plan, self._size = model, plan, size
        self._rank: int | None = None
        """The rank whose run it is; None: the whole run."""
        self._whole: dict[tuple[str, int], Any] = {}
        """Outputs of column linears and records of row linears in the whole run, by module and
        index of its call."""
        self._calls = Counter[str]()
        """How often each module was called in the forward that runs now."""
        self._leaves: list[Tensor] = []
        """Outputs of the column linears since the last row linear, as leaves of the graph."""
        self._other = ""
        """The first module since the last row whose output is not the rank's share of its output in
        the whole run; empty: there is none."""
        self.of_gradients = ""
        """The error message for the first gradients that differ; empty: none differ."""
        for name, cut in plan.cuts.items():
            if not cut.whole:
                act = self._row if plan.is_row(name) else self._column
                module = model.get_submodule(name)
                stack.enter_context(replaced_forward(module, partial(act, name, module.forward)))
        for region in plan.regions:
            for name in () if region.whole else region.between:
                module, note = model.get_submodule(name), partial(self._compare_output, name)
                stack.callback(module.register_forward_hook(note).remove)

    def begin(self, rank: int) -> None:
        """Begin the run of `rank`, with the outputs of the whole run."""
        self._rank = rank
        self._calls.clear()
        self._leaves.clear()

    def differ(self, whole: Tensor, own: Tensor, limit: float = 1e-5) -> bool:
        """Return whether `own` is not this rank's share of `whole`, along each dim that differs.

        `limit`: the allowed difference relative to the largest value; float32 sums in another order
        differ by less.
        """
        assert self._rank is not None
        for dim, (all_of, of_rank) in enumerate(zip(whole.shape, own.shape, strict=True)):
            if all_of != of_rank:
                whole = _share(whole, self._rank, self._size, dim)
        if whole.shape != own.shape:
            return True
        # Equal infinities differ by 0; their difference would be NaN.
        apart = torch.where(whole == own, 0, whole - own).abs()
        largest = whole.masked_fill(whole.isinf(), 0).abs().max() if own.numel() else 0
        return bool(own.numel()) and not bool(apart.max() <= limit * largest)

    def _key(self, name: str) -> tuple[str, int]:
        """Count a call of a module; return its key, which is the same in each run."""
        self._calls[name] += 1
        return name, self._calls[name]

    def _column(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return a column's output in the whole run, or the rank's share of it, as a new leaf."""
        key = self._key(name)
        if self._rank is None:
            with torch.no_grad():
                self._whole[key] = forward(x)
        # Take the output of the whole run in a rank's run as well: then an error before this column
        # has no effect after it.
        y = self._whole[key]
        if self._rank is not None:
            y = _share(y, self._rank, self._size)
        self._leaves.append(y.detach().requires_grad_())
        # Return a copy, because the model may write into it.
        return self._leaves[-1].clone(memory_format=torch.contiguous_format)

    def _row(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return a row's output in the whole run; check input and gradients in a rank's run.

        Raises ValueError if the input is not the rank's share. If only the gradients differ, keeps
        the error in `of_gradients`, because an error in forward says more.
        """
        key, gradients = self._key(name), self._gradients(x)
        if self._rank is None:
            with torch.no_grad():
                self._whole[key] = _Given(x.detach(), gradients, forward(x))
        whole: _Given = self._whole[key]
        if self._rank is not None:
            if self.differ(whole.x, x.detach()):
                raise ValueError(self._message(self._other, name, whole.x.shape[-1]))
            if self._gradients_differ(whole.gradients, gradients):
                said = self._message("", name, whole.x.shape[-1], " in its backward pass")
                self.of_gradients = self.of_gradients or said
        self._other = ""
        # Return a copy, because the model may write into it.
        return whole.y.clone()

    def _gradients(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of a fixed weighted sum of x with respect to earlier columns'
        outputs.

        Outputs that x does not depend on are kept for a later row: a block may call the columns of
        several rows first.
        """
        leaves = self._leaves
        if not (leaves and x.requires_grad):
            return ()
        # A feature's factor depends on its index among all features: it is the same in both runs.
        first = 0 if self._rank is None else self._rank * x.shape[-1]
        factors = torch.arange(first, first + x.shape[-1]).cos().to(x.dtype)
        found = torch.autograd.grad(x, leaves, factors.expand_as(x), allow_unused=True)
        self._leaves = [x for x, grad in zip(leaves, found, strict=True) if grad is None]
        return found

    def _gradients_differ(
        self, whole: tuple[Tensor | None, ...], own: tuple[Tensor | None, ...]
    ) -> bool:
        """Return whether the rank's `own` gradients are not its share of the whole run's gradients.

        Also True if only one of the two runs has a gradient.
        """
        if [x is None for x in whole] != [x is None for x in own]:
            return True
        pairs = zip(whole, own, strict=True)
        return any(a is not None and b is not None and self.differ(a, b, 1e-3) for a, b in pairs)

    def _compare_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Compare the output of a module between column and row with its output in the whole run.

        A forward hook. Records the first module whose outputs differ, so that the error for a wrong
        input of the row linear can name it.
        """
        key = self._key(name)
        if not isinstance(output, Tensor):
            return
        if self._rank is None:
            self._whole[key] = output.detach()
        elif not self._other and self._whole[key].dim() == output.dim():
            self._other = name if self.differ(self._whole[key], output.detach()) else ""

    def _message(self, place: str, row: str, features: int, where: str = "") -> str:
        """Return the error message for a row whose input is not the rank's share.

        `place`: the module at fault; "": it is unknown, so the region's module is named. `where`:
        text that follows "all features", such as " in its backward pass".
        """
        regions = self._plan.regions
        place = place or next(r.module for r in regions if row.startswith(f"{r.module}."))
        return (
            f"{place} ({type(self._model.get_submodule(place)).__name__}) computes over all"
            f" features{where}, as a norm or a fused linear that is cut as one does, but before"
            f" {row} a rank has {features // self._size} of the {features} features of a token"
        )


def _share(x: Tensor, rank: int, size: int, dim: int = -1) -> Tensor:
    """Return a rank's part of x along a dim, as `torch.chunk` cuts: the last parts are smaller."""
    length = -(-x.shape[dim] // size)
    first = min(rank * length, x.shape[dim])
    return x.narrow(dim, first, min(length, x.shape[dim] - first))
