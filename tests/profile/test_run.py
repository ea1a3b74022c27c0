"""Profiles of real runs: `isp profile` in every mode, and single steps of a run that trains."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from isp.config import load_config
from isp.core.mesh import Mode
from isp.profile import Profile
from isp.profile.table import describe
from isp.train.profiling.profile_run import ProfileOptions, config_for, profile_ranks
from tests.profile.test_trace import assert_nested
from tests.ranks import run_programs
from tests.train.jobs import run_folders, run_forked, write_job


def _events(folder: Path) -> list[dict]:
    with gzip.open(folder / "trace.json.gz") as file:
        return json.load(file)["traceEvents"]


def _profile_noted(rank, job, options):
    """Profile on `rank`; return the result and the lines of progress."""
    notes = []
    return profile_ranks(load_config(job), options, note=notes.append), notes


@pytest.mark.slow
def test_all_modes_are_profiled_on_two_ranks(tmp_path):
    """Catches a mode that trains on other data, lacks a number, or is not in trace or table."""
    job = write_job(tmp_path)
    options = ProfileOptions(warmup_steps=1, steps=2, command="isp profile job.yaml")
    done, nothing = run_programs(2, lambda rank: _profile_noted(rank, job, options))
    assert nothing == (None, [])
    done, notes = done
    assert notes[0] == "profiling mtp (1 of 4 modes): 4 steps"
    assert len(notes) == 4
    (folder,) = (tmp_path / "out" / "job" / "profile").iterdir()
    assert done[1] == folder
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "trace.json.gz"]
    profile = Profile.load(folder / "profile.json")
    assert profile == done[0]
    table = describe(profile)
    assert [mode.mode for mode in profile.modes] == [mode.value for mode in Mode]
    assert profile.largest_loss_difference < 1e-5
    assert (profile.world_size, profile.num_steps, profile.command) == (2, 2, options.command)
    for mode in profile.modes:
        summary = mode.summary
        assert len(mode.losses) == len(mode.ranks[1].totals) == 2
        assert 0 < summary.exposed_ms <= summary.comm_ms <= 2 * summary.step_ms
        assert sum(kind.sent_bytes for kind in summary.by_kind.values()) == summary.sent_bytes
        timelines = [rank.timeline for rank in mode.ranks]
        assert len(timelines[0].collectives) == summary.num_transfers
        assert mode.waits
        assert mode.mode in table
    isp = profile.modes[-1]
    assert (isp.weight, isp.plan_grid is None, profile.modes[0].plan_grid) == (2, False, None)
    labels = {c.label for c in isp.ranks[0].timeline.collectives}
    assert {"model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight.grad"} <= labels
    events = _events(folder)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert {f"{mode} rank {rank}" for mode in Mode for rank in range(2)} <= set(names)
    ours = [e for e in events if e["pid"] < 8]
    assert_nested(ours)
    _check_torch_events_are_inside_ours(events)


def _check_torch_events_are_inside_ours(events) -> None:
    """Check that torch.profiler's matrix products are within ISP's steps, for all ranks and
    modes.
    """
    for process in range(8):
        steps = [e for e in events if e["pid"] == process and e.get("cat") == "forward"]
        begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
        theirs = [
            e["ts"]
            for e in events
            if (e["pid"] - 1_000_000) // 1000 == process and e["name"] == "aten::mm"
        ]
        assert theirs
        assert any(begin <= moment <= end for moment in theirs)


def test_weight_size_is_the_configured_one_or_all_ranks(tmp_path):
    """Catches isp compared with weights that are not sharded, and a silently changed size."""
    config = load_config(write_job(tmp_path))
    assert config_for(config, Mode.ISP, 4).parallel.weight.size == 2
    alone = load_config(write_job(tmp_path), ["--parallel.weight.size=1"])
    assert config_for(alone, Mode.ISP, 4).parallel.weight.size == 4
    assert config_for(alone, Mode.MSP, 4).parallel.tensor.size == 2
    with pytest.raises(ValueError, match="3"):
        config_for(config, Mode.ISP, 3)


def test_configured_steps_of_a_run_are_profiled(tmp_path):
    """Catches steps that are not profiled, others that are, and profiling that changes the
    training.
    """
    job = write_job(tmp_path)
    profiler = ["--profiler.enable_profiling", "--profiler.profile_freq=2"]
    run_forked(job, "--training.steps=4")
    run_forked(job, "--training.steps=4", *profiler, "--job.name=seen")
    (plain,), (seen,) = run_folders(job), run_folders(job, "seen")
    folders = sorted(path.name for path in (seen / "profile_traces").iterdir())
    assert folders == ["step_2", "step_4"]
    losses = [json.loads(line)["loss"] for line in (plain / "metrics.jsonl").open()]
    for number in (2, 4):
        folder = seen / "profile_traces" / f"step_{number}"
        profile = Profile.load(folder / "profile.json")
        (mode,) = profile.modes
        assert mode.losses == (losses[number - 1],)
        assert mode.summary.by_kind["all_gather"].num_transfers == _gathers(mode)
        assert any(e["name"] == "aten::mm" for e in _events(folder))
        assert {p.name for p in folder.iterdir()} == {"profile.json", "trace.json.gz"}
    assert "profiled step 4" in (seen / "logs" / "rank_0.log").read_text()


def _gathers(mode) -> int:
    """Return the expected gathers: embedding, one block and head; backward reuses two of them."""
    assert any(c.label == "model.embed_tokens.weight" for c in mode.ranks[0].timeline.collectives)
    return 1 + 4 + 1


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path):
    """Catches a full or missing disk for the profiles that ends the training."""
    job = write_job(tmp_path)
    words = ["--training.steps=2", "--profiler.enable_profiling", "--profiler.profile_freq=2"]
    words += ["--profiler.save_traces_folder=config.yaml", "--profiler.with_torch=false"]
    run_forked(job, *words)
    (run,) = run_folders(job)
    assert (
        "writing the profile of step 2 failed on rank 0"
        in (run / "logs" / "rank_0.log").read_text()
    )
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
