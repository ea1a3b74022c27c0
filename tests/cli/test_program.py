"""The command line: what each command answers, and how it fails."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from isp.cli import main
from isp.config import load_config
from isp.data.indexed import IndexedDataset
from isp.utils.files import download_hint
from tests.data.test_tokenizer import write_tokenizer
from tests.ranks import run_isp

MINIMAL = "model:\n  preset: tiny\ndata:\n  source: python-stdlib\n"
ROOT = Path(__file__).parents[2]

SMALL_MODEL = ["--model.hidden_size", "16", "--model.num_heads", "2", "--model.num_layers", "3"]


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Return the path of a file with the smallest configuration."""
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    return str(path)


def test_config_prints_the_configuration_of_a_run(job, capsys, tmp_path):
    """Catches a printed configuration that differs from the one a run would use."""
    words = ["--training.steps", "9", "--parallel.tensor.mode=mtp"]
    assert main(["config", job, *words]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_config(printed) == load_config(job, words)


def test_cuda_device_max_connections_is_set_before_cuda_starts(job, monkeypatch):
    """Catches CUDA_DEVICE_MAX_CONNECTIONS set after `--parallel auto` has started CUDA."""
    name, number = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setenv(name, "8")
    monkeypatch.setattr("isp.config.load_config", lambda *_: number.append(os.environ[name]))
    main(["config", job])
    monkeypatch.delenv(name)
    main(["config", job])
    assert number == ["8", "32"]


def test_help_keys_prints_the_reference(capsys):
    """Catches a reference that needs a CONFIG, or that no command line reaches."""
    for words, first in (([], "`job`: "), (["optimizer.grad_scaler"], "`optimizer.grad_scaler`: ")):
        with pytest.raises(SystemExit) as ended:
            main(["config", "--help-keys", *words])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(first)
    with pytest.raises(SystemExit) as ended:
        main(["config", "--help-keys", "optimiser"])
    assert ended.value.code == 2
    assert "optimiser is not a section: use one of job, " in capsys.readouterr().err


def test_overrides_may_precede_the_file(job, capsys):
    """Catches the value of an override read as CONFIG."""
    assert main(["config", "--training.seed", "5", job, "--training.deterministic"]) == 0
    assert "seed: 5\n  deterministic: true" in capsys.readouterr().out


def test_config_names_sections_that_the_mode_ignores(job, capsys):
    """Catches a section that is silently ignored."""
    assert main(["config", job, "--parallel.tensor.mode=fsp", "--parallel.weight.size=2"]) == 0
    assert "note: parallel.weight is not used in fsp mode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--training.lrr", "1"], "training.lrr: no such key"),
        (["--lr", "1"], "lr: no such key; did you mean 'optimizer.lr' or 'optimizer.muon.lr'?"),
    ],
)
@pytest.mark.parametrize("command", ["config", "train"])
def test_a_wrong_key_is_one_message_and_exit_code_2(job, capsys, command, words, fault):
    """Catches a traceback, or exit code 0, for a misspelled key."""
    assert main([command, job, *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert fault in output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], ""),
        (["train"], ""),
        (["topology"], ""),
        (["data"], ""),
        (["topology", "--world", "4", "--tenser", "2"], "did you mean --tensor?"),
        (["generate", "FOLDER", "--promt=hi"], "--promt: no such option; did you mean --prompt?"),
        (["topology", "--world", "4", "--colour", "2"], "unrecognized arguments: --colour 2"),
        (["topology", "--world", "9" * 5000], ""),
        (["config", "FILE", "training.steps=2 "], "a key is given as --training.steps=2"),
        (["evaluate", "FOLDER", "++data.seq_len=2"], "a key is given as --data.seq_len=2"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words, fault, capsys):
    """Catches an incomplete command line that does something, and an ignored misspelled option."""
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert exited.value.code == 2
    said = capsys.readouterr().err
    assert "usage: isp" in said
    assert fault in said


