"""Linear recurrences over tokens: what a scan needs to know of one to split it over ranks.

T tokens, H heads, G groups of heads that share an input, n segments: runs of tokens of one document

A recurrence keeps a state for each head and changes it with each token by a linear map that depends
on the token. So over a segment the state is S' = M S + E, where the transition M and the state E
from zero follow from the segment's tokens alone: they are what ranks send each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Inputs",
    "Recurrence",
    "by_segment",
    "decays",
    "in_chunks",
]


class Inputs(NamedTuple):
    """What a scan reads."""

    of_heads: tuple[Tensor, ...]
    """[T, H, ..]."""
    of_groups: tuple[Tensor, ...]
    """[T, G, ..]; head h reads group h // (H / G)."""
    constants: tuple[Tensor | None, ...] = ()
    """[H, ..], the same for all tokens."""

    @property
    def num_heads(self) -> int:
        return self.of_heads[0].shape[1]

    @property
    def num_groups(self) -> int:
        return self.of_groups[0].shape[1] if self.of_groups else self.num_heads

    def flat(self) -> Inputs:
        """Of tokens [B, S, ..], the same as [B S, ..]."""
        return self.of_tokens(lambda x: x.flatten(0, 1))

    def of_tokens(self, select: Callable[[Tensor], Tensor]) -> Inputs:
        """Of the tokens that `select` takes of each tensor."""
        of_heads, of_groups = (tuple(map(select, xs)) for xs in (self.of_heads, self.of_groups))
        return Inputs(of_heads, of_groups, self.constants)


class Recurrence(Protocol):
    """One kind of scan: goes through the tokens of a document from a state to a state."""

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The results [T, H, V] and the final states [n, H, ..] of segments of these `lengths`.

        `initial` states [n, H, ..]; None: zeros. States are float32 at least.
        """

    def state_size(self, inputs: Inputs) -> int:
        """Numbers of a document's state, of all heads."""

    def flops(self, inputs: Inputs) -> int:
        """Of a token, forward: products with the states and with what changes them."""

    def summary(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Transition and final state from zero of each segment, as one row of numbers: [n, F]."""

    def summary_size(self, inputs: Inputs) -> int:
        """F."""

    def after(self, summary: Tensor, state: Tensor | None, inputs: Inputs) -> Tensor:
        """The state [H, ..] after a segment with this summary [F], from `state`; None: zeros."""


def in_chunks(x: Tensor, size: int) -> Tensor:
    """x [T, H, ..] in chunks of tokens, [n, H, size, ..]; behind the last token are zeros."""
    padded = F.pad(x, (0,) * (2 * x.dim() - 1) + (-len(x) % size,))
    chunks: Tensor = padded.unflatten(0, (-1, size)).transpose(1, 2)
    return chunks


def by_segment(
    scan: Callable[..., tuple[Tensor, Tensor]],
    xs: Sequence[Tensor],
    lengths: Sequence[int],
    initial: Iterable[Tensor],
) -> tuple[Tensor, Tensor]:
    """Results and final states of `scan`, which is called with a state and a segment of each x."""
    segments = (x.split(list(lengths)) for x in xs)
    found = [scan(*each) for each in zip(initial, *segments, strict=False)]
    outs, states = zip(*found, strict=True)
    return torch.cat(outs), torch.stack(states)


def decays(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Decays within chunks of c tokens, of their logarithms [n, H, c, ..] of any size.

    Of each token from the one before the chunk [n, H, c, ..], and from each token of the chunk
    [n, H, c, c, ..], zero from later ones. The latter are sums of what lies between: as differences
    of the former's logarithms they would be lost behind a strong decay.
    """
    size, rest = logarithms.shape[2], (1,) * (logarithms.dim() - 3)
    ones = torch.ones(size, size, dtype=torch.bool, device=logarithms.device)
    seen, later = (ones.tril(at).view(size, size, *rest) for at in (0, -1))
    between = logarithms.unsqueeze(3).where(later, 0).cumsum(2)
    return logarithms.cumsum(2).exp(), between.masked_fill_(~seen, -torch.inf).exp_()
