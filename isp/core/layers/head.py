"""The head's losses, computed in loss chunks of tokens so that not all logits exist at once.

B batch, S sequence, D hidden size, V vocabulary; S' the tokens and V' the logits of a rank; p ranks
that share the logits of their tokens (1 if each computes all logits of its own); c loss chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Pending
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.linear import LinearLayer, Moves, NeedsGrad, needs_grad
from isp.core.layers.vocab_loss import LogitShard, losses_and_gradient
from isp.core.mesh.phase import Phase
from isp.core.weights.gradients import weight_gradient
from isp.core.weights.wp_communicator import FullWeights

__all__ = ["HeadGradients", "HeadLoss", "deliver", "num_loss_chunks", "one_ahead"]


class _ChunkedLoss(Function):
    """forward   for each loss chunk: logits = move_y(move_x(x) W^T), their losses, and at once
                 dx = move_dx(move_dy(dlogits) W) and dW += move_dy(dlogits)^T move_x(x)
    backward  dx and dW, times dloss / expected; dW to the communicator

    Forward computes the gradients, too, for a gradient of the loss that is `expected` by then. So
    there are three products a token, as without loss chunks, the weight is gathered once, and dW is
    reduced once. A chunk's x is gathered while the one before is computed, and its dx is
    communicated while its dW is computed.

    [Note: Sum of products] With several loss chunks, dW is added up in float32 or wider and rounded
    once. One chunk gives the bits of a linear followed by a cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Tensor,
        bias: Tensor | None,
        expected: Tensor,
        labels: Tensor,
        of: HeadLoss,
        training: bool,
    ) -> Tensor:
        ctx.head = head = of.head
        # A graph is recorded or not outside of this function: in here grad mode is off.
        needs = [training and need for need in ctx.needs_input_grad[:3]]
        count = num_loss_chunks(x, labels.numel(), of.chunk_tokens)
        pieces = x.chunk(count, dim=1)  # [B, S'/c, D]
        # Gathering x joins the ranks' tokens, so a chunk's labels are those of every rank's slice.
        by_ranks = labels.unflatten(1, (of.num_slices, -1))  # [B, p, S']
        targets = [t.flatten(1) for t in by_ranks.chunk(len(pieces), dim=2)]  # [B, p S'/c]
        sums = HeadGradients(of, x, len(pieces), needs)
        loss = torch.zeros((), dtype=torch.float64, device=x.device)
        with head.communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, target in zip(one_ahead(of.moves, head.name, pieces), targets, strict=True):
                given = expected if any(needs) else None
                losses, dy = of.losses_of_chunk(own_x, full, target, given)
                loss += losses.sum()
                if dy is not None:
                    sums.add(own_x, dy, full.weight)
                del dy  # before the next chunk's logits are allocated
        ctx.save_for_backward(*sums.sums(), expected)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs = needs_grad(ctx, 3)
        *sums, expected = ctx.saved_tensors
        # The factor is 1 unless the caller scaled the loss after `expected` was given.
        head, factor = ctx.head, dloss / expected
        # No weight is read here. The use tells the communicator that backward has come to the
        # head, so that it launches the gathers planned for this point.
        unshard = head.communicator.unshard
        with unshard(head, Phase.BACKWARD, head.weight) if needs[0] else nullcontext():
            dx, dw, db = (x.mul_(factor) if n else None for x, n in zip(sums, needs, strict=True))
            dw, db = deliver(head, dw, db, needs[1:])
        return dx, dw, db, None, None, None, None


