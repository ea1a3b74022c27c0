"""The decoder over the inference layers, where weights stay: norms, sums, collectives between them.

T tokens, D hidden size, V vocabulary; H', F', V' the heads, inner features and logits of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.attention import AttentionMask
from isp.comm import Channel
from isp.layers.inference import (
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
    InferenceVocabParallelEmbedding,
)
from isp.layers.norm import RMSNorm
from isp.layers.workspace import InferenceWorkspace, Residual
from model.block import Block, Rotary
from model.decoder import Decoder

__all__ = ["InferenceDecoder"]


_SPARE = 8
"""Buffers are at most for so many times the tokens of a call."""
_TILE_TOKENS = 4096
"""An MLP's inner features exist for at most so many tokens at a time."""


class InferenceDecoder:
    """Reads tokens by the weights of a decoder, whole, whose features are split over `tensor`.

    Buffers are those of the call with most tokens. A call with more makes them anew, and so does
    one with far fewer, as the first that decodes: what a prompt took is free then.
    """

    def __init__(self, decoder: Decoder, tensor: Channel, *, split_tokens: bool) -> None:
        """`split_tokens`: whether a rank has its tokens alone between the linears, as in msp."""
        assert decoder.span == (0, decoder.config.num_layers)
        self.decoder, self.tensor, self.split_tokens = decoder, tensor, split_tokens
        self.vocab_size = decoder.config.vocab_size
        self._layers: _Layers | None = None

    @torch.no_grad()
    def logits_of(
        self,
        x: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None,
        pick: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The logits [1, n, V'] of the tokens that `pick`, [1, T, D] -> [1, n, D], leaves.

        x, positions [1, T], on every rank all of them.
        """
        (ids,), decoder = x, self.decoder
        layers = self._made_for(len(ids))
        residual = layers.embedding(ids)
        mask = AttentionMask(
            causal=True, window=decoder.config.sliding_window, cu_seqlens=cu_seqlens
        )
        rotary = decoder.rotary(positions, dtype=residual.value.dtype)
        hidden: Residual | Tensor = residual
        for block in layers.blocks:
            hidden = block(hidden, residual, rotary, mask)
        assert isinstance(hidden, Tensor)
        (rows,) = pick(hidden.unsqueeze(0))
        assert decoder.head is not None
        return F.linear(rows, decoder.head.weight).unsqueeze(0)

    def buffer_bytes(self, tokens: int) -> int:
        """Memory of the buffers for a call of so many tokens; makes them."""
        return self._made_for(tokens).workspace.num_bytes

    def _made_for(self, tokens: int) -> _Layers:
        made = self._layers
        if made is None or not made.max_tokens <= _SPARE * tokens <= _SPARE * made.max_tokens:
            self._layers = None  # its buffers first
            made = self._layers = _Layers(self, tokens)
        return made


class _Layers:
    def __init__(self, model: InferenceDecoder, max_tokens: int) -> None:
        decoder = model.decoder
        assert decoder.embedding is not None
        assert decoder.norm is not None
        table = decoder.embedding.weight
        self.max_tokens = max_tokens
        self.workspace = workspace = InferenceWorkspace(
            model.tensor,
            decoder.config.hidden_size,
            max_tokens=max_tokens,
            split_tokens=model.split_tokens,
            compiled=decoder.norm.compiled,
            device=table.device,
            dtype=table.dtype,
        )
        self.embedding = InferenceVocabParallelEmbedding(decoder.embedding, workspace)
        blocks = list(decoder.blocks())
        norms = chain((block.attention_norm for block in blocks[1:]), (decoder.norm,))
        self.blocks = [
            _Block(block, norm, workspace) for block, norm in zip(blocks, norms, strict=True)
        ]


class _Block:
    """A block whose last norm is that of what follows it."""

    def __init__(self, block: Block, next_norm: RMSNorm, workspace: InferenceWorkspace) -> None:
        self.attention, self.mlp = block.attention, block.feed_forward
        self.core = block.attention.core.attention
        self.ffn_norm, self.next_norm = block.ffn_norm, next_norm
        self.wqkv = InferenceLayerNormColumnParallelLinear(
            block.attention.wqkv, workspace, norm=block.attention_norm, slot="wqkv"
        )
        self.wo = InferenceRowParallelLinear(block.attention.wo, workspace)
        self.w13 = InferenceLayerNormColumnParallelLinear(
            block.feed_forward.w13,
            workspace,
            slot="w13",
            max_tokens=min(workspace.max_tokens, _TILE_TOKENS),
        )
        self.w2 = InferenceRowParallelLinear(block.feed_forward.w2, workspace)

    def __call__(
        self, x: Residual | Tensor, residual: Residual, rotary: Rotary, mask: AttentionMask
    ) -> Tensor:
        """The residual or its norm [T, D], to be added to -> the next block's norm of it [T, D]."""
        fused = self.wqkv(x).unsqueeze(0)  # [1, T, (H' + 2K') d]
        heads = self.core(*self.attention.to_heads(fused, rotary), mask=mask)
        normed = self.wo.add_norm(heads[0].flatten(1), residual, self.ffn_norm)  # [T, D]
        if len(normed) <= _TILE_TOKENS:
            return self.w2.add_norm(self._inner(normed), residual, self.next_norm)
        tiles = map(self._inner, normed.split(_TILE_TOKENS))
        return self.w2.add_norm(tiles, residual, self.next_norm)

    def _inner(self, normed: Tensor) -> Tensor:
        return self.mlp.activation(self.w13(normed))  # [T, F']
