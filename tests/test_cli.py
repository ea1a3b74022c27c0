"""The command line: what each command answers, and how it fails."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from isp.cli import main
from isp.cli.failures import report_broken_pipe
from isp.cli.launch import launch, rank_folder
from isp.config import load_config
from isp.data.indexed import IndexedDataset
from tests.data.test_tokenizer import write_tokenizer

MINIMAL = "model:\n  preset: tiny\ndata:\n  source: python-stdlib\n"
ROOT = Path(__file__).parent.parent

# A rank as `isp train` makes one, with something to do that needs no process group.
RANK_SCRIPT = """
import ctypes, os, pathlib, signal, sys, time
from isp.cli.failures import report
from isp.cli.launch import follow_launcher

def tell(word):  # in one write: the ranks share a pipe
    os.write(1, word.encode() + b"\\n")

def act(how):
    failing = pathlib.Path(__file__).with_name("failing")
    if rank == 1:
        failing.touch()
    while how in ("raise", "kill") and not failing.exists():
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
    tell("ready")
    if how == "stuck":
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        ctypes.PyDLL(None).sleep(600)  # no other thread of Python runs meanwhile
    while not stopped and how == "stop":
        time.sleep(0.05)
    time.sleep(0.3)
    if how != "stop":
        raise RuntimeError("connection closed by peer")
    tell("saved")

rank, stopped = int(os.environ["RANK"]), []
for stop in (signal.SIGINT, signal.SIGTERM):
    signal.signal(stop, lambda *_: stopped.append(True))
follow_launcher()
try:
    act(sys.argv[1])
except Exception as error:
    sys.exit(report(error))