@pytest.mark.parametrize("text", ["--prompts a", "--is it 3.5?"])
def test_a_value_that_looks_like_an_option_is_a_value(text, capsys):
    """Catches a text read as an option or key, and a name after `--` read as an option."""
    assert main(["generate", "nowhere", "--prompt", text]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main(["generate", "--prompt=a", "--", "--promt"]) == 2
    assert "--promt does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["config", "JOB", "--model.preset=null", "--model.hf=them/it"],
        ["train", "JOB", "--nproc=1", "--data.tokenizer=them/it"],
        ["generate", "them/it", "--prompt=hi"],
        ["check", "them/it"],
    ],
)
def test_a_hub_name_is_refused_with_the_download_command(words, job, capsys):
    """Catches a refusal that does not say how a model of the hub becomes a folder."""
    assert main([job if word == "JOB" else word for word in words]) == 2
    said = capsys.readouterr().err
    assert "hub, download it first: `hf download them/it --local-dir it`" in said


@pytest.mark.parametrize(
    "path", ["{here}/them/it", "models/tokenizer.json", "a/b.yml", "a/b.txt", "ckpt/step_20"]
)
def test_a_missing_path_gets_no_advice_to_download(path, tmp_path, monkeypatch):
    """Catches advice to download a local folder or file of the user that does not exist."""
    monkeypatch.chdir(tmp_path)
    assert download_hint("them/it")
    assert download_hint(path.format(here=tmp_path)) == ""


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
def test_a_layout_of_many_ranks_in_one_process_names_nproc(job, capsys, command, words, least):
    """Catches advice to change the layout where --nproc was forgotten, and a wrong number of
    ranks.
    """
    assert main([command, job, *words]) == 2
    said = capsys.readouterr().err
    assert f"start them with --nproc {least} or torchrun" in said
    assert "use 1" not in said
    load_config(job, words).topology(least)


MISSING = {
    "--data.source=gone.txt": "data.source=gone.txt does not exist",
    "--data.source=gone.bin": "gone.bin and gone.idx is missing",
    "--data.tokenizer=gone.json": "data.tokenizer=gone.json does not exist",
    "--model.vocab_size=100": "model.vocab_size=100 is smaller than the 257 entries",
    "--data.source=a.jsonl --data.text_key=b": "a.jsonl, line 1 has no key 'b', only 'text'",
    "--data.source=p.jsonl": "p.jsonl, line 1: 'position_ids' has 7 at token 1",
}
HELD_OUT = {
    "--data.valid_source=[gone/*.txt]": "data.valid_source=gone/*.txt matches no file",
    "--validation.freq=5": "validation.freq=5 needs held-out text",
}
"""Keys of evaluation, which a profile does not need."""


@pytest.mark.parametrize(
    ("command", "word", "fault"),
    [("train", *of) for of in (MISSING | HELD_OUT).items()]
    + [("profile", *of) for of in MISSING.items()],
)
def test_missing_data_are_reported_before_ranks_start(
    job, capsys, monkeypatch, command, word, fault
):
    """Catches ranks that are started only to find that there is nothing to read."""
    monkeypatch.chdir(Path(job).parent)
    Path("a.jsonl").write_text('{"text": "x"}\n' * 5)
    tokens = '{"input_ids": [1, 2], "position_ids": [0, %d]}\n'
    Path("p.jsonl").write_text(tokens % 7)
    monkeypatch.setattr("isp.cli.launch.launch", _must_not_run)
    assert main([command, job, "--nproc", "2", *word.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if not line.startswith("checking "))
    assert fault in line


def test_damaged_checkpoints_are_reported_before_ranks_start(job, capsys, monkeypatch):
    """Catches a traceback, or ranks that are started, where one line can say what is wrong."""
    monkeypatch.chdir(Path(job).parent)
    monkeypatch.setattr("isp.cli.launch.launch", _must_not_run)
    checkpoint = Path("outputs/isp/2026-11-21_03-06-12/checkpoint/step_1")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    assert main(["train", job, "--nproc", "2"]) == 2
    assert "\nerror: no usable checkpoint in" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_missing_device_is_reported_before_ranks_start(job, capsys, monkeypatch, command):
    """Catches ranks that start and then each refuse the device."""
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


def test_data_prepare_applies_its_options(tmp_path, capsys):
    """Catches an option of `isp data prepare` without effect."""
    (tmp_path / "a.jsonl").write_text('{"body": "abc"}\n{"body": "de"}\n')
    words = ["--output", str(tmp_path / "out"), "--text-key", "body"]
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), *words]) == 0
    said = capsys.readouterr().out
    assert "7 tokens in 2 documents" in said
    assert "by the tokenizer bytes (257 entries); train with --data.source" in said
    written = (tmp_path / "out.bin").read_bytes()
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), *words[:2]]) == 2
    assert "out.bin exists already: name another --output, or" in capsys.readouterr().err
    assert (tmp_path / "out.bin").read_bytes() == written
    assert (tmp_path / "out.bin").stat().st_size > 0
    assert (tmp_path / "out.idx").exists()


