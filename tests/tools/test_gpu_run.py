"""The runner of the GPU steps, with programs that need no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch

from tests.profile.html_page import HtmlPage

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench_memory  # noqa: E402
import bench_mfu  # noqa: E402
import gpu_run  # noqa: E402
import gpu_steps  # noqa: E402
from check_with_torch import shares  # noqa: E402
from gpu_steps import PARTS, QUESTIONS, STEPS, Step, words  # noqa: E402

ONE_GPU = gpu_run.Machine("cuda", 1, {"GPUs": "NVIDIA X"})


def _step(name: str, code: str, seconds: float = 60.0) -> Step:
    return Step(name, "what for", seconds, f'{{python}} -c "{code}"', "", "first")


def _run(folder: Path, *names: str, seconds: float = 999.0) -> int:
    """Run the steps with this many seconds from now."""
    gpu_run.BEGUN = time.monotonic()
    options = gpu_run.argparse.Namespace(names=list(names), seconds=seconds)
    return gpu_run.run_all(options, ONE_GPU, folder)


def _begun(told: str) -> list[str]:
    return [line.split(":")[0] for line in told.splitlines() if line.endswith("...")]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "BEGUN", 0.0)
    monkeypatch.delenv("OUT", raising=False)


def test_a_run_continues_after_a_step_that_fails_or_hangs(tmp_path, monkeypatch, capsys):
    """Catches a failure that ends the run, a rank left running, and a failure missing in the
    report.
    """
    leave = "import subprocess, time; print(subprocess.Popen(['sleep', '99']).pid, flush=True)"
    row = "open('{json}', 'w').write('[7]')"
    steps = (
        _step("hangs", f"{leave}; {row}; time.sleep(99)", seconds=3),
        _step("fails", "print('FAILED tests/a.py::b'); print('<b> & why'); exit(3)"),
        _step("counts", row),
        _step("two", "")._replace(gpus=2),
    )
    monkeypatch.setattr(gpu_run, "STEPS", steps)
    assert _run(tmp_path) == 1
    found = {p.stem: json.loads(p.read_text()) for p in tmp_path.glob("*.json")}
    assert {name: one["result"].split(" after")[0] for name, one in found.items()} == {
        "hangs": "stopped",
        "fails": "failed with 3",
        "counts": "passed",
    }
    assert found["counts"]["numbers"] == found["hangs"]["numbers"] == [7]
    pid, *where = (tmp_path / "hangs.log").read_text().splitlines()
    assert where[-1] == "KeyboardInterrupt"  # the log has the traceback
    left = Path("/proc", pid)
    for _ in range(50):
        if not left.exists() or ") Z" in (left / "stat").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process of the step that hangs is still there")
    page = HtmlPage((tmp_path / "report" / "index.html").read_text())
    assert "1 of 3 steps passed" in page.text
    assert "<b> & why" in page.text
    assert all(question in page.text for question, _ in QUESTIONS)
    *_, first, why, second, test, report = capsys.readouterr().out.splitlines()
    assert (first, why) == ("hangs: stopped after its 3 s", "    KeyboardInterrupt")
    assert (second, test) == ("fails: failed with 3", "    FAILED tests/a.py::b")
    assert report.startswith("report: ")
    log = (tmp_path / "counts.json").stat().st_mtime_ns
    _run(tmp_path)
    assert (tmp_path / "counts.json").stat().st_mtime_ns == log, "what has passed is done again"


def test_everything_is_in_the_archive_after_each_step(tmp_path, monkeypatch):
    """Catches results lost when the machine is taken away: the second step checks those of the
    first.
    """
    see = "import shutil; shutil.copy('{folder}/results.tgz', '{folder}/seen.tgz')"
    steps = _step("one", "print(1)"), _step("two", see)
    monkeypatch.setattr(gpu_run, "STEPS", steps)
    assert _run(tmp_path) == 0
    for name, logs in (("seen", ["one"]), ("results", ["one", "two"])):
        with tarfile.open(tmp_path / f"{name}.tgz") as archive:
            expected = {f"results/{log}.{kind}" for log in logs for kind in ("log", "json")}
            assert {*expected, "results/report/index.html"} <= {*archive.getnames()}


def test_only_the_archive_and_the_page_are_written_to_out(tmp_path, monkeypatch):
    """Catches other files in $OUT, and an archive that is lost when the machine is taken away."""
    out = tmp_path / "out"
    see = f"import shutil; shutil.copytree('{out}', '{tmp_path}/seen')"
    monkeypatch.setattr(gpu_run, "STEPS", (_step("one", "print(1)"), _step("two", see)))
    monkeypatch.setenv("OUT", str(out))
    work = tmp_path / "work"
    work.mkdir()
    assert _run(work) == 0
    for folder in (out, tmp_path / "seen"):
        assert {path.name for path in folder.iterdir()} == {"results.tgz", "index.html"}
    assert (out / "results.tgz").read_bytes() == (work / "results.tgz").read_bytes()


def test_a_page_that_fails_loses_no_results(tmp_path, monkeypatch, capsys):
    """Catches an error of the page that ends the run, or keeps its results out of the archive."""
    half = "open('{json}', 'w').write('[7')"
    monkeypatch.setattr(gpu_run, "STEPS", (_step("one", half), _step("two", "print(2)")))
    (tmp_path / "two.json").write_text('{"step": ')  # left by a killed step
    (tmp_path / "report").write_text("no folder")
    assert _run(tmp_path) == 0
    assert "no page: FileExistsError" in capsys.readouterr().out
    with tarfile.open(tmp_path / "results.tgz") as archive:
        assert {"results/one.json", "results/two.log"} <= {*archive.getnames()}
    assert json.loads((tmp_path / "one.json").read_text())["numbers"] is None


def test_a_short_call_runs_the_steps_that_fit_and_the_next_call_the_rest(
    tmp_path, monkeypatch, capsys
):
    """Catches time reserved for whole limits, and time spent on a step that cannot end in it."""
    steps = (
        _step("fails", "exit(3)"),
        _step("long", "", seconds=240),
        _step("too_long", "", seconds=600),
        _step("whole", "", seconds=120)._replace(part=""),
        _step("short", ""),
    )
    monkeypatch.setattr(gpu_run, "STEPS", steps)
    allowed = {}
    real = gpu_run.run

    def noted(step, machine, folder, seconds):
        allowed[step.name] = seconds
        return real(step, machine, folder, seconds)

    monkeypatch.setattr(gpu_run, "run", noted)
    for begun in (["fails", "long", "short"], ["fails"]):
        _run(tmp_path, seconds=100)
        assert _begun(capsys.readouterr().out) == begun
    assert allowed["short"] == 60
    assert 60 < allowed["long"] < 100
    _run(tmp_path)
    assert _begun(capsys.readouterr().out) == ["too_long", "whole", "fails"]
    _run(tmp_path, "long")
    assert _begun(capsys.readouterr().out) == ["long"]


def test_parts_consist_of_steps_for_one_gpu():
    """Catches a part that needs two GPUs, and one with a wrong or missing step."""
    first = gpu_run.chosen(["first"], ONE_GPU, {})
    ran = {step.name: {} for step in first}
    second = gpu_run.chosen(["second"], ONE_GPU, ran)
    assert [step.name for step in first][:2] == ["facts", "tests"]
    assert {step.part for step in first} == {"first"}
    # then the remaining steps, if there is time
    assert {step.part for step in second} == {"second", ""}
    assert [step.part for step in second] == sorted((s.part for s in second), reverse=True)
    assert not [step for step in (*first, *second) if step.gpus > 1 or not step.default]
    for part, seconds in PARTS.items():
        assert sum(step.seconds for step in STEPS if step.part == part) < 1.2 * seconds
    del ran["two_ranks"], ran["attention"]  # the first part had no time for these
    missed = [step.name for step in gpu_run.chosen(["second"], ONE_GPU, ran) if step not in second]
    assert missed == ["two_ranks", "attention"]
    assert gpu_run.chosen(["second"], ONE_GPU, ran)[:2] != second[:2]  # they come first


@pytest.mark.parametrize(
    ("words", "limit"),
    [("first", 530), ("mfu second", 290), ("first second", 820), ("mfu", float("inf"))],
)
def test_a_part_keeps_its_time_limit_with_other_steps(monkeypatch, words, limit):
    """Catches a step named with a part that removes the part's limit."""
    found = []
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", *words.split()])
    monkeypatch.setattr(gpu_run, "install_wheels", lambda folder: None)
    monkeypatch.setattr(gpu_run, "run_on_machine", lambda options: found.append(options.seconds))
    gpu_run.main()
    assert found == [limit]