"""


SMALL_MODEL = ["--model.hidden_size", "16", "--model.num_heads", "2", "--model.num_layers", "3"]


@pytest.fixture
def job(tmp_path: Path) -> str:
    """A file with the smallest configuration."""
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    return str(path)


class Launcher:
    """A launcher of two ranks of RANK_SCRIPT; forked, as it needs torch."""

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
        """Exit code, output and errors, once it and its ranks have closed the pipe."""
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


def test_config_prints_what_loads_back(job, capsys, tmp_path):
    """Catches a printed configuration that is not the one a run would use."""
    words = ["--training.steps", "9", "--parallel.tensor.mode=mtp"]
    assert main(["config", job, *words]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_config(printed) == load_config(job, words)


def test_help_keys_prints_the_reference(capsys):
    """Catches a reference that needs a CONFIG, or that the command line does not reach."""
    for words, first in (([], "`job`: "), (["optimizer.grad_scaler"], "`optimizer.grad_scaler`: ")):
        with pytest.raises(SystemExit) as ended:
            main(["config", "--help-keys", *words])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(first)
    with pytest.raises(SystemExit) as ended:
        main(["config", "--help-keys", "optimiser"])
    assert ended.value.code == 2
    assert "optimiser is no section: use one of job, " in capsys.readouterr().err


def test_overrides_may_stand_before_the_file(job, capsys):
    """Catches the value of an override taken for CONFIG."""
    assert main(["config", "--training.seed", "5", job, "--training.deterministic"]) == 0
    assert "seed: 5\n  deterministic: true" in capsys.readouterr().out


def test_config_names_what_the_mode_ignores(job, capsys):
    """Catches a section that is ignored in silence."""
    assert main(["config", job, "--parallel.tensor.mode=fsp", "--parallel.weight.size=2"]) == 0
    assert "note: parallel.weight is not used in fsp mode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--training.lrr", "1"], "training.lrr: no such key"),
        (["--lr", "1"], "lr: no such key; did you mean 'optimizer.lr'?"),
    ],
)
@pytest.mark.parametrize("command", ["config", "train"])
def test_a_wrong_key_is_one_message_and_exit_code_2(job, capsys, command, words, fault):
    """Catches a traceback, or success, for a key with a typo."""
    assert main([command, job, *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert fault in output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train"],
        ["topology"],
        ["data"],
        ["topology", "--world", "4", "--tenser", "2"],
        ["topology", "--world", "9" * 5000],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words, capsys):
    """Catches an incomplete command line that does something, or a mistyped option ignored."""
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert exited.value.code == 2
    assert "usage: isp" in capsys.readouterr().err


def test_train_checks_sizes_before_it_starts_ranks(job, capsys, monkeypatch):
    """Catches ranks that are started only to refuse the world size."""
    monkeypatch.setattr("isp.cli.launch.launch", _must_not_run)
    words = ["--parallel.tensor.size=3", "--data.seq_len=2049"]
    assert main(["train", job, "--nproc", "4", *words]) == 2
    assert "parallel.tensor.size=3 must divide the world size 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["--parallel.tensor.size=2"], 2),
        (["--parallel.tensor.size=2", "--parallel.weight.size=4"], 4),
        (["--parallel.tensor.size=4", "--parallel.weight.size=2", "--parallel.zero1.size=3"], 12),
        (["--parallel.tensor.size=2", "--parallel.tensor.mode=mtp", "--parallel.weight.size=8"], 2),
        (["--parallel.pipeline.size=4", "--parallel.tensor.size=2", "--data.micro_num=4"], 8),
    ],
)
@pytest.mark.parametrize("command", ["train", "profile"])
def test_one_process_for_many_ranks_is_told_to_start_them(job, capsys, command, words, least):
    """Catches advice to give up the split, where --nproc was forgotten; and a wrong number."""
    assert main([command, job, *words]) == 2
    said = capsys.readouterr().err
    assert f"start them with --nproc {least}, or with torchrun" in said
    assert "use 1" not in said
    load_config(job, words).topology(least)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--data.source=gone.txt"], "data.source=gone.txt does not exist"),
        (["--data.valid_source=[gone/*.txt]"], "data.valid_source=gone/*.txt matches no file"),
        (["--data.source=gone.bin"], "gone.bin and gone.idx is missing"),
        (["--data.tokenizer=gone.json"], "data.tokenizer=gone.json does not exist"),
        (["--model.vocab_size=100"], "model.vocab_size=100 is smaller than the 257 entries"),
        (["--validation.freq=5"], "validation.freq=5 needs held-out text"),
    ],
)
@pytest.mark.parametrize("command", ["train", "profile"])
def test_missing_data_are_told_before_ranks_start(job, capsys, monkeypatch, command, words, fault):
    """Catches ranks that are started only to find that there is nothing to read."""
    monkeypatch.chdir(Path(job).parent)
    monkeypatch.setattr("isp.cli.launch.launch", _must_not_run)
    assert main([command, job, "--nproc", "2", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fault in line


def test_damaged_checkpoints_are_told_before_ranks_start(job, capsys, monkeypatch):
    """Catches a traceback, or ranks that start, where a line says what is wrong."""
    monkeypatch.chdir(Path(job).parent)
    monkeypatch.setattr("isp.cli.launch.launch", _must_not_run)
    checkpoint = Path("outputs/isp/2026-11-21_03-06-12/checkpoint/step_1")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    assert main(["train", job, "--nproc", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: no good checkpoint in")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_missing_device_is_told_before_ranks_start(job, capsys, monkeypatch, command):
    """Catches ranks that are started only to refuse, each of them."""
    monkeypatch.setattr("isp.cli.launch.launch", _must_not_run)
    assert main([command, job, "--nproc=2", "--training.device=cuda"]) == 2
    assert "training.device=cuda, but torch finds no CUDA device" in capsys.readouterr().err


def test_nproc_inside_torchrun_is_refused(job, capsys, monkeypatch):
    """Catches ranks that start ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("isp.cli.launch.launch", _must_not_run)
    assert main(["train", job, "--nproc", "4"]) == 2
    assert "--nproc 4 inside torchrun" in capsys.readouterr().err


def _must_not_run(*_: object) -> int:
    raise AssertionError("ranks were started")


