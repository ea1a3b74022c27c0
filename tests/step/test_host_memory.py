"""Host memory of block inputs: checked before a run, planned, and logged."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from isp.config import load_config
from isp.core.comm import pinned_memory as of_the_system
from isp.planner.case import PlanCase
from isp.planner.memory import memory
from isp.step import host_memory
from isp.step.host_memory import check_host_memory, input_bytes_on_host
from tests.train.jobs import run_folders, run_forked, write_job

OFFLOADED = ("--model.num_layers=6", "--model.checkpoint=1", "--model.checkpoint_offload=true")
TABLES = ("--model.vocab_size=262144", "--model.hidden_size=256")
"""Keys that give tables of 0.25 GiB each in float32, much larger than the other weights."""
CASES = {
    "isp": (2, OFFLOADED),
    "half, in segments": (
        2,
        (*OFFLOADED, "--model.checkpoint=0.6", "--model.checkpoint_segment=3"),
    ),
    "mtp, in parts, 1F1B": (
        4,
        (
            *OFFLOADED,
            "--model.checkpoint_distribute_activations=true",
            "--parallel.tensor.mode=mtp",
            "--parallel.weight.size=1",
            "--parallel.pipeline.size=2",
            "--data.micro_num=5",
            "--data.micro_bsz=2",
        ),
    ),
    "interleaved": (
        4,
        (
            *OFFLOADED,
            "--parallel.pipeline.size=2",
            "--parallel.pipeline.schedule=Interleaved1F1B",
            "--parallel.pipeline.num_chunks=2",
            "--data.micro_num=4",
            "--training.dtype=bfloat16",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_checked_host_memory_equals_the_planned_one(name: str, tmp_path: Path) -> None:
    """Catches chunks, micro-batches in flight, or the tensor group missing in one of the two."""
    world, overrides = CASES[name]
    config = load_config(write_job(tmp_path), overrides)
    case = PlanCase.of(config, world, on_cpu=True)
    for rank in range(world):
        stage = rank // case.topology.stage
        assert input_bytes_on_host(config, case.topology, stage) == memory(case, rank).host > 0


def test_a_run_logs_the_size_of_its_host_buffers(tmp_path: Path) -> None:
    """Catches a size that is not logged, or is not that of the buffers."""
    job = write_job(tmp_path)
    run_forked(job, *OFFLOADED, "--training.steps=2")
    (run,) = run_folders(job)
    told = (run / "logs" / "rank_0.log").read_text()
    expected = input_bytes_on_host(
        load_config(job, OFFLOADED), load_config(job, OFFLOADED).topology(2), 0
    )
    found = re.search(
        r"inputs of recomputed blocks are kept in ([\d.]+) MiB of host memory in 6 buffers",
        told,
    )
    assert found is not None, told
    assert float(found[1]) == pytest.approx(expected / 2**20, abs=0.1)


def test_too_little_host_memory_is_refused_before_the_run(tmp_path: Path) -> None:
    """Catches a machine that starts to swap, or a rank that is killed, hours later."""
    config = load_config(write_job(tmp_path), (*OFFLOADED, "--data.seq_len=4194304"))
    topology = config.topology(2)
    with (
        mock.patch.object(host_memory, "attainable_bytes", return_value=2**30),
        pytest.raises(
            ValueError, match=r"2 ranks keep 1\.5 GiB of block inputs in .* there are 1\.0 GiB: use"
        ),
    ):
        check_host_memory(config, topology, 2)
    check_host_memory(load_config(write_job(tmp_path)), topology, 2)


def test_memory_that_is_not_free_yet_only_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a refusal on a machine that frees memory on demand and first shows little of it."""
    config = load_config(write_job(tmp_path), (*OFFLOADED, "--data.seq_len=4194304"))
    free = 2 * 2**30
    monkeypatch.setattr(host_memory, "attainable_bytes", lambda: 2 * 2**30)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free)
    check_host_memory(config, config.topology(2), 2)
    assert caplog.messages == []
    free = 2**30
    check_host_memory(config, config.topology(2), 2)
    (line,) = caplog.messages
    assert "2 ranks keep 1.5 GiB of block inputs in this machine's memory, of which 1.0 GiB" in line
    assert "if the machine runs out of memory, use a larger model.checkpoint_segment" in line


