"""Ring attention: a rank attends to one block of keys after another and merges the results.

c context ranks, T tokens of this rank, L keys of a block as kernels get them, h query heads, k KV
heads, d head size

    step t   receive from rank (own - t) mod c the keys and values that this rank's queries see
             out_t [T, h, d], lse_t [T, h] = kernel(q, k_t, v_t)
             merge into out and lse, in float32 or wider

At most two blocks are in memory at a time, where `gather` has all. Each block comes directly from
the rank that owns it, so no rank forwards keys that it does not need, and the next block is sent
while the kernel computes this one.

backward   for each step: receive k_t and v_t again; dq += .., dk_t, dv_t = kernel'(.., out, lse)
           with `out` and `lse` of all keys; send dk_t and dv_t back to the rank that owns the
           keys, which adds them in the order of steps

Source: Liu et al. 2023 (ring attention). Sums are in float32: sums in the model's dtype lose
precision with the number of ranks (ring-flash-attention, issue 42).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from isp.core.attention.backends.lse import LseKernel
from isp.core.attention.context_parallel.route import KeyExchange, Route, wide
from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Channel, Pending
from isp.core.comm.tag import Purpose, Tag

__all__ = ["Ring", "ring_attention"]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Attend with q [T, h, d] to all ranks' keys; k, v [T, k, d] are this rank's -> [T, h, d]."""
    # Put keys and values in one tensor [T, 2, k, d], so that each step sends one message.
    out: Tensor = _RingAttention.apply(q, torch.stack((k, v), 1), ring)
    return out


class Ring:
    """The steps of a ring for one micro-batch, each with its route; step 0 is a rank's own keys."""

    def __init__(
        self, channel: Channel, routes: Sequence[Route], kernel: LseKernel, device: torch.device
    ) -> None:
        self.kernel = kernel
        own, *others = (
            KeyExchange(
                channel if step else Channel.solo(),
                route.on(device),
                Tag(Purpose.KEYS, tensor=f"attention.kv.{step}"),
            )
            for step, route in enumerate(routes)
        )
        # All ranks leave out a step in which no rank receives anything.
        self.steps = [own, *(step for step in others if step.route.most_received)]

    def attend(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Attend with q [T, h, d], given own kv [T, 2, k, d], to the keys of all ranks.

        Returns the output [T, h, d] and the log-sum-exp [T, h], float32 or wider.
        """
        dtype = wide(q.dtype)
        total, lse = q.new_zeros(q.shape, dtype=dtype), q.new_zeros(q.shape[:2], dtype=dtype)
        for number, (step, k, v) in enumerate(self._blocks(kv)):
            rows, mask = step.route.queries, step.route.mask
            if not len(k):  # this rank's queries see no key of this step
                continue
            out, part = self.kernel.with_lse(_at(q, rows), k, v, mask)
            if number == 0:  # step 0 has every query, because each sees its own key
                total, lse = out.to(dtype), part.to(dtype)
                continue
            # Softmax results of two sets of keys are weighted by e^(lse of the set - lse of both).
            before = _at(lse, rows)
            after = torch.logaddexp(before, part)
            merged = _at(total, rows) * (before - after).exp().unsqueeze(-1)
            merged += out * (part - after).exp().unsqueeze(-1)
            total, lse = _put(total, rows, merged), _put(lse, rows, after)
        return total, lse

    def gradients(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of q and kv, in float32 or wider."""
        dq, dkv = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, kv))
        returning: list[tuple[KeyExchange, Pending]] = []
        for step, k, v in self._blocks(kv):
            rows, mask = step.route.queries, step.route.mask
            d_block = kv.new_empty(0, *kv.shape[1:])
            if len(k):
                d_out, queries, outs, lses = (_at(x, rows) for x in (dout, q, out, lse))
                d_rows, *d_keys = self.kernel.gradients(d_out, queries, k, v, outs, lses, mask)
                dq = _put(dq, rows, _at(dq, rows) + d_rows)
                d_block = torch.stack(d_keys, 1).to(kv.dtype)
            # Send even if this rank's queries see no key of the step: the transfer is a collective.
            returning.append((step, step.send_back(d_block)))
            # Wait for the gradients of the step before, whose transfer overlapped this computation.
            if len(returning) > 1:
                _add_returned(*returning.pop(0), dkv)
        _add_returned(*returning.pop(), dkv)
        return dq, dkv

    def _blocks(self, kv: Tensor) -> Iterator[tuple[KeyExchange, Tensor, Tensor]]:
        """Yield each step with its k and v [L, k, d], after launching the next step's transfer."""
        arrive = self.steps[0].go_out((kv,))
        for step, following in zip_longest(self.steps, self.steps[1:]):
            k, v = arrive()[0].unbind(1)
            if following is not None:
                arrive = following.go_out((kv,))
            yield step, k, v


class _RingAttention(Function):
    """The autograd function of `ring_attention`; backward fetches the blocks of keys again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: Ring) -> Tensor:
        total, lse = ring.attend(q, kv)
        out = total.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        dq, dkv = ctx.ring.gradients(dout, q, kv, out, lse)
        return dq.to(q.dtype), dkv.to(kv.dtype), None


def _add_returned(step: KeyExchange, returning: Pending, total: Tensor) -> None:
    """Wait for the gradients of this rank's keys that one step of the ring sends back here.

    Adds them to `total`, the sum over all steps.
    """
    step.add_to(total, returning.wait())


def _at(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x at the given token indices; None: x itself."""
    return x if rows is None else x.index_select(0, rows)


def _put(x: Tensor, rows: Tensor | None, new: Tensor) -> Tensor:
    """Write `new` into x at the given token indices and return x; None: return `new`."""
    return new if rows is None else x.index_put_((rows,), new)
