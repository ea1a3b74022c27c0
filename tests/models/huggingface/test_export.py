"""Checkpoints of `model.hf` as folders that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from isp.checkpoint.state import CheckpointWeights
from isp.cli import main
from isp.models.huggingface.tiny import tiny_config
from isp.models.loading import exported_tensors
from tests.models.folders import load_folder, write_folder, write_job
from tests.train.jobs import run_folders, run_forked
from tools.architectures import config_of

KINDS = "mixtral qwen3_moe gpt_oss deepseek_v2 qwen3_next minimax gpt2 gpt_neox phi3"


@pytest.mark.parametrize("kind", KINDS.split())
def test_an_export_has_the_names_and_shards_of_save_pretrained(tmp_path: Path, kind: str) -> None:
    """Catches experts under their names in memory, which vLLM does not load."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(config_of(kind)))
    model.save_pretrained(tmp_path)
    weights = dict(model.named_parameters())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    found = dict(exported_tensors(str(tmp_path), shapes, lambda name: weights[name].detach()))
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_trained_checkpoint_exports_all_weights_and_buffers(tmp_path: Path) -> None:
    """Catches buffers that are left out, and weights from before training."""
    source = write_folder(tmp_path / "model", "deepseek_v3")
    file = source / "model.safetensors"
    before = load_file(file)
    for name, tensor in before.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.arange(tensor.numel()) / 7)
    # what transformers does not load: the layer of a further token
    lost = ("eh_proj.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight")
    before |= {f"model.layers.61.{name}": torch.randn(3, 5) for name in lost}
    save_file(before, file, metadata={"format": "pt"})
    (source / "tokenizer.json").write_text("{}")
    job = write_job(tmp_path, source)
    run_forked(job, "--training.steps=2", "--parallel.tensor.size=2", "--parallel.weight.size=2")
    (run,) = run_folders(job)
    assert main(["checkpoint", "export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(x, before[n]) for n, x in after.items() if ".61." in n)
    weights = CheckpointWeights(run)
    loaded = load_folder(tmp_path / "hf")
    assert loaded.dtype is torch.float64
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights.read(name)), name
    kept = dict(loaded.named_buffers())
    (name,) = (name for name in before if name.endswith("e_score_correction_bias"))
    assert torch.equal(kept[name].float(), before[name].float())
    assert kept[name].abs().max() > 0.3
    norm = "model.norm.weight"
    assert not torch.equal(weights.read(norm), before[norm].double())
