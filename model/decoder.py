"""The decoder of the Llama, InternLM2 and Qwen families in plain PyTorch, for one device.

Modules have the names of transformers' modules. `isp.parallelize` shards the decoder like any
other module.

B batch, S sequence, D hidden size, H query heads, K key/value heads, d head size, F MLP size, V
vocabulary; N tokens, E experts, k experts for each token
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.attention.api import attention
from isp.core.layers.compiled import compiles
from isp.core.layers.rotary import RotaryEmbedding, apply_rotary
from isp.core.layers.swiglu import swiglu
from model.config import ModelConfig

__all__ = ["Decoder"]

Rotary = tuple[Tensor, Tensor]
"""The cos and sin of the rotary angles of all tokens, [B, S, d/2] each."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and norms of q and k if configured."""

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
        """Return the output of attention, x [B, S, D] -> [B, S, D]; `rotary`: cos and sin."""
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
    """SwiGLU MLP: down(silu(gate) * up)."""

    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        hidden, self.compiled = config.hidden_size, config.compile
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the MLP, x [B, S, D] -> [B, S, D]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        y: Tensor = self.down_proj(swiglu(gate, up, compiled=compiles(self.compiled, x.device)))
        return y


class Router(nn.Module):
    """Router that chooses for each token the k experts with the largest softmax probabilities."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.normed = config.experts_per_token, config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens: x [N, D] -> logits [N, E], weights [N, k], numbers of experts [N, k]."""
        logits = F.linear(x, self.weight)
        # Compute the softmax in float32 at least, as transformers does.
        wide = torch.promote_types(x.dtype, torch.float32)
        weights, numbers = logits.softmax(-1, dtype=wide).topk(self.top_k, dim=-1)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(x.dtype), numbers


class Experts(nn.Module):
    """SwiGLU experts with stacked weights, with the signature of transformers' experts."""

    # These attributes declare as in transformers how the stacks are arranged: gate and up are the
    # two halves of one weight [E, 2 F, D].
    has_gate, is_concatenated, is_transposed = True, True, False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        self.compiled = config.compile
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))  # [E, 2 F, D]
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))  # [E, D, F]

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts: x [N, D] -> [N, D].

        numbers [N, k]: the experts of each token; weights [N, k]: their weights.
        """
        # Sort the N k pairs of token and expert by expert, so that each expert has adjacent rows.
        found, order = numbers.flatten().sort(stable=True)  # [N k]
        every = torch.arange(len(self.gate_up_proj), device=x.device)
        ends = torch.searchsorted(found, every, right=True, out_int32=True)  # [E]
        # Pair i belongs to token i // k.
        inside = _grouped(x[order // numbers.shape[1]], self.gate_up_proj, ends)  # [N k, 2 F]
        inside = swiglu(*inside.chunk(2, -1), compiled=compiles(self.compiled, x.device))
        # `order.argsort()` undoes the sort.
        y = _grouped(inside, self.down_proj, ends)[order.argsort()]  # [N k, D]
        out: Tensor = (y.unflatten(0, numbers.shape) * weights.unsqueeze(-1)).sum(1)
        return out


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own weight: x [R, I], weight [E, O, I] -> [R, O].

    Group e is the rows from `ends[e - 1]` up to, not including, `ends[e]`; ends [E].
    """
    # torch's kernels need rows of a multiple of 16 bytes, and do not take float64. On meta only
    # `grouped_mm` works: the code below would read values of `ends`.
    fits = all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])
    if x.is_meta or (fits and x.dtype != torch.float64):
        return F.grouped_mm(x, weight.mT, offs=ends)
    parts = x.tensor_split(ends[:-1].long().cpu())
    return torch.cat([part @ own.T for part, own in zip(parts, weight, strict=True)])


class MixtureOfExperts(nn.Module):
    """MLP of routed experts, and optionally a shared expert with a sigmoid gate as in Qwen2-MoE."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate, self.experts = Router(config), Experts(config)
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_expert_intermediate_size:
            self.shared_expert = MLP(config, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the routed and shared experts of x: [B, S, D] -> [B, S, D]."""
        tokens = x.flatten(0, 1)
        _, weights, numbers = self.gate(tokens)
        y: Tensor = self.experts(tokens, numbers, weights).view_as(x)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            # Call it after the experts: only then isp can compute it while their tokens are in
            # flight.
            y = y + self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        return y


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + MLP(norm(x)), or experts as the MLP."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: nn.Module
        if config.num_experts and index >= config.num_dense_layers:
            self.mlp = MixtureOfExperts(config)
        else:
            self.mlp = MLP(config, config.intermediate_size)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Return the block's output: x [B, S, D] -> [B, S, D]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Trunk(nn.Module):
    """The decoder without its head: embedding, blocks and final norm (`model` in transformers)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.rotary = RotaryEmbedding(
            config.head_size, base=config.rope_theta, scaling=config.rope_scaling
        )

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states of tokens and positions [B, S]: [B, S, D]."""
        x = self.embed_tokens(tokens)
        rotary = self.rotary(positions, dtype=x.dtype)
        for block in self.layers:
            x = block(x, rotary)
        y: Tensor = self.norm(x)
        return y


@dataclass(frozen=True)
class _Recorder:
    """Declares, as models of transformers do, that output 0 of a `Router` is its logits."""

    target_class: type[nn.Module] = Router
    index: int = 0
    layer_name: str | None = None


class Decoder(nn.Module):
    """The language model of a `model` section: token ids to logits."""

    # isp finds the routers by this attribute, as in models of transformers.
    _can_record_outputs = {"router_logits": _Recorder()}  # noqa: RUF012

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config_json = {"num_experts_per_tok": config.experts_per_token}
        self.init_std = config.init_std
        self.init_std_of_outputs = config.init_std / math.sqrt(2 * config.num_layers)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.apply(self._init_weights)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of tokens and positions [B, S]: [B, S, V]."""
        logits: Tensor = self.lm_head(self.model(tokens, positions))
        return logits

    @property
    def tp_plan(self) -> dict[str, str]:
        """The tensor-parallel plan, written as in transformers, for modes that split features."""
        mlps = "mlp", "mlp.shared_expert"
        columns = [f"self_attn.{x}_proj" for x in "qkv"]
        columns += [f"{mlp}.{x}_proj" for mlp in mlps for x in ("gate", "up")]
        rows = "self_attn.o_proj", *(f"{mlp}.down_proj" for mlp in mlps)
        styles = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
        return {f"model.layers.*.{name}": style for name, style in styles.items()}

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters of one module; call it for the submodules before."""
        match module:
            case nn.Linear() | nn.Embedding():
                nn.init.normal_(module.weight, std=self.init_std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            case nn.RMSNorm():
                nn.init.ones_(module.weight)
            case Attention():
                # Overwrite the weight that the case for nn.Linear has set in the submodule.
                nn.init.normal_(module.o_proj.weight, std=self.init_std_of_outputs)
            case MLP():
                nn.init.normal_(module.down_proj.weight, std=self.init_std_of_outputs)
            case Router():
                nn.init.normal_(module.weight, std=self.init_std)
            case Experts():
                nn.init.normal_(module.gate_up_proj, std=self.init_std)
                nn.init.normal_(module.down_proj, std=self.init_std_of_outputs)
