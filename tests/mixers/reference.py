"""Recurrences and convolutions, token by token: the oracle of every scan."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.mixers.recurrence import Inputs

__all__ = ["by_document", "convolution", "delta_rule", "mamba2", "selective"]


def by_document(run, lengths, *xs: Tensor) -> Tensor:
    """`run` on the tokens of each document by itself: xs [T, ..]."""
    return torch.cat(
        [run(*(x[a:b] for x in xs)) for a, b in pairwise(accumulate(lengths, initial=0))]
    )


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """x [T, C], weight [C, K] -> [T, C]."""
    taps = weight.shape[1]
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for tap in range(taps):
            if (at := t - (taps - 1 - tap) * dilation) >= 0:
                out[t] = out[t] + weight[:, tap] * x[at]
    return out if bias is None else out + bias


def delta_rule(v: Tensor, g: Tensor, beta: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """v [T, H, V], g [T, H] or [T, H, K], beta [T, H], q and k [T, G, K] -> [T, H, V]."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, outs = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for t in range(len(v)):
        decay = g[t].exp()
        state = state * decay.view(len(decay), -1, 1)
        missing = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], missing)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs) if outs else v


def mamba2(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, bias: Tensor
) -> Tensor:
    """x [T, H, P], dt [T, H], B and C [T, G, N], A, D and bias [H] -> [T, H, P]."""
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    dt = F.softplus(dt + bias).clamp(0.05, 0.9)
    state, outs = x.new_zeros(*x.shape[1:], B.shape[2]), []
    for t in range(len(x)):
        written = torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t])
        state = (A * dt[t]).exp().view(-1, 1, 1) * state + written
        outs.append(torch.einsum("hpn,hn->hp", state, C[t]) + D.unsqueeze(1) * x[t])
    return torch.stack(outs) if outs else x


def selective(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, bias: Tensor
) -> Tensor:
    """x and dt [T, C], B and C [T, 1, N], A [C, N], D and bias [C] -> [T, C]."""
    dt = F.softplus(dt + bias)
    state, outs = torch.zeros_like(A), []
    for t in range(len(x)):
        state = (A * dt[t].unsqueeze(1)).exp() * state + torch.outer(dt[t] * x[t], B[t, 0])
        outs.append(state @ C[t, 0] + D * x[t])
    return torch.stack(outs) if outs else x


def inputs_of(xs: list[Tensor], num_of_heads: int, num_of_groups: int) -> Inputs:
    """Tensors in the order of `Inputs`."""
    ends = num_of_heads, num_of_heads + num_of_groups
    return Inputs(tuple(xs[: ends[0]]), tuple(xs[ends[0] : ends[1]]), tuple(xs[ends[1] :]))
