"""Ranks that rendezvous through torchrun's store, at first and after a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isp.cli.failures import report_end
from isp.cli.launch import speaks
from isp.core.comm import Mesh, World, cuda, decided_by_rank_0, streams, world
from tests.ranks import run_ranks
from tests.toolkit import topology


def _meet(rank: int, port: int, restarts: int) -> float:
    """Return the sum over the ranks after a rendezvous to which rank 0 comes later than rank 1."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GROUP_WORLD_SIZE="1",
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(restarts),
    )
    time.sleep(0.0 if rank else 0.5)
    with World(torch.device("cpu"), timeout_seconds=20.0):
        x = torch.ones(1) + rank
        dist.all_reduce(x)
        dist.barrier()
    return x.item()


def test_restarted_ranks_rendezvous() -> None:
    """Catches new ranks that connect to dead ones whose addresses are still in the store."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restarts in (0, 1):
        assert run_ranks(2, _meet, agent.port, restarts) == [3.0, 3.0]


def test_a_port_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch's traceback where another run or another program uses the port."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(port))):
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        world = World(torch.device("cpu"), timeout_seconds=5)
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is already in use"), world:
            pass


def _fail() -> list[str]:
    raise ValueError("nothing fits")


class _NotedStore(dist.Store):
    """A store that contains an error, stores nothing, and records how many seconds a wait may
    take.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str) -> str:
        return json.dumps([None, "nothing fits"])

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.waited.append(timeout.total_seconds())
        raise dist.DistStoreError("wait timeout")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_wait_until_all_have_read_the_error_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """Catches a store that closes before late ranks of another machine have read the error, also if
    a rank that fails first ends rank 0, and a wait beyond the user's timeout.
    """
    store = _NotedStore()
    monkeypatch.setattr(world, "_rendezvous_store", lambda timeout: store)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for seconds in (600.0, 20.0):
        with pytest.raises(ValueError, match="nothing fits"):
            decided_by_rank_0(_fail, seconds)
    assert store.waited == [60.0, 20.0]


def test_a_timeout_while_rank_0_chooses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the store's traceback on ranks that have waited for too long."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.01))
    monkeypatch.setattr(world, "_rendezvous_store", lambda timeout: store)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^rank 1 has waited comm.init_timeout_seconds=0\.01 for"):
        decided_by_rank_0(_fail, 0.01)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_rank_or_world_size_alone_makes_no_world(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches a process that waits for other ranks although only one of the two variables
    is set.
    """
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "16")
    assert decided_by_rank_0(lambda: ["chosen"], 1.0) == (["chosen"], None)
    world = World(torch.device("cpu"))
    assert (world.rank, world.size) == (0, 1)
    assert speaks()
    assert report_end(signal.SIGTERM) == 128 + signal.SIGTERM


class _Options:
    """A stand-in for the options of NCCL, which torch has only where it is built with NCCL."""

    def __init__(self, *, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


class _NCCL:
    Options = _Options


def test_all_communication_streams_have_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stream on which transfers wait for a long kernel, and options that two process
    groups share, since torch writes into them.
    """
    asked: list[dict[str, Any]] = []
    cuda = torch.device("cuda", 0)
    store = dist.HashStore()
    monkeypatch.setattr(world, "_rendezvous_store", lambda timeout: store)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _NCCL, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(dist, "new_group", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with World(cuda, timeout_seconds=7, rank=0, size=2):
        pass
    Mesh(topology(2, tensor=2), 0)
    given = [options["pg_options"] for options in asked if options.get("backend") != "gloo"]
    assert asked[0]["device_id"] == cuda
    assert given[0]._timeout == asked[0]["timeout"] == timedelta(seconds=7)
    assert all(options.is_high_priority_stream for options in given)
    assert len({id(options) for options in given}) == len(given) > 1
    made: list[int] = []
    monkeypatch.setattr(streams, "Stream", lambda device, priority: made.append(priority))
    streams.new(cuda)
    assert made == [-1]


def _settings(monkeypatch: pytest.MonkeyPatch, device: torch.device, **variables: str) -> list[str]:
    """Return the calls that set up the allocator, in order, when a world of one rank is entered."""
    for name in cuda.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append("set_device"))
    with World(device, rank=0, size=1):
        return calls


def test_expandable_segments_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a default set too late or over the user's setting, and settings that torch
    rejects.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    gpu = torch.device("cuda", 0)
    assert _settings(monkeypatch, torch.device("cpu")) == []
    assert _settings(monkeypatch, gpu) == ["expandable_segments:True", "set_device"]
    for name in cuda.ALLOCATOR_VARIABLES:
        assert _settings(monkeypatch, gpu, **{name: "max_split_size_mb:64"}) == ["set_device"]


@pytest.mark.parametrize(
    ("number", "warned"), [("1", True), ("7", True), ("8", False), ("32", False), (None, False)]
)
def test_a_low_cuda_device_max_connections_is_reported(
    number: str | None,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches Megatron-LM's CUDA_DEVICE_MAX_CONNECTIONS=1, which silently disables overlap."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    variables = {} if number is None else {"CUDA_DEVICE_MAX_CONNECTIONS": number}
    _settings(monkeypatch, torch.device("cpu"), **variables)
    assert caplog.messages == []
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == number
    _settings(monkeypatch, torch.device("cuda", 0), **variables)
    assert len(caplog.messages) == warned
    assert all(f"CUDA_DEVICE_MAX_CONNECTIONS={number}" in line for line in caplog.messages)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == (number or "32")


def test_a_device_started_before_the_setting_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a number of queues that is set after CUDA has read it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    gpu, name = torch.device("cuda", 0), "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    _settings(monkeypatch, gpu)
    assert caplog.messages == []  # one rank has few streams
    World(gpu, rank=1, size=2)
    assert caplog.messages == []  # rank 0 says it
    World(gpu, rank=0, size=2)  # not entered: a process group may be the user's own
    assert name not in os.environ
    (line,) = caplog.messages
    assert line.startswith("CUDA was started before ISP, with 8 queues")
    monkeypatch.setenv(name, "8")
    World(gpu, rank=0, size=2)
    assert caplog.messages == [line]
