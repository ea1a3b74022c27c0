"""The losses of a head, computed in loss chunks of tokens, so that not all logits exist at once.

B batch, D hidden size, V vocabulary; S' positions of the sequence on a rank; V' logits of a token
on a rank; p ranks that split the logits of all their tokens (1 if each rank has all logits of its
own tokens); c loss chunks.
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
    """The autograd function of the sum of a head's losses; forward computes the gradients, too.

    forward   for each loss chunk: logits = move_y(move_x(x) W^T), their losses, and at once
                 dx = move_dx(move_dy(dlogits) W) and dW += move_dy(dlogits)^T move_x(x)
    backward  dx and dW, times dloss / expected; dW to the communicator

    `expected` is the gradient of the loss that forward assumes. So each token costs three products,
    as without loss chunks, and the weight is gathered and dW reduced only once. A chunk's x is
    gathered while the chunk before is computed; its dx is in flight while its dW is computed.
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
        # `training` is the caller's grad mode; inside of an autograd function it is always off.
        needs = [training and need for need in ctx.needs_input_grad[:3]]
        count = num_loss_chunks(x, labels.numel(), of.chunk_tokens)
        pieces = x.chunk(count, dim=1)  # [B, S'/c, D]
        # Gathering a chunk of x concatenates the tokens that it has on each rank. So its labels are
        # taken from each rank's part of `labels`, not from consecutive places.
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
                del dy  # frees its memory before the next chunk's logits are allocated
        ctx.save_for_backward(*sums.sums(), expected)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs = needs_grad(ctx, 3)
        *sums, expected = ctx.saved_tensors
        # The factor is 1 unless the caller scaled the loss by something that is not in `expected`.
        head, factor = ctx.head, dloss / expected
        # No weight is read here. `unshard` is called all the same, because it tells the prefetch
        # plan that the head's backward runs now, and so launches the gathers planned there.
        unshard = head.communicator.unshard
        with unshard(head, Phase.BACKWARD, head.weight) if needs[0] else nullcontext():
            dx, dw, db = (x.mul_(factor) if n else None for x, n in zip(sums, needs, strict=True))
            dw, db = deliver(head, dw, db, needs[1:])
        return dx, dw, db, None, None, None, None


