"""Streams, allocator and process groups as only a GPU with NCCL shows them; one rank suffices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isp.core.comm import World, streams
from isp.core.comm.cuda import ALLOCATOR_VARIABLES, registered

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


def nccl_group() -> dist.ProcessGroup:
    """Return a process group of this rank alone, with the options of a mesh."""
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=GPU,
        pg_options=streams.nccl_options(),
    )
    return dist.new_group(
        [0], use_local_synchronization=True, pg_options=streams.nccl_options(), group_desc="weight"
    )


def high_priority() -> None:
    with World(GPU, rank=0, size=1):
        group = nccl_group()
        assert group._get_backend(GPU).options.is_high_priority_stream
        assert group.group_desc == "weight"
        x = torch.ones(4, device=GPU)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [1] * 4
        dist.destroy_process_group()


def expandable() -> None:
    with World(GPU, rank=0, size=1):
        x = torch.ones(2**22, device=GPU)
        segments = torch.cuda.memory_snapshot()
        assert [s["is_expandable"] for s in segments] == [True] * len(segments)
        torch.cuda.memory._record_memory_history()
        del x
        assert torch.cuda.memory._snapshot()["segments"]  # as MemoryGuard reads it


def registered_buffers() -> None:
    with World(GPU, rank=0, size=1, expands_segments=False):
        group = nccl_group()
        if not group._get_backend(GPU).supports_tensor_alloc(GPU):
            with pytest.raises(ValueError, match="nccl_ub=true needs GPUs"):
                registered(group, GPU, key="nccl_ub")
            return
        allocate, side = registered(group, GPU, key="nccl_ub"), streams.new(GPU)
        x = torch.arange(8.0, device=GPU)
        streams.follow(side)
        with streams.on(side):
            out = allocate(8, x.dtype)
            dist.all_gather_into_tensor(out, x, group=group)
        assert side is not None
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(out, x)
        dist.destroy_process_group()


@pytest.mark.nccl
@pytest.mark.parametrize("case", [high_priority, expandable, registered_buffers])
def test_torch_and_nccl_accept_our_options(case: Callable[[], None]) -> None:
    """Catches options, settings and memory that this torch, NCCL or GPU does not support."""
    done = subprocess.run(  # in a child process, since settings and groups are global
        [sys.executable, "-c", f"from tests.core.comm import test_gpu; test_gpu.{case.__name__}()"],
        cwd=Path(__file__).parents[3],
        env={k: v for k, v in os.environ.items() if k not in ALLOCATOR_VARIABLES},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


def test_a_high_priority_kernel_overtakes_a_large_one() -> None:
    """Catches communication streams on which a transfer waits until earlier compute has ended."""
    side, long = streams.new(GPU), torch.ones(2**30, dtype=torch.bfloat16, device=GPU)
    short, ends = torch.ones(2**10, device=GPU), []
    assert side is not None
    for _ in range(2):  # kernels are loaded in the first round
        start = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        start.record()
        side.wait_event(start)
        long.sin_()
        ends[0].record()
        with streams.on(side):
            short.add_(1)
            ends[1].record()
        torch.cuda.synchronize()
        last, passing = (start.elapsed_time(end) for end in ends)
    assert passing < last / 2