def test_a_model_that_cannot_fit_is_refused_by_its_parameter_count(tmp_path: Path) -> None:
    """Catches an allocation of gigabytes until a machine swaps or kills a rank, and an error that
    does not say what would fit.
    """
    large = (*TABLES, "--training.dtype=float32", "--training.device=cpu")
    parameters = 2 * 262144 * 256  # the two tables
    for words in ((), ("--parallel.tensor.size=1", "--parallel.weight.size=1")):
        config = load_config(write_job(tmp_path), (*large, *words))
        topology = config.topology(2)
        # Weights and gradients of each rank's shards, and two states, split over all ranks.
        gib = 4 * parameters * (2 * 2 // topology.weight + 2) / 2**30
        for room, fits in ((gib + 0.05, True), (gib - 0.05, False)):
            with mock.patch.object(host_memory, "total_bytes", return_value=int(room * 2**30)):
                if fits:
                    check_host_memory(config, topology, 2)
                    continue
                with pytest.raises(ValueError, match=rf"2 ranks would take at least {gib:.1f} GiB"):
                    check_host_memory(config, topology, 2)


def test_a_model_that_exceeds_device_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches host memory counted for device tensors, and states counted on both."""
    device = SimpleNamespace(total_memory=int(1.01 * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    large = (*TABLES, "--training.dtype=float32", "--training.device=cuda")
    config = load_config(write_job(tmp_path), large)  # 0.25 GiB of weights on each of two ranks
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "total_bytes", lambda: 0)
        check_host_memory(config, config.topology(2), 2)
    device.total_memory = int(0.99 * 2**30)
    with pytest.raises(ValueError, match=r"a rank would take at least 1\.0 GiB .* its device has"):
        check_host_memory(config, config.topology(2), 2)
    offloaded = load_config(write_job(tmp_path), (*large, "--optimizer.offload_states=true"))
    check_host_memory(offloaded, offloaded.topology(2), 2)


def test_background_copies_of_states_count_with_offloaded_inputs(tmp_path: Path) -> None:
    """Catches background saves forgotten where states are not on the host."""
    large = (*TABLES, "--checkpoint.interval=5")
    config = load_config(write_job(tmp_path), (*OFFLOADED, *large))
    topology = config.topology(2)
    with mock.patch.object(host_memory, "attainable_bytes", return_value=2**30):
        with pytest.raises(ValueError, match=r"1\.5 GiB of copies .*async_mode=disabled"):
            check_host_memory(config, topology, 2)
        check_host_memory(
            load_config(write_job(tmp_path), (*OFFLOADED, *large, "--checkpoint.interval=0")),
            topology,
            2,
        )


def test_host_memory_counts_the_states_of_the_stages_on_a_machine(tmp_path: Path) -> None:
    """Catches a machine with only the table's stage that is checked for the mean of all stages."""
    words = ("model.num_layers=3", "parallel.pipeline.size=3")
    words += ("parallel.tensor.size=1", "parallel.weight.size=1", "data.micro_num=3")
    words += ("optimizer.offload_states=true", "checkpoint.interval=0")
    config = load_config(write_job(tmp_path), (*TABLES, *(f"--{word}" for word in words)))
    topology = config.topology(3)
    with mock.patch.object(host_memory, "attainable_bytes", return_value=int(0.4 * 2**30)):
        check_host_memory(config, topology, 1, 1)
        for first in (0, 2):
            with pytest.raises(ValueError, match=r"0\.5 GiB of optimizer states"):
                check_host_memory(config, topology, 1, first)


def test_available_memory_respects_container_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an ignored limit of a container, and a failure on a system that reports nothing."""
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    monkeypatch.setattr(of_the_system, "_MEMINFO", meminfo)
    monkeypatch.setattr(of_the_system, "_CGROUP", cgroup)
    assert of_the_system.available_bytes() is of_the_system.attainable_bytes() is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\nSwapTotal: 3 kB\nHugePages: 0\n")
    assert of_the_system.available_bytes() == 2 * 2**20
    assert of_the_system.attainable_bytes() == 9 * 1024
    assert of_the_system.total_bytes() == 12 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert of_the_system.available_bytes() == 2 * 2**20
    (cgroup / "memory.max").write_text("1500000\n")
    (cgroup / "memory.current").write_text("700000\n")
    (cgroup / "memory.stat").write_text("anon 5\nactive_file 150000\ninactive_file 50000\n")
    assert of_the_system.available_bytes() == 1_000_000
    meminfo.write_text(meminfo.read_text().replace("MemTotal: 9", "MemTotal: 9000"))
    assert of_the_system.attainable_bytes() == 1_000_000
    meminfo.write_text(meminfo.read_text().replace("MemTotal: 9000", "MemTotal: 9"))
    (cgroup / "memory.max").write_text("5000\n")
    assert of_the_system.total_bytes() == 5000 + 3 * 1024
