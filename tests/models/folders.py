"""Small folders of Hugging Face models, and jobs that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from tests.models.models import OF_ITS_OWN, SIZES

__all__ = ["TEXT_SIZES", "load_folder", "small_config", "write_folder", "write_job"]

TEXT_SIZES = {name: size for name, size in SIZES.items() if not name.endswith("_token_id")}
TEXT_SIZES |= {"vocab_size": 272, "num_hidden_layers": 2, "max_position_embeddings": 128}
_OWN = {
    "gpt2": {"n_layer": 2, "n_positions": 128},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"num_hidden_layers": 3},
    "deepseek_v32": {"num_hidden_layers": 3},
}

_JOB = """
job: {{name: {name}, dump_folder: {folder}/out}}
model: {{hf: {model}, checkpoint: 0.5}}
data: {{source: {folder}/text.txt, seq_len: 32, micro_bsz: 2}}
optimizer: {{lr: 1.0e-2}}
lr_scheduler: {{min_lr_factor: 1.0}}
training: {{steps: 5, device: cpu, dtype: float64, seed: 3}}
"""


def small_config(kind: str, **changes: Any) -> Any:
    """Return the configuration of a small model of this type."""
    own = {**OF_ITS_OWN.get(kind, {}), **_OWN.get(kind, {})}
    return transformers.AutoConfig.for_model(kind, **{**TEXT_SIZES, **own, **changes})


def write_folder(
    folder: Path, kind: str, *, weights: bool = True, own_names: bool = False, **changes: Any
) -> Path:
    """Write and return a folder with a small model.

    Its tensors have the names of the hub's files, or with `own_names` those in memory.
    """
    config = small_config(kind, **changes)
    if weights:
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, save_original_format=not own_names)
    else:
        config.save_pretrained(folder)
    return folder


def load_folder(folder: Path) -> Any:
    """Return the model that transformers loads from a folder, entirely in float64.

    Since version 5.24 transformers builds routers in float32 in any case, which rounds their
    weights.
    """
    kind = transformers.AutoModelForCausalLM
    model: Any = kind.from_pretrained(folder, dtype=torch.float64)
    rounded = [name for name, weight in model.named_parameters() if weight.dtype is torch.float32]
    read = load_file(folder / "model.safetensors") if rounded else {}
    for name in rounded:
        owner, _, local = name.rpartition(".")
        setattr(model.get_submodule(owner), local, nn.Parameter(read[name]))
    return model


def write_job(folder: Path, model: Path, name: str = "job") -> Path:
    """Write and return a job that trains `model` in `folder` for 5 steps in float64."""
    words = "".join(f"word {i} of many\n" for i in range(400))
    (folder / "text.txt").write_text(words)
    path = folder / f"{name}.yaml"
    path.write_text(_JOB.format(folder=folder, model=model, name=name))
    return path
