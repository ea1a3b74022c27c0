"""InternLM2 as its published `modeling_internlm2.py` lays its weights out, and nothing more."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["PlainInternLM2"]

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, VOCAB = 32, 8, 2, 40, 2, 96
D = HIDDEN // HEADS
CONFIG = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bias": False,
    "rope_theta": 1000.0,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float64",
}


class PlainInternLM2(nn.Module):
    """Tokens [B, S] -> logits [B, S, V], in float64."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"model.tok_embeddings": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
        for i in range(LAYERS):
            block = f"model.layers.{i}"
            sizes |= {
                f"{block}.attention.wqkv": ((HEADS + 2 * KV_HEADS) * D, HIDDEN),
                f"{block}.attention.wo": (HIDDEN, HIDDEN),
                f"{block}.feed_forward.w1": (INNER, HIDDEN),
                f"{block}.feed_forward.w3": (INNER, HIDDEN),
                f"{block}.feed_forward.w2": (HIDDEN, INNER),
                f"{block}.attention_norm": (HIDDEN,),
                f"{block}.ffn_norm": (HIDDEN,),
            }
        sizes["model.norm"] = (HIDDEN,)
        self.named = {
            f"{name}.weight": nn.Parameter(
                0.2 * torch.randn(size, dtype=torch.float64) + (len(size) == 1)
            )
            for name, size in sizes.items()
        }
        for index, parameter in enumerate(self.named.values()):
            self.register_parameter(str(index), parameter)

    def save(self, folder: Path) -> None:
        """Write it as it is published."""
        folder.mkdir()
        tensors = {name: parameter.detach() for name, parameter in self.named.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(CONFIG))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.named["model.tok_embeddings.weight"])
        for i in range(LAYERS):
            at = {
                name.removeprefix(f"model.layers.{i}."): parameter
                for name, parameter in self.named.items()
                if name.startswith(f"model.layers.{i}.")
            }
            x = x + self._attention(_norm(x, at["attention_norm.weight"]), at)
            y = _norm(x, at["ffn_norm.weight"])
            gate, up = y @ at["feed_forward.w1.weight"].T, y @ at["feed_forward.w3.weight"].T
            x = x + (F.silu(gate) * up) @ at["feed_forward.w2.weight"].T
        return _norm(x, self.named["model.norm.weight"]) @ self.named["output.weight"].T

    def _attention(self, x: Tensor, at: dict[str, Tensor]) -> Tensor:
        shared = HEADS // KV_HEADS
        qkv = rearrange(
            x @ at["attention.wqkv.weight"].T, "b s (h g d) -> b s h g d", g=2 + shared, d=D
        )
        q = rearrange(qkv[..., :shared, :], "b s h g d -> b (h g) s d")
        k, v = (rearrange(qkv[..., i, :], "b s h d -> b h s d") for i in (-2, -1))
        k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True)
        return rearrange(y, "b h s d -> b s (h d)") @ at["attention.wo.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])


def _turned(x: Tensor) -> Tensor:
    inverse = CONFIG["rope_theta"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(x.shape[2]).double()[:, None] * inverse
    cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], -1) * sin
