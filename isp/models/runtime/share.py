"""Trial runs of a model on one rank's share of its features, before ranks start.

[Note: Shares] Between a column and a row, a rank has its share of the features, and the model's own
code must compute them without the features of other ranks. If it takes a mean or a norm over all of
them, the shapes fit but the result is wrong. So the model runs on the CPU without weights, as in
[Note: Locality], once whole and once for each of a few ranks. In a rank's run, a column linear
returns the rank's share of its output in the whole run, and a row linear returns the same as there.
The input of the row, and the gradients from there back to the columns, must be the rank's share of
those in the whole run. Nothing is sent, and no error reaches the next region. The head is a column,
too: the result of the model's code on a rank's logits must be the rank's share of the logits. The
cases that [Note: Locality] lists are not detected.

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
    """Run the stage module that `build` makes of `shape` for one of `size` ranks, on meta tensors.

    The mode is always msp, in which the number of tokens inside a region differs from that outside.
    Raises ValueError, or an error of the model's code, if the model does not run on a rank's share
    of the features.
    """
    tensor, tokens = DryChannel("tensor", size, 0), 8 * size
    layers = RankLayers(
        mode=Mode.MSP,
        tensor=tensor,
        weight=tensor,
        communicator=LocalWeights(),
        device=torch.device("meta"),
        dtype=torch.float32,
    )
    attentions = (call for call in trace.calls if call.sizes is not None)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        """Check that attention gets the rank's share of the heads for all tokens."""
        call = next(attentions)
        assert call.sizes is not None
        parts = plan.head_parts(call.block, size)
        heads, kv_heads = call.sizes.num_heads // parts, call.sizes.num_kv_heads // parts
        expected = [(tokens, heads), (tokens, kv_heads), (tokens, kv_heads)]
        found = [tuple(x.shape[1:3]) for x in (q, k, v)]
        if found != expected or (sinks is not None and len(sinks) != heads):
            raise ValueError(f"{call.block} calls attention with heads of other ranks")
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    with identity_experts(shape):  # while it is copied, so that the copy's calls of experts count
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

    shape, buffers and forward are those of `isp.models.tracing.probe.check_local`, which returned
    `run`; `size`: tensor ranks. See [Note: Shares].
    """
    model = without_weights(shape, buffers, trace.roles, training=run.training)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(trace.vocab_size, (1, run.tokens), generator=random)
    positions = torch.arange(run.tokens)[None]
    vectors = {name: model.get_parameter(name) for name in plan.vectors}
    with local_calls(model, gradients=True), ExitStack() as stack:
        shares = _Shares(model, plan, size, stack)
        whole = forward(model, ids, positions)
        for rank in sorted({0, 1, size - 1}):  # code that needs other features differs on each
            shares.begin(rank)
            for name, vector in vectors.items():
                owner, _, local = name.rpartition(".")
                own = nn.Parameter(vector.chunk(size)[rank], requires_grad=False)  # of its heads
                setattr(model.get_submodule(owner), local, own)
            if shares.differ(whole, forward(model, ids, positions)):
                raise ValueError(
                    f"code after {plan.head} computes over all {whole.shape[-1]} logits of a token,"
                    f" of which a rank has a part"
                )
        if shares.of_gradients:  # after all ranks: where forward differs, so do gradients
            raise ValueError(shares.of_gradients)


class _Given(NamedTuple):
    """The input and output of a row linear in the whole run, and gradients before it."""

    x: Tensor
    """[.., I]"""
    gradients: tuple[Tensor | None, ...]
    """Gradients of the columns' outputs before it, of a fixed sum of x."""
    y: Tensor


