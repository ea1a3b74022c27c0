"""`run_ranks`: runs a function on forked gloo ranks, on the CPUs of this machine."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from isp.core.comm import use_loopback
from isp.core.torch_private import FileStore

__all__ = ["RankError", "run_ranks"]


class RankError(RuntimeError):
    """A rank raised, died, or did not answer in time; the text says which, with its traceback."""


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0
) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` forked ranks and return the results in rank order.

    Ranks start with a copy of this process's memory, so `fn` and its arguments need not be
    picklable; results must be. All ranks have ended when this returns. Raises RankError for the
    first rank that fails.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, folder, timeout_seconds, sender, fn, args),
                daemon=True,
            )
            process.start()
            # Close the sending end here: only the child has it then, so the pipe ends if the child
            # dies, and `_collect` does not wait for the timeout.
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], processes: list[Any], timeout_seconds: float) -> list[Any]:
    """Return the results of all ranks in rank order; raise RankError for the first that fails."""
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        missing = [p for i, p in enumerate(pipes) if i not in results]
        arrived = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
        if not arrived:
            ranks = [i for i in range(len(pipes)) if i not in results]
            raise RankError(f"ranks {ranks} did not answer within {timeout_seconds:.0f} s")
        for rank in [i for i, pipe in enumerate(pipes) if pipe in arrived]:
            try:
                results[rank], error = pipes[rank].recv()
            except EOFError:
                raise RankError(_describe_death(rank, processes[rank])) from None
            if error:
                raise RankError(f"rank {rank} failed:\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _describe_death(rank: int, process: Any) -> str:
    """Return a sentence about a rank that ended without a result, with the signal that ended it."""
    process.join(5)
    code = process.exitcode
    if code is None or code >= 0:
        return f"rank {rank} died without an answer"
    hint = ": the system may be out of memory" if -code == signal.SIGKILL else ""
    return f"rank {rank} died without an answer, by {signal.Signals(-code).name}{hint}"


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_seconds: float,
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run `fn` on a forked rank, send its result or traceback to the parent, and exit."""
    # Never collect the parent's garbage here: when a store or a compiler is freed, it may wait for
    # its threads, which a fork does not copy.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    use_loopback()
    error, result = "", None
    try:
        store = FileStore(os.path.join(folder, "store"), world_size)
        # If the parent is killed, no one ends the ranks: their collectives then time out.
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        result = fn(rank, *args)
    except BaseException:
        error = traceback.format_exc()
    sender.send((result, error))
    sender.close()
    # The parent kills this process when all ranks have answered. Until then keep its connections
    # open: another rank may still be connecting.
    time.sleep(60)
    os._exit(0)  # do not destroy process groups, which hangs if another rank has failed
