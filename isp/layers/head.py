"""The losses of the tokens whose logits a linear gives: the logits never exist as a whole.

B batch, S sequence, D hidden size, V vocabulary; S' the tokens and V' the logits of a rank; p ranks
whose tokens' losses a rank computes together (1 where each has its own), c chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.autograd import Function, once_differentiable
from isp.comm import Channel, Pending
from isp.comm.tag import Purpose, Tag
from isp.layers.linear import LinearLayer, Moves, NeedsGrad, needs_grad
from isp.layers.loss import losses_and_gradient
from isp.layers.weight_gradients import weight_gradient
from isp.parallel.phase import Phase
from isp.weights.wp import FullWeights

__all__ = ["HeadLoss", "num_chunks", "one_ahead"]


class _ChunkedLoss(Function):
    """forward   of each chunk of tokens: logits = move_y(move_x(x) W^T), their losses, and at once
                 dx = move_dx(move_dy(dlogits) W) and dW += move_dy(dlogits)^T move_x(x)
    backward  dx and dW, times dloss / expected; dW to the communicator

    Here the gradient of a loss is known with the loss, as soon as its own gradient is: `expected`.
    So there are three products a token, as without chunks, the weight is read in one use, and the
    one dW leaves once. A chunk's x is gathered while the one before is computed, and its dx travels
    while its dW is.

    [Note: Sum of products] Of several chunks dW is added up in float32 at least, and rounded once.
    One chunk is computed as a linear and a cross-entropy would be, in every bit.
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
        each: list[Tensor] | None,
        training: bool,
    ) -> Tensor:
        ctx.head = head = of.head
        need_x, need_w, need_b = (training and need for need in ctx.needs_input_grad[:3])
        needs = need_x or need_w or need_b
        moves, communicator = of.moves, head.communicator
        pieces = x.chunk(num_chunks(x, labels, of.chunk_tokens), dim=1)  # [B, S'/c, D]
        count = len(pieces)
        by_ranks = labels.unflatten(1, (-1, x.shape[1]))  # [B, p, S']
        targets = [target.flatten(1) for target in by_ranks.chunk(count, dim=2)]  # [B, p S'/c]
        dx = torch.empty_like(x) if need_x else None
        dx_parts = [None] * count if dx is None else dx.chunk(count, dim=1)
        dw_dtype = communicator.gradient_dtype(x.dtype)
        loss, dw, db = torch.zeros((), dtype=torch.float64, device=x.device), None, None
        with communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, target, dx_part in zip(
                one_ahead(moves, head.name, pieces), targets, dx_parts, strict=True
            ):
                losses, dy = of.chunk(own_x, full, target, expected if needs else None)
                loss += losses.sum()
                if each is not None:
                    each.append(losses.unflatten(1, (by_ranks.shape[1], -1)))  # [B, p, S'/c]
                if dy is None:
                    continue
                arriving = None
                if dx_part is not None:
                    tag = Tag(Purpose.INPUT_GRADIENT, head.name, "dx")
                    arriving = moves.dx(dy @ full.weight.to(dy.dtype), tag=tag)
                if need_w:
                    wide = torch.promote_types(dy.dtype, torch.float32) if count > 1 else dw_dtype
                    flat_x = own_x.flatten(0, 1).to(dy.dtype)  # no name but `dy` holds the logits
                    dw = weight_gradient(dy.flatten(0, 1), flat_x, dtype=wide, into=dw, add=True)
                if need_b:
                    wide = torch.promote_types(dy.dtype, torch.float32) if count > 1 else dy.dtype
                    summed = dy.flatten(0, 1).sum(0, dtype=wide)
                    db = summed if db is None else db + summed
                del dy
                if dx_part is not None and arriving is not None:
                    dx_part.copy_(arriving.wait())
        dw = None if dw is None else dw.to(dw_dtype)
        db = None if db is None else db.to(x.dtype)
        ctx.save_for_backward(dx, dw, db, expected)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_w, needs_b = needs_grad(ctx, 3)
        dx, dw, db, expected = ctx.saved_tensors
        head, communicator = ctx.head, ctx.head.communicator
        factor = dloss / expected  # 1, unless somebody has done something else with the loss
        # No weight is read: the use says that backward has come here.
        use = communicator.unshard(head, Phase.BACKWARD, head.weight) if needs_x else nullcontext()

        def delivered(gradient: Tensor, needs: NeedsGrad, is_bias: bool) -> Tensor | None:
            if not needs:
                return None
            found: Tensor | None = communicator.grad_hook(
                gradient.mul_(factor),
                module=head,
                is_bias=is_bias,
                returned=needs is NeedsGrad.VALUE,
            )
            return found

        with use:
            dw, db = delivered(dw, needs_w, False), delivered(db, needs_b, True)
        dx = dx.mul_(factor) if needs_x else None
        return dx, dw, db, None, None, None, None, None