def one_ahead(moves: Moves, layer: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the pieces of x after their collective; the next one's is launched before."""
    tag = Tag(Purpose.ACTIVATION, layer, "x")
    before: Pending | None = None
    for piece in pieces:
        arriving = moves.x(piece.contiguous(), tag=tag)  # contiguous: one product for all rows
        if before is not None:
            yield before.wait()
        before = arriving
    assert before is not None
    yield before.wait()


def num_loss_chunks(x: Tensor, num_tokens: int, chunk_tokens: int) -> int:
    """Return the number of loss chunks for x [B, S', D], of at most `chunk_tokens` tokens (0: all).

    `num_tokens` counts all rows and ranks. A chunk has at least one position of the sequence.
    """
    if not chunk_tokens or not num_tokens:
        return 1
    at_each = num_tokens // x.shape[1]  # tokens at one position: B rows of p ranks
    return math.ceil(x.shape[1] / max(1, chunk_tokens // at_each))


class HeadGradients:
    """Accumulates dx, dW and db of a head, one loss chunk after another [Note: Sum of products]."""

    def __init__(self, of: HeadLoss, x: Tensor, count: int, needs: Sequence[Any]) -> None:
        """`count` is the number of loss chunks; `needs`: flags for x, the weight and the bias."""
        self._of, self._count, self._narrow = of, count, x.dtype
        _, self._of_weight, self._of_bias = needs
        self._dx = torch.empty_like(x) if needs[0] else None
        self._dx_parts = iter(() if self._dx is None else self._dx.chunk(count, dim=1))
        self._dtype = of.head.communicator.gradient_dtype(x.dtype)
        self._dw: Tensor | None = None
        self._db: Tensor | None = None

    def add(self, x: Tensor, dy: Tensor, weight: Tensor) -> None:
        """Add the gradients of the next chunk, from its x and the gradient dy of its product."""
        arriving = None
        if self._dx is not None:
            tag = Tag(Purpose.INPUT_GRADIENT, self._of.head.name, "dx")
            arriving = self._of.moves.dx(dy @ weight.to(dy.dtype), tag=tag)
        flat = dy.flatten(0, 1)
        several = torch.promote_types(dy.dtype, torch.float32) if self._count > 1 else None
        # dW is computed while dx is communicated.
        if self._of_weight:
            flat_x, wide = x.flatten(0, 1).to(dy.dtype), several or self._dtype
            self._dw = weight_gradient(flat, flat_x, dtype=wide, into=self._dw, add=True)
        if self._of_bias:
            summed = flat.sum(0, dtype=several or dy.dtype)
            self._db = summed if self._db is None else self._db + summed
        if arriving is not None:
            next(self._dx_parts).copy_(arriving.wait())

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dx, dW and db of all chunks, None for those not needed."""
        dw = None if self._dw is None else self._dw.to(self._dtype)
        return self._dx, dw, None if self._db is None else self._db.to(self._narrow)


def deliver(
    head: LinearLayer, dw: Tensor | None, db: Tensor | None, needs: Sequence[NeedsGrad]
) -> tuple[Tensor | None, Tensor | None]:
    """Give dW and db to the communicator and return what autograd delivers instead.

    `needs`: the use of the weight's and the bias's gradient.
    """

    def given(gradient: Tensor | None, need: NeedsGrad, is_bias: bool) -> Tensor | None:
        if gradient is None or not need:
            return None
        returned = need is NeedsGrad.VALUE
        found: Tensor | None = head.communicator.grad_hook(
            gradient, module=head, is_bias=is_bias, returned=returned
        )
        return found

    return given(dw, needs[0], False), given(db, needs[1], True)


class HeadLoss(NamedTuple):
    """The head of a model with its losses, computed one loss chunk at a time.

    x [B, S', D] is the linear's input; labels are [B, S'], or [B, p S'] if the ranks of a sequence
    share its logits.
    """

    head: LinearLayer
    moves: Moves
    """Collectives of x and dx, and, as y and dy, of the model's logits and their gradient."""
    logit_shard: LogitShard
    """The part of a token's logits that this rank reads."""
    chunk_tokens: int
    """Tokens of a loss chunk; 0: all tokens are one chunk."""
    after_head: Callable[[Tensor], Tensor] | None = None
    """The model's operations after its head, [B, n, V'] -> logits, such as a soft cap or a scale;
    None: there are none."""
    num_slices: int = 1
    """p, the number of ranks whose tokens are in the logits of this rank."""

    def total(self, x: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        """Return the sum of all losses, a float64 scalar.

        `expected` [], not 0, is the gradient that the sum will get; None: 1. Gradients are computed
        with it in forward, so that float16 neither overflows nor underflows; backward corrects them
        if the gradient is another one.
        """
        if expected is None:
            expected = torch.ones((), dtype=torch.float64, device=x.device)
        head, training = self.head, torch.is_grad_enabled()
        loss: Tensor = _ChunkedLoss.apply(
            x, head.weight, head.bias, expected, labels, self, training
        )
        return loss

    def losses_of_chunk(
        self, x: Tensor, full: FullWeights, target: Tensor, expected: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the losses of a loss chunk, one for each target, and the linear's output gradient.

        `expected`: the gradient of each loss; None: no gradient is computed.
        """
        logits, back = self.logits(x, full, training=expected is not None)
        losses, dy = losses_and_gradient(logits, target, expected, self.logit_shard)
        del logits  # their memory holds the gradient now, and is free without one
        if dy is not None:
            tag = Tag(Purpose.OUTPUT_GRADIENT, self.head.name, "dy")
            dy = self.moves.dy(dy, tag=tag).wait()
        return losses, dy if dy is None or back is None else back(dy)

    def logits(
        self, x: Tensor, full: FullWeights, *, training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """Return the logits as the loss reads them, which may be overwritten, and a backward.

        The backward maps the gradient, after `moves.dy`, to that of the linear's output; None if
        `after_head` is None or does nothing.
        """
        logits, back = self._own_logits(x, full, training=training)
        tag = Tag(Purpose.ACTIVATION, self.head.name, "y")
        return self.moves.y(logits, tag=tag).wait(), back

    def _own_logits(
        self, x: Tensor, full: FullWeights, *, training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        y = F.linear(x, full.weight, full.bias)
        if self.after_head is None:
            return y, None
        # A graph of `after_head` alone, on a leaf: grad mode is off in the function around this.
        with torch.set_grad_enabled(training):
            leaf = y.detach().requires_grad_(training)
            given = _HeadOutput.apply(leaf)
            made_by = given.grad_fn
            logits = self.after_head(given)
        # The same tensor and node come back if nothing was done; an operation in place would
        # return the same tensor with another node.
        if logits is given and logits.grad_fn is made_by:
            return y, None
        # A copy, as the loss overwrites logits that this graph may have saved.
        return logits.detach().clone(), lambda dy: torch.autograd.grad(logits, leaf, dy)[0]


class _HeadOutput(Function):
    """Returns a leaf as a result, which a model may write into; it may not write into a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy
