"""Saving and loading in one process: values, dtypes, and checkpoints that do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from isp.checkpoint import Checkpointer, CheckpointError, inspect
from isp.checkpoint.boxes import Shard
from isp.checkpoint.checkpointer import _Staging
from isp.config.sections import CheckpointConfig
from isp.core.comm import Channel
from tests.checkpoint.runs import LION, chosen, clear, expect, fill, make_run, whole_value
from tests.toolkit import topology

ONE = topology()
CONFIG = CheckpointConfig(async_mode="disabled")


def _checkpointer(folder: Path, config: CheckpointConfig = CONFIG) -> Checkpointer:
    return Checkpointer(folder, config, world=Channel.solo())


def _save(folder: Path, dtype: torch.dtype, step: int = 20, *, wide: int = 6) -> None:
    run = make_run(0, ONE, dtype, wide=wide)
    fill(run)
    _checkpointer(folder).save(step, run.state, tokens=640)


@pytest.mark.parametrize("saved", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.float64, torch.bfloat16])
def test_any_dtype_loads_any_other(tmp_path: Path, saved: torch.dtype, loaded: torch.dtype) -> None:
    """Catches masters rounded through bfloat16 weights, and weights that differ from their
    masters.
    """
    _save(tmp_path, saved)
    run = make_run(0, ONE, loaded)
    checkpointer = _checkpointer(tmp_path)
    info = chosen(checkpointer)
    checkpointer.load(info, run.state)
    narrow = saved is not torch.float64 and loaded is torch.float64
    assert expect(run, torch.float32 if narrow else None) > 0


def test_masters_are_saved_only_where_they_differ(tmp_path: Path) -> None:
    """Catches float32 weights written twice, and bfloat16 ones without their masters."""
    _save(tmp_path / "narrow", torch.bfloat16)
    _save(tmp_path / "wide", torch.float32)
    assert "bfloat16  float32         float32" in inspect(tmp_path / "narrow" / "step_20")
    assert "float32  -               float32" in inspect(tmp_path / "wide" / "step_20")


def test_values_of_each_rank_are_restored(tmp_path: Path) -> None:
    """Catches lost progress, shared values or rank values, and random states that are not
    bit-equal.
    """
    run = make_run(0, ONE, torch.float32)
    state = torch.get_rng_state()
    checkpointer = _checkpointer(tmp_path)
    checkpointer.save(3, run.state, tokens=5, shared={"config": "a: 1"}, local={"rng": state})
    info = chosen(checkpointer)
    resumed = checkpointer.load(info, run.state)
    assert (resumed.step, resumed.tokens, resumed.shared) == (3, 5, {"config": "a: 1"})
    assert resumed.local is not None
    assert torch.equal(resumed.local["rng"], state)


def test_weights_load_without_an_optimizer_but_not_the_reverse(tmp_path: Path) -> None:
    """Catches weights that need optimizer states to load, and an optimizer left without its
    states.
    """
    _save(tmp_path / "all", torch.bfloat16)
    run = make_run(0, ONE, torch.float32)
    weights = dataclasses.replace(run.state, optimizer=None)
    checkpointer = _checkpointer(tmp_path / "all")
    info = chosen(checkpointer)
    checkpointer.load(info, weights)
    for item in run.state.parameters:
        name, parameter, layout = item.name, item.parameter, item.layout
        expected = whole_value(name, "master", layout.global_shape).float()
        assert torch.equal(parameter.detach(), expected)
    only = _checkpointer(tmp_path / "weights")
    only.save(1, weights, tokens=0)
    info = chosen(only)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        only.load(info, run.state)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_a_warm_start_takes_only_weights(
    tmp_path: Path, saved: torch.dtype, loaded: torch.dtype
) -> None:
    """Catches moments or step counts that are loaded too, and masters left at their initial
    values.
    """
    _save(tmp_path, saved)
    run = make_run(0, ONE, loaded)
    checkpointer = _checkpointer(tmp_path)
    info = checkpointer.choose_initial(tmp_path / "step_20")
    resumed = checkpointer.load(info, run.state, weights_only=True)
    assert resumed.local is None
    state = run.optimizer.state_dict()
    assert state["step"] == 0
    for item in run.state.parameters:
        name, parameter, layout = item.name, item.parameter, item.layout
        tensors = state["parameters"][name]["tensors"]
        master = whole_value(name, "master", layout.global_shape).float()
        assert torch.equal(tensors.pop("master"), master), name
        assert torch.equal(parameter.detach(), master.to(loaded)), name
        assert not any(moment.any() for moment in tensors.values())


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Catches parameters of another model that are loaded, or skipped, silently."""
    _save(tmp_path, torch.float32)
    checkpointer = _checkpointer(tmp_path)
    info = chosen(checkpointer)
    wider = make_run(0, ONE, torch.float32, wide=8)
    with pytest.raises(CheckpointError, match=r"has shape \(37, 6\) in the checkpoint"):
        checkpointer.load(info, wider.state)
    run = make_run(0, ONE, torch.float32)
    fewer = dataclasses.replace(run.state, parameters=run.state.parameters[:-1])
    with pytest.raises(
        CheckpointError,
        match=r"weights that the run's model lacks, so it is of another model: model\.norm\.weight",
    ):
        checkpointer.load(info, fewer)
    renamed = [dataclasses.replace(item, name=f"my_{item.name}") for item in run.state.parameters]
    other = dataclasses.replace(run.state, parameters=renamed, optimizer=None)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks model\.my_embedding.weight"):
        checkpointer.load(info, other)


def test_another_update_rule_is_refused(tmp_path: Path) -> None:
    """Catches moments of adamw loaded as the momentum of lion, and states silently left at zero."""
    adamw = make_run(0, ONE, torch.float32)
    lion = make_run(0, ONE, torch.float32, config=LION)
    for saved, run, fault in (
        (adamw, lion, r"exp_avg and exp_avg_sq, optimizer\.name=lion needs exp_avg:"),
        (lion, adamw, r"exp_avg, optimizer\.name=adamw needs exp_avg and exp_avg_sq:"),
    ):
        checkpointer = _checkpointer(tmp_path / run.optimizer.config.name)
        checkpointer.save(20, saved.state, tokens=0)
        info = chosen(checkpointer)
        with pytest.raises(ValueError, match=rf"{fault}.*initial_load_model_only=true"):
            checkpointer.load(info, run.state)


def test_a_background_save_keeps_the_state_of_its_step(tmp_path: Path) -> None:
    """Catches weights that training has already changed written under the old step."""
    run = make_run(0, ONE, torch.float32)
    checkpointer = _checkpointer(tmp_path, CheckpointConfig(async_mode="async"))
    fill(run)
    checkpointer.save(20, run.state, tokens=0)
    clear(run)
    checkpointer.save(30, run.state, tokens=0)
    checkpointer.wait()
    info = chosen(checkpointer, load_step=20)
    checkpointer.load(info, run.state)
    assert expect(run) > 0
    assert checkpointer.folder.steps() == [30, 20]


def test_a_background_failure_is_raised_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a failure that is not reported, or that prevents the next save."""
    run = make_run(0, ONE, torch.float32)
    folder = tmp_path / "checkpoint"
    folder.write_text("a file is in the way")
    checkpointer = _checkpointer(folder, CheckpointConfig(async_mode="async"))
    checkpointer.save(10, run.state, tokens=0)
    checkpointer.save(20, run.state, tokens=0)
    with pytest.raises(CheckpointError, match=r"saving .*step_20 failed on rank 0"):
        checkpointer.wait()
    checkpointer.wait()
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert [e.split(" failed on ")[0] for e in errors] == [
        f"saving {folder / name}" for name in ("step_10", "step_20")
    ]
    assert all(e.endswith("Older checkpoints are unchanged. The run continues.") for e in errors)
    folder.unlink()
    checkpointer.save(30, run.state, tokens=0)
    checkpointer.wait()
    assert checkpointer.folder.steps() == [30]


def test_a_run_waits_for_its_last_save(tmp_path: Path) -> None:
    """Catches a run reported as done, or as stopped, before its state is on disk."""
    run = make_run(0, ONE, torch.float32)
    checkpointer = _checkpointer(tmp_path, CheckpointConfig(async_mode="async"))
    checkpointer.save(10, run.state, tokens=0)
    checkpointer.save(20, run.state, tokens=0, wait=True)
    assert checkpointer.folder.steps() == [20, 10]
    (tmp_path / "step_30.tmp").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"saving .*step_30 failed"):
        checkpointer.save(30, run.state, tokens=0, wait=True)


def test_a_run_that_fails_finishes_its_background_save(tmp_path: Path) -> None:
    """Catches the newest checkpoint lost because the run ended with an error soon after the save
    began.
    """
    run = make_run(0, ONE, torch.float32, wide=4096)
    checkpointer = _checkpointer(tmp_path, CheckpointConfig(async_mode="async"))

    def train() -> None:
        with checkpointer:
            checkpointer.save(10, run.state, tokens=0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert checkpointer.folder.steps() == [10]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("back", ["cpu", "cuda"])
def test_tensors_on_a_device_are_saved_and_loaded(
    tmp_path: Path, mode: Literal["disabled", "async"], back: str
) -> None:
    """Catches copies from a device that are written before they have arrived."""
    run = make_run(0, ONE, torch.bfloat16, wide=4096, device="cuda")
    fill(run)
    checkpointer = _checkpointer(tmp_path, CheckpointConfig(async_mode=mode))
    checkpointer.save(20, run.state, tokens=0)
    clear(run)
    checkpointer.wait()
    other = make_run(0, ONE, torch.bfloat16, wide=4096, device=back)
    info = chosen(checkpointer)
    checkpointer.load(info, other.state)
    assert expect(other) > 0


def test_torch_can_read_a_checkpoint(tmp_path: Path) -> None:
    """Catches a checkpoint that only this project can open."""
    _save(tmp_path, torch.float32)
    dcp_to_torch_save(tmp_path / "step_20", tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    expected = whole_value("wqkv.weight", "master", (16, 6)).float()
    assert torch.equal(weights["model.wqkv.weight"], expected)


def test_copies_reuse_their_memory() -> None:
    """Catches copies of more than the shards, memory allocated at each save, and a changed size."""
    whole = torch.arange(40.0).view(8, 5)
    staging = _Staging()
    addresses = set()
    for step in range(3):
        rest = torch.full((3 + step // 2,), step)
        shards = {s.key: s for s in (Shard.whole("rows", whole[2:4]), Shard.whole("rest", rest))}
        copied = {key: shard.pieces[0].data for key, shard in staging.copy(shards).items()}
        before = whole[2:4].clone()
        whole += 1
        assert torch.equal(copied["rows"], before)
        assert torch.equal(copied["rest"], rest)
        assert copied["rows"].untyped_storage().nbytes() == before.nbytes
        addresses.add(copied["rows"].data_ptr())
    assert len(addresses) == 1
