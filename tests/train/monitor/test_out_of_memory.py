"""The report of a run that is out of memory: what used the memory, and where it failed."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isp.core.mesh import Axis, Mode
from isp.models.runtime.stage_module import StageModule
from isp.train.monitor.out_of_memory import (
    MemoryGuard,
    OutOfMemory,
    describe_owners,
    memory_owners,
)
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.jobs import run_folders, run_forked, write_job
from tests.train.runs import Layout, Meshes, Task, make_run

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24
)
LAYOUT = Layout(mode=Mode.ISP, tensor=2, weight=2, data=2, micro=2)


def allocate_too_much() -> Tensor:
    """Allocate a tensor larger than any machine's address space."""
    return torch.empty(2**60, dtype=torch.uint8)


def _owners(rank: int, dtype: torch.dtype) -> tuple[dict[str, int], int, int, dict[str, int]]:
    """Return the owners of memory after two steps, elements of this rank's shards and rows, and
    bytes in pools.
    """
    run = make_run(Meshes(rank).of(LAYOUT), LAYOUT, Task(model=MODEL), dtype=dtype)
    run.numbers(range(2))
    communicator = run.step.communicator
    assert communicator is not None
    found = memory_owners(run.step)
    elements = sum(item.parameter.numel() for item in run.parameters)
    states = run.optimizer.state_dict()["parameters"].values()
    rows = sum(state["tensors"]["exp_avg"].numel() for state in states)
    assert run.step.mesh[Axis.ZERO1].size == 2
    run.close()
    pools = {
        "gathered weights": communicator.pool.reserved_bytes,
        "gradients in transfer": communicator.reduce_pool.reserved_bytes,
    }
    return found, elements, rows, pools


@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, 0), (torch.bfloat16, 4)], ids=["float32", "bfloat16"]
)
def test_reported_sizes_are_those_of_the_tensors(dtype: torch.dtype, master: int) -> None:
    """Catches masters that are the weights counted twice, and shards counted as whole tensors."""
    for found, elements, rows, pools in run_ranks(LAYOUT.world, _owners, dtype):
        assert 0 < rows < elements
        assert found["weights"] == elements * dtype.itemsize
        assert found["gradients"] == elements * 4
        assert found["optimizer states"] == rows * (8 + master)
        assert {name: found[name] for name in pools} == pools
        assert min(pools.values()) > 0


def test_owners_are_listed_by_size() -> None:
    """Catches the largest owner lost among the others."""
    owners = {"weights": 3 * 2**20, "optimizer states": 2**32}
    assert describe_owners(owners, 2**32 + 2**29).splitlines() == [
        "  optimizer states            4.00 GiB",
        "  activations and the rest   509.0 MiB",
        "  weights                      3.0 MiB",
    ]


def test_other_errors_are_unchanged() -> None:
    """Catches any error reported as one of memory."""
    with (
        pytest.raises(RuntimeError, match=r"^shapes$"),
        MemoryGuard(CPU, rank=0, snapshots=None),
    ):
        raise RuntimeError("shapes")


def test_an_error_wrapped_in_another_is_found() -> None:
    """Catches the wrapping of torch's pipelines, which hides the cause."""

    def wrap() -> None:
        try:
            allocate_too_much()
        except RuntimeError as error:
            raise RuntimeError("stage 0 failed to run forward") from error

    with (
        pytest.raises(OutOfMemory, match=r"rank 3 on .* while the model was built: .*allocate"),
        MemoryGuard(CPU, rank=3, snapshots=None),
    ):
        wrap()


def test_a_run_reports_the_owners_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rank that ends with only the allocator's message, or reports the wrong phase."""
    forward, calls = StageModule.__call__, []

    def forward_or_fail(self: StageModule, *args: Tensor) -> Tensor:
        calls.append(0)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            allocate_too_much()
        return forward(self, *args)

    monkeypatch.setattr(StageModule, "__call__", forward_or_fail)
    job = write_job(tmp_path)
    with pytest.raises(RuntimeError, match=r"rank 1 failed"):
        run_forked(job, "--profiler.enable_memory_snapshot")
    (run,) = run_folders(job)
    log = (run / "logs/rank_1.log").read_text()
    told = log[log.rindex("OutOfMemory: ") :]
    assert told.startswith(
        f"OutOfMemory: rank 1 on {socket.gethostname()} ran out of memory in forward and backward"
        f" of step 3: "
    )
    lines = re.findall(r"^  (\w[\w ]+?)  +([\d.]+) ([GM])iB$", told, re.MULTILINE)
    sizes = [float(size) * (1024 if unit == "G" else 1) for _, size, unit in lines]
    assert sizes == sorted(sizes, reverse=True)
    assert lines[0][0] == "activations and the rest"
    assert {"weights", "gradients", "optimizer states", "gathered weights"} <= {
        name for name, _, _ in lines
    }
    assert "use a smaller data.micro_bsz" in told
    assert "has no effect on CPU" in log
    assert not (run / "memory_snapshot").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_is_written(tmp_path: Path) -> None:
    """Catches a memory history that is recorded, at a cost, and then lost."""
    device = torch.device("cuda", 0)
    with (
        pytest.raises(OutOfMemory, match=r"its history is in .*rank_0\.pickle"),
        MemoryGuard(device, rank=0, snapshots=tmp_path / "memory_snapshot"),
    ):
        torch.empty(2**50, dtype=torch.uint8, device=device)
    torch.cuda.memory._record_memory_history(enabled=None)
    assert (tmp_path / "memory_snapshot/rank_0.pickle").stat().st_size > 0
