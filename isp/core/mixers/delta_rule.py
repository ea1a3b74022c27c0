"""The gated delta rule, and its form with a decay for each feature (KDA), by scan chunks of tokens.

T tokens, H heads of values with V features, G heads of keys with K features (G divides H), c tokens
of a chunk

    S_t = D_t S_(t-1) + beta_t k_t (v_t - k_t^T D_t S_(t-1))^T       S [K, V], D_t = exp(g_t)
    o_t = S_t^T q_t / sqrt(K)

g is the logarithm of the decay: [T, H], or [T, H, K] with a decay for each feature of the keys.

Within a chunk, with decays a_t = exp(g_1 + .. + g_t) and A the strict lower triangle of
beta_i (k_i a_i / a_j) . k_j, the corrected values are U - W S, where
(I + A) [U | W] = beta [v | k a] (the UT transform): matrix products and a triangular solve.

Sources: Yang et al. 2024 (gated delta networks), Kimi Linear 2025 (KDA); the code is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.mixers import kernels
from isp.core.mixers.recurrence import Inputs, by_segment, decays, in_chunks

__all__ = ["DeltaRule"]

_CHUNK = {2: 64, 3: 16}
"""Tokens of a chunk, by the number of dims of g: with g [T, H, K], each pair of tokens has K decays
in memory, so chunks are shorter."""


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """The scan of `isp.gated_delta_rule`.

    Of the `Inputs`, `of_heads` are v, g and beta, `of_groups` q and k.
    """

    normalise: bool
    """True: q and k of each token are scaled to length 1."""

    def scan(
        self, inputs: Inputs, lengths: Sequence[int], initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scan like `Recurrence.scan`; states are [n, H, K, V]."""
        found = kernels.delta_rule(inputs, lengths, initial, normalise=self.normalise)
        if found is not None:
            return found
        v, g, beta = inputs.of_heads
        q, k = inputs.of_groups
        dtype = torch.promote_types(v.dtype, torch.float32)
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        if self.normalise:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        share = v.shape[1] // k.shape[1]
        if share > 1:
            q, k = (x.repeat_interleave(share, 1) for x in (q, k))
        zeros = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        begins = repeat(zeros) if initial is None else initial.to(dtype)
        out, states = by_segment(_scan, (q, k, v, g, beta), lengths, begins)
        return out.to(inputs.of_heads[0].dtype), states

    def summary(self, inputs: Inputs, lengths: Sequence[int]) -> Tensor:
        """Return the summaries [n, H K (V + K)] of segments: final state from zero, transition.

        A summary is [H, K, V + K], flat. The values are widened by K zeros and the scan begins with
        the state [0 | identity]. So any kernel with an initial state computes both in one call.
        """
        (v, *others), k = inputs.of_heads, inputs.of_groups[1]
        key_size = k.shape[2]
        one = torch.eye(
            key_size, dtype=torch.promote_types(v.dtype, torch.float32), device=v.device
        )
        begin = F.pad(one, (v.shape[2], 0)).expand(len(lengths), v.shape[1], -1, -1)
        wide = Inputs((F.pad(v, (0, key_size)), *others), inputs.of_groups, inputs.constants)
        return self.scan(wide, lengths, begin)[1].flatten(1)

    def summary_size(self, inputs: Inputs) -> int:
        """Return the number of elements that a rank sends of a segment: see `summary`."""
        v, k = inputs.of_heads[0], inputs.of_groups[1]
        return v.shape[1] * k.shape[2] * (v.shape[2] + k.shape[2])

    def state_size(self, inputs: Inputs) -> int:
        """Return the number of elements of a document's state."""
        v, k = inputs.of_heads[0], inputs.of_groups[1]
        return v.shape[1] * k.shape[2] * v.shape[2]

    def flops(self, inputs: Inputs) -> int:
        """Return the FLOPs of a token: products of a state with key and query, and its update."""
        v, k = inputs.of_heads[0], inputs.of_groups[1]
        return 6 * v.shape[1] * k.shape[2] * v.shape[2]

    def after(self, summary: Tensor, state: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the state [H, K, V] after a segment with `summary` that begins with `state`."""
        v, k = inputs.of_heads[0], inputs.of_groups[1]
        wide = summary.view(v.shape[1], k.shape[2], v.shape[2] + k.shape[2])
        from_zero, transition = wide[..., : v.shape[2]], wide[..., v.shape[2] :]
        return from_zero if state is None else transition @ state + from_zero


def _scan(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan a segment: q, k [T, H, K], v [T, H, V], state [H, K, V] -> [T, H, V], [H, K, V]."""
    if not len(q):
        return v, state
    size, length = min(_CHUNK[g.dim()], len(q)), len(q)
    # The last chunk is padded with zero tokens, which neither decay the state (g = 0) nor write.
    q, k, v, g, beta = (in_chunks(x, size) for x in (q, k, v, g, beta))  # [N, H, c, ..]
    # `kept` is the decay from before the chunk to each token, `pair` from each token to each later.
    kept, pair = decays(g)  # [N, H, c] and [N, H, c, c], each with K if g has it
    if g.dim() == 3:
        kk, qk = (k @ k.mT) * pair, (q @ k.mT) * pair
        kept, pair = kept.unsqueeze(-1), pair.unsqueeze(-1)
    else:
        kk = torch.einsum("nhik,nhjk,nhijk->nhij", k, k, pair)
        qk = torch.einsum("nhik,nhjk,nhijk->nhij", q, k, pair)
    # Solve (I + A) [U | W] = beta [v | k a] for U and W (see the top of this file): `system` is A.
    system = (beta.unsqueeze(-1) * kk).tril(-1)
    given = beta.unsqueeze(-1) * torch.cat((v, k * kept), -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)  # U and W
    # `written` are the keys, decayed to the end of the chunk; `last` is the decay over all of it.
    written, last = k * pair[:, :, -1], kept[:, :, -1].unsqueeze(-1)  # last: [N, H, 1 or K, 1]
    outs = []
    # Only this loop over chunks is sequential: all else was computed for all chunks at once.
    for value, key, query, inside, decay, write in zip(
        *(x.unbind() for x in (values, keys, q * kept, qk, last, written.mT)),
        strict=True,
    ):
        corrected = value - key @ state
        outs.append(query @ state + inside @ corrected)
        state = decay * state + write @ corrected
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[:length], state
