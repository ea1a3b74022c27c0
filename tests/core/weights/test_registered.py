"""Gather buffers in memory registered with NCCL (`parallel.weight.nccl_ub`)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.comm import Channel, Mesh
from isp.core.comm.cuda import ALLOCATOR_VARIABLES, check_registers, registered
from isp.core.mesh import WeightConfig
from tests.model.decoders import SMALL
from tests.ranks import run_ranks
from tests.train.runs import Layout, Run, Task, make_run

KEY = "parallel.weight.nccl_ub"


class _Backend:
    """A stand-in for NCCL's backend, which allocates registered memory."""

    def __init__(self, real: Any, *, supports: bool) -> None:
        self.real, self.supports = real, supports
        self.made: set[int] = set()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.supports

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.empty(size, dtype=dtype, device=device)
        self.made.add(buffer.untyped_storage().data_ptr())
        return buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _trained(rank: int) -> None:
    layout = Layout(weight=2, data=2)
    mesh, task = Mesh(layout.topology(), rank), Task(model=SMALL)
    plain = make_run(mesh, layout, task)
    expected = plain.numbers(range(2))
    plain.close()
    backend = _Backend(None, supports=True)
    real, used = dist.ProcessGroup._get_backend, set[int]()

    def get_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
        backend.real = real(group, device)
        return backend

    gather = Channel.all_gather_into

    def all_gather_into(channel: Channel, out: Tensor, x: Tensor, **options: Any) -> Any:
        if channel.name == "weight":
            used.add(out.untyped_storage().data_ptr())
        return gather(channel, out, x, **options)

    registering = Layout(weight=2, data=2, options=WeightConfig(nccl_ub=True))
    with (
        mock.patch.object(dist.ProcessGroup, "_get_backend", get_backend),
        mock.patch.object(Channel, "all_gather_into", all_gather_into),
    ):
        run: Run = make_run(mesh, registering, task)
        assert run.numbers(range(2)) == expected
    communicator = run.step.built.communicator
    assert communicator is not None
    assert used == backend.made
    assert communicator.pool.allocations == len(used)


def test_weights_are_gathered_into_registered_buffers() -> None:
    """Catches an ordinary buffer among them, and another result."""
    run_ranks(2, _trained)


def test_registered_buffers_are_refused_where_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a key that is silently ignored, and torch's error in the middle of a step."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    check_registers(KEY, "cuda")
    with pytest.raises(ValueError, match=f"{KEY}=true registers buffers with NCCL"):
        check_registers(KEY, "cpu")
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "backend:native,expandable_segments:True")
        with pytest.raises(ValueError, match=f"{name}=backend.* unset the variable"):
            check_registers(KEY, "cuda")
        monkeypatch.delenv(name)
    group = mock.Mock()
    group._get_backend.return_value = _Backend(None, supports=False)
    with pytest.raises(ValueError, match=f"{KEY}=true needs GPUs .* use false"):
        registered(group, torch.device("cuda", 0), key=KEY)
