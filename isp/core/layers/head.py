"""The losses of the tokens whose logits a linear gives: the logits never exist as a whole.

B batch, S sequence, D hidden size, V vocabulary; S' the tokens and V' the logits of a rank; p ranks
whose tokens' losses a rank computes together (1 where each has its own), c chunks.
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
from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.compiled import CompileWhen, compiles
from isp.core.layers.linear import LinearLayer, Moves, NeedsGrad, needs_grad
from isp.core.layers.vocab_loss import losses_and_gradient
from isp.core.layers.weight_gradients import weight_gradient
from isp.core.mesh.phase import Phase
from isp.core.weights.wp import FullWeights

__all__ = ["HeadGradients", "HeadLoss", "deliver", "num_chunks", "one_ahead"]


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
        needs = [training and need for need in ctx.needs_input_grad[:3]]
        pieces = x.chunk(num_chunks(x, labels.numel(), of.chunk_tokens), dim=1)  # [B, S'/c, D]
        by_ranks = labels.unflatten(1, (-1, x.shape[1]))  # [B, p, S']
        targets = [t.flatten(1) for t in by_ranks.chunk(len(pieces), dim=2)]  # [B, p S'/c]
        sums = HeadGradients(of, x, len(pieces), needs)
        loss = torch.zeros((), dtype=torch.float64, device=x.device)
        with head.communicator.unshard(head, Phase.FORWARD, shard, bias) as full:
            for own_x, target in zip(one_ahead(of.moves, head.name, pieces), targets, strict=True):
                losses, dy = of.chunk(own_x, full, target, expected if any(needs) else None)
                loss += losses.sum()
                if each is not None:
                    each.append(losses.unflatten(1, (by_ranks.shape[1], -1)))  # [B, p, S'/c]
                if dy is not None:
                    sums.add(own_x, dy, full.weight)
                del dy
        ctx.save_for_backward(*sums.sums(), expected)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs = needs_grad(ctx, 3)
        *sums, expected = ctx.saved_tensors
        head, factor = ctx.head, dloss / expected  # 1, unless somebody changed the loss
        # No weight is read: the use says that backward has come here.
        unshard = head.communicator.unshard
        with unshard(head, Phase.BACKWARD, head.weight) if needs[0] else nullcontext():
            dx, dw, db = (x.mul_(factor) if n else None for x, n in zip(sums, needs, strict=True))
            dw, db = deliver(head, dw, db, needs[1:])
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


def num_chunks(x: Tensor, num_tokens: int, chunk_tokens: int) -> int:
    """The chunks of x's sequence, as equal as may be; `num_tokens`: of all rows and ranks."""
    if not chunk_tokens or not num_tokens:
        return 1
    at_each = num_tokens // x.shape[1]
    return math.ceil(x.shape[1] / max(1, chunk_tokens // at_each))


class HeadGradients:
    """dx, dW and db of a head, of one chunk after the other [Note: Sum of products]."""

    def __init__(self, of: HeadLoss, x: Tensor, count: int, needs: Sequence[Any]) -> None:
        """`count`: the chunks of x; `needs`: whether x, the weight and the bias need one."""
        self._of, self._count, self._narrow = of, count, x.dtype
        _, self._of_weight, self._of_bias = needs
        self._dx = torch.empty_like(x) if needs[0] else None
        self._dx_parts = iter(() if self._dx is None else self._dx.chunk(count, dim=1))
        self._dtype = of.head.communicator.gradient_dtype(x.dtype)
        self._dw: Tensor | None = None
        self._db: Tensor | None = None

    def add(self, x: Tensor, dy: Tensor, weight: Tensor) -> None:
        """Those of the next chunk: what was multiplied, and the gradient of what came of it."""
        arriving = None
        if self._dx is not None:
            tag = Tag(Purpose.INPUT_GRADIENT, self._of.head.name, "dx")
            arriving = self._of.moves.dx(dy @ weight.to(dy.dtype), tag=tag)
        flat = dy.flatten(0, 1)
        several = torch.promote_types(dy.dtype, torch.float32) if self._count > 1 else None
        if self._of_weight:
            flat_x, wide = x.flatten(0, 1).to(dy.dtype), several or self._dtype
            self._dw = weight_gradient(flat, flat_x, dtype=wide, into=self._dw, add=True)
        if self._of_bias:
            summed = flat.sum(0, dtype=several or dy.dtype)
            self._db = summed if self._db is None else self._db + summed
        if arriving is not None:
            next(self._dx_parts).copy_(arriving.wait())

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx, dW and db of all chunks."""
        dw = None if self._dw is None else self._dw.to(self._dtype)
        return self._dx, dw, None if self._db is None else self._db.to(self._narrow)


def deliver(
    head: LinearLayer, dw: Tensor | None, db: Tensor | None, needs: Sequence[NeedsGrad]
) -> tuple[Tensor | None, Tensor | None]:
    """Give dW and db to the communicator, as far as the weight and the bias need them."""

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
    behind: Callable[[Tensor], Tensor] | None = None
    """What the model does to what its head gives, [B, n, V'] -> the logits; None: nothing."""
    compile: CompileWhen = False
    """Whether losses are computed by compiled kernels."""

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
            channel=self.channel,
            first=self.first,
            compiled=compiles(self.compile, logits.device),
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
