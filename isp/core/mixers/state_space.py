"""State-space scans: Mamba2, with a decay for each head; Mamba, with one for each state number.

T tokens, H heads, G groups of heads (G divides H), P features of a head, N numbers of its state,
C channels, c tokens of a chunk

    Mamba2      S_t = exp(A dt_t) S_(t-1) + dt_t x_t B_t^T      S [P, N] of each head, A a number
    selective   s_t = exp(A dt_t) s_(t-1) + dt_t x_t B_t        s [N] of each channel, A [N]
                y_t = S_t C_t + D x_t

Sources: Gu and Dao 2023 (Mamba), Dao and Gu 2024 (Mamba2, its scan by chunks); the code is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.mixers import kernels
from isp.core.mixers.recurrence import Inputs, by_segment, decays, in_chunks

__all__ = ["Mamba2", "SelectiveScan"]

_CHUNK = 64
"""Number of consecutive tokens whose outputs a scan computes at once, by matmuls."""


@dataclass(frozen=True, kw_only=True)
class _StateSpace:
    """The base of the scans of Mamba and Mamba2.

    Of the `Inputs`, `of_heads` are x and dt, `of_groups` B and C, `constants` A, D and dt_bias.
    """

    dt_softplus: bool
    """True: dt is softplus(dt + dt_bias); False: dt + dt_bias."""
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """(least, most): dt is then clamped to this range."""

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scan like `Recurrence.scan`; states are [n, H, P, N] or [n, C, N]."""
        x, dt, A, D, B, C = self._read(inputs)
        out, states = self._segments(A, (x, dt, B, C), lengths, initial)
        if D is not None:
            out = out + D.view(-1, *(1 for _ in x.shape[2:])) * x
        return out.to(inputs.of_heads[0].dtype), states

    def summary(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Return summaries [n, F]: logarithm of the decay, then the final state from zero."""
        _, dt, A, *_ = self._read(inputs)
        states = self._from_zero(inputs, lengths)
        time = torch.stack([t.sum(0) for t in dt.split(list(lengths))])  # [n, H]
        decay = A * (time if A.dim() == 1 else time.unsqueeze(-1))
        return torch.cat((decay.flatten(1), states.flatten(1)), 1)

    def summary_size(self, inputs: Inputs) -> int:
        """Return the number of elements that a rank sends of a segment: see `summary`."""
        x, B, A = inputs.of_heads[0], inputs.of_groups[0], inputs.constants[0]
        assert A is not None
        return A.numel() + x.shape[1:].numel() * B.shape[-1]

    def state_size(self, inputs: Inputs) -> int:
        """Return the number of elements of a document's state."""
        x, B = inputs.of_heads[0], inputs.of_groups[0]
        return x.shape[1:].numel() * B.shape[-1]

    def flops(self, inputs: Inputs) -> int:
        """Return the FLOPs of a token: the update of a state, and its product with C."""
        x, B = inputs.of_heads[0], inputs.of_groups[0]
        return 4 * x.shape[1:].numel() * B.shape[-1]

    def after(self, summary: Tensor, state: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the state [H, P, N] or [C, N] after a segment that begins with `state`."""
        x, B, A = inputs.of_heads[0], inputs.of_groups[0], inputs.constants[0]
        assert A is not None
        from_zero = summary[A.numel() :].view(*x.shape[1:], B.shape[-1])
        if state is None:
            return from_zero
        decay = summary[: A.numel()].view(A.shape).exp()
        return decay.view(*A.shape, *(1,) * (state.dim() - A.dim())) * state + from_zero

    def _from_zero(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Return the final states of segments that begin with zeros."""
        return self.scan(inputs, lengths, None)[1]

    def _segments(
        self, A: Tensor, xs: Sequence[Tensor], lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return results without the term of D, and final states, for tokens x, dt, B and C."""
        x, B = xs[0], xs[2]
        zeros = x.new_zeros(*x.shape[1:], B.shape[-1])
        begins = repeat(zeros) if initial is None else initial.to(x.dtype)
        return by_segment(partial(self._segment, A), xs, lengths, begins)

    def _segment(
        self, A: Tensor, state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scan one segment from `state`; return results and final state."""
        raise NotImplementedError

    def _read(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Return x, dt, A, D, B, C in float32 or wider; dt after its bias, softplus and limits."""
        (x, dt), (B, C) = inputs.of_heads, inputs.of_groups
        A, D, dt_bias = inputs.constants
        assert A is not None
        dtype = torch.promote_types(x.dtype, torch.float32)
        x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
        if dt_bias is not None:
            dt = dt + dt_bias.to(dtype)
        if self.dt_softplus:
            dt = F.softplus(dt)
        dt = dt.clamp(*self.dt_limit)
        return x, dt, A, None if D is None else D.to(dtype), B, C


class Mamba2(_StateSpace):
    """Scan of Mamba2: x [T, H, P], dt [T, H], B and C [T, G, N], A, D and dt_bias [H]."""

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scan like `Recurrence.scan`; states are [n, H, P, N]."""
        found = kernels.mamba2(
            inputs, lengths, initial, dt_softplus=self.dt_softplus, dt_limit=self.dt_limit
        )
        if found is None:
            return super().scan(inputs, lengths, initial)
        out, states = found
        return out, self._from_zero(inputs, lengths) if states is None else states

    def _from_zero(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Return the final states of segments that begin with zeros, without a scan.

        A state is the sum of what the tokens write, each decayed to the end of the segment.
        """
        states = []
        xs, dts, A, _, Bs, _ = self._read(inputs)
        for x, dt, B in zip(*(t.split(list(lengths)) for t in (xs, dts, Bs)), strict=True):
            # Sum of dt over all later tokens of the segment: [T, H].
            later = F.pad(dt, (0, 0, 0, 1))[1:].flip(0).cumsum(0).flip(0)
            written = x * (dt * (A * later).exp()).unsqueeze(-1)
            of_groups = written.unflatten(1, (B.shape[1], -1))  # [T, G, H/G, P]
            states.append(torch.einsum("tghp,tgn->ghpn", of_groups, B).flatten(0, 1))
        return torch.stack(states)

    def _segment(
        self, A: Tensor, state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not len(x):
            return x, state
        share = x.shape[1] // B.shape[1]
        B, C = (t.repeat_interleave(share, 1) for t in (B, C))
        size, length = min(_CHUNK, len(x)), len(x)
        x, decay = x * dt.unsqueeze(-1), A * dt
        x, decay, B, C = (in_chunks(t, size) for t in (x, decay, B, C))  # [n, H, c, ..]
        kept, pair = decays(decay)  # [n, H, c], [n, H, c, c]
        inside = ((C @ B.mT) * pair) @ x  # what a token reads of its own chunk
        # `written` is what a chunk adds to the state at its end. `asked` is C with decays, by which
        # the chunk's tokens read the state before the chunk.
        written = (x * pair[:, :, -1].unsqueeze(-1)).mT @ B  # [n, H, P, N]
        asked = C * kept.unsqueeze(-1)  # [n, H, c, N]
        begins = []  # the state before each chunk; only this loop is sequential
        for last, write in zip(kept[:, :, -1, None, None].unbind(), written.unbind(), strict=True):
            begins.append(state)
            state = last * state + write
        out = inside + asked @ torch.stack(begins).mT
        return out.transpose(1, 2).flatten(0, 1)[:length], state


class SelectiveScan(_StateSpace):
    """Scan of Mamba: x and dt [T, C], B and C [T, 1, N], A [C, N], D and dt_bias [C]."""

    def _segments(
        self, A: Tensor, xs: Sequence[Tensor], lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        found = kernels.selective_scan(A, xs, lengths, initial)
        return super()._segments(A, xs, lengths, initial) if found is None else found

    def _segment(
        self, A: Tensor, state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor
    ) -> tuple[Tensor, Tensor]:
        decay = (A * dt.unsqueeze(-1)).exp()  # [T, C, N]
        written = (x * dt).unsqueeze(-1) * B
        states = []
        for write, kept in zip(written.unbind(), decay.unbind(), strict=True):
            state = torch.addcmul(write, kept, state)
            states.append(state)
        if not states:
            return x, state
        return (torch.stack(states) * C).sum(-1), state
