"""Attention on CPU: torch's flash kernel, document by document, as one autograd node.

B batch, S sequence, T tokens = B * S, H query heads, K KV heads, G = H / K, d head size

forward   for each piece: out[rows], lse[rows] = kernel(q[rows], k[rows], v[rows])
backward  for each piece: dq[rows] += .., dk[rows] += .., dv[rows] += ..

One node, because with slices under autograd every document's gradient would be a tensor of the
whole sequence: quadratic in the number of documents. The kernel never forms S x S scores; the band
masks of windows, and of short causal documents, have at most 256 rows.

[Note: float32 on CPU] bfloat16 and float16 are attended in float32: more exact, and torch's kernel
takes ten times as long for a bfloat16 backward where the processor has no bfloat16 arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isp.attention.mask import AttentionMask
from isp.attention.pieces import (
    EVERYTHING,
    KeyPiece,
    Visible,
    document_lengths,
    pieces_of,
)
from isp.autograd import Function

__all__ = ["CpuAttention"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_BATCH_BELOW = 64
"""Neighbouring documents of equal length share a kernel call if they are shorter, in tokens."""

_SPLIT_UP_TO = 1024
"""Causal documents of up to so many tokens are cut into blocks: the kernel skips hidden keys only
512 at a time, so that it would compute nearly the whole square of a shorter one."""

_SMALL = 1 << 18
"""Numbers of a mask that is kept from call to call, at most."""

_APART_FROM = 64
"""Keys before all queries of a document are attended to by themselves, without a mask, from so
many on."""


class CpuAttention:
    """Local attention on CPU, exact for packed documents, windows and unequal lengths."""

    def __init__(self, *, scale: float | None = None) -> None:
        self.scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        """q [B, Sq, H, d], k and v [B, Sk, K, d] -> [B, Sq, H, d]."""
        pieces = _pieces(mask, q, k)
        wide = [x.to(_dtype(q)).flatten(0, 1) for x in (q, k, v)]  # [T, H, d]
        out: Tensor = _Pieces.apply(*wide, pieces, self.scale)
        return out.view(q.shape).to(q.dtype)

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """See `LseKernel`."""
        pieces = _pieces(mask, q.unsqueeze(0), k.unsqueeze(0))
        return _attend(pieces, self.scale, *(x.to(_dtype(q)) for x in (q, k, v)))

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: AttentionMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LseKernel`."""
        pieces = _pieces(mask, q.unsqueeze(0), k.unsqueeze(0))
        wide = (x.to(_dtype(q)) for x in (dout, q, k, v, out, lse))
        return _gradients(pieces, self.scale, *wide)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _pieces(mask: AttentionMask, q: Tensor, k: Tensor) -> tuple[KeyPiece, ...]:
    return pieces_of(
        document_lengths(mask, q.shape[0], q.shape[1], k.shape[1]),
        causal=mask.causal,
        window=mask.window,
        batch_below=_BATCH_BELOW,
        split_up_to=_SPLIT_UP_TO,
        apart_from=_APART_FROM,
    )


