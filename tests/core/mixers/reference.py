"""Recurrences and convolutions, token by token: the reference of every scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.mixers.delta_rule import DeltaRule
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.mixers.state_space import Mamba2, SelectiveScan


def by_document(run, lengths, *xs: Tensor) -> Tensor:
    """Apply `run` to the tokens of each document alone: xs [T, ..]."""
    return torch.cat(
        [run(*(x[a:b] for x in xs)) for a, b in pairwise(accumulate(lengths, initial=0))]
    )


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """Convolve causally: x [T, C], weight [C, K] -> [T, C]."""
    taps = weight.shape[1]
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for tap in range(taps):
            if (at := t - (taps - 1 - tap) * dilation) >= 0:
                out[t] = out[t] + weight[:, tap] * x[at]
    return out if bias is None else out + bias


def delta_rule(
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    q: Tensor,
    k: Tensor,
    state: Tensor | None = None,
    *,
    normalise: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule: v [T, H, V], g [T, H] or [T, H, K], beta [T, H], q and k [T, G, K],
    initial state [H, K, V] -> [T, H, V], and the final state.
    """
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    if normalise:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, outs = v.new_zeros(*k.shape[1:], v.shape[2]) if state is None else state, []
    for t in range(len(v)):
        decay = g[t].exp()
        state = state * decay.view(len(decay), -1, 1)
        missing = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], missing)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs) if outs else v, state


def mamba2(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run Mamba2: x [T, H, P], final dt [T, H], B and C [T, G, N], A and D [H], initial state [H,
    P, N] -> [T, H, P], and the final state.
    """
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    state, outs = x.new_zeros(*x.shape[1:], B.shape[2]) if state is None else state, []
    for t in range(len(x)):
        written = torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t])
        state = (A * dt[t]).exp().view(-1, 1, 1) * state + written
        outs.append(torch.einsum("hpn,hn->hp", state, C[t]) + D.unsqueeze(1) * x[t])
    return torch.stack(outs) if outs else x, state


def selective(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor) -> Tensor:
    """Run the selective scan: x and final dt [T, C], B and C [T, N], A [C, N] -> [T, C], without D
    x.
    """
    state, outs = torch.zeros_like(A), []
    for t in range(len(x)):
        state = (A * dt[t].unsqueeze(1)).exp() * state + torch.outer(dt[t] * x[t], B[t])
        outs.append(state @ C[t])
    return torch.stack(outs) if outs else x


class Kind(NamedTuple):
    """A recurrence, its loop over tokens, and the shapes of its inputs."""

    recurrence: Recurrence
    plain: Callable[..., Tensor]
    of_heads: tuple[tuple[int, ...], ...]
    of_groups: tuple[tuple[int, ...], ...]
    constants: tuple[tuple[int, ...], ...]
    state: tuple[int, ...]

    @property
    def number(self) -> int:
        """The number of tensors with a row for each token."""
        return len(self.of_heads) + len(self.of_groups)

    def tensors(self, tokens: int, seed: int) -> list[Tensor]:
        """Return random tensors in the order of `Inputs`."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(tokens, *s) for s in (*self.of_heads, *self.of_groups)]
        shapes += self.constants
        xs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        if isinstance(self.recurrence, DeltaRule):
            xs[1], xs[2] = -xs[1].abs(), xs[2].sigmoid()
        else:
            xs[self.number] = -xs[self.number].abs()
        return [x.requires_grad_() for x in xs]

    def inputs(self, xs: Sequence[Tensor]) -> Inputs:
        """Return `Inputs` of tensors that are in its order."""
        of_heads, rest = xs[: len(self.of_heads)], xs[len(self.of_heads) :]
        groups = len(self.of_groups)
        return Inputs(tuple(of_heads), tuple(rest[:groups]), tuple(rest[groups:]))


def delta_kind(
    heads: int,
    groups: int,
    *,
    key: int = 5,
    value: int = 3,
    per_feature: bool = False,
    normalise: bool = True,
) -> Kind:
    """Return the gated delta rule, or KDA if it has a decay for each feature."""
    g = (heads, key) if per_feature else (heads,)
    shapes = ((heads, value), g, (heads,)), ((groups, key),) * 2, (), (heads, key, value)
    rule = DeltaRule(normalise=normalise)
    return Kind(rule, lambda *xs: delta_rule(*xs, normalise=normalise)[0], *shapes)


def mamba2_kind(heads: int, groups: int, *, key: int = 4, value: int = 3) -> Kind:
    """Return Mamba2 with limits of its time steps."""

    def plain(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, bias: Tensor
    ) -> Tensor:
        return mamba2(x, F.softplus(dt + bias).clamp(0.05, 0.9), B, C, A, D)[0]

    shapes = ((heads, value), (heads,)), ((groups, key),) * 2, ((heads,),) * 3, (heads, value, key)
    return Kind(Mamba2(dt_softplus=True, dt_limit=(0.05, 0.9)), plain, *shapes)


def selective_kind(channels: int, *, key: int = 4) -> Kind:
    """Return Mamba's selective scan."""

    def plain(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, bias: Tensor
    ) -> Tensor:
        return selective(x, F.softplus(dt + bias), B[:, 0], C[:, 0], A) + D * x

    constants = (channels, key), (channels,), (channels,)
    shapes = ((channels,),) * 2, ((1, key),) * 2, constants, (channels, key)
    return Kind(SelectiveScan(dt_softplus=True), plain, *shapes)
