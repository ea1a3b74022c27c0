"""Logits of each token, those that are asked for: a `ResultRules`.

V logits of a token, V' those of a rank, K those that are asked for
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.comm import Channel
from isp.comm.tag import Purpose, Tag
from isp.layers.loss import places_of

__all__ = ["AllLogits", "PickedLogits", "TopLogits"]

_TAG = Tag(Purpose.LOSS, tensor="logits")


class AllLogits(NamedTuple):
    """All V of them, in float32 at least."""

    channel: Channel
    """The ranks over which the logits of a token are split."""
    first: int
    """The vocabulary entry of this rank's first logit."""
    vocab_size: int
    needs_logits: bool = False
    num_buffers: int = 1

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, None]:
        each = math.ceil(self.vocab_size / self.channel.size)
        own = F.pad(_wide(logits), (0, each - logits.shape[-1]))
        return self.channel.all_gather(own, -1, tag=_TAG).wait()[..., : self.vocab_size], None

    def gradient(self, logits: Tensor, beside: Tensor, kept: None, given: Tensor) -> Tensor:
        return given[..., self.first : self.first + logits.shape[-1]].to(logits.dtype)


class PickedLogits(NamedTuple):
    """Those of the tokens [.., K] that are given beside, in float32 at least."""

    channel: Channel
    first: int
    vocab_size: int
    needs_logits: bool = False
    num_buffers: int = 1

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, None]:
        local, held = places_of(beside, self.first, logits.shape[-1])
        own = logits.gather(-1, local) if logits.shape[-1] else logits.new_zeros(beside.shape)
        return self.channel.all_reduce(_wide(own).masked_fill(~held, 0), tag=_TAG).wait(), None

    def gradient(
        self, logits: Tensor, beside: Tensor, kept: Tensor | None, given: Tensor
    ) -> Tensor:
        local, held = places_of(beside, self.first, logits.shape[-1])
        gradient = given.new_zeros(logits.shape)
        if logits.shape[-1]:
            gradient.scatter_add_(-1, local, given.masked_fill(~held, 0))
        return gradient.to(logits.dtype)


class TopLogits(NamedTuple):
    """The K/2 largest of all, and their tokens behind them, which have no gradient.

    Those are numbers of the dtype of the logits, float32 at least: exact up to 2^24.
    """

    channel: Channel
    first: int
    vocab_size: int
    top: int
    needs_logits: bool = False
    num_buffers: int = 1

    def find(self, logits: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.topk(min(self.top, logits.shape[-1]), -1)
        missing = (0, self.top - values.shape[-1])
        values = self._joined(F.pad(_wide(values), missing, value=-math.inf))
        tokens = self._joined(F.pad(tokens + self.first, missing))
        values, order = values.topk(self.top, -1)
        tokens = tokens.gather(-1, order)
        return torch.cat([values, tokens.to(values.dtype)], -1), tokens

    def gradient(self, logits: Tensor, beside: Tensor, kept: Tensor, given: Tensor) -> Tensor:
        picked = PickedLogits(*self[:3])
        return picked.gradient(logits, kept, None, given[..., : self.top])

    def _joined(self, x: Tensor) -> Tensor:
        """That of all ranks, one behind the other."""
        return self.channel.all_gather(x, -1, tag=_TAG).wait()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
