"""`Recurrence`, the interface of linear recurrences that a scan can split over ranks.

T tokens, H heads, G groups of heads that share an input, n segments: ranges of tokens of a document

A recurrence has a state for each head, and each token changes it by a linear map that depends on
the token. So a segment turns the state S into M S + E. The transition M and the final state from
zero, E, depend only on the segment's tokens: they are its summary, which ranks send to each other.
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
    """The inputs of a scan: one per head, one per group of heads, or the same for all tokens."""

    of_heads: tuple[Tensor, ...]
    """Inputs of each of the H heads, for T tokens: [T, H, ..]."""
    of_groups: tuple[Tensor, ...]
    """Inputs of each of the G groups of heads, [T, G, ..]; head h reads group h // (H / G)."""
    constants: tuple[Tensor | None, ...] = ()
    """Inputs that are the same for all tokens, [H, ..]."""

    @property
    def num_heads(self) -> int:
        """H, the number of heads."""
        return self.of_heads[0].shape[1]

    @property
    def num_groups(self) -> int:
        """G, the number of groups of heads; H if no input is one of groups."""
        return self.of_groups[0].shape[1] if self.of_groups else self.num_heads

    def flat(self) -> Inputs:
        """Return the inputs with the dims of tokens [B, S, ..] joined: [B S, ..]."""
        return self.of_tokens(lambda x: x.flatten(0, 1))

    def of_tokens(self, select: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with `select`, which picks some tokens, applied to each tensor."""
        of_heads, of_groups = (tuple(map(select, xs)) for xs in (self.of_heads, self.of_groups))
        return Inputs(of_heads, of_groups, self.constants)


class Recurrence(Protocol):
    """A linear recurrence over the tokens of documents, such as the gated delta rule or Mamba.

    If a document is split over ranks, each rank sends a summary of its slice, from which later
    ranks compute the state before their own slices.
    """

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the results [T, H, V] and the final states [n, H, ..] of n segments.

        `lengths`: tokens of each segment. `initial`: states [n, H, ..] before each segment; None:
        zeros. States are float32 or wider.
        """

    def state_size(self, inputs: Inputs) -> int:
        """Return the number of elements of a document's state, for all heads."""

    def flops(self, inputs: Inputs) -> int:
        """Return the FLOPs of a token in forward: updates of the state, and products with it."""

    def summary(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Return the summary of each segment, its transition and final state from zero: [n, F]."""

    def summary_size(self, inputs: Inputs) -> int:
        """Return F, the number of elements of a summary."""

    def after(self, summary: Tensor, state: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the state [H, ..] after a segment with `summary` [F] that begins with `state`.

        `state` is [H, ..]; None: zeros.
        """


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Return x [T, H, ..] in chunks of `size` tokens, [n, H, size, ..]; zeros fill the last one."""
    # `F.pad` takes pairs (before, after), last dim first: only the end of dim 0 is padded.
    padded = F.pad(x, (0,) * (2 * x.dim() - 1) + (-len(x) % size,))
    chunks: Tensor = padded.unflatten(0, (-1, size)).transpose(1, 2)
    return chunks


def by_segment(
    scan: Callable[..., tuple[Tensor, Tensor]],
    xs: Sequence[Tensor],
    lengths: Sequence[int],
    initial: Iterable[Tensor],
) -> tuple[Tensor, Tensor]:
    """Call `scan(state, *segment of each x)` for each segment; join results and final states."""
    segments = (x.split(list(lengths)) for x in xs)
    found = [scan(*each) for each in zip(initial, *segments, strict=False)]
    outs, states = zip(*found, strict=True)
    return torch.cat(outs), torch.stack(states)


def decays(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return decays within chunks of c tokens, given the logarithms [n, H, c, ..] of token decays.

    The first result [n, H, c, ..] is the decay from before the chunk to each token. The second
    [n, H, c, c, ..] has at (i, j) the decay from token j to token i, which is 0 if j is later.
    """
    size, rest = logarithms.shape[2], (1,) * (logarithms.dim() - 3)
    ones = torch.ones(size, size, dtype=torch.bool, device=logarithms.device)
    seen, later = (ones.tril(at).view(size, size, *rest) for at in (0, -1))
    # Sum over the tokens after j up to i. Differences of the cumulative sums below would lose all
    # digits after a strong decay.
    between = logarithms.unsqueeze(3).where(later, 0).cumsum(2)
    return logarithms.cumsum(2).exp(), between.masked_fill_(~seen, -torch.inf).exp_()
