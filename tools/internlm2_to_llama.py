"""Rewrite a model folder of InternLM2 as a Llama that computes the same logits, for `model.hf`.

    python tools/internlm2_to_llama.py internlm2-7b internlm2-7b-llama

The code of InternLM2 is not in transformers. Source of names and layouts:
`modeling_internlm2.py` and `configuration_internlm2.py` in its model folders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from isp.checkpoint.folder import describe_contents
from isp.models.huggingface.weight_files import WeightFiles, WeightWriter, copy_tokenizer
from isp.utils.files import read_json

NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
"""Parts of InternLM2's parameter names, and their names in transformers' Llama."""
KIND = "InternLM2ForCausalLM"
DROPPED = ("architectures", "attn_implementation", "auto_map", "bias", "model_type")
"""Keys of InternLM2's config.json that a Llama's lacks, or has with another value."""


def described(config: dict[str, Any]) -> dict[str, Any]:
    """Return the Llama's config.json; raise ValueError if `config` is not an InternLM2's."""
    known = config.get("model_type"), config.get("architectures", [KIND])
    if known != ("internlm2", [KIND]):
        raise ValueError(f"config.json has {known[0]} {known[1]}, not internlm2 [{KIND}]")
    kept = {key: value for key, value in config.items() if key not in DROPPED}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return kept | kind | {"attention_bias": config.get("bias", True), "mlp_bias": False}


def renamed(name: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the Llama's tensors that one tensor of InternLM2 becomes, with their names."""
    # Older folders have this tensor. A Llama has none: it computes it from rope_theta.
    if name.endswith("rotary_emb.inv_freq"):
        return
    if ".attention.wqkv." in name:
        # The rows of the fused weight are, for each KV head: its query heads, then its key head,
        # then its value head.
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        shared, size = heads // groups, config["hidden_size"] // heads
        of_groups = tensor.unflatten(0, (groups, shared + 2, size))  # [G, H/G + 2, d, ..]
        for x, rows in zip("qkv", of_groups.split([shared, 1, 1], dim=1), strict=True):
            yield name.replace("attention.wqkv", f"self_attn.{x}_proj"), rows.flatten(0, 2)
        return
    for theirs, own in NAMES.items():
        name = name.replace(f".{theirs}.", f".{own}.")
    yield "lm_head.weight" if name == "output.weight" else name, tensor


def convert(source: Path, target: Path) -> None:
    """Write the model in `source` as a Llama to `target`.

    At most the tensors of one file are in memory at a time.
    """
    if describe_contents(target) not in ("is empty", "does not exist"):
        raise ValueError(f"{target} {describe_contents(target)}: name a new or an empty folder")
    config = read_json(source / "config.json")
    llama, files = described(config), WeightFiles(source)
    with WeightWriter(target) as writer:
        for name in sorted(files.names):
            for own, tensor in renamed(name, files.read(name), config):
                writer.add(own, tensor)
    (target / "config.json").write_text(json.dumps(llama, indent=2) + "\n")
    copy_tokenizer(source, target)
    if (tokenizer := target / "tokenizer_config.json").is_file():
        kept = read_json(tokenizer)
        # These keys name InternLM2's own code, which is not copied.
        for of_code in ("auto_map", "tokenizer_class"):
            kept.pop(of_code, None)
        tokenizer.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a new or an empty folder")
    given = parser.parse_args()
    convert(given.source, given.target)
