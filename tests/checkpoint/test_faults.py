"""Saves on ranks that cannot write, and on ranks that die while they write."""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import resource
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from isp.checkpoint import Checkpointer, CheckpointError
from isp.config.sections import CheckpointConfig
from tests.checkpoint.runs import Run, chosen, clear, expect, fill, make_run
from tests.ranks import run_ranks
from tests.toolkit import topology

LAYOUT = topology(2, weight=2)
WIDE = 2048
"""Features of the model, which give tensors of about 300 KiB."""


def _limit_file_size(num_bytes: int) -> None:
    """Let the next write beyond `num_bytes` of a file fail, on this rank only."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _run(rank: int, folder: Path, mode: str = "disabled") -> tuple[Run, Checkpointer]:
    run = make_run(rank, LAYOUT, torch.float32, wide=WIDE)
    config = CheckpointConfig(async_mode=mode)  # type: ignore[arg-type]
    fill(run)
    return run, Checkpointer(folder, config, world=run.world)


def _save_and_wait(checkpointer: Checkpointer, step: int, run: Run) -> None:
    checkpointer.save(step, run.state, tokens=0)
    checkpointer.wait()


def _fail_once(rank: int, folder: Path, mode: str, failing: int) -> list[str]:
    """Save 10, fail to save 20 because rank `failing` cannot write, load 10, save 30."""
    run, checkpointer = _run(rank, folder, mode)
    _save_and_wait(checkpointer, 10, run)
    if rank == failing:
        _limit_file_size(100_000)
    with pytest.raises(CheckpointError) as caught:
        _save_and_wait(checkpointer, 20, run)
    _limit_file_size(resource.RLIM_INFINITY)
    left = sorted(os.listdir(folder))
    dist.barrier()
    info = chosen(checkpointer)
    clear(run)
    checkpointer.load(info, run.state)
    assert expect(run) > 0
    _save_and_wait(checkpointer, 30, run)
    return [str(caught.value), *left]


@pytest.mark.parametrize(("mode", "failing"), [("disabled", 0), ("async", 1)])
def test_a_failed_write_fails_the_save_on_all_ranks(
    tmp_path: Path, mode: str, failing: int
) -> None:
    """Catches ranks that wait for the rank that failed, and a partial checkpoint kept or
    published.
    """
    answers = run_ranks(2, _fail_once, tmp_path, mode, failing, timeout_seconds=20)
    message = answers[0][0]
    assert answers[1][0] == message
    assert f"saving {tmp_path}/step_20 failed on rank {failing}: OSError: " in message
    assert "File too large" in message
    assert "Older checkpoints are unchanged" in message
    assert answers[0][1:] == ["step_10"]
    assert sorted(os.listdir(tmp_path)) == ["step_10", "step_30"]


def _die_while_writing(rank: int, folder: Path, store: str, mode: str) -> None:
    """Kill rank 1 while it writes its second checkpoint."""
    faulthandler.dump_traceback_later(25)  # says where it hangs, if it does
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    run, checkpointer = _run(rank, folder, mode)
    _save_and_wait(checkpointer, 10, run)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _limit_file_size(100_000)
    code = 0
    try:
        _save_and_wait(checkpointer, 20, run)
    except RuntimeError:
        code = 3  # the exit code expected of the survivor
    os._exit(code)


def _resume(rank: int, folder: Path) -> list[str]:
    run, checkpointer = _run(rank, folder)
    info = chosen(checkpointer)
    assert info.step == 10
    clear(run)
    checkpointer.load(info, run.state)
    assert expect(run) > 0
    checkpointer.save(20, run.state, tokens=0)
    checkpointer.wait()
    return list(info.passed_over)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_resumes_from_the_checkpoint_before_a_death(tmp_path: Path, mode: str) -> None:
    """Catches survivors that hang, and a run that cannot resume from the previous checkpoint."""
    folder, begin = tmp_path / "checkpoint", time.monotonic()
    context = mp.get_context("fork")
    arguments = (folder, str(tmp_path / "store"), mode)
    ranks = [context.Process(target=_die_while_writing, args=(r, *arguments)) for r in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=30)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [3, -signal.SIGXFSZ]
    assert time.monotonic() - begin < 30
    assert sorted(os.listdir(folder)) == ["step_10", "step_20.tmp"]
    passed_over = run_ranks(2, _resume, folder)
    assert passed_over[0] == ["step_20.tmp: left over from a save that did not end"]
    assert sorted(os.listdir(folder)) == ["step_10", "step_20"]


def _save_until_killed(folder: Path, mode: str, published: Connection) -> None:
    """Resume from the newest checkpoint: save its step again, then later steps one by one."""
    run = make_run(0, topology(), torch.float32)
    fill(run)
    config = CheckpointConfig(keep_latest_k=2, async_mode=mode)  # type: ignore[arg-type]
    checkpointer = Checkpointer(folder, config, world=run.world)
    info = checkpointer.choose()
    for step in itertools.count(1 if info is None else info.step):
        _save_and_wait(checkpointer, step, run)
        published.send(step)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path: Path, mode: str) -> None:
    """Catches a moment during a write, replacement or deletion at which a death loses a
    checkpoint.
    """
    context, chance = mp.get_context("fork"), random.Random(0)
    run = make_run(0, topology(), torch.float32)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), world=run.world)
    newest = 0
    for _ in range(8):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_save_until_killed, args=(tmp_path, mode, sender))
        process.start()
        sender.close()
        begin = time.monotonic()
        assert receiver.poll(30), "nothing was saved"
        time.sleep(chance.uniform(0, 2) * (time.monotonic() - begin))  # of up to two saves
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                newest = receiver.recv()
        info = chosen(checkpointer)
        assert info.step >= newest
        clear(run)
        checkpointer.load(info, run.state)
        assert expect(run) > 0
    assert newest > 1, "every save was of the first step: nothing was replaced or deleted"
