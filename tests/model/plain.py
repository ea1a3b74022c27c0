"""The decoder and its training loop once more, in plain torch: what every layout has to equal.

Nothing of it comes from the project but the names of the configuration: separate projections, one
`scaled_dot_product_attention` a document, rotation by complex numbers, torch's own AdamW.

B batch, S sequence, D hidden size, H query heads, K key/value heads, d head size, n document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.data.batch import MicroBatch
from isp.layers.module import RowsOf
from isp.settings import OptimizerConfig
from model.config import ModelConfig
from model.weight_names import earlier_names
from tests.optim.plain_muon import PlainMuon

__all__ = ["PlainDecoder", "document_bounds", "plain_adamw", "train_plainly"]


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, inner, d, eps = (
            config.hidden_size,
            config.intermediate_size,
            config.head_size,
            config.norm_eps,
        )
        q, kv = config.num_heads * d, config.kv_heads * d
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.q = nn.Linear(hidden, q, bias=config.qkv_bias)
        self.k = nn.Linear(hidden, kv, bias=config.qkv_bias)
        self.v = nn.Linear(hidden, kv, bias=config.qkv_bias)
        self.q_norm = nn.RMSNorm(d, eps=eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(d, eps=eps) if config.qk_norm else nn.Identity()
        self.o = nn.Linear(q, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor, bounds: Sequence[int]) -> Tensor:
        h, d = self.norm1(x), self.config.head_size
        q = _turned(self.q_norm(self.q(h).unflatten(-1, (-1, d))), turn)  # [B, S, H, d]
        k = _turned(self.k_norm(self.k(h).unflatten(-1, (-1, d))), turn)  # [B, S, K, d]
        v = self.v(h).unflatten(-1, (-1, d))
        documents = [self._attend(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in pairwise(bounds)]
        x = x + self.o(torch.cat(documents, 1).flatten(2))
        h = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, window = q.shape[1], self.config.sliding_window
        place = torch.arange(n)
        distance = place[:, None] - place[None, :]
        seen = (distance >= 0) & (distance < (n if window is None else window))
        out: Tensor = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2)  # [B, n, H, d]


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Multiply the pairs (x_i, x_{i + d/2}) by `turn` [B, S, d/2], complex numbers."""
    pairs = torch.complex(*x.chunk(2, -1)) * turn.unsqueeze(2)
    return torch.cat((pairs.real, pairs.imag), -1)


_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **{x: f"self_attn.{x}_proj" for x in ("q", "k", "v", "o")},
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
"""The project's names of a block's modules."""


class PlainDecoder(nn.Module):
    """Tokens to logits; `frequencies` [d/2], where given, are the rotary ones."""

    def __init__(
        self, config: ModelConfig, *, frequencies: Tensor | None = None, logit_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.config, self.logit_scale = config, logit_scale
        pairs = torch.arange(config.head_size // 2, dtype=torch.float64)
        plain = torch.exp(-2 * pairs / config.head_size * math.log(config.rope_theta))
        self.frequencies = plain if frequencies is None else frequencies
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, bounds: Sequence[int]) -> Tensor:
        """tokens and positions [B, S] -> [B, S, V]; documents are cut at `bounds`, 0 .. S."""
        angles = positions.unsqueeze(-1) * self.frequencies  # [B, S, d/2]
        turn = torch.polar(torch.full_like(angles, self.logit_scale), angles)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turn, bounds)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> PlainDecoder:
        """Take the weights of the project's decoder, whole, under its names or earlier ones."""
        names, earlier, left = dict(self._names()), earlier_names(self.config), dict(weights)
        for name, parameter in names.items():
            source, first, _ = RowsOf(name) if name in weights else earlier[name]
            parameter.copy_(weights[source][first : first + len(parameter)])
            left.pop(source, None)
        assert not left, f"weights that the plain decoder has no place for: {left.keys()}"
        return self

    def _names(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "model.embed_tokens.weight", self.embedding.weight
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_embeddings:
            yield "lm_head.weight", self.head.weight
        for i, block in enumerate(self.blocks):
            for local, parameter in block.named_parameters():
                module, _, kind = local.partition(".")
                yield f"model.layers.{i}.{_NAMES[module]}.{kind}", parameter


def document_bounds(batch: MicroBatch) -> list[int]:
    """Where the documents of a row begin, and its end."""
    if batch.cu_seqlens is None:
        return [0, batch.tokens.shape[1]]
    bounds: list[int] = batch.cu_seqlens.tolist()
    return bounds


def plain_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's AdamW; matrices decay, vectors do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )


def plain_muon(model: nn.Module, config: OptimizerConfig) -> PlainMuon:
    """Muon of the matrices of blocks, AdamW of all else; per head as q, k and v have them."""

    def group(name: str, p: nn.Parameter) -> dict[str, Any]:
        if p.dim() < 2 or not name.startswith("blocks."):
            decay = config.weight_decay if p.dim() > 1 else 0.0
            return {"params": [p], "rule": "adamw", "cuts": (), "weight_decay": decay}
        keys, cuts, scale = config.muon, [slice(None)], config.muon.lr / config.lr
        if keys.per_head and name.rpartition(".")[0][-2:] in (".q", ".k", ".v"):
            size = model.config.head_size
            cuts = [slice(i, i + size) for i in range(0, len(p), size)]
        decay = keys.weight_decay
        return {
            "params": [p],
            "rule": "muon",
            "cuts": cuts,
            "weight_decay": decay,
            "lr_scale": scale,
        }

    return PlainMuon([group(*named) for named in model.named_parameters()], config)


def train_plainly(
    model: PlainDecoder,
    steps: Iterable[tuple[float, Sequence[MicroBatch]]],
    config: OptimizerConfig,
    *,
    max_norm: float,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, given its learning rate and micro-batches."""
    make = plain_muon if config.name == "muon" else plain_adamw
    optimizer, numbers = make(model, config), list[tuple[float, float]]()
    for lr, batches in steps:
        num_valid = sum(int((batch.labels != -100).sum()) for batch in batches)
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for batch in batches:
            logits = model(batch.tokens, batch.positions, document_bounds(batch))
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
            ) / max(num_valid, 1)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if num_valid:
            optimizer.step()
        numbers.append((total, norm.item()))
    return numbers
