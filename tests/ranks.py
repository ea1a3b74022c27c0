"""Runs functions, programs and commands on several ranks, as forked processes with gloo."""

from __future__ import annotations

import io
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, NamedTuple

import torch._dynamo  # noqa: F401 - torch.optim loads it: once here, not in every forked rank
import torch.distributed as dist

from isp.cli import main
from isp.parity.forked import run_ranks

__all__ = ["Said", "launch_forked", "run_each", "run_isp", "run_programs", "run_ranks"]


def run_each(
    world_size: int, fn: Callable[..., Any], cases: Mapping[str, Any], timeout_seconds: float = 60.0
) -> dict[str, list[Any]]:
    """Run `fn(rank, case)` for every case in turn on the same ranks; an error names its case.

    Return the results of each case in rank order.
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
    """Run functions that create their own process group, with the variables that torchrun sets."""
    return run_ranks(world_size, _program, free_port(), fn, args, timeout_seconds=timeout_seconds)


def free_port() -> int:
    """Return a free port below the kernel's ephemeral range, from which other sockets get
    theirs.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _program(rank: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.barrier()  # a group that one rank leaves while others still connect to it fails
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return fn(rank, *args)


class Said(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def run_isp(world_size: int, *words: str) -> list[Said]:
    """Run the command `isp` with `words` on each rank, as torchrun starts it."""
    return run_programs(world_size, _isp, words)


def _isp(rank: int, words: Sequence[str]) -> Said:
    sys.argv[1:] = words
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main()
    return Said(code, out.getvalue(), err.getvalue())


def launch_forked(world_size: int, command: Sequence[str]) -> int:
    """Replace `isp.cli.launch.launch` by forked ranks, without torchrun."""
    assert command[:2] == ["-m", "isp"]
    said = run_isp(world_size, *command[2:])
    for of_rank in said:
        print(of_rank.out, end="")
        print(of_rank.err, end="", file=sys.stderr)
    return max(of_rank.code for of_rank in said)
