"""Runs a function on several ranks, as forked processes over gloo."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # torch.optim loads it: once here, not in every forked rank
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["run_ranks"]


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0
) -> list[Any]:
    """`fn(rank, *args)` on each of `world_size` ranks; their results in rank order.

    Results must be picklable. The first rank that raises fails the test with its traceback, and a
    rank that does not answer in time fails it too; nothing is left running.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, folder, sender, fn, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        missing = [p for i, p in enumerate(pipes) if i not in results]
        arrived = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
        if not arrived:
            ranks = [i for i in range(len(pipes)) if i not in results]
            raise TimeoutError(f"ranks {ranks} did not answer in time")
        for pipe in arrived:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                results[rank], error = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RuntimeError(f"rank {rank} died without an answer") from None
            if error:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    error, result = "", None
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = fn(rank, *args)
    except BaseException:
        error = traceback.format_exc()
    sender.send((result, error))
    sender.close()
    time.sleep(60)  # to be killed when all have answered: a neighbour may still be connecting
    os._exit(0)  # without tearing groups down: a failed neighbour would make that hang
