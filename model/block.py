"""One block of the decoder: attention and MLP, and what of them is computed again.

B batch, S sequence, D hidden size, H query heads, K key/value heads, d head size, F MLP size;
S' the tokens and H', K', F' the features that this rank computes (see `isp.layers.factory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from isp.attention import AttentionMask, DistributedAttention
from isp.layers.factory import LayerFactory
from isp.layers.rotary import apply_rotary, split_heads
from isp.layers.swiglu import silu_and_multiply
from isp.layers.tiled_mlp import TiledMLP
from isp.parallel.config import LaunchPoint
from isp.recompute import Recomputer
from isp.weights.declare import DeclaredUse
from isp.weights.trace import Passes
from model.config import ModelConfig

__all__ = ["Attention", "Block", "Rotary"]

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the positions of this rank's tokens."""


class CoreAttention(nn.Module):
    """The attention of one block: a place that the communicator can see being passed."""

    def __init__(self, attention: DistributedAttention):
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """q [B, S', H', d], k and v [B, S', K', d] -> [B, S', H', d]."""
        return self.attention(q, k, v, mask=mask)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; one fused projection to q, k and v."""

    def __init__(self, config: ModelConfig, layers: LayerFactory, core: DistributedAttention):
        super().__init__()
        d, parts = config.head_size, layers.feature_parts
        self.head_size = d
        self.compiled = layers.compiled
        self.heads = (config.num_heads // parts, config.kv_heads // parts)
        q, kv = config.num_heads * d, config.kv_heads * d
        std = config.init_std
        self.wqkv = layers.column(config.hidden_size, (q, kv, kv), bias=config.qkv_bias, std=std)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = layers.rms_norm(d, eps=config.norm_eps, per_head=True)
            self.k_norm = layers.rms_norm(d, eps=config.norm_eps, per_head=True)
        self.core = CoreAttention(core)
        self.wo = layers.row(q, config.hidden_size, std=std / math.sqrt(2 * config.num_layers))

    def to_heads(self, fused: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Split `wqkv`'s output -> q [B, S', H', d], k and v [B, S', K', d], q and k rotated."""
        num_q, num_kv = self.heads
        heads = fused.unflatten(-1, (-1, self.head_size))  # [B, S', H' + 2K', d]
        if self.q_norm is None or self.k_norm is None:
            return split_heads(heads, num_q, num_kv, *rotary, compiled=self.compiled)
        q, k, v = heads.split((num_q, num_kv, num_kv), dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rotary(x, *rotary, compiled=self.compiled) for x in (q, k))
        return q, k, v

    def output(self, heads: Tensor) -> Tensor:
        """Map what each head found, [B, S', H', d] -> [B, S', D]."""
        y: Tensor = self.wo(heads.flatten(-2))
        return y


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(gate) * up), gate and up in one fused projection."""

    def __init__(self, config: ModelConfig, layers: LayerFactory):
        super().__init__()
        hidden, inner, std = config.hidden_size, config.intermediate_size, config.init_std
        self.compiled = layers.compiled
        self.w13 = layers.column(hidden, (inner, inner), std=std)
        self.w2 = layers.row(inner, hidden, std=std / math.sqrt(2 * config.num_layers))

    def activation(self, fused: Tensor) -> Tensor:
        """Activate `w13`'s output, [B, S', 2F'] -> [B, S', F']."""
        return silu_and_multiply(fused, compiled=self.compiled)

    def forward(self, x: Tensor, tiled: TiledMLP) -> Tensor:
        """x [B, S', D] through norm, MLP and residual in tiles, a place that others can see."""
        return tiled(x)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layers: LayerFactory,
        core: DistributedAttention,
        recompute: Recomputer,
        *,
        recomputed: bool,
    ):
        super().__init__()
        self.config = config
        self.recomputed = recomputed
        self.keeps_attention = config.checkpoint_keeps_attention
        self.drops_norms = config.checkpoint_norm_outputs
        self.drops_activation = config.checkpoint_mlp_activation
        self.recompute = recompute
        self.attention_norm = layers.rms_norm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, layers, core)
        self.ffn_norm = layers.rms_norm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, layers)
        self.tiled = self._tiled(layers, config.mlp_tile_tokens) if config.mlp_tile_tokens else None

    def _tiled(self, layers: LayerFactory, tokens: int) -> TiledMLP:
        mlp = self.feed_forward
        return layers.tiled_mlp(
            norm=self.ffn_norm,
            column=mlp.w13,
            activation=mlp.activation,
            row=mlp.w2,
            tokens=tokens,
        )

    def forward(self, x: Tensor, rotary: Rotary, mask: AttentionMask) -> Tensor:
        """x [B, S', D] -> [B, S', D].

        If `recomputed`, only x is kept for backward, or x and what attention takes and gives.
        """
        if not (self.recomputed and torch.is_grad_enabled()):
            return self._computed(x, rotary, mask)
        if not self.keeps_attention:
            return self.recompute(self._computed, x, rotary, mask)
        q, k, v = self.recompute(self._before_attention, x, rotary)
        heads = self.attention.core(q, k, v, mask)
        return self.recompute(self._after_attention, x, heads)

    def _computed(self, x: Tensor, rotary: Rotary, mask: AttentionMask) -> Tensor:
        # No name holds q, k and v behind attention, which may have sent them away.
        return self._after_attention(
            x, self.attention.core(*self._before_attention(x, rotary), mask)
        )

    def _before_attention(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        fused = self._through(self.attention_norm, self.attention.wqkv, x, drop=self.drops_norms)
        return self.attention.to_heads(fused, rotary)

    def _after_attention(self, x: Tensor, heads: Tensor) -> Tensor:
        if self.tiled is not None or self.drops_norms:
            return self._mlp(x + self.attention.output(heads))
        x, inside = self.ffn_norm.of_sum(x, self.attention.output(heads))
        inside = self.feed_forward.w13(inside)  # no name holds the norm's output any longer
        return self._activated(x, inside)

    def _mlp(self, x: Tensor) -> Tensor:
        mlp = self.feed_forward
        if self.tiled is not None:
            y: Tensor = mlp(x, self.tiled)
            return y
        return self._activated(x, self._through(self.ffn_norm, mlp.w13, x, drop=self.drops_norms))

    def _activated(self, x: Tensor, fused: Tensor) -> Tensor:
        mlp = self.feed_forward
        return x + self._through(mlp.activation, mlp.w2, fused, drop=self.drops_activation)

    def _through(
        self, part: Callable[..., Tensor], linear: nn.Module, x: Tensor, *, drop: bool
    ) -> Tensor:
        """linear(part(x)); `drop` what is between the two until its gradient is near."""
        if drop:
            return self.recompute.without_output(part, linear, x)
        y: Tensor = linear(part(x))
        return y

    def weight_uses(self) -> tuple[DeclaredUse, ...]:
        """The linears of the block in forward order, and where the next may be launched."""
        attention, mlp, at, config = self.attention, self.feed_forward, LaunchPoint, self.config
        norm_and_sum = Passes(between=5 * config.hidden_size)
        turned = (config.num_heads + config.kv_heads) * config.head_size
        tiled = self.tiled is not None
        mlp_call = mlp if tiled else None
        return (
            DeclaredUse(
                name="wqkv",
                layer=attention.wqkv,
                launch_point=at.WQKV,
                passes=norm_and_sum._replace(inside=2 * turned),
            ),
            DeclaredUse(
                name="attn",
                at=attention.core,
                launch_point=at.ATTN,
                in_recompute=not self.keeps_attention,
            ),
            DeclaredUse(
                name="wo",
                layer=attention.wo,
                launch_point=at.WO,
                passes=Passes(),
            ),
            DeclaredUse(
                name="w1",
                layer=mlp.w13,
                at=mlp_call,
                launch_point=at.W1,
                in_recompute=not tiled,
                passes=norm_and_sum,
            ),
            DeclaredUse(
                name="w2",
                layer=mlp.w2,
                at=mlp_call,
                in_recompute=not tiled,
                with_previous=tiled,
                passes=Passes(inside=3 * config.intermediate_size),
            ),
        )
