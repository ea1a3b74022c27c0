"""The decoder and its training loop in plain torch: the reference of every layout.

The decoder is plain PyTorch, which test_decoder.py compares with transformers. Nothing of the
project's layouts is used here: documents are computed one by one, with torch's own AdamW.

B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import OptimizerConfig
from model.config import ModelConfig
from model.decoder import Decoder
from tests.core.optim.plain_muon import PlainMuon

__all__ = ["PlainDecoder", "document_bounds", "plain_adamw", "train_plainly"]


class PlainDecoder(nn.Module):
    """A model from tokens to logits that computes each document alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.decoder = config, Decoder(config)

    def forward(self, tokens: Tensor, positions: Tensor, bounds: Sequence[int]) -> Tensor:
        """Return logits [B, S, V] of tokens and positions [B, S]; `bounds`, 0 .. S, separate
        documents.
        """
        documents = [self.decoder(tokens[:, a:b], positions[:, a:b]) for a, b in pairwise(bounds)]
        return torch.cat(documents, 1)

    def load_weights(self, weights: Mapping[str, Tensor]) -> PlainDecoder:
        """Load whole weights by name."""
        missing, unexpected = self.decoder.load_state_dict(weights, strict=False)
        tied = ["lm_head.weight"] if self.config.tie_embeddings else []
        assert (missing, unexpected) == (tied, [])
        return self


def document_bounds(batch: MicroBatch) -> list[int]:
    """Return the starts of the documents of a row, and its end."""
    if batch.cu_seqlens is None:
        return [0, batch.tokens.shape[1]]
    bounds: list[int] = batch.cu_seqlens.tolist()
    return bounds


def plain_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return torch's AdamW with weight decay of matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )


def plain_muon(model: nn.Module, config: OptimizerConfig) -> PlainMuon:
    """Return Muon for the matrices of blocks and AdamW for other weights; q, k and v may be per
    head.
    """

    def group(name: str, p: nn.Parameter) -> dict[str, Any]:
        if p.dim() < 2 or ".layers." not in name:
            decay = config.weight_decay if p.dim() > 1 else 0.0
            return {"params": [p], "rule": "adamw", "cuts": (), "weight_decay": decay}
        keys, cuts, scale = config.muon, [slice(None)], config.muon.lr / config.lr
        if keys.per_head and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
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
    """Return loss and gradient norm of each step, given its learning rate and micro-batches."""
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
