"""A user's model with a tied weight, dropout, parameters outside of modules, and buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isp

VOCAB = 96


class OwnBlock(nn.Module):
    """A block with one attention; `trouble` makes it misbehave."""

    def __init__(self, size: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, size // heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q = nn.Linear(size, size)
        self.k, self.v = (nn.Linear(size, kv_heads * self.head) for _ in range(2))
        self.out, self.up = nn.Linear(size, size), nn.Linear(size, 2 * size)
        self.down, self.dropout = nn.Linear(2 * size, size), nn.Dropout(dropout)
        self.trouble = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.trouble == "other order":
            k, q, v = self.k(y), self.q(y), self.v(y)
        else:
            q, k, v = self.q(y), self.k(y), self.v(y)
        q, k, v = (z.unflatten(-1, (-1, self.head)) for z in (q, k, v))
        x = x + self.dropout(self.out(isp.attention(q, k, v, window=20).flatten(2)))
        if self.trouble == "failure":
            raise ArithmeticError("as planned")
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Positions(nn.Embedding):
    """An embedding that indexes its weight itself, as Whisper's does."""

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight[positions]


class Own(nn.Module):
    """A model from tokens and positions [B, S] to logits [B, S, V].

    Its parameters `temperature` and `gains` are in no module that is called.
    """

    def __init__(self, *, dropout: float = 0.0, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, 32), Positions(64, 32)
        self.blocks = nn.ModuleList(OwnBlock(32, 4, 2, dropout) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.temperature = nn.Parameter(torch.ones(1))
        self.gains = nn.ParameterDict({"last": nn.Parameter(torch.ones(32))})
        self.register_buffer("precise", torch.ones(32, dtype=torch.float64))
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.gains["last"] * self.precise.to(x.dtype)
        return self.head(x) / self.temperature