def test_missing_packages_are_reported_with_how_to_install_them(monkeypatch):
    """Catches a traceback, or advice that needs a network, where packages are missing."""
    monkeypatch.setitem(gpu_run.NEEDED, "isp_not_there", "pydantic")
    with pytest.raises(SystemExit) as stopped:
        gpu_run.look("cpu")
    told = str(stopped.value)
    assert "lacks pydantic" in told
    pins = r"-d \.whl pydantic==\S+ pydantic_core==\S+ annotated-types==\S+ typing-inspection==\S+"
    assert re.search(rf"pip download --no-deps [^;]+ {pins} typing_extensions==\S+\n", told)
    assert "name .whl as well, for each command" in told


@pytest.mark.parametrize("broken", [False, True])
def test_wheels_are_installed_for_a_run(tmp_path, monkeypatch, capsys, broken):
    """Catches wheels that are ignored, come after installed packages on the path, or are not
    needed, and a broken wheel that ends the run or blocks the others.
    """
    if broken:
        (tmp_path / "a_broken_one-1.0-py3-none-any.whl").write_text("no archive")
    monkeypatch.setattr(gpu_run, "WHEELS", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    info = "isp_not_there-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "isp_not_there-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("isp_not_there.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: isp_not_there\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    there = tmp_path / "there"
    gpu_run.install_wheels(there)
    assert (there / "isp_not_there.py").exists()
    assert gpu_run.environment("cpu")["PYTHONPATH"] == f"{there}:before"
    told = capsys.readouterr().out
    assert broken == ("a_broken_one-1.0-py3-none-any.whl is not installed: " in told)
    (tmp_path / "a_broken_one-1.0-py3-none-any.whl").unlink(missing_ok=True)
    gpu_run.install_wheels(tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("fault", [ValueError("no host memory\nat all"), RuntimeError("a kernel")])
def test_a_contestant_that_fails_has_a_row(tmp_path, monkeypatch, fault):
    """Catches a failure that ends a benchmark, is lost, or hides earlier measurements."""
    numbers = tmp_path / "n.json"

    def measure(rung, tokens, options):
        if rung == 3:
            raise fault
        if rung == 2:
            assert len(json.loads(numbers.read_text())) == 2  # measurements are saved
            raise torch.OutOfMemoryError
        return bench_memory.Row(list(bench_memory.RUNGS)[rung], tokens, 2, 1, 1.0)

    monkeypatch.setattr(bench_memory, "measure", measure)
    words = ["--rungs", "4", "--lengths", "8", "--json", str(numbers)]
    only = "loss in chunks,MLP in tiles,recompute all blocks"  # in this order
    monkeypatch.setattr(sys, "argv", ["bench_memory.py", *words, "--only", only])
    assert bench_memory.main() == 1
    faults = [row["fault"] for row in json.loads(numbers.read_text())]
    told = str(fault).split("\n")[0]
    assert faults == ["", f"{type(fault).__name__}: {told}", "out of memory"]


def test_a_contestant_of_the_mfu_benchmark_that_fails_has_a_row(tmp_path, monkeypatch, capsys):
    """Catches a failure of transformers that ends the benchmark, and a loss of another model."""

    def ours(config, batch, mesh, folder):
        if not config.model.compile:
            raise ValueError("not so")
        return lambda: 5.0

    monkeypatch.setattr(bench_mfu, "write_folder", lambda folder, *_: None)
    monkeypatch.setattr(bench_mfu, "ours", ours)
    monkeypatch.setattr(
        bench_mfu, "plain", lambda *_, shard=None: lambda: 5.01 if shard is None else 7.0
    )
    numbers = tmp_path / "n.json"
    words = ["--device", "cpu", "--presets", "tiny", "--lengths", "8", "--rounds", "1"]
    words += ["--also", "model.compile=false", "--json", str(numbers)]
    monkeypatch.setattr(sys, "argv", ["bench_mfu.py", *words])
    assert bench_mfu.main() == 1
    rows = {row["who"]: row["fault"] for row in json.loads(numbers.read_text())}
    assert rows == {
        "isp": "",
        "isp, model.compile=false": "ValueError: not so",
        "transformers, sdpa": "",
        "transformers, fully_shard, sdpa": "the first loss is 7.0000, not 5.0000",
    }
    assert "| ValueError: not so |" in capsys.readouterr().out


def test_each_file_of_gpu_tests_is_in_one_step():
    """Catches a file of tests that no step runs, or that two run."""
    gpu, kernel, nccl = (gpu_steps.tests_of(kind) for kind in ("gpu", "kernel", "nccl"))
    assert "tests/core/attention/test_local.py" in kernel
    assert not {*gpu} & {*kernel}
    marked = subprocess.run(
        ["grep", "-rl", "--include=test_*.py", "mark[.]gpu", "tests"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert {*gpu, *kernel} == {*marked.stdout.split()}
    assert {*nccl} < {*gpu}


def test_every_step_names_an_existing_program():
    """Catches a tool that was renamed, and two steps of the same name."""
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        for device in ("cuda", "cpu"):
            command = words(step, device, 1, Path("n.json"), Path("folder"))
            assert not [word for word in command if "{" in word]
            for word in command:
                if word.startswith(("tools/", "configs/", "tests/")):
                    assert (ROOT / word).exists(), word


def test_a_machine_without_a_gpu_is_reported():
    """Catches a traceback, or no message, where there is no GPU."""
    done = subprocess.run(
        ["bash", "tools/gpu.sh", "parity"],
        cwd=ROOT,
        env={**gpu_run.environment("cpu"), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (
        1,
        "no GPU here: `bash tools/gpu.sh --device cpu` runs every step at toy size\n",
    )


def test_exposed_time_is_not_covered_by_another_kernel():
    """Catches kernels of another rank or step that count, and overlap counted as exposed."""

    def kernel(pid: int, name: str, begin: float, end: float) -> dict:
        place = {"ph": "X", "cat": "kernel", "pid": pid, "tid": 7}
        return {**place, "name": name, "ts": begin, "dur": end - begin}

    def lane(tid: int, begin: float, end: float) -> dict:
        return {"ph": "X", "pid": 3, "tid": tid, "name": "", "ts": begin, "dur": end - begin}

    events = [
        lane(1, 100, 150),
        lane(1, 150, 200),  # the step is 100 long
        lane(2, 130, 141),  # of which we found 11 exposed
        kernel(1_003_000, "gemm", 90, 130),
        kernel(1_003_001, "ncclDevKernel_AllGather", 120, 142),  # 12 of it without another kernel
        kernel(1_003_000, "gemm", 142, 250),
        kernel(1_003_001, "ncclDevKernel_AllGather", 200, 260),  # the next step's
        kernel(1_004_000, "ncclDevKernel_AllGather", 100, 200),  # another rank's
        {"ph": "M", "pid": 1_003_000, "name": "process_name"},
    ]
    assert list(shares(events)) == [(3, pytest.approx(12), pytest.approx(11))]
