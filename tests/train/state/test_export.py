"""Runs of the decoder exported as folders of transformers, from every layout, in every digit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from safetensors.torch import load_file

from isp.checkpoint import Checkpointer, TrainState
from isp.checkpoint.state import CheckpointWeights
from isp.cli import main
from isp.config import JobConfig, load_config
from isp.config.sections import CheckpointConfig
from isp.core.layers.module import MasterStream
from isp.core.mesh import Axis, Mode
from isp.models.huggingface import weight_files as model_folder
from isp.parity.forked import RankError
from isp.train.state.export import export
from isp.train.state.saved_run import saved_values
from model.config import ModelConfig
from model.decoder import Decoder
from tests.model.decoders import MADE
from tests.model.folders import loaded, of_decoder
from tests.ranks import run_ranks
from tests.train.jobs import run_folders, run_forked, write_job
from tests.train.runs import SEQ_LEN, Layout, Meshes, Run, Task, make_run

pytest.importorskip("transformers", minversion="5")

LAYOUTS = {
    "isp": Layout(tensor=2, weight=4, data=2),
    "mtp": Layout(mode=Mode.MTP, tensor=2, data=2),
    "stages": Layout(tensor=2, weight=2, pipeline=2, micro=2),
}
CASES = {
    "isp": ["llama", "mistral", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe"],
    "mtp": ["qwen2", "llama3"],
    "stages": ["llama, tied"],
}
SAVED = [("isp", "mistral"), ("isp", "mixtral"), ("isp", "qwen3_moe"), ("mtp", "qwen2")]


def _config(folder: Path, name: str) -> JobConfig:
    """Return a configuration of the decoder `name`."""
    model = TypeAdapter(ModelConfig).dump_python(MADE[name], mode="json")
    values = {
        "model": model,
        "data": {"source": str(folder), "seq_len": SEQ_LEN},
        "training": {"dtype": "float64"},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(values))
    return load_config(path)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Return the model of transformers for each decoder, by its name."""
    return {name: of_decoder(MADE[name], SEQ_LEN) for of in CASES.values() for name in of}


def _begin(run: Run, state: dict[str, torch.Tensor]) -> None:
    """Load the weights of a transformers model, which have the same names, into a run."""
    with torch.no_grad():
        for item in run.parameters:
            item.parameter.copy_(item.layout.shard(state[item.name]))
    run.optimizer.take_up_weights()
    run.step.weights_changed()


def _go(rank: int, models: dict[str, Any], configs: dict[str, JobConfig], saved: Path) -> Any:
    """Return loss and gradient norm of a first step, for all families in all layouts."""
    meshes, found = Meshes(rank), {}
    for of, layout in LAYOUTS.items():
        for name in CASES[of] if rank < layout.world else ():
            run = make_run(meshes.of(layout), layout, Task(model=MADE[name], packed=False))
            _begin(run, models[name].model.state_dict())
            if (of, name) in SAVED:
                _save(run, configs[name], saved / of / name)
            found[of, name] = run.numbers([0])[0]
            run.close()
    return found


def _save(run: Run, config: JobConfig, folder: Path) -> None:
    mesh = run.step.mesh
    state = TrainState(parameters=run.parameters, optimizer=run.optimizer, topology=mesh.topology)
    with Checkpointer(folder, CheckpointConfig(), world=mesh[Axis.WORLD]) as checkpointer:
        shared = saved_values(config, mesh.topology)
        checkpointer.save(1, state, tokens=0, shared=shared, wait=True)


def test_every_layout_computes_as_transformers(models, tmp_path, monkeypatch) -> None:
    """Catches a row in another place: of a segment, a KV group or a rank's interval; and rotary
    angles.

    Exports from two layouts must have the original tensors bit by bit, in several small files.
    """
    configs = {name: _config(tmp_path, name) for name in models}
    of_ranks = run_ranks(4, _go, models, configs, tmp_path, timeout_seconds=110)
    assert len(of_ranks[0]) == sum(map(len, CASES.values()))
    for (of, name), (loss, norm) in of_ranks[0].items():
        task = Task(model=MADE[name], packed=False)
        batches = [task.batch(0, place) for place in range(LAYOUTS[of].global_batch)]
        wanted_loss, wanted_norm = _plainly(models[name], batches)
        assert math.isclose(loss, wanted_loss, rel_tol=1e-9), (of, name)
        assert math.isclose(norm, wanted_norm, rel_tol=1e-9), (of, name)
    monkeypatch.setattr(model_folder, "_FILE_BYTES", 9000)
    for of, name in SAVED:
        again = tmp_path / "again" / of / name
        done = export(tmp_path / of / name, again)
        assert done.num_tensors == len(_tensors(again)) > 10
        assert len(list(again.glob("model-*.safetensors"))) > 3
        state, before = loaded(again).model.state_dict(), models[name].model.state_dict()
        assert all(torch.equal(state[key], before[key]) for key in before), name