def one_ahead(moves: Moves, layer: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Run the collective `moves.x` on each of the loss chunks `pieces`, and yield the results.

    While the caller computes with a result, the collective of the next chunk is in flight.
    """
    tag = Tag(Purpose.ACTIVATION, layer, "x")
    before: Pending | None = None
    for piece in pieces:
        # A contiguous piece can be flattened without a copy, and is multiplied in one matmul.
        arriving = moves.x(piece.contiguous(), tag=tag)
        if before is not None:
            yield before.wait()
        before = arriving
    assert before is not None
    yield before.wait()


def num_loss_chunks(x: Tensor, num_tokens: int, chunk_tokens: int) -> int:
    """Return the number of loss chunks for x [B, S', D], of at most `chunk_tokens` tokens (0: all).

    `num_tokens` counts the tokens of all B rows and p ranks. A chunk has at least one position of
    the sequence.
    """
    if not chunk_tokens or not num_tokens:
        return 1
    at_each = num_tokens // x.shape[1]  # each position has B p tokens: B sequences on p ranks
    return math.ceil(x.shape[1] / max(1, chunk_tokens // at_each))


class HeadGradients:
    """Accumulates dx, dW and db of a head, one loss chunk after another.

    With several loss chunks, dW is accumulated in float32 or wider and rounded once. With one
    chunk, the bits are those of a linear followed by a cross-entropy.
    """

    def __init__(self, of: HeadLoss, x: Tensor, count: int, needs: Sequence[Any]) -> None:
        """Start with nothing, for `count` loss chunks of x [B, S', D].

        `needs`: which gradients are needed, of x, the weight and the bias.
        """
        self._of, self._count, self._narrow = of, count, x.dtype
        _, self._of_weight, self._of_bias = needs
        self._dx = torch.empty_like(x) if needs[0] else None
        self._dx_parts = iter(() if self._dx is None else self._dx.chunk(count, dim=1))
        self._dtype = of.head.communicator.gradient_dtype(x.dtype)
        self._dw: Tensor | None = None
        self._db: Tensor | None = None

    def add(self, x: Tensor, dy: Tensor, weight: Tensor) -> None:
        """Add the gradients of the next chunk, from its x and its output gradient dy."""
        arriving = None
        if self._dx is not None:
            tag = Tag(Purpose.INPUT_GRADIENT, self._of.head.name, "dx")
            arriving = self._of.moves.dx(dy @ weight.to(dy.dtype), tag=tag)
        flat = dy.flatten(0, 1)
        several = torch.promote_types(dy.dtype, torch.float32) if self._count > 1 else None
        # dW is computed after the collective of dx is launched, so that it hides this transfer.
        if self._of_weight:
            flat_x, wide = x.flatten(0, 1).to(dy.dtype), several or self._dtype
            self._dw = weight_gradient(flat, flat_x, dtype=wide, into=self._dw, add=True)
        if self._of_bias:
            summed = flat.sum(0, dtype=several or dy.dtype)
            self._db = summed if self._db is None else self._db + summed
        if arriving is not None:
            next(self._dx_parts).copy_(arriving.wait())

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dx, dW and db summed over all chunks; None for each that is not needed."""
        dw = None if self._dw is None else self._dw.to(self._dtype)
        return self._dx, dw, None if self._db is None else self._db.to(self._narrow)


def deliver(
    head: LinearLayer, dw: Tensor | None, db: Tensor | None, needs: Sequence[NeedsGrad]
) -> tuple[Tensor | None, Tensor | None]:
    """Pass dW and db to the communicator; return the two gradients that the backward must return.

    `needs`: why the backward pass needs the gradients of the weight and of the bias.
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
    """The head of a model and its losses, computed one loss chunk at a time.

    x [B, S', D] is the input of the head's linear. Labels are [B, S'], those of this rank's tokens.
    If each rank computes losses from a part of the vocabulary, labels are [B, p S'], those of the
    tokens of all ranks of the sequence.
    """

    head: LinearLayer
    moves: Moves
    """The collectives: `x` and `dx` of the linear's input, `y` and `dy` of the model's logits."""
    logit_shard: LogitShard
    """The part of a token's logits that this rank's losses read."""
    chunk_tokens: int
    """Number of tokens in a loss chunk; 0: all tokens are one chunk."""
    after_head: Callable[[Tensor], Tensor] | None = None
    """The model's operations between its head and the loss, such as a soft cap or a scale:
    [B, tokens, V'] -> logits of the same shape. None: there are none."""
    num_slices: int = 1
    """p, the number of ranks whose tokens are in the logits of this rank."""

    def total(self, x: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        """Return the sum of all losses, a float64 scalar.

        `expected` [], not 0, is the gradient that backward will have for the sum; None: 1. Forward
        computes gradients with it, so that float16 neither overflows nor underflows; backward
        scales them if the gradient is a different one.
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
        """Return the loss of each target of a loss chunk, and the gradient of the linear's output.

        `expected`: the gradient of each loss; None: no gradient is computed.
        """
        logits, back = self.logits(x, full, training=expected is not None)
        losses, dy = losses_and_gradient(logits, target, expected, self.logit_shard)
        # If a gradient was computed, it has overwritten the logits; if not, this frees them.
        del logits
        if dy is not None:
            tag = Tag(Purpose.OUTPUT_GRADIENT, self.head.name, "dy")
            dy = self.moves.dy(dy, tag=tag).wait()
        return losses, dy if dy is None or back is None else back(dy)

    def logits(
        self, x: Tensor, full: FullWeights, *, training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """Return the logits, which the loss may overwrite, and the backward of `after_head`.

        The backward maps the gradient of the logits, after `moves.dy`, to that of the linear's
        output; it is None if `after_head` is None or changes nothing.
        """
        logits, back = self._own_logits(x, full, training=training)
        tag = Tag(Purpose.ACTIVATION, self.head.name, "y")
        return self.moves.y(logits, tag=tag).wait(), back

    def _own_logits(
        self, x: Tensor, full: FullWeights, *, training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """Return what `logits` returns, but with the logits before the collective `moves.y`."""
        y = F.linear(x, full.weight, full.bias)
        if self.after_head is None:
            return y, None
        # A graph of `after_head` alone, from a leaf: this runs inside an autograd function, which
        # records nothing.
        with torch.set_grad_enabled(training):
            leaf = y.detach().requires_grad_(training)
            given = _HeadOutput.apply(leaf)
            made_by = given.grad_fn
            logits = self.after_head(given)
        # The same tensor with the same node: `after_head` did nothing. An operation in place
        # returns the same tensor, but with a new node.
        if logits is given and logits.grad_fn is made_by:
            return y, None
        # A copy, as the loss overwrites logits that this graph may have saved.
        return logits.detach().clone(), lambda dy: torch.autograd.grad(logits, leaf, dy)[0]


class _HeadOutput(Function):
    """The identity: turns a leaf into a result, because torch forbids to write into a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy
