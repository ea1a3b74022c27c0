"""Two machines, simulated by network namespaces with a torchrun in each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.ranks import free_port
from tests.train.jobs import ROOT, numbers, run_folders, run_forked, tensors, write_job
from tools.netns import INTERFACE, Wires, why_not

FIRST = "10.77.0.1"


class Launchers:
    """Starts torchruns in `folder`, which no other test uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        options: Sequence[str],
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        enter: Callable[[], None],
    ) -> subprocess.Popen[bytes]:
        """Start torchrun with `options`, whose ranks run `isp train` with `words`.

        Its output goes to the file `said`. The new process first calls `enter`.
        """
        project = {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        with self.said(len(self._started)).open("wb") as said:
            process = subprocess.Popen(
                [*command, "-m", "isp", "train", *words],
                cwd=self._folder,
                env={**os.environ, **project, **env},
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=enter,
            )
        self._started.append(process)
        return process

    def said(self, number: int) -> Path:
        """Return where the output of a launcher and its ranks is, for messages of failing tests."""
        return self._folder / f"said_{number}.txt"

    def end(self) -> None:
        """Kill all launchers, and their ranks, which plain torchrun puts into sessions of their
        own.
        """
        for process in self._started:
            process.kill()
            process.wait()
        while found := _processes_in(self._folder):
            for number in found:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.01)


def _processes_in(folder: Path) -> list[int]:
    """Return the processes that were started in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended, or belongs to another user
                if Path(os.readlink(entry / "cwd")) == folder.resolve():
                    found.append(int(entry.name))
    return found


@pytest.fixture
def wires() -> Iterator[Wires]:
    """Yield two namespaces with a link between them."""
    if reason := why_not():
        pytest.skip(reason)
    made = Wires(2)
    try:
        made.__enter__()
    except RuntimeError as error:
        pytest.skip(f"this machine does not let us make network namespaces: {error}")
    yield made
    made.__exit__(None, None, None)


@pytest.fixture
def torchruns(tmp_path: Path, wires: Wires) -> Iterator[Launchers]:
    made = Launchers(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds: two imports of torch on a busy machine
def test_two_machines_train_as_one_and_stop_together(
    tmp_path: Path, wires: Wires, torchruns: Launchers
) -> None:
    """Catches code that only works within one machine, and a stop that the other machine misses."""
    job = write_job(tmp_path)
    machines = [
        torchruns.start(
            ["--nnodes=2", f"--node-rank={rank}", f"--master-addr={FIRST}", "--nproc-per-node=1"],
            [str(job), "--training.steps", "100000"],
            env={"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"},
            enter=lambda rank=rank: wires.enter(rank),  # type: ignore[misc]
        )
        for rank in (0, 1)
    ]
    said = [torchruns.said(number) for number in (0, 1)]

    def await_word(word: str, running: list[subprocess.Popen[bytes]]) -> None:
        while word not in said[0].read_text():
            for machine in running:
                assert machine.poll() is None, [path.read_text() for path in said]
            time.sleep(0.05)

    await_word("step=5", machines)
    machines[1].send_signal(signal.SIGTERM)
    machines[1].wait()
    # The other torchrun waits 300 seconds for the one that was killed; its rank has ended.
    await_word("stopped after step", machines[:1])
    (run,) = run_folders(job)
    stopped = numbers(run)
    steps = len(stopped)
    assert 5 <= steps < 100000
    assert [path.name for path in (run / "checkpoint").glob("step_*")] == [f"step_{steps}"]

    run_forked(job, "--training.steps", str(steps), "--job.name", "whole")
    (whole,) = run_folders(job, "whole")
    assert stopped == numbers(whole)


def _wait_for_store(port: int) -> None:
    """Wait until a launcher serves the others at this port."""
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", ["rank", "agent"])
def test_a_death_on_one_machine_loses_nothing(tmp_path: Path, killed: str) -> None:
    """Catches ranks that connect to addresses of dead ones, and a step that is lost or repeated.

    A restarted agent finds the others by a variable: without it, torchrun 2.13 itself waits for an
    address that is never written again.
    """
    job, agents = write_job(tmp_path), Launchers(tmp_path)
    port = free_port()
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", *meet]
    # Many cheap steps, so that the kill after the first checkpoint comes before the end.
    words = ["--training.steps", "60", "--checkpoint.interval", "10"]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "01"[killed == "agent"]}

    def start() -> subprocess.Popen[bytes]:
        return agents.start(options, [str(job), *words], env=env, enter=lambda: None)

    try:
        running = [start()]
        # the agent that opens the port first hosts the store, and must not be the killed one
        _wait_for_store(port)
        running.append(start())
        while not (tmp_path / "out/job/latest/checkpoint/step_10").exists():
            said = [agents.said(number).read_text() for number in (0, 1)]
            assert {agent.poll() for agent in running} == {None}, said
            time.sleep(0.05)
        last = running[1].pid
        if killed == "agent":
            running.pop().kill()
            running.append(start())
        else:
            ranks = Path(f"/proc/{last}/task/{last}/children").read_text().split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
        codes = [agent.wait(timeout=240) for agent in running]
        said = [agents.said(number).read_text() for number in (0, 1)]
        assert codes == [0, 0], said
    finally:
        agents.end()
    run_forked(job, *words, "--job.name", "whole")
    (run,), (whole,) = run_folders(job), run_folders(job, "whole")
    assert (run / "logs/rank_0.log").read_text().count("resumed from") == 1
    assert numbers(run) == numbers(whole)
    ours, theirs = tensors(run, 60), tensors(whole, 60)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