class _Shares:
    """The column and row linears of a model, run with all features and then with one rank's."""

    def __init__(self, model: nn.Module, plan: TensorPlan, size: int, stack: ExitStack) -> None:
        """Replace forwards in the model until `stack` ends; the first run is the whole one."""
        self._model, self._plan, self._size = model, plan, size
        self._rank: int | None = None
        """None: the run is the whole one."""
        self._whole: dict[tuple[str, int], Any] = {}
        """Outputs of columns and records of rows in the whole run, by module and call number."""
        self._calls = Counter[str]()
        self._leaves: list[Tensor] = []
        """Outputs of columns since the last row, as leaves of the graph."""
        self._other = ""
        """The first module since the last row whose output is not the rank's share of that in the
        whole run; empty: none."""
        self.of_gradients = ""
        """The message for the first gradients that differ; empty: none do."""
        for name, cut in plan.cuts.items():
            if not cut.whole:
                act = self._row if plan.is_row(name) else self._column
                module = model.get_submodule(name)
                stack.enter_context(replaced_forward(module, partial(act, name, module.forward)))
        for region in plan.regions:
            for name in () if region.whole else region.between:
                module, note = model.get_submodule(name), partial(self._passed, name)
                stack.callback(module.register_forward_hook(note).remove)

    def begin(self, rank: int) -> None:
        """Begin the run of a rank."""
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
        apart = torch.where(whole == own, 0, whole - own).abs()  # of equal infinities, too
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
        y = self._whole[key]
        if self._rank is not None:
            y = _share(y, self._rank, self._size)
        self._leaves.append(y.detach().requires_grad_())
        # A copy, as the model may change it in place.
        return self._leaves[-1].clone(memory_format=torch.contiguous_format)

    def _row(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return a row's output in the whole run; check its input and gradients in a rank's run."""
        key, gradients = self._key(name), self._gradients(x)
        if self._rank is None:
            with torch.no_grad():
                self._whole[key] = _Given(x.detach(), gradients, forward(x))
        whole: _Given = self._whole[key]
        if self._rank is not None:
            if self.differ(whole.x, x.detach()):
                raise ValueError(self._said(self._other, name, whole.x.shape[-1]))
            if self._gradients_differ(whole.gradients, gradients):
                said = self._said("", name, whole.x.shape[-1], " in its backward pass")
                self.of_gradients = self.of_gradients or said
        self._other = ""
        return whole.y.clone()

    def _gradients(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of a sum of x with fixed factors, at the columns' outputs.

        Columns without one are kept: a block may call those of several rows first.
        """
        leaves = self._leaves
        if not (leaves and x.requires_grad):
            return ()
        # The factor of a feature is the same in the whole run and in its rank's run.
        first = 0 if self._rank is None else self._rank * x.shape[-1]
        factors = torch.arange(first, first + x.shape[-1]).cos().to(x.dtype)
        found = torch.autograd.grad(x, leaves, factors.expand_as(x), allow_unused=True)
        self._leaves = [x for x, grad in zip(leaves, found, strict=True) if grad is None]
        return found

    def _gradients_differ(
        self, whole: tuple[Tensor | None, ...], own: tuple[Tensor | None, ...]
    ) -> bool:
        """Return whether a rank's gradients are not its share, or only one run has some."""
        if [x is None for x in whole] != [x is None for x in own]:
            return True
        pairs = zip(whole, own, strict=True)
        return any(a is not None and b is not None and self.differ(a, b, 1e-3) for a, b in pairs)

    def _passed(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Compare the output of a module between a column and a row, as a forward hook.

        The first that differs is remembered, to be named if the input of the row differs.
        """
        key = self._key(name)
        if not isinstance(output, Tensor):
            return
        if self._rank is None:
            self._whole[key] = output.detach()
        elif not self._other and self._whole[key].dim() == output.dim():
            self._other = name if self.differ(self._whole[key], output.detach()) else ""

    def _said(self, place: str, row: str, features: int, where: str = "") -> str:
        """Return the message for a row whose input is wrong.

        `place`: the module at fault; empty: unknown, so the region's module is named.
        """
        regions = self._plan.regions
        place = place or next(r.module for r in regions if row.startswith(f"{r.module}."))
        return (
            f"{place} ({type(self._model.get_submodule(place)).__name__}) computes over all"
            f" features{where}, as a norm or a fused linear that is cut as one does, but before"
            f" {row} a rank has {features // self._size} of the {features} features of a token"
        )


def _share(x: Tensor, rank: int, size: int, dim: int = -1) -> Tensor:
    """Return a rank's part of a dim, like `torch.chunk`: equal parts, the last ones smaller."""
    length = -(-x.shape[dim] // size)
    first = min(rank * length, x.shape[dim])
    return x.narrow(dim, first, min(length, x.shape[dim] - first))