def _attend(
    pieces: tuple[KeyPiece, ...], scale: float | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The output [T, H, d] and the log of each softmax's sum [T, H]."""
    covered = sum(len(p.block.query) * p.count for p in pieces if not p.goes_on) == q.shape[0]
    out = q.new_empty(q.shape) if covered else q.new_zeros(q.shape)
    lse = q.new_full((*q.shape[:2], 1), -torch.inf)
    group, masks = q.shape[1] // k.shape[1], _Masks(q)
    for piece in pieces:
        result, logsumexp = _forward(
            *_inputs(piece, q, k, v, group),
            0.0,
            piece.is_causal_square,
            attn_mask=masks.of(piece),
            scale=scale,
        )
        logsumexp = logsumexp.unsqueeze(-1)
        rows, sums = (_queries(piece, x, group) for x in (out, lse))
        if piece.goes_on:
            total = torch.logaddexp(sums, logsumexp)
            rows.mul_((sums - total).exp_()).addcmul_(result, (logsumexp - total).exp_())
            sums.copy_(total)
        else:
            rows.copy_(result)
            sums.copy_(logsumexp)
    return out, lse.squeeze(-1)


def _gradients(
    pieces: tuple[KeyPiece, ...],
    scale: float | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    group, masks = q.shape[1] // k.shape[1], _Masks(q)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    for piece in pieces:
        grads = _backward(
            _queries(piece, dout, group),
            *_inputs(piece, q, k, v, group),
            _queries(piece, out, group),
            _queries(piece, lse.unsqueeze(-1), group).squeeze(-1),
            0.0,
            piece.is_causal_square,
            attn_mask=masks.of(piece),
            scale=scale,
        )
        _queries(piece, dq, group).add_(grads[0])
        _add_keys(piece, dk, grads[1], group)
        _add_keys(piece, dv, grads[2], group)
    return dq, dk, dv


class _Pieces(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: tuple[KeyPiece, ...], scale: float | None
    ) -> Tensor:
        out, lse = _attend(pieces, scale, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx.pieces, ctx.scale, dout, *ctx.saved_tensors), None, None


class _Masks:
    """The band masks of one call, each made once at most: blocks of a document share theirs.

    Blocks that see all keys up to their own place differ only in how many that are: they share the
    end of the widest mask so far, which grows by doubling.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._made: dict[tuple[Visible, int, int], Tensor] = {}
        self._widest: dict[tuple[int, int], Tensor] = {}

    def of(self, piece: KeyPiece) -> Tensor | None:
        """[queries, keys] to add to the logits; None where no mask need be given."""
        query, key, visible, _ = piece.block
        if visible == EVERYTHING or piece.is_causal_square:
            return None
        if visible.low is not None or visible.high is None:
            which = visible, len(query), len(key)
            if which not in self._made:
                self._made[which] = self._mask(len(query), len(key), visible)
            return self._made[which]
        last = visible.high - len(key)
        widest = self._widest.get((last, len(query)))
        if widest is None or widest.shape[1] < len(key):
            width = max(len(key), 0 if widest is None else 2 * widest.shape[1])
            widest = self._mask(len(query), width, Visible(None, last + width))
            self._widest[last, len(query)] = widest
        return widest[:, widest.shape[1] - len(key) :]

    def _mask(self, rows: int, width: int, visible: Visible) -> Tensor:
        small = rows * width <= _SMALL and type(self._like) is Tensor  # nothing that stands for one
        make = _small_band if small else _band
        return make(rows, width, visible, self._like.dtype, self._like.device)


@torch.inference_mode(False)  # one made in it could not serve training
def _band(
    rows: int, width: int, visible: Visible, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[rows, width]: 0 where a key is seen, else the least that is added to a logit."""
    # finite: a row of which a whole kernel block is hidden must not become inf - inf
    least = torch.finfo(dtype).min / 2
    mask = torch.zeros(rows, width, dtype=dtype, device=device)
    if visible.high is not None:
        mask += torch.full_like(mask, least).triu_(visible.high + 1)
    if visible.low is not None:
        mask += torch.full_like(mask, least).tril_(visible.low - 1)
    return mask


_small_band = lru_cache(maxsize=16)(_band)
"""Kept, as layers and steps have the same again and again."""


def _inputs(piece: KeyPiece, q: Tensor, k: Tensor, v: Tensor, group: int) -> tuple[Tensor, ...]:
    return _queries(piece, q, group), _keys(piece, k, group), _keys(piece, v, group)


def _documents(x: Tensor, rows: range, count: int, stride: int) -> Tensor:
    """Rows of `count` documents: [T, H, d] -> [count, rows, H, d], a view."""
    if count == 1:
        return x[rows.start : rows.stop].unsqueeze(0)
    return x.as_strided(
        (count, len(rows), *x.shape[1:]),
        (stride * x.stride(0), *x.stride()),
        x.storage_offset() + rows.start * x.stride(0),
    )


def _queries(piece: KeyPiece, x: Tensor, group: int) -> Tensor:
    """[T, H, d] -> [K, G, rows, d], or [count, H, rows, d] of several documents; a view."""
    rows = _documents(x, piece.block.query, piece.count, piece.num_queries)  # [count, rows, H, d]
    if piece.count == 1:
        heads: Tensor = rows[0].unflatten(1, (-1, group))
        return heads.permute(1, 2, 0, 3)
    return rows.transpose(1, 2)


def _keys(piece: KeyPiece, x: Tensor, group: int) -> Tensor:
    """[T, K, d] -> [K, G, rows, d], each head seen G times (a view), or [count, H, rows, d]."""
    rows = _documents(x, piece.block.key, piece.count, piece.num_keys)  # [count, rows, K, d]
    if piece.count == 1:
        return rows[0].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    if group > 1:
        rows = rows.repeat_interleave(group, 2)
    return rows.transpose(1, 2)


def _add_keys(piece: KeyPiece, total: Tensor, grad: Tensor, group: int) -> None:
    """Add the gradient of `_keys` to that of the whole."""
    rows = _documents(total, piece.block.key, piece.count, piece.num_keys)
    if piece.count == 1:
        rows[0].add_(grad.sum(1).transpose(0, 1) if group > 1 else grad[:, 0].transpose(0, 1))
    elif group > 1:
        rows.add_(grad.unflatten(1, (-1, group)).sum(2).transpose(1, 2))
    else:
        rows.add_(grad.transpose(1, 2))
