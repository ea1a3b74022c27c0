"""The calls by which a model mixes tokens other than by attention, and where all of them go.

B batch, S sequence (S' the tokens of a rank), C channels, K taps; H heads of values, G heads of
keys, d and e their sizes; P features of a head, N numbers of its state
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
    """Where the calls of a parallelised model go."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """As `isp.core.attention.api.Attend`."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """x [B, S', C], weight [C, K], bias [C] -> [B, S', C]."""

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Of tokens [B, S', ..] -> [B, S', H, ..], as the first of `inputs.of_heads`."""

    def choose(self, indexer: Indexer) -> Tensor:
        """The numbers of the keys that tokens attend to, [B, S', G, n], see `Chosen`."""


_mixers: ContextVar[Mixers | None] = ContextVar("mixers", default=None)


def current_mixers() -> Mixers | None:
    """Where calls go now; None outside of a parallelised model's forward."""
    return _mixers.get()


@contextmanager
def mix_by(mixers: Mixers) -> Iterator[None]:
    """Calls of this module, and of attention, in this context go to `mixers`."""
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
    """Causal depthwise convolution, which `isp.parallelize` spreads over the ranks.

    x [B, S, C], weight [C, K] (the last tap is the token's own), bias [C] -> [B, S, C].
    `activation`: None, "silu" or "swish". Outside of a parallelised model each sequence is one
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
    """The gated delta rule, which `isp.parallelize` spreads over the ranks.

    q and k [B, S, G, d], v [B, S, H, e], beta [B, S, H], and g the logarithm of the decay:
    [B, S, H], or [B, S, H, d] for one a feature (KDA) -> [B, S, H, e]; G divides H. `normalise`: q
    and k to length 1. Outside of a parallelised model each sequence is one document.
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
    """A state-space scan, which `isp.parallelize` spreads over the ranks.

    Mamba2, with A [H]: x [B, S, H, P], dt [B, S, H], B and C [B, S, G, N], D and dt_bias [H] ->
    [B, S, H, P]; G divides H. Mamba's selective scan, with A [C, N]: x and dt [B, S, C], B and C
    [B, S, N], D and dt_bias [C] -> [B, S, C]. Outside of a parallelised model each sequence is one
    document.
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
    mixers = _mixers.get()
    if mixers is not None:
        return mixers.scan(recurrence, inputs)
    x = inputs.of_heads[0]
    out, _ = recurrence.scan(inputs.flat(), [x.shape[1]] * x.shape[0], None)
    return out.view(x.shape)
