"""Runs functions, programs and commands on several ranks, as forked processes over gloo."""

from __future__ import annotations

import io
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.optim loads it: once here, not in every forked rank
import torch.distributed as dist
import torch.multiprocessing as mp

from isp.cli import main

__all__ = ["Said", "launch_forked", "run_each", "run_isp", "run_programs", "run_ranks"]


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


def run_each(
    world_size: int, fn: Callable[..., Any], cases: Mapping[str, Any], timeout_seconds: float = 60.0
) -> dict[str, list[Any]]:
    """`fn(rank, case)` of every case in turn, on the same ranks; a failure names its case.

    What each gave, in rank order.
    """
    of_ranks = run_ranks(world_size, _each, fn, cases, timeout_seconds=timeout_seconds)
    return {name: [of_rank[name] for of_rank in of_ranks] for name in cases}


def _each(rank: int, fn: Callable[..., Any], cases: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        try:
            found[name] = fn(rank, case)
        except BaseException as error:
            error.add_note(f"the case: {name}")
            raise
    return found


def run_programs(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 100.0
) -> list[Any]:
    """`run_ranks` of what makes its own process group, with what torchrun sets for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_ranks(world_size, _program, port, fn, args, timeout_seconds=timeout_seconds)


def _program(rank: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.barrier()  # a group that one rank leaves while others still connect to it fails
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return fn(rank, *args)


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


def run_isp(world_size: int, *words: str) -> list[Said]:
    """The command `isp` with `words`, as torchrun starts it on each rank."""
    return run_programs(world_size, _isp, words)


def _isp(rank: int, words: Sequence[str]) -> Said:
    sys.argv[1:] = words
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main()
    return Said(code, out.getvalue(), err.getvalue())


def launch_forked(world_size: int, command: Sequence[str]) -> int:
    """In place of `isp.cli.launch.launch`, without torchrun."""
    assert command[:2] == ["-m", "isp"]
    said = run_isp(world_size, *command[2:])
    for of_rank in said:
        print(of_rank.out, end="")
        print(of_rank.err, end="", file=sys.stderr)
    return max(of_rank.code for of_rank in said)


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