def test_data_prepare_reports_the_token_that_ends_documents(tmp_path, capsys):
    """Catches an `--eos-token` without effect, also for the byte tokenizer."""
    tokenizer = write_tokenizer(tmp_path / "t", ["</s>", "<mine>"])
    (tmp_path / "a.txt").write_text("the cat")
    words = ["data", "prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    ends = []
    for more in ([], ["--eos-token", "<mine>"]):
        assert main([*words, "--overwrite", "--tokenizer", str(tokenizer), *more]) == 0
        (document,) = IndexedDataset(tmp_path / "out")
        ends.append(document.tolist()[-1])
    assert ends == [4, 5]
    assert main([*words, "--overwrite", "--eos-token", "<mine>"]) == 2
    assert "--eos-token=<mine> has no effect with --tokenizer=bytes" in capsys.readouterr().err


def test_errors_contain_no_terminal_escape_codes(job, capsys):
    """Catches escape codes in a name or a file that reach the terminal."""
    Path(job).with_name("\x1b[31ma.jsonl").write_text("[1]\n")
    assert main(["data", "prepare", str(Path(job).parent / "*.jsonl"), "--output", "x"]) == 2
    assert "\\x1b[31ma.jsonl, line 1 is a JSON list" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [KeyError("x"), RuntimeError("x"), ValueError("x")])
