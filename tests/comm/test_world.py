"""Ranks that meet through torchrun's store, once and again."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from isp.comm import World
from tests.ranks import run_ranks


def _meet(rank: int, port: int, restarts: int) -> float:
    """What the ranks sum up to, after rank 0 has come later than rank 1."""
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


def test_ranks_that_are_started_again_meet() -> None:
    """Catches new ranks that look for dead ones, whose addresses are in the store still."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restarts in (0, 1):
        assert run_ranks(2, _meet, agent.port, restarts) == [3.0, 3.0]


def test_a_port_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch's traceback where another run, or another program, has the port."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(port))):
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        world = World(torch.device("cpu"), timeout_seconds=5)
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is in use"), world:
            pass
