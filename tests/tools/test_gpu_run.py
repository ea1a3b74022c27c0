"""The runner of the steps for GPUs, with programs that need none."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.report.html_page import HtmlPage

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_run  # noqa: E402
from check_with_torch import shares  # noqa: E402
from gpu_steps import STEPS, Step, words  # noqa: E402

ONE_GPU = gpu_run.Machine("cuda", 1, {"GPUs": "NVIDIA X"})


def _step(name: str, code: str) -> Step:
    return Step(name, "what for", 1, f'{{python}} -c "{code}"', "")


def test_a_run_goes_on_after_a_step_that_fails_or_hangs(tmp_path, monkeypatch):
    """Catches a failure that ends the run, a rank left running, and a page that does not tell."""
    leave = "import subprocess, time; print(subprocess.Popen(['sleep', '99']).pid, flush=True)"
    steps = (
        _step("hangs", f"{leave}; time.sleep(99)"),
        _step("fails", "print('<b> & why'); exit(3)"),
        Step("counts", "", 1, "{python} -c \"open('{json}', 'w').write('[7]')\"", ""),
        _step("two", "")._replace(gpus=2),
    )
    monkeypatch.setattr(gpu_run, "STEPS", (steps[0]._replace(minutes=0.03), *steps[1:]))
    options = gpu_run.argparse.Namespace(names=[], minutes=9.0)
    assert gpu_run.run_all(options, ONE_GPU, tmp_path) == 1
    found = {p.stem: json.loads(p.read_text()) for p in tmp_path.glob("*.json")}
    assert {name: one["result"].split(" after")[0] for name, one in found.items()} == {
        "hangs": "stopped",
        "fails": "failed with 3",
        "counts": "passed",
    }
    assert found["counts"]["numbers"] == [7]
    left = Path("/proc") / (tmp_path / "hangs.log").read_text().strip()
    for _ in range(50):
        if not left.exists() or ") Z" in (left / "stat").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process of the step that hangs is still there")
    page = HtmlPage((tmp_path / "report" / "index.html").read_text())
    assert "1 of 3 steps passed" in page.text
    assert "<b> & why" in page.text
    log = (tmp_path / "counts.json").stat().st_mtime_ns
    gpu_run.run_all(options, ONE_GPU, tmp_path)
    assert (tmp_path / "counts.json").stat().st_mtime_ns == log, "what has passed is done again"


def test_a_short_call_does_what_fits_and_the_next_one_the_rest(tmp_path, monkeypatch, capsys):
    """Catches time spent on a step that cannot end in it, or on what failed before."""
    steps = _step("fails", "exit(3)"), _step("long", "")._replace(minutes=9), _step("short", "")
    monkeypatch.setattr(gpu_run, "STEPS", steps)
    options = gpu_run.argparse.Namespace(names=[], minutes=5.0)
    for begun in (["fails", "short"], ["long", "fails"]):
        gpu_run.run_all(options, ONE_GPU, tmp_path)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in lines if line.endswith("...")] == begun
    assert json.loads((tmp_path / "long.json").read_text())["exit"] == 0


def test_every_step_names_a_program_that_is_there():
    """Catches a tool that was renamed, and a step of the same name as another."""
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        for device in ("cuda", "cpu"):
            command = words(step, device, 1, Path("n.json"), Path("folder"))
            assert not [word for word in command if "{" in word]
            for word in command:
                if word.startswith(("tools/", "configs/", "tests/")):
                    assert (ROOT / word).exists(), word


def test_without_a_gpu_it_says_so():
    """Catches a traceback, or nothing at all, where there is no GPU."""
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


def test_exposed_is_what_no_other_kernel_covers():
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
        kernel(1_003_001, "ncclDevKernel_AllGather", 120, 142),  # 12 of it beside nothing
        kernel(1_003_000, "gemm", 142, 250),
        kernel(1_003_001, "ncclDevKernel_AllGather", 200, 260),  # the next step's
        kernel(1_004_000, "ncclDevKernel_AllGather", 100, 200),  # another rank's
        {"ph": "M", "pid": 1_003_000, "name": "process_name"},
    ]
    assert list(shares(events)) == [(3, pytest.approx(12), pytest.approx(11))]
