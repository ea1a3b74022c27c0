"""Small models of transformers in float64, and their greedy continuations of prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isp.checkpoint import Checkpointer, TrainState
from isp.config import load_config
from isp.config.sections import CheckpointConfig
from isp.core.comm import Mesh
from isp.core.mesh import Axis, Topology
from isp.evaluation.engine import Engine, choose_layout
from isp.evaluation.source import Source, open_source
from isp.models.build import build_model
from isp.models.huggingface.tiny import kept_in_float64, tiny_model
from isp.train.state.saved_run import saved_values
from model.build import language_model
from tests.model.folders import in_float64
from tests.toolkit import topology
from tools.architectures import ARCHITECTURES

__all__ = [
    "FAMILIES",
    "HYBRIDS",
    "PROMPTS",
    "checkpoint_of",
    "made",
    "opened",
    "read",
    "saved",
    "written",
]

WINDOW = 9
_SIZES = {
    "vocab_size": 258,  # does not divide by 4 ranks
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt2": {},
}
HYBRIDS = (
    "lfm2 (conv)",
    "qwen3_next",
    "kimi_linear",
    "nemotron_h",
    "mamba2",
    "jamba",
    "minimax",
    "olmo_hybrid",
    "deepseek_v32",
    "minimax_m3_vl_text (sparse)",
)
"""Families with convolutions, scans or key choice; mamba2 has no attention, and mtp does not split
olmo_hybrid.
"""
DECODER = ("llama", "qwen3")
"""Families that the decoder computes; their rotary angles are not rounded, like the decoder's."""

PROMPTS = [[5, 3, 9], [7] + [(11 * i) % 151 for i in range(2 * WINDOW)], [1]]
"""Prompts of unequal lengths; the second exceeds the window, others reach it during generation."""


@cache
def made(family: str) -> Any:
    """Return the small model of a family, with random weights, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if family in HYBRIDS:
        whole = AutoConfig.for_model(family.split()[0], **ARCHITECTURES[family])
        whole.eos_token_id = None
        return _without_ties(tiny_model(whole).eval())
    sizes: dict[str, Any] = dict(_SIZES)
    if family == "gpt2":
        sizes = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 258,
            "eos_token_id": None,
            "bos_token_id": None,
            "initializer_range": 0.3,
        }
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float64
    )
    if family in DECODER:
        in_float64(model)
    return kept_in_float64(model).eval()


def _without_ties(model: Any) -> Any:
    """Return the model with indexers that have no ties: two heads are never both zero after the
    ReLU.

    The choice between equal keys depends on their number, so layouts could differ.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("indexer.wq_b.weight"):
            heads = parameter.data.unflatten(0, (model.config.index_n_heads, -1))
            heads[1] = -heads[0]
    return model


def saved(family: str, folder: Path) -> Path:
    """Return the folder with the same model in Hugging Face's format."""
    from transformers import AutoModelForCausalLM

    model = made(family)
    plain = AutoModelForCausalLM.from_config(model.config).double()
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    return folder


def checkpoint_of(family: str, folder: Path) -> Path:
    """Return the folder with the same model as a checkpoint of ISP's decoder, at step 0."""
    model, path = made(family), folder / "config.yaml"
    theirs = model.config
    keys = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "num_layers": theirs.num_hidden_layers,
        "num_heads": theirs.num_attention_heads,
        "num_kv_heads": theirs.num_key_value_heads,
        "head_dim": theirs.head_dim,
        "intermediate_size": theirs.intermediate_size,
        "norm_eps": theirs.rms_norm_eps,
        "rope_theta": theirs.rope_parameters["rope_theta"],
        "sliding_window": getattr(theirs, "sliding_window", None),
        "qk_norm": family == "qwen3",
    }
    folder.mkdir(exist_ok=True)
    values = {"model": keys, "data": {"source": "x"}, "training": {"dtype": "float64"}}
    path.write_text(json.dumps(values))
    config, mesh = load_config(path), Mesh(topology(), 0)
    built = build_model(
        language_model(config.model, "float64"),
        config.parallel,
        mesh,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    with torch.no_grad():
        for item in built.parameters:
            item.parameter.copy_(item.layout.shard(model.state_dict()[item.name]))
    state = TrainState(parameters=built.parameters, optimizer=None, topology=mesh.topology)
    into = folder / "checkpoint"
    with Checkpointer(into, CheckpointConfig(), world=mesh[Axis.WORLD]) as checkpointer:
        shared = saved_values(config, mesh.topology)
        checkpointer.save(0, state, tokens=0, shared=shared, wait=True)
    return into


def opened(path: Path, rank: int, ranks: int, words: Sequence[str] = ()) -> tuple[Source, Engine]:
    """Return the engine of one of several ranks for a checkpoint or folder in float64."""
    source = open_source(path, dtype="float64", tokenizer="bytes")
    layout = choose_layout(source.model, ranks, words)
    assert layout.ranks == ranks
    mesh = Mesh(Topology.create(ranks, layout.parallel), rank)
    return source, source.engine(layout.parallel, mesh, torch.device("cpu"))


@cache
def read(model: Any, ids: tuple[int, ...]) -> Tensor:
    """Return the logits of the plain model [S, V]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def written(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the plain model's greedy continuation, with a full forward for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(read(model, tuple(ids))[-1].argmax()))
    return ids[len(prompt) :]
