"""Models of Hugging Face in the decoder: loaded in every layout, trained, and written again."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from isp.checkpoint import Checkpointer, TrainState
from isp.checkpoint.whole import WholeWeights
from isp.cli import main
from isp.config import JobConfig, load_config
from isp.layers.module import MasterStream
from isp.layers.rope_scaling import RopeScaling, RopeScalingType
from isp.models import folder as model_folder
from isp.parallel import Axis, Mode
from isp.run.forked import RankError
from isp.settings import CheckpointConfig
from isp.train.begin_from import beyond_positions, load_folder
from isp.train.export import export
from isp.train.resume import saved_values
from model.config import ModelConfig
from model.decoder import Decoder
from model.huggingface import model_values
from tests.model.folders import FAMILIES, Logits, loaded, make_folder
from tests.ranks import run_ranks
from tests.train.jobs import run_folders, run_forked, tensors, write_job
from tests.train.runs import SEQ_LEN, Layout, Meshes, Task, make_run

transformers = pytest.importorskip("transformers", minversion="5")

NAMES = [*FAMILIES, "internlm2"]
LAYOUTS = {
    "isp": Layout(tensor=2, weight=4, data=2),
    "mtp": Layout(mode=Mode.MTP, tensor=2, data=2),
    "stages": Layout(tensor=2, weight=2, pipeline=2, micro=2),
}

CASES = {
    "isp": NAMES,
    "mtp": ["qwen2", "internlm2"],
    "stages": ["llama, tied"],
}
SAVED = [*(("isp", name) for name in NAMES[::2]), ("mtp", "qwen2"), ("mtp", "internlm2")]


def _config(folder: Path, source: Path, **model: Any) -> JobConfig:
    """A configuration that begins from `source`."""
    path = folder / "config.yaml"
    values = {
        "model": {"init_from": str(source), **model},
        "data": {"source": str(path), "seq_len": SEQ_LEN},
        "training": {"dtype": "float64"},
    }
    path.write_text(json.dumps(values))
    return load_config(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Logits]]:
    """A folder of each family, and what computes its logits."""
    root = tmp_path_factory.mktemp("folders")
    found = {}
    for index, name in enumerate(NAMES):
        folder = root / str(index)
        found[name] = folder, make_folder(name, folder)
    return found


def _go(rank: int, configs: dict[str, JobConfig], saved: Path) -> dict[Any, Any]:
    """Loss and gradient norm of a first step, of all families in all layouts."""
    meshes, found = Meshes(rank), {}
    for of, layout in LAYOUTS.items():
        if rank >= layout.world:
            continue
        for name, config in configs.items():
            task = Task(model=config.model, packed=False)
            if name not in CASES[of]:
                continue
            run = make_run(meshes.of(layout), layout, task)
            state = TrainState(
                parameters=run.parameters,
                optimizer=run.optimizer,
                topology=run.step.mesh.topology,
            )
            load_folder(state, config.model)
            run.step.weights_changed()
            if (of, name) in SAVED:
                _save(run, state, config, saved / of / name)
            found[of, name] = run.numbers([0])[0]
            run.close()
    return found


def _save(run: Any, state: TrainState, config: JobConfig, folder: Path) -> None:
    mesh = run.step.mesh
    with Checkpointer(folder, CheckpointConfig(), world=mesh[Axis.WORLD]) as checkpointer:
        shared = saved_values(config, mesh.topology)
        checkpointer.save(1, state, tokens=0, shared=shared, wait=True)


def _logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """[1, S] -> [1, S, V]."""
    with torch.no_grad():
        logits: torch.Tensor = decoder(tokens, torch.arange(tokens.shape[1])[None])
        return logits


def test_every_layout_computes_what_transformers_does(folders, tmp_path, monkeypatch) -> None:
    """A row in another place: a segment, a KV group, a rank's interval, or an angle of its own.

    Exported again from two layouts, every tensor is the one that was read, bit for bit, in several
    files of which none holds much.
    """
    configs = {name: _config(tmp_path, folder) for name, (folder, _) in folders.items()}
    of_ranks = run_ranks(4, _go, configs, tmp_path, timeout_seconds=110)
    for (of, name), (loss, norm) in of_ranks[0].items():
        layout, (_, reference) = LAYOUTS[of], folders[name]
        task = Task(model=configs[name].model, packed=False)
        batches = [task.batch(0, place) for place in range(layout.global_batch)]
        wanted_loss, wanted_norm = _plainly(reference, batches)
        assert math.isclose(loss, wanted_loss, rel_tol=1e-9), (of, name)
        assert math.isclose(norm, wanted_norm, rel_tol=1e-9), (of, name)
    monkeypatch.setattr(model_folder, "_FILE_BYTES", 9000)
    for of, name in SAVED:
        folder, again = folders[name][0], tmp_path / "again" / of / name
        done = export(tmp_path / of / name, again)
        there, here = _tensors(folder), _tensors(again)
        assert done.num_tensors == len(here) > 10
        assert len(list(again.glob("model-*.safetensors"))) > 3
        assert there.keys() == here.keys(), name
        assert all(torch.equal(there[key], here[key]) for key in there), name
        if name != "internlm2":
            state, before = loaded(again).model.state_dict(), folders[name][1].model.state_dict()
            assert all(torch.equal(state[key], before[key]) for key in before), name


def _plainly(reference: Logits, batches: list[Any]) -> tuple[float, float]:
    """Loss and gradient norm of a step."""
    assert isinstance(reference, torch.nn.Module)
    reference.zero_grad()
    logits = torch.cat([reference(batch.tokens) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = [p.grad.flatten() for p in reference.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients).norm().item()


def test_a_trained_model_is_the_same_in_transformers(folders, tmp_path, capsys) -> None:
    """An export of other weights than the last step's, or of a stale configuration."""
    source, _ = folders["llama, tied"]
    job = _job(tmp_path, source)
    words = ["--data.seq_len=64", "--training.dtype=float64", "--model.rope_theta=500.0"]
    sizes_of_isp = ["--parallel.tensor.size=2", "--parallel.weight.size=4"]
    run_forked(job, *words, *sizes_of_isp, "--training.steps=6", num_ranks=4)
    (run,) = run_folders(job)
    (source / "tokenizer.json").write_text("{}")
    assert main(["checkpoint", "export", str(run), "--hf", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr()
    assert "step_6" in said.out
    assert said.err == ""
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    weights = WholeWeights(run)
    config = load_config(job, words).model
    ours, start = Decoder(config).double(), Decoder(config).double()
    start.load_state_dict(_tensors(source), strict=False)  # the head is the table
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.read(name))
    theirs = loaded(tmp_path / "hf")
    tokens = torch.arange(3, 11)[None]
    logits, expected = theirs(tokens), _logits(ours, tokens)
    assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()
    assert (expected - _logits(start, tokens)).abs().max() > 1e-2  # it was trained


def test_an_export_has_one_tensor_at_a_time(folders, tmp_path, monkeypatch) -> None:
    """A model that is read whole before its first file is written."""
    run_forked(_job(tmp_path, folders["qwen3"][0]), "--training.steps=1")
    files: list[int] = []

    def read(self: WholeWeights, name: str) -> torch.Tensor:
        files.append(len(list((tmp_path / "hf").iterdir())))
        return whole(self, name)

    whole = WholeWeights.read
    monkeypatch.setattr(WholeWeights, "read", read)
    monkeypatch.setattr(model_folder, "_FILE_BYTES", 4000)
    export(tmp_path / "out" / "job" / "latest", tmp_path / "hf", dtype="bfloat16")
    assert files[0] == 0
    assert files == sorted(files)
    assert len(set(files)) > 8
    found = _tensors(tmp_path / "hf")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_run_that_goes_on_reads_no_folder(folders, tmp_path) -> None:
    """Weights that are begun from anew when a run is started again."""
    source = tmp_path / "source"
    shutil.copytree(folders["qwen2"][0], source)
    job = _job(tmp_path, source)
    run_forked(job, "--training.steps=2")
    before = WholeWeights(*run_folders(job)).read("model.norm.weight")
    (source / "model.safetensors").unlink()
    run_forked(job, "--training.steps=3")
    weights = WholeWeights(*run_folders(job))
    assert weights.info.step == 3
    assert 0 < (weights.read("model.norm.weight") - before).abs().max() < 0.05


def test_master_weights_are_what_was_read(folders, tmp_path) -> None:
    """Master weights that are those of the random beginning, or were rounded on their way."""
    source, _ = folders["qwen2"]
    still = ["--optimizer.lr=1e-30", "--training.steps=1"]
    run_forked(_job(tmp_path, source), "--training.dtype=bfloat16", *still)
    (run,) = run_folders(tmp_path / "job.yaml")
    weights = WholeWeights(run)
    expected = _tensors(source)["model.norm.weight"]
    assert torch.equal(weights.read("model.norm.weight"), expected.bfloat16())
    master = tensors(run, weights.info.step)["optimizer.model.norm.weight.master"]
    assert torch.equal(master, expected.float())
    assert not torch.equal(master, expected.bfloat16().float())


def _job(folder: Path, source: Path) -> Path:
    """The job of `tests.train.jobs`, begun from the model in `source`."""
    job = write_job(folder)
    text = job.read_text()
    sizes = text[text.index("model:") : text.index("data:")]
    job.write_text(text.replace(sizes, f"model: {{init_from: {source}}}\n"))
    return job


def _cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _replaced_by_a_folder(folder: Path) -> None:
    (file := folder / "model.safetensors").unlink()
    file.mkdir()


def _changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        found = _tensors(folder)
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return act


def _described(**changes: object) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return act


NORM = "model.layers.0.input_layernorm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no folder": (shutil.rmtree, "is not a folder"),
    "cut short": (_cut_short, "model.safetensors is damaged or cut short"),
    "unreadable": (_replaced_by_a_folder, "model.safetensors cannot be read: Is a directory"),
    "missing": (_changed(lambda found: found.pop(NORM)), f"missing: {NORM}"),
    "family": (_described(model_type="gemma"), "use model.hf, which trains other"),
    "bias": (_described(attention_bias=True), "has attention_bias=true"),
    "a size that is none": (_described(hidden_size="32"), "hidden_size=32, which must be a"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_folder_is_refused_before_ranks_start(name, folders, tmp_path, capsys) -> None:
    """A folder that is found wrong by a traceback of some rank, or not at all."""
    source, (damage, words) = tmp_path / "source", DAMAGES[name]
    shutil.copytree(folders["llama"][0], source)
    job = _job(tmp_path, source)
    damage(source)
    assert main(["train", str(job), "--nproc", "2"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert f"model.init_from={source}" in said
    assert said.count("error") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_an_export_without_the_folder_that_was_begun_from(folders, tmp_path, capsys) -> None:
    """A run whose beginning was moved away, and cannot be had any more, or in silence only."""
    source, reference = folders["internlm2"]
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    changed = load_file(moved / "model.safetensors")
    for name in ("model.tok_embeddings.weight", "output.weight"):
        changed[name] = changed[name].repeat(3, 1)[:260].contiguous()  # as the bytes need
    save_file(changed, moved / "model.safetensors", metadata={"format": "pt"})
    _described(vocab_size=260)(moved)
    job = _job(tmp_path, moved)
    still = ["--optimizer.lr=1e-30", "--training.steps=1", "--training.dtype=float64"]
    run_forked(job, *still)
    shutil.rmtree(moved)
    assert main(["checkpoint", "export", str(tmp_path / "out" / "job"), "--hf", "x"]) == 2
    latest = str(tmp_path / "out" / "job" / "latest")
    assert main(["checkpoint", "export", latest, "--hf", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr()
    assert ": llama, " in said.out
    assert f"note: model.init_from={moved} is not there" in said.err
    assert "note: the run names no tokenizer" in said.err
    tokens = torch.arange(12)[None]
    expected = reference(tokens)
    logits = loaded(tmp_path / "hf")(tokens)[..., : expected.shape[-1]]
    assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()


def test_an_export_that_cannot_be_is_refused(folders, tmp_path, capsys) -> None:
    """An export that writes over a model, or leaves half a one."""
    source = folders["llama"][0]
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


@pytest.mark.parametrize(
    ("rope", "model", "trained"),
    [
        (None, {}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {}, 256),
        (None, {"rope_theta": 5e5}, None),
        (None, {"rope_scaling": RopeScaling(type=RopeScalingType.LINEAR, factor=8.0)}, None),
    ],
)
def test_rows_beyond_the_positions_of_a_folder_are_told(
    rope: dict[str, Any] | None, model: dict[str, Any], trained: int | None, tmp_path: Path
) -> None:
    """Catches a model that is trained at positions that it does not know, unasked and silently,
    and a warning of those that somebody has seen to.
    """
    found = {**transformers.LlamaConfig(max_position_embeddings=64).to_dict(), "rope_scaling": rope}
    found["rope_parameters"] = {**(rope or {"rope_type": "default"}), "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(found))
    values = {**model_values(found), **model, "init_from": str(tmp_path)}
    values["rope_scaling"] = model.get("rope_scaling") or (
        rope and RopeScaling(**values["rope_scaling"])
    )
    config = ModelConfig(**values)
    assert beyond_positions(config, trained or 64) == ""
    told = beyond_positions(config, 300)
    assert ("beyond the" in told) == (trained is not None)
    assert trained is None or f"300 tokens have positions beyond the {trained}" in told
    if not model:
        assert "its rotary" in beyond_positions(ModelConfig(hf=str(tmp_path)), 300)


def test_weights_that_are_loaded_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches minutes of random numbers at the start of a run that resumes or loads others."""
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
    make_folder("llama", tmp_path / "theirs")
    run_forked(_job(tmp_path, tmp_path / "theirs"), *few, "--job.name", "theirs")
