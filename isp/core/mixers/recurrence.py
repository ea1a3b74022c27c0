"""`Recurrence`, the interface of linear recurrences by which a scan splits one over ranks.

T tokens, H heads, G groups of heads that share an input, n segments: ranges of tokens of a document

A recurrence keeps a state for each head and changes it with each token by a linear map that depends
on the token. So over a segment the state becomes S' = M S + E, where the transition M and the state
E from zero follow from the segment's tokens alone: ranks send each other these two.
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
    """The inputs of a scan."""

    of_heads: tuple[Tensor, ...]
    """Inputs of each head, [T, H, ..]."""
    of_groups: tuple[Tensor, ...]
    """Inputs of each group, [T, G, ..]; head h reads group h // (H / G)."""
    constants: tuple[Tensor | None, ...] = ()
    """Inputs that are the same for all tokens, [H, ..]."""

    @property
    def num_heads(self) -> int:
        """H."""
        return self.of_heads[0].shape[1]

    @property
    def num_groups(self) -> int:
        """G; H if there are no inputs of groups."""
        return self.of_groups[0].shape[1] if self.of_groups else self.num_heads

    def flat(self) -> Inputs:
        """Return inputs of tokens [B, S, ..] as [B S, ..]."""
        return self.of_tokens(lambda x: x.flatten(0, 1))

    def of_tokens(self, select: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs of the tokens that `select` takes of each tensor."""
        of_heads, of_groups = (tuple(map(select, xs)) for xs in (self.of_heads, self.of_groups))
        return Inputs(of_heads, of_groups, self.constants)


class Recurrence(Protocol):
    """A kind of scan over the tokens of documents."""

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the results [T, H, V] and final states [n, H, ..] of segments of these lengths.

        `initial`: states [n, H, ..] before each segment; None: zeros. States are float32 or wider.
        """

    def state_size(self, inputs: Inputs) -> int:
        """Return the elements of a document's state, for all heads."""

    def flops(self, inputs: Inputs) -> int:
        """Return a token's operations in forward: products with states and with their changes."""

    def summary(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Return transition and final state from zero of each segment, as one row each: [n, F]."""

    def summary_size(self, inputs: Inputs) -> int:
        """Return F, the elements of a summary."""

    def after(self, summary: Tensor, state: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the state [H, ..] after a segment with `summary` [F], from `state` (None: 0)."""


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Cut x [T, H, ..] into chunks of tokens, [n, H, size, ..], padding the last with zeros."""
    padded = F.pad(x, (0,) * (2 * x.dim() - 1) + (-len(x) % size,))
    chunks: Tensor = padded.unflatten(0, (-1, size)).transpose(1, 2)
    return chunks


def by_segment(
    scan: Callable[..., tuple[Tensor, Tensor]],
    xs: Sequence[Tensor],
    lengths: Sequence[int],
    initial: Iterable[Tensor],
) -> tuple[Tensor, Tensor]:
    """Call `scan` with a state and a segment of each x; join the results and the final states."""
    segments = (x.split(list(lengths)) for x in xs)
    found = [scan(*each) for each in zip(initial, *segments, strict=False)]
    outs, states = zip(*found, strict=True)
    return torch.cat(outs), torch.stack(states)


def decays(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return decays within chunks of c tokens, given logarithms [n, H, c, ..] of tokens' decays.

    Returns the decay from before the chunk to each token, [n, H, c, ..], and that from each token
    to each later one, [n, H, c, c, ..], with zeros from later tokens to earlier ones. The latter's
    logarithms are sums over the tokens between; as differences of the former's they would lose all
    digits after a strong decay.
    """
    size, rest = logarithms.shape[2], (1,) * (logarithms.dim() - 3)
    ones = torch.ones(size, size, dtype=torch.bool, device=logarithms.device)
    seen, later = (ones.tril(at).view(size, size, *rest) for at in (0, -1))
    between = logarithms.unsqueeze(3).where(later, 0).cumsum(2)
    return logarithms.cumsum(2).exp(), between.masked_fill_(~seen, -torch.inf).exp_()
