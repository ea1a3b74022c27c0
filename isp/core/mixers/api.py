"""Convolutions and scans as a user's model calls them, and their redirection to all ranks.

B batch, S sequence (S' tokens of a rank), C channels, K taps; H heads of values with e features, G
heads of keys with d features; P features of a head of a state-space model, N numbers of its state
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from isp.core.attention.api import AttentionOptions, attend_by
from isp.core.mixers.convolution import convolve_alone
from isp.core.mixers.delta_rule import DeltaRule
from isp.core.mixers.key_choice import Indexer
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.mixers.state_space import Mamba2, SelectiveScan

__all__ = [
    "Mixers",
    "causal_conv1d",
    "current_mixers",
    "gated_delta_rule",
    "mix_by",
    "state_space_scan",
]


class Mixers(Protocol):
    """The mixers that a parallelized model calls: each works on all ranks of a sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Attend with q [B, S', H, d] to the keys of all ranks of the sequence -> [B, S', H, e].

        k [B, S', K, d] and v [B, S', K, e] are this rank's.
        """

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """Convolve x [B, S', C] with weight [C, K] and bias [C] -> [B, S', C]."""

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Scan tokens [B, S', ..] -> [B, S', H, ..], with the shape of `inputs.of_heads[0]`."""

    def choose(self, indexer: Indexer) -> Tensor:
        """Return the indices of the keys that tokens attend to, [B, S', G, n]; see `Chosen`."""


_mixers: ContextVar[Mixers | None] = ContextVar("mixers", default=None)
"""The mixers that compute calls of `causal_conv1d`, `gated_delta_rule` and `state_space_scan`; set
while a parallelized model runs."""


def current_mixers() -> Mixers | None:
    """Return the mixers of the parallelized model that runs now; None if none runs."""
    return _mixers.get()


@contextmanager
def mix_by(mixers: Mixers) -> Iterator[None]:
    """Let `mixers` compute all calls of attention, convolution and scans in this context."""
    token = _mixers.set(mixers)
    try:
        with attend_by(mixers.attend):
            yield
    finally:
        _mixers.reset(token)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dilation: int = 1,
) -> Tensor:
    """Convolve each channel causally; `isp.parallelize` distributes the call over the ranks.

    x [B, S, C], weight [C, K] (the last tap is the token's own), bias [C] -> [B, S, C].
    `activation`: None, "silu" or "swish". Outside of a parallelized model, each sequence is one
    document. Raises ValueError for another activation.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation={activation!r} must be None, 'silu' or 'swish'")
    mixers = _mixers.get()
    if mixers is None:
        out = convolve_alone(x, weight, bias, dilation)
    else:
        out = mixers.convolve(x, weight, bias, dilation)
    return out if activation is None else F.silu(out)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, normalise: bool = True
) -> Tensor:
    """Scan by the gated delta rule; `isp.parallelize` distributes the call over the ranks.

    q and k [B, S, G, d], v [B, S, H, e], beta [B, S, H], and g, the logarithm of the decay:
    [B, S, H], or [B, S, H, d] with a decay for each feature (KDA) -> [B, S, H, e]; G divides H.
    `normalise` scales q and k to length 1. Outside of a parallelized model, each sequence is one
    document.
    """
    return _scanned(DeltaRule(normalise=normalise), Inputs((v, g, beta), (q, k)))


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Scan by a state-space model; `isp.parallelize` distributes the call over the ranks.

    Mamba2, with A [H]: x [B, S, H, P], dt [B, S, H], B and C [B, S, G, N], D and dt_bias [H] ->
    [B, S, H, P]; G divides H. Mamba's selective scan, with A [C, N]: x and dt [B, S, C], B and C
    [B, S, N], D and dt_bias [C] -> [B, S, C]. Outside of a parallelized model, each sequence is
    one document.
    """
    least, most = dt_limit
    options: Any = {"dt_softplus": dt_softplus, "dt_limit": (least, most)}
    if A.dim() == 1:
        kind: Recurrence = Mamba2(**options)
    else:
        kind = SelectiveScan(**options)
        B, C = B.unsqueeze(2), C.unsqueeze(2)
    return _scanned(kind, Inputs((x, dt), (B, C), (A, D, dt_bias)))


def _scanned(recurrence: Recurrence, inputs: Inputs) -> Tensor:
    """Scan by the current mixers; if there are none, each sequence is one document."""
    mixers = _mixers.get()
    if mixers is not None:
        return mixers.scan(recurrence, inputs)
    x = inputs.of_heads[0]
    out, _ = recurrence.scan(inputs.flat(), [x.shape[1]] * x.shape[0], None)
    return out.view(x.shape)
