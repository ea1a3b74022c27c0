"""Runs that train PEFT adapters, against PEFT itself in a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from isp.checkpoint.state import CheckpointWeights
from isp.cli import main
from isp.config import JobConfig, load_config
from isp.core.comm import Mesh
from isp.core.mesh import ParallelConfig, Topology
from isp.data.batch import BatchSampler
from isp.data.sources import open_datasets
from isp.evaluation.source import open_source
from isp.models.build import build_model
from isp.models.huggingface.tiny import kept_in_float64
from isp.step.job_models import trained_model
from isp.train.state.export import export
from tests.models.folders import write_folder, write_job
from tests.models.models import Rows, Trained, trained_plainly
from tests.train.jobs import numbers, run_folders, run_forked

TOLERANCE = 1e-9  # float64, sums in another order

KEYS: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "lora_only",
    "use_rslora": True,
}
OVERRIDES = ["--data.pack=false"]
OVERRIDES += [f"--model.adapter.{key}={json.dumps(value)}" for key, value in KEYS.items()]
SPREAD = ("--parallel.tensor.size=2", "--parallel.weight.size=4", "--data.micro_num=1")
STAGES = ("--parallel.pipeline.size=2", "--parallel.weight.size=1", "--data.micro_num=2")


def _base(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return kept_in_float64(model)


def _initial(config: JobConfig, *, frozen: bool = False) -> dict[str, Tensor]:
    """Return the initial weights of a run, or of its reference."""
    mesh = Mesh(Topology.create(1, ParallelConfig()), 0)
    built = build_model(
        trained_model(config).frozen() if frozen else trained_model(config),
        config.parallel,
        mesh,
        seed=config.training.seed,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    return {item.name: item.parameter.detach().clone() for item in built.parameters}


def _rows(config: JobConfig, steps: int) -> list[Rows]:
    """Return the batches of the first steps, each row with the token after it, which is its last
    label.
    """
    train = open_datasets(config.data, seed=config.training.seed).train
    sampler = BatchSampler(dataset=train, micro_bsz=2, micro_num=2)
    found = []
    for step in range(steps):
        batches = sampler.micro_batches(step, 0, 1)
        found.append(Rows(torch.cat([torch.cat((b.tokens, b.labels[:, -1:]), 1) for b in batches])))
    return found


def _assert_equal(found: Path, expected: Trained) -> None:
    steps = numbers(found)
    assert [step[1] for step in steps] == pytest.approx(expected.losses, abs=TOLERANCE)
    assert [step[2] for step in steps] == pytest.approx(expected.norms, abs=TOLERANCE)


def test_an_adapter_trains_and_loads_as_in_peft(tmp_path: Path) -> None:
    """Catches adapters that start differently in another layout, are lost on resume, or are scaled
    differently; checkpoints with the base model; and folders that PEFT reads as another model.
    """
    base = write_folder(tmp_path / "base", "qwen2")
    job = write_job(tmp_path, base)
    config = load_config(job, [*OVERRIDES, "--data.micro_num=2"])
    model: Any = get_peft_model(_base(base), LoraConfig(**KEYS), autocast_adapter_dtype=False)
    begun = _initial(config)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, begun[name]), name
        bound = (1 / parameter.shape[-1]) ** 0.5 if "lora_A" in name else 0.0
        assert "lora_" not in name or 0.9 * bound <= begun[name].abs().max() <= bound, name
        parameter.data.copy_(begun[name])
    data = _rows(config, 4)
    expected = trained_plainly(model, data, lr=1e-2)
    run_forked(job, *OVERRIDES, *SPREAD, "--training.steps=2", num_ranks=4)
    run_forked(job, *OVERRIDES, *STAGES, "--training.steps=4", num_ranks=2)
    (run,) = run_folders(job)
    _assert_equal(run, expected)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert CheckpointWeights(run).shapes.keys() == trained, "the base model is in no checkpoint"
    done = export(run, tmp_path / "adapter")
    assert done.model_type == "adapter"
    loaded: Any = PeftModel.from_pretrained(
        _base(base), tmp_path / "adapter", autocast_adapter_dtype=False, is_trainable=True
    )
    for name, weight in loaded.named_parameters():
        assert (weight - expected.weights[name]).abs().max() < TOLERANCE, name
    again = write_job(tmp_path, tmp_path / "adapter", "again")
    run_forked(again, OVERRIDES[0], *SPREAD, "--training.steps=2", num_ranks=4)
    _assert_equal(run_folders(again, "again")[0], trained_plainly(loaded, data[:2], lr=1e-2))
    for name, weight in _initial(load_config(again), frozen=True).items():
        assert (weight - expected.weights[name]).abs().max() < TOLERANCE, name
    for path in (run, tmp_path / "adapter"):
        assert main(f"generate {path} --prompt a --tokenizer bytes".split()) == 0
    source = open_source(tmp_path / "adapter", tokenizer="bytes")
    assert source.section.adapter == load_config(again).model.adapter


def test_target_modules_match_as_in_peft(tmp_path: Path) -> None:
    """Catches a text read as letters, or as a name or pattern where PEFT does not."""
    folder = write_folder(tmp_path / "base", "qwen2", weights=False)
    job, base = write_job(tmp_path, folder), transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder)
    for words in (
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|down)_proj", "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["1.mlp.up_proj"]},
        {"exclude_modules": ["v_proj"]},
    ):
        theirs: Any = get_peft_model(
            base.from_config(config), LoraConfig(task_type="CAUSAL_LM", **words)
        )
        given = [
            f"--model.adapter.{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in words.items()
        ]
        ours = trained_model(load_config(job, given)).model
        assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()


def test_unsupported_adapter_keys_are_refused_by_name(tmp_path: Path) -> None:
    """Catches keys that are interpreted as something else, and errors deep inside PEFT."""
    job = write_job(tmp_path, write_folder(tmp_path / "base", "qwen3_moe", weights=False))
    for words, why in {
        "use_dora": "each rank holds only a part: use false",
        "r=0": "model.adapter.r=0 must be at least 1",
        "lora_r=4": "no such key",
        "target_modules=[k]": r'target_modules=\["k"\]: Target .* linear layers: k_proj,',
        "target_modules=q_proj": r"whole names, or all-linear: use a list, \[q_proj\], for their",
        "target_modules=q_proj,v_proj": r"use a list, \[q_proj, v_proj\], for",
        "target_modules=[all-linear]": "Use all-linear, without a list",
        "target_modules=(q": r'target_modules="\(q" is no regular expression \(missing \)',
        "exclude_modules=+q": r'exclude_modules="\+q" is no regular expression \(nothing to',
        "target_parameters=[mlp.gate.weight]": "which is not a stack of experts: use",
    }.items():
        with pytest.raises(ValueError, match=why):
            _ = trained_model(load_config(job, [f"--model.adapter.{words}"]))
    with pytest.raises(ValueError, match=r"model.adapter needs model.hf"):
        load_config(job, ["--model.hf=null", "--model.adapter.r=4"])
    folder = tmp_path / "adapter"
    LoraConfig(base_model_name_or_path="org/model").save_pretrained(folder)
    with pytest.raises(ValueError, match=r'base_model_name_or_path="org/model" .* is no folder'):
        load_config(job, [f"--model.hf={folder}"])
    with pytest.raises(ValueError, match=r"model.adapter.r=4 contradicts .* which has 8"):
        load_config(job, [f"--model.adapter.folder={folder}", "--model.adapter.r=4"])
    LoraConfig(layers_to_transform=[1]).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"layers_to_transform=\[1\] .* is not supported"):
        load_config(job, [f"--model.adapter.folder={folder}"])
