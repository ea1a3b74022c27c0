"""The decoder of the Llama, InternLM2 and Qwen families in plain PyTorch, for one device.

Modules have the names that transformers gives them. `isp.parallelize` spreads it over ranks as any
other module.

B batch, S sequence, D hidden size, H query heads, K key/value heads, d head size, F MLP size, V
vocabulary
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from isp.attention.call import attention
from isp.layers.compiled import compiles
from isp.layers.rotary import RotaryEmbedding, apply_rotary
from isp.layers.swiglu import swiglu
from model.config import ModelConfig

__all__ = ["Decoder"]

Rotary = tuple[Tensor, Tensor]
"""cos and sin of the positions of all tokens, each [B, S, d/2]."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, d, bias = config.hidden_size, config.head_size, config.qkv_bias
        self.head_size, self.window, self.compiled = d, config.sliding_window, config.compile
        self.q_proj = nn.Linear(hidden, config.num_heads * d, bias=bias)
        self.k_proj = nn.Linear(hidden, config.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(hidden, config.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * d, hidden, bias=False)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(d, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(d, eps=config.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_size)) for y in (q, k, v))  # [B, S, H or K, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        compiled = compiles(self.compiled, x.device)
        q, k = (apply_rotary(y, *rotary, compiled=compiled) for y in (q, k))
        heads = attention(q, k, v, window=self.window)  # [B, S, H, d]
        y: Tensor = self.o_proj(heads.flatten(-2))
        return y


class MLP(nn.Module):
    """SwiGLU: down(silu(gate) * up)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, self.compiled = config.hidden_size, config.intermediate_size, config.compile
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        y: Tensor = self.down_proj(swiglu(gate, up, compiled=compiles(self.compiled, x.device)))
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Trunk(nn.Module):
    """Everything ahead of the head: transformers' `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.rotary = RotaryEmbedding(
            config.head_size, base=config.rope_theta, scaling=config.rope_scaling
        )

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [B, S] -> [B, S, D]."""
        x = self.embed_tokens(tokens)
        rotary = self.rotary(positions, dtype=x.dtype)
        for block in self.layers:
            x = block(x, rotary)
        y: Tensor = self.norm(x)
        return y


class Decoder(nn.Module):
    """Tokens to logits, by the sizes and options of `model` in a configuration."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.init_std_of_outputs = config.init_std / math.sqrt(2 * config.num_layers)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.apply(self._init_weights)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The logits: tokens and positions [B, S] -> [B, S, V]."""
        logits: Tensor = self.lm_head(self.model(tokens, positions))
        return logits

    @property
    def tp_plan(self) -> dict[str, str]:
        """How modes that split features split them, in the words of transformers."""
        columns = *(f"self_attn.{x}_proj" for x in "qkv"), "mlp.gate_proj", "mlp.up_proj"
        rows = "self_attn.o_proj", "mlp.down_proj"
        styles = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
        return {f"model.layers.*.{name}": style for name, style in styles.items()}

    def _init_weights(self, module: nn.Module) -> None:
        """Begin the parameters of a module; those inside have begun."""
        match module:
            case nn.Linear() | nn.Embedding():
                nn.init.normal_(module.weight, std=self.init_std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            case nn.RMSNorm():
                nn.init.ones_(module.weight)
            case Attention():
                nn.init.normal_(module.o_proj.weight, std=self.init_std_of_outputs)
            case MLP():
                nn.init.normal_(module.down_proj.weight, std=self.init_std_of_outputs)