def one_ahead(moves: Moves, layer: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """The pieces of x as they are multiplied; the next one is on its way by then."""
    tag = Tag(Purpose.ACTIVATION, layer, "x")
    before: Pending | None = None
    for piece in pieces:
        arriving = moves.x(piece.contiguous(), tag=tag)  # one product for all rows
        if before is not None:
            yield before.wait()
        before = arriving
    assert before is not None
    yield before.wait()


def num_chunks(x: Tensor, labels: Tensor, chunk_tokens: int) -> int:
    """The chunks of x's sequence, as equal as may be."""
    if not chunk_tokens or not labels.numel():
        return 1
    at_each = labels.numel() // x.shape[1]  # losses, of all rows and ranks
    return math.ceil(x.shape[1] / max(1, chunk_tokens // at_each))


class HeadLoss(NamedTuple):
    """The losses of tokens whose logits a linear gives, a chunk of tokens at a time.

    x [B, S', D] is what the linear is given; labels are [B, S'], or [B, p S'] where the ranks of a
    sequence compute its losses together.
    """

    head: LinearLayer
    moves: Moves
    """Of x and dx; y and dy are the logits of the model and their gradient."""
    channel: Channel
    """The ranks over which the logits of a token are split."""
    first: int
    """The vocabulary entry of this rank's first logit."""
    chunk_tokens: int
    """Tokens whose losses are computed at a time; 0: all."""
    label_smoothing: float = 0.0
    behind: Callable[[Tensor], Tensor] | None = None
    """What the model does to what its head gives, [B, n, V'] -> the logits; None: nothing."""

    def total(self, x: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        """The sum of all losses, [].

        `expected` [], not 0, is the gradient that the sum is going to have; None: 1. Gradients are
        computed with it, so that narrow numbers are of the right size, and are right with any
        other.
        """
        return self._computed(x, labels, expected, None)

    def each(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token in the place of its label; no gradient."""
        found: list[Tensor] = []
        with torch.no_grad():
            self._computed(x, labels, None, found)
        return torch.cat(found, dim=2).flatten(1)

    def _computed(
        self, x: Tensor, labels: Tensor, expected: Tensor | None, each: list[Tensor] | None
    ) -> Tensor:
        if expected is None:
            expected = torch.ones((), dtype=torch.float64, device=x.device)
        head, training = self.head, torch.is_grad_enabled()
        loss: Tensor = _ChunkedLoss.apply(
            x, head.weight, head.bias, expected, labels, self, each, training
        )
        return loss

    def chunk(
        self, x: Tensor, full: FullWeights, target: Tensor, expected: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The losses of a chunk, one a target, and the gradient of what the linear gives.

        None where no gradient is `expected`.
        """
        logits, back = self.logits(x, full, training=expected is not None)
        losses, dy = losses_and_gradient(
            logits,
            target,
            expected,
            label_smoothing=self.label_smoothing,
            channel=self.channel,
            first=self.first,
        )
        del logits
        if dy is not None:
            tag = Tag(Purpose.OUTPUT_GRADIENT, self.head.name, "dy")
            dy = self.moves.dy(dy, tag=tag).wait()
        return losses, dy if dy is None or back is None else back(dy)

    def logits(
        self, x: Tensor, full: FullWeights, *, training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """The logits where they are scored, which may be overwritten, and the way back.

        That is through `behind`, if there is one, for a gradient that `moves.dy` has moved.
        """
        logits, back = self._own_logits(x, full, training=training)
        tag = Tag(Purpose.ACTIVATION, self.head.name, "y")
        return self.moves.y(logits, tag=tag).wait(), back

    def _own_logits(
        self, x: Tensor, full: FullWeights, *, training: bool
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        y = F.linear(x, full.weight, full.bias)
        if self.behind is None:
            return y, None
        with torch.set_grad_enabled(training):
            leaf = y.detach().requires_grad_(training)
            given = _Given.apply(leaf)
            made_by = given.grad_fn
            logits = self.behind(given)
        if logits is given and logits.grad_fn is made_by:  # else it was written into
            return y, None
        return logits.detach().clone(), lambda dy: torch.autograd.grad(logits, leaf, dy)[0]


class _Given(Function):
    """A leaf as the result of a head: nobody may write into a leaf, nor into a view of it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy
