"""The launcher of ranks: what it reports, and how it and its ranks end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from ast import literal_eval
from pathlib import Path

import pytest

from isp.cli import main
from isp.cli.failures import LAUNCHER_REPORTS, report, report_broken_pipe, report_end
from isp.cli.launch import launch
from tests.disk import no_file_larger_than

ROOT = Path(__file__).parents[2]

# A rank as `isp train` makes one, with something to do that needs no process group.
RANK_SCRIPT = """
import ctypes, os, pathlib, signal, sys, time
from isp.cli.failures import report, report_end, report_interrupt
from isp.cli.launch import follow_launcher

def tell(word):  # in one write: the ranks share a pipe
    os.write(1, word.encode() + b"\\n")

def act(how):
    failing = pathlib.Path(__file__).with_name("failing")
    if rank == 1:
        failing.touch()
    while how in ("raise", "kill", "quit") and not failing.exists():
        time.sleep(0.01)  # the other rank may take longer to begin than to end
    if how == "raise" and rank == 1:
        raise RuntimeError("the first to fail")
    if how == "refuse":
        open("absent.yaml")
    if how == "linger":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if rank == 1:
            try:
                open("absent.yaml")
            except OSError as error:
                report(error)
            time.sleep(60)  # ending takes it longer than the other rank
        time.sleep(1)
        open("absent.yaml")
    if how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "quit" and rank == 1:
        os._exit(3)
    if how == "begin":
        signal.signal(signal.SIGINT, signal.default_int_handler)
    tell("ready")
    if how == "begin":
        time.sleep(60)
    if how == "one":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return tell("saved")
    if how == "stuck":
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        ctypes.PyDLL(None).sleep(600)  # no other thread of Python runs meanwhile
    while not stopped and how in ("stop", "finish"):
        time.sleep(0.05)
    time.sleep(0.3)
    if how not in ("stop", "finish"):
        raise RuntimeError("connection closed by peer")
    tell("saved")

rank, stopped = int(os.environ["RANK"]), []
for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(stop, lambda number, _: stopped.append(number))
follow_launcher()
try:
    act(sys.argv[1])
    sys.exit(report_end(stopped[0] if stopped and sys.argv[1] != "finish" else None))
except KeyboardInterrupt as error:
    sys.exit(report_interrupt(error))
except Exception as error:
    sys.exit(report(error))
"""


class Launcher:
    """A launcher with two ranks of RANK_SCRIPT, in a forked process, since it needs torch."""

    def __init__(self, folder: Path, how: str) -> None:
        self._errors = folder / "errors"
        script = folder / "rank.py"
        script.write_text(RANK_SCRIPT)
        read, write = os.pipe()
        self._output = os.fdopen(read)
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=self._launch, args=(write, [str(script), how]))
        self.process.start()
        os.close(write)

    def _launch(self, output: int, command: list[str]) -> None:
        os.dup2(output, 1)
        sys.stderr = self._errors.open("w")
        os.dup2(sys.stderr.fileno(), 2)
        sys.exit(launch(2, command))

    def await_ranks(self) -> None:
        assert [self._output.readline() for _ in range(2)] == ["ready\n"] * 2

    def send(self, stop: signal.Signals) -> None:
        os.kill(self.process.pid, stop)

    def end(self) -> tuple[int | None, str, str]:
        """Return exit code, output and errors after the launcher and its ranks have closed the
        pipe.
        """
        output = self._output.read()
        self.process.join(60)
        return self.process.exitcode, output, self._errors.read_text()


@pytest.fixture
def start_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started: list[Launcher] = []

    def start(how: str) -> Launcher:
        started.append(Launcher(tmp_path, how))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()  # its ranks follow
        launcher.end()


@pytest.mark.parametrize(
    ("how", "code", "shown", "hidden"),
    [
        ("raise", 1, ["rank 1 failed:", "RuntimeError: the first to fail"], "closed by peer"),
        ("refuse", 2, ["error: [Errno 2] No such file or directory: 'absent.yaml'"], "Traceback"),
        ("linger", 2, ["error: [Errno 2] No such file or directory: 'absent.yaml'"], "SIGTERM"),
        ("kill", 137, ["error: rank 1 was killed by SIGKILL"], "closed by peer"),
        ("quit", 3, ["error: rank 1 ended with exit code 3 and gave no reason"], "closed by peer"),
    ],
)
def test_the_first_failure_of_the_ranks_is_shown_once(start_ranks, how, code, shown, hidden):
    """Catches a launcher that shows the errors that follow from the first, torchrun's report, or
    nothing.
    """
    ended, _, errors = start_ranks(how).end()
    assert ended == code, errors
    for words in shown:
        assert errors.count(words) == 1, errors
    assert hidden not in errors
    assert "torch/distributed" not in errors


# A rank that meets the others and names each address at which it or its launcher listens.
MEETING_SCRIPT = """
import os, psutil, torch
from isp.core.comm import World

with World(torch.device("cpu"), timeout_seconds=20.0) as world:
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    found = {"met": x.item()}
    for who, pid in ("rank", os.getpid()), ("launcher", os.getppid()):
        sockets = psutil.Process(pid).net_connections("inet")
        found[who] = sorted({s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN})
    print(found, file=open(f"{__file__}.{world.rank}", "w"))
    torch.distributed.barrier()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="lists the sockets of another process")
def test_ranks_of_one_machine_rendezvous_without_host_name_or_open_port(tmp_path, monkeypatch):
    """Catches a port that other users or machines can reach, where torchrun unpickles what it
    receives, and ranks that wait for a host name that does not resolve.
    """
    script = tmp_path / "rank.py"
    script.write_text(MEETING_SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("getfqdn", "gethostname"):
        monkeypatch.setattr(socket, name, lambda *_: "no-such-machine.invalid")
    fork = multiprocessing.get_context("fork")
    launcher = fork.Process(target=lambda: sys.exit(launch(2, [str(script)])))
    launcher.start()
    launcher.join(60)
    launcher.kill()  # its ranks follow
    assert launcher.exitcode == 0
    for rank in range(2):
        found = literal_eval(Path(f"{script}.{rank}").read_text())
        assert found == {"met": 2.0, "rank": ["127.0.0.1"], "launcher": []}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_lets_the_ranks_save(start_ranks, stop):
    """Catches ranks that are killed, or left running, when the launcher receives a stop signal."""
    launcher = start_ranks("stop")
    launcher.await_ranks()
    launcher.send(stop)
    assert launcher.end() == (128 + stop, "saved\n" * 2, "")


def test_a_signal_to_one_rank_sets_the_exit_code(start_ranks):
    """Catches a run that stopped early but exits with 0."""
    code, output, errors = start_ranks("one").end()
    assert (code, errors) == (128 + signal.SIGUSR1, "")
    assert sorted(output.split()) == ["ready", "ready", "saved", "saved"]


def test_a_signal_during_the_last_step_is_no_failure(start_ranks):
    """Catches a finished run that is trained again because its exit code says that it was
    stopped.
    """
    launcher = start_ranks("finish")
    launcher.await_ranks()
    launcher.send(signal.SIGTERM)
    assert launcher.end() == (0, "saved\n" * 2, "")


def test_torchrun_does_not_restart_a_stopped_rank(tmp_path, monkeypatch):
    """Catches a stopped run that plain torchrun counts as failed and starts again."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv(LAUNCHER_REPORTS, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert report_end(signal.SIGTERM) == 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("RANK")
    assert report_end(signal.SIGTERM) == 128 + signal.SIGTERM


def test_a_stop_during_the_start_is_reported_once(start_ranks):
    """Catches an interrupted start without any message, or with one from each rank."""
    launcher = start_ranks("begin")
    launcher.await_ranks()
    launcher.send(signal.SIGINT)
    assert launcher.end() == (128 + signal.SIGINT, "", "error: stopped by SIGINT\n")


def test_the_launcher_respects_nohup(start_ranks):
    """Catches ranks under `nohup` that stop when the terminal closes."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launcher = start_ranks("stop")
    finally:
        signal.signal(signal.SIGHUP, old)
    launcher.await_ranks()
    launcher.send(signal.SIGHUP)
    time.sleep(0.3)
    launcher.send(signal.SIGTERM)
    assert launcher.end() == (128 + signal.SIGTERM, "saved\n" * 2, "")


@pytest.mark.parametrize("room", [0, 10])
def test_an_error_file_is_written_atomically(tmp_path, monkeypatch, capsys, room):
    """Catches half of a file, on which torchrun's agent fails, and an error that is not shown."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv(LAUNCHER_REPORTS, "1")
    with no_file_larger_than(room):
        report(FileNotFoundError(2, "absent", "here"))
    assert list(tmp_path.iterdir()) == []
    assert "absent" in capsys.readouterr().err
    report(FileNotFoundError(2, "absent", "here"))
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
    assert "absent" in json.loads(file.read_text())["message"]["message"]
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the ranks on Linux only")
def test_ranks_end_when_their_launcher_is_killed(start_ranks):
    """Catches ranks that outlive their launcher because they wait in a call that never returns."""
    launcher = start_ranks("stuck")
    launcher.await_ranks()
    launcher.send(signal.SIGKILL)
    assert launcher.end() == (-signal.SIGKILL, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the ranks on Linux only")
def test_a_second_stop_signal_ends_everything_at_once(start_ranks):
    """Catches a launcher that keeps waiting for ranks which do not answer."""
    launcher = start_ranks("stuck")
    launcher.await_ranks()
    launcher.send(signal.SIGINT)
    time.sleep(1.5)
    assert launcher.process.is_alive()
    launcher.send(signal.SIGINT)
    assert launcher.end()[0] == 128 + signal.SIGINT


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("1", False)])
def test_a_refusal_under_plain_torchrun_is_printed_once(tmp_path, capsys, monkeypatch, rank, shown):
    """Catches a refusal printed by every rank, or missing from torchrun's report."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert main(["train", str(tmp_path / "absent.yaml")]) == 2
    assert ("cannot read it" in capsys.readouterr().err) is shown
    recorded = json.loads((tmp_path / "error.json").read_text())
    assert "cannot read it" in recorded["message"]["extraInfo"]["py_callstack"]


def test_a_closed_stdout_is_reported_as_the_cause(tmp_path, capsys, monkeypatch):
    """Catches a traceback of the other ranks in `isp evaluate ... --nproc 2 | head`."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert report_broken_pipe(BrokenPipeError()) == 141
    assert (
        "stdout was closed" in json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    )
    assert capsys.readouterr().err == ""
