"""Two machines, as far as one can have them: network namespaces, a torchrun in each."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.jobs import Launchers, launchers, numbers, run_folders, run_forked, write_job
from tools.netns import INTERFACE, Wires, why_not

FIRST = "10.77.0.1"


@pytest.fixture
def wires() -> Iterator[Wires]:
    """Two namespaces with a wire between them."""
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
    with launchers(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds: twice the import of torch, on a machine that does more
def test_train_as_one_and_stop_together(tmp_path: Path, wires: Wires, torchruns: Launchers) -> None:
    """Catches what works within one machine only, and a stop that the other one does not hear."""
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

    await_word("step: 5/", machines)
    machines[1].send_signal(signal.SIGTERM)
    machines[1].wait()
    # The other torchrun waits for the one that is gone, 300 seconds: its rank has ended long since.
    await_word("stopped after step", machines[:1])
    (run,) = run_folders(job)
    stopped = numbers(run)
    steps = len(stopped)
    assert 5 <= steps < 100000
    assert [path.name for path in (run / "checkpoint").glob("step_*")] == [f"step_{steps}"]

    run_forked(job, "--training.steps", str(steps), "--job.name", "whole")
    (whole,) = run_folders(job, "whole")
    assert stopped == numbers(whole)