def test_an_internal_error_keeps_its_traceback(job, capsys, monkeypatch, fault):
    """Catches a bug, or a library's ValueError, reported as a mistake of the user."""

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr("isp.config.to_yaml", fail)
    assert main(["config", job]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_one_message(job, capsys, monkeypatch):
    """Catches a full disk that ends in a traceback."""

    def fail(*_: object, **__: object) -> None:
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
def test_commands_without_training_do_not_load_torch(words):
    """Catches an import that makes `isp topology`, `isp config` or `--help` wait for seconds."""
    code = f"import sys, isp.cli\ntry: code = isp.cli.main({words})\n"
    code += "except SystemExit as end: code = end.code\n"
    code += "assert not code and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


LEAVE = """
import atexit, os, runpy, sys, threading, isp.cli
class Kept:
    write = os.write
    def __del__(self):
        self.write(1, b"torn down")
sys.kept = Kept()
atexit.register(print, "wound up")
threading.Thread(target=threading.Event().wait).start()
isp.cli.main = lambda: print("told") or {code}
runpy.run_module("isp", run_name="__main__")
"""


@pytest.mark.parametrize(("code", "rank"), [(0, "1"), (3, "1"), (0, None), (3, None)])
def test_a_command_exits_without_interpreter_teardown(code: int, rank: str | None) -> None:
    """Catches a finished command that a thread aborts while the interpreter exits, and an error
    message that is lost because the rank is aborted while it exits.
    """
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", LEAVE.format(code=code)],
        cwd=ROOT,
        env=env if rank is None else {**env, "RANK": rank, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == code
    wound_up = code == 0 or rank is None
    assert done.stdout.split("\n") == ["told", *(["wound up"] if wound_up else []), ""]


LINGER = """
import atexit, threading, isp.__main__ as program
atexit.register(threading.Event().wait)
program._EXIT_SECONDS = 0.2
program.main = lambda: 0
program.run()
"""


def test_a_hanging_exit_handler_does_not_delay_the_exit() -> None:
    """Catches a finished run that stays alive while a tracker's exit handler waits."""
    done = subprocess.run(
        [sys.executable, "-c", LINGER], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    assert "an exit handler of a library still runs after 0.2 s" in done.stderr


@pytest.mark.parametrize("words", [["--version"], ["train", "configs/quickstart.yaml"]])
def test_missing_packages_are_reported_with_how_to_install_them(words: list[str]) -> None:
    """Catches a traceback where `pip install` was forgotten or the environment is not active."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "isp", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: ISP needs the package pydantic, which {sys.executable} does")
    assert "pip install -e ." in line


def test_closed_streams_do_not_end_a_command(job: str) -> None:
    """Catches a traceback and exit code 1 of a command, or a run, that is started with `>&-`."""
    command = shlex.join([sys.executable, "-m", "isp", "config", job])
    assert subprocess.run(["sh", "-c", f"{command} <&- >&- 2>&-"], cwd=ROOT).returncode == 0


def test_a_closed_stderr_pipe_does_not_end_a_command(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that ends because the pipe of its stderr is closed, as by `2>&1 | head`."""
    read, write = os.pipe()
    os.close(read)
    pipe = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stderr", pipe)
    codes = [main(["config", job, f"--optimizer.muon.lr={rate}"]) for rate in ("0.1", "-1")]
    monkeypatch.undo()
    with suppress(BrokenPipeError):  # its buffer still has text
        pipe.close()
    assert codes == [0, 2], "a note, and an error"


def test_ctrl_c_is_reported(job: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Catches an interrupted command that ends without a message."""

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("isp.config.load_config", interrupted)
    assert main(["config", job]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "error: stopped by SIGINT\n"


def test_schedule_prints_the_plan(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan that ignores the configuration; its launch point must follow the key."""
    plans = []
    for point in ("wqkv", "w1"):
        key = "--parallel.weight.launch_allgather_before"
        assert main(["prefetch", job, key, point, *SMALL_MODEL]) == 0
        plans.append(capsys.readouterr().out)
    assert "start" in plans[0]
    assert "all of layers.1" in plans[0]
    assert plans[0] != plans[1]


def test_schedule_refuses_modes_that_gather_no_weights(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan printed for a mode that gathers nothing."""
    assert main(["prefetch", job, "--parallel.tensor.mode", "mtp", *SMALL_MODEL]) == 2
    assert "use isp" in capsys.readouterr().err


def test_checkpoints_are_shown_and_verified(tmp_path, capsys):
    """Catches exit code 0 for a damaged checkpoint, and another code for a sound one."""
    run = tmp_path / "run"
    source = tmp_path / "text.txt"
    source.write_text("some words to learn " * 50)
    config = tmp_path / "job.yaml"
    config.write_text(MINIMAL.replace("python-stdlib", str(source)))
    options = ["--training.steps", "1", "--training.device", "cpu", "--data.seq_len", "32"]
    folder = ["--job.dump_folder", str(run)]
    (done,) = run_isp(1, "train", str(config), *SMALL_MODEL, *options, *folder)
    assert done.code == 0, done.err
    (latest,) = run.glob("*/latest")
    assert main(["checkpoint", "inspect", str(latest)]) == 0
    assert "step_1" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(latest / "checkpoint/step_1")]) == 0
    assert "lm_head.weight" in capsys.readouterr().out
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
        (["--modes", "isp,isp", *HELD_OUT], "each once"),  # held-out text need not be there
        (["--nproc", "3", "--parallel.tensor.size", "2"], "in mtp mode: parallel.tensor.size=2"),
        (["--job.dump_folder", "/dev/null/x", "--nproc", "2"], "job.dump_folder=/dev/null/x"),
    ],
)
def test_profile_checks_modes_and_folder_before_ranks_start(job, capsys, words, fault):
    """Catches a mode or a folder that is refused only after ranks have been started."""
    assert main(["profile", job, *words]) == 2
    said = capsys.readouterr()
    assert fault in said.err
    assert "profiling" not in said.out


def test_planning_runs_on_one_thread(job, capsys, monkeypatch):
    """Catches threads that wait for each other: planning an 8B model took three times as long."""
    asked = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    commands = ["plan"], ["layouts", "--world", "2"], ["prefetch"]
    for name, *more in commands:
        assert main([name, job, *more, *SMALL_MODEL]) == 0
        assert f"planning {job}: tracing its model" in capsys.readouterr().err
    assert asked == [1, 1, 1]


def test_a_process_that_profiles_keeps_its_threads(job, monkeypatch):
    """Catches a profile on one thread of a run that has several."""
    asked = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr("isp.train.profiling.profile_run.profile_ranks", lambda *_, **__: None)
    assert main(["profile", job, "--modes", "isp", *SMALL_MODEL]) == 0
    assert asked == []