def test_topology_prints_megatrons_order(capsys):
    """Catches groups printed in another order than Megatron-LM's."""
    assert main(["topology", "--world", "16", "--tensor", "2", "--pipeline", "4"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "[0, 1]  [2, 3]" in lines["tensor"]
    assert "[0, 2]  [1, 3]  [4, 6]" in lines["data"]
    assert "[0, 4, 8, 12]  [1, 5, 9, 13]" in lines["pipeline"]


def test_topology_of_many_ranks_fits_in_lines(capsys):
    """Catches a page of numbers for 1,024 ranks."""
    assert main(["topology", "--world", "1024", "--tensor", "4", "--weight", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 200
    assert (
        "tensor       [0, 1, 2, 3]  [4, 5, 6, 7]  [8, 9, 10, 11]  ..  [1020, 1021, 1022, 1023]"
        in lines
    )
    assert any("[64, 65, 66, .., 127]" in line for line in lines if line.startswith("weight "))


def test_topology_takes_every_size(capsys):
    """Catches an option of `isp topology` that is parsed and dropped."""
    words = ["--world", "8", "--mode", "isp", "--tensor", "2", "--weight", "4", "--zero1", "1"]
    assert main(["topology", *words]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "[0, 1, 2, 3]  [4, 5, 6, 7]" in lines["weight"]
    assert "[0]  [4]" in lines["zero1"]


def test_topology_refuses_sizes_that_do_not_fit(capsys):
    """Catches groups printed for an impossible split."""
    assert main(["topology", "--world", "4", "--tensor", "3"]) == 2
    assert "parallel.tensor.size=3 must divide" in capsys.readouterr().err


def test_data_prepare_writes_what_it_says(tmp_path, capsys):
    """Catches an option of `isp data prepare` that does not reach the work."""
    (tmp_path / "a.jsonl").write_text('{"body": "abc"}\n{"body": "de"}\n')
    words = ["--output", str(tmp_path / "out"), "--text-key", "body"]
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), *words]) == 0
    assert "7 tokens in 2 documents" in capsys.readouterr().out
    assert (tmp_path / "out.bin").stat().st_size > 0
    assert (tmp_path / "out.idx").exists()


def test_data_prepare_ends_documents_as_it_is_told(tmp_path, capsys):
    """Catches `--eos-token` that does not reach the work, or is ignored for bytes."""
    tokenizer = write_tokenizer(tmp_path / "t", ["</s>", "<mine>"])
    (tmp_path / "a.txt").write_text("the cat")
    words = ["data", "prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    ends = []
    for more in ([], ["--eos-token", "<mine>"]):
        assert main([*words, "--tokenizer", str(tokenizer), *more]) == 0
        (document,) = IndexedDataset(tmp_path / "out")
        ends.append(document.tolist()[-1])
    assert ends == [4, 5]
    assert main([*words, "--eos-token", "<mine>"]) == 2
    assert "--eos-token=<mine> has no meaning with --tokenizer=bytes" in capsys.readouterr().err


def test_data_prepare_of_a_missing_file_is_one_message(tmp_path, capsys):
    """Catches a traceback for a mistyped path."""
    missing = str(tmp_path / "absent.txt")
    assert main(["data", "prepare", missing, "--output", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err
    assert missing in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("fault", [KeyError("x"), RuntimeError("x"), ValueError("x")])
def test_a_fault_of_ours_keeps_its_traceback(job, capsys, monkeypatch, fault):
    """Catches a bug, or a library's ValueError, reported as if the user could put it right."""

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr("isp.config.to_yaml", fail)
    assert main(["config", job]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_one_message(job, capsys, monkeypatch):
    """Catches a full disk that ends in a traceback."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("isp.config.to_yaml", fail)
    assert main(["config", job]) == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    "words",
    [
        ["topology", "--world", "4"],
        ["--version"],
        ["train", "--help"],
        ["config", "configs/quickstart.yaml"],
    ],
)
def test_commands_that_start_nothing_do_not_load_torch(words):
    """Catches an import that makes `isp topology`, `isp config` or `--help` wait for seconds."""
    code = f"import sys, isp.cli\ntry: code = isp.cli.main({words})\n"
    code += "except SystemExit as end: code = end.code\n"
    code += "assert not code and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("how", "code", "told", "untold"),
    [
        ("raise", 1, ["rank 1 failed:", "RuntimeError: the first to fail"], "closed by peer"),
        ("refuse", 2, ["error: [Errno 2] No such file or directory: 'absent.yaml'"], "Traceback"),
        ("linger", 2, ["error: [Errno 2] No such file or directory: 'absent.yaml'"], "SIGTERM"),
        ("kill", 137, ["error: rank 1 was killed by SIGKILL"], "closed by peer"),
    ],
)
def test_the_first_failure_of_the_ranks_is_told_once(start_ranks, how, code, told, untold):
    """Catches a launcher that shows the ranks' knock-on errors, torchrun's report, or nothing."""
    ended, _, errors = start_ranks(how).end()
    assert ended == code, errors
    for words in told:
        assert errors.count(words) == 1, errors
    assert untold not in errors
    assert "torch/distributed" not in errors


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_lets_the_ranks_save(start_ranks, stop):
    """Catches ranks killed, or left running, when the launcher is told to stop."""
    launcher = start_ranks("stop")
    launcher.await_ranks()
    launcher.send(stop)
    assert launcher.end() == (128 + stop, "saved\n" * 2, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the ranks on Linux only")
def test_a_killed_launcher_takes_its_ranks_with_it(start_ranks):
    """Catches ranks that outlive their launcher, in a call that never returns."""
    launcher = start_ranks("stuck")
    launcher.await_ranks()
    launcher.send(signal.SIGKILL)
    assert launcher.end() == (-signal.SIGKILL, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the ranks on Linux only")
def test_a_second_stop_signal_ends_everything_at_once(start_ranks):
    """Catches a launcher that goes on waiting for ranks which do not answer."""
    launcher = start_ranks("stuck")
    launcher.await_ranks()
    launcher.send(signal.SIGINT)
    time.sleep(1.5)
    assert launcher.process.is_alive()
    launcher.send(signal.SIGINT)
    assert launcher.end()[0] == 128 + signal.SIGINT


KEEP_FOLDER = """
import sys, time
from isp.cli.launch import rank_folder
with rank_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_folders_of_killed_launchers_are_removed(tmp_path, monkeypatch):
    """Catches folders that pile up, and one that is removed while its launcher needs it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = [
        subprocess.Popen(
            [sys.executable, "-c", KEEP_FOLDER],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = [Path(other.stdout.readline().strip()) for other in others]
    others[0].kill()
    others[0].wait()
    try:
        with rank_folder() as own:
            assert set(tmp_path.iterdir()) == {folders[1], own}
        assert set(tmp_path.iterdir()) == {folders[1]}
    finally:
        others[1].kill()
        others[1].wait()


@pytest.mark.parametrize(("rank", "told"), [("0", True), ("1", False)])
def test_ranks_of_plain_torchrun_refuse_once(tmp_path, capsys, monkeypatch, rank, told):
    """Catches the same refusal printed by every rank, or missing from torchrun's report."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert main(["train", str(tmp_path / "absent.yaml")]) == 2
    assert ("cannot read it" in capsys.readouterr().err) is told
    recorded = json.loads((tmp_path / "error.json").read_text())
    assert "cannot read it" in recorded["message"]["extraInfo"]["py_callstack"]


def test_a_reader_that_leaves_is_told_as_what_ended_the_ranks(tmp_path, capsys, monkeypatch):
    """Catches a traceback of the other ranks behind `isp generate ... --nproc 2 | head`."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert report_broken_pipe(BrokenPipeError()) == 141
    assert (
        "stdout was closed" in json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    )
    assert capsys.readouterr().err == ""


def test_schedule_prints_the_plan(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that is not the configuration's own: its launch point moves with the key."""
    plans = []
    for point in ("wqkv", "w1"):
        key = "--parallel.weight.launch_allgather_before"
        assert main(["prefetch", job, key, point, *SMALL_MODEL]) == 0
        plans.append(capsys.readouterr().out)
    assert "start" in plans[0]
    assert "all of layers.1" in plans[0]
    assert plans[0] != plans[1]


def test_schedule_is_of_isp_mode_only(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan shown for a mode that gathers nothing, and the older name of the command lost."""
    assert main(["schedule", job, "--parallel.tensor.mode", "mtp", *SMALL_MODEL]) == 2
    assert "use isp" in capsys.readouterr().err


def test_checkpoints_are_shown_and_verified(tmp_path, capsys):
    """Catches damage that ends with exit code 0, and a whole checkpoint that does not."""
    run = tmp_path / "run"
    source = tmp_path / "text.txt"
    source.write_text("some words to learn " * 50)
    config = tmp_path / "job.yaml"
    config.write_text(MINIMAL.replace("python-stdlib", str(source)))
    options = ["--training.steps", "1", "--training.device", "cpu", "--data.seq_len", "32"]
    folder = ["--job.dump_folder", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "isp", "train", str(config), *SMALL_MODEL, *options, *folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (latest,) = run.glob("*/latest")
    assert main(["checkpoint", "inspect", str(latest)]) == 0
    assert "step_1" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(latest / "checkpoint/step_1")]) == 0
    assert "head.weight" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(latest)]) == 0
    assert "good" in capsys.readouterr().out
    shard = max((latest / "checkpoint/step_1").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert main(["checkpoint", "verify", str(latest)]) == 1
    assert shard.name in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(tmp_path / "absent")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--modes", "isp,tp"], "--modes isp,tp: write one or more of mtp,msp,fsp,isp, each once"),
        (["--modes", "isp,isp"], "each once"),
        (["--nproc", "3", "--parallel.tensor.size", "2"], "in mtp mode: parallel.tensor.size=2"),
        (["--job.dump_folder", "/dev/null/x", "--nproc", "2"], "job.dump_folder=/dev/null/x"),
    ],
)
def test_profile_refuses_before_it_starts_ranks(job, capsys, words, fault):
    """Catches a mode that cannot be, or a folder, found out only when ranks have been started."""
    assert main(["profile", job, *words]) == 2
    said = capsys.readouterr()
    assert fault in said.err
    assert "profiling" not in said.out