def _plainly(reference: Any, batches: list[Any]) -> tuple[float, float]:
    """Return loss and gradient norm of a step of the reference."""
    reference.zero_grad()
    logits = torch.cat([reference(batch.tokens) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = [p.grad.flatten() for p in reference.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients).norm().item()


def _logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [1, S, V] of tokens [1, S]."""
    with torch.no_grad():
        logits: torch.Tensor = decoder(tokens, torch.arange(tokens.shape[1])[None])
        return logits


def test_a_trained_model_gives_the_same_logits_in_transformers(tmp_path, capsys) -> None:
    """Catches an export of other weights than the last step's, and of an outdated configuration."""
    job = write_job(tmp_path)
    words = ["--training.dtype=float64", "--model.rope_theta=500.0"]
    sizes_of_isp = ["--parallel.tensor.size=2", "--parallel.weight.size=4"]
    run_forked(job, *words, *sizes_of_isp, "--training.steps=6", num_ranks=4)
    (run,) = run_folders(job)
    assert main(["checkpoint", "export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr()
    assert ": llama, " in said.out
    assert "step_6" in said.out
    assert "note: the run names no tokenizer" in said.err
    weights = CheckpointWeights(run)
    config = load_config(job, words).model
    ours, start = Decoder(config).double(), Decoder(config).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.read(name))
    theirs = loaded(tmp_path / "hf")
    tokens = torch.arange(3, 11)[None]
    logits, expected = theirs(tokens), _logits(ours, tokens)
    assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()
    assert (expected - _logits(start, tokens)).abs().max() > 1e-2  # it was trained


def test_an_export_holds_one_tensor_at_a_time(tmp_path, monkeypatch) -> None:
    """Catches a model that is read whole before its first file is written."""
    run_forked(write_job(tmp_path), "--training.steps=1", "--model.num_layers=2")
    files: list[int] = []

    def read(self: CheckpointWeights, name: str) -> torch.Tensor:
        files.append(len(list((tmp_path / "hf").iterdir())))
        return whole(self, name)

    whole = CheckpointWeights.read
    monkeypatch.setattr(CheckpointWeights, "read", read)
    monkeypatch.setattr(model_folder, "_FILE_BYTES", 1500)
    export(tmp_path / "out" / "job" / "latest", tmp_path / "hf", dtype="bfloat16")
    assert files[0] == 0
    assert files == sorted(files)
    assert len(set(files)) > 8
    found = _tensors(tmp_path / "hf")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_impossible_export_is_refused(tmp_path, capsys) -> None:
    """Catches an export that overwrites a model, or leaves a partial one."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).touch()
    for words, fault in (
        ((str(tmp_path), "--hf", str(source)), "holds a Hugging Face model"),
        ((str(tmp_path), "--hf", str(tmp_path / "new")), "is not a checkpoint"),
    ):
        assert main(["checkpoint", "export", *words]) == 2
        said = capsys.readouterr().err
        assert fault in said
        assert "Traceback" not in said
    assert not (tmp_path / "new").exists()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_weights_that_are_loaded_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches minutes of random initialization in a run that resumes or loads its weights."""
    job, few = write_job(tmp_path), ("--training.steps", "1")
    run_forked(job, *few)
    (first,) = run_folders(job)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("drawn")

    monkeypatch.setattr(MasterStream, "drawn", refuse)
    run_forked(job, "--training.steps", "2")
    run_forked(job, *few, "--job.name", "other", "--checkpoint.initial_load_path", str(first))
    with pytest.raises(RankError, match=r"making the initial weights failed on rank 0: .* drawn"):
        run_forked(job, *few, "--job.name", "fresh")
