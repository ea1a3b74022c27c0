"""The report of a run: its numbers, its pictures, and what it does without."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from matplotlib.lines import Line2D

from isp.cli import main
from isp.metrics import MetricsFile, StepRecord
from isp.report.run import means, run_page
from isp.report.style import to_svg
from isp.run.environment import Environment, RankPlace
from isp.run.folder import RunFolder
from tests.metrics.test_record import RECORD
from tests.report.html_page import HtmlPage

pytestmark = pytest.mark.filterwarnings("error")  # a picture that does not fit
NAME = "<b>&\"quick'<i>"
CONFIG = f"""
job: {{name: {json.dumps(NAME)}}}
model: {{preset: tiny}}
data: {{source: python-stdlib, seq_len: 512}}
parallel: {{tensor: {{size: 2}}, weight: {{size: 2}}}}
"""
PICTURES = ["loss", "lr", "grad_norm", "throughput", "exposed", "memory"]
COMMAND = ["python", "-m", "isp", "train", "my job.yaml", "--training.steps", "6"]


def record(step: int, **changes: float | bool | None) -> StepRecord:
    times = {"step_ms": 100.0, "comm_ms": 40.0, "exposed_ms": 10.0, "tgs": 512.0}
    return replace(RECORD, step=step, tokens=1024 * step, **times | changes)


RECORDS = [
    record(1, step_ms=900.0, exposed_ms=800.0),  # the warm-up
    record(2),
    record(3, loss=math.nan, grad_norm=math.inf, skipped=True),
    record(4, loss=2.5, val_loss=2.25),
    record(6, step_ms=200.0, comm_ms=40.0, exposed_ms=30.0, val_loss=math.nan),  # two steps
]


def make_run(path: Path, records: Sequence[StepRecord]) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir()
    folder.config_file.write_text(CONFIG)
    places = [RankPlace("host", "X100"), RankPlace("host", "X100")]
    folder.environment_file.write_text(replace(Environment.of(places), command=COMMAND).to_json())
    with MetricsFile(folder.metrics_file) as metrics:
        for each in records:
            metrics.write(each)
    return folder


class Written(NamedTuple):
    html: str
    page: HtmlPage
    pictures: list[Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = make_run(tmp_path_factory.mktemp("report") / "run", RECORDS)
    assert main(["report", str(folder.path)]) == 0
    html = (folder.path / "report" / "report.html").read_text()
    return Written(html, HtmlPage(html), sorted((folder.path / "report").glob("*.png")))


def test_page_has_the_numbers(written: Written) -> None:
    """Catches means that count the warm-up, or a record of two steps as one."""
    text = written.page.text
    # Steps 2, 3, 4: 100 ms, 40 under way, 10 exposed; 5 and 6: 200, 40, 30.
    assert "13% of each step is exposed: compute waited for transfers for 18.0 of 140.0 ms." in text
    assert "under way for 40.0 ms" in text
    assert "means over steps 2 to 6" in text
    assert "2.7391 at step 1, 2.7391 at step 6" in text
    assert "1,024 tokens in sequences of 512" in text
    assert "Loss 2.7391 at step 6, not finite on held-out text." in text
    assert "steps with a skipped update 1 " in text
    assert "world 2 = pipeline 1 x data 1 x tensor 2" in text
    assert "isp train 'my job.yaml' --nproc 2 --training.steps 6" in text
    assert "/run/config.yaml --nproc 2 --html measures a few steps" in text


def test_loss_rate_and_norm_come_before_time(written: Written) -> None:
    """Catches a page that leads with communication, and commands that look like prose."""
    titles = re.findall("<h2>(.*?)</h2>", written.html)
    assert titles == ["Training", "Time", "Memory", "The run"]
    assert [picture.stem for picture in written.pictures] == sorted(PICTURES)
    shown = re.findall('aria-label="(.*?)"', written.html)
    assert [alt.split(" over")[0] for alt in shown[:3]] == [
        "Loss",
        "Learning rate",
        "Gradient norm",
    ]
    commands = re.findall("<code>(isp \\w+)", written.html)
    assert commands == ["isp profile", "isp train"]


def test_pictures_are_png(written: Written) -> None:
    """Catches a file that is no picture, or too small a one."""
    assert written.pictures
    for path in written.pictures:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(data[16:20], "big") == 2160  # twice the width on the page


def test_means_of_one_record() -> None:
    """Catches a run of one record, which has nothing but its warm-up, without numbers."""
    only = means([record(3, step_ms=80.0, comm_ms=0.0, exposed_ms=0.0)])
    assert (only.first, only.last, only.step_ms, only.tgs) == (1, 3, 80.0, 512.0)
    assert only.exposed_ms == 0


def test_throughput_is_tokens_over_time() -> None:
    """Catches a mean of rates, to which a fast step counts as much as a slow one."""
    # 1000 tokens in 1 s and 1000 in 4 s are 2000 in 5 s.
    slow = record(3, step_ms=4000.0, tgs=250.0)
    assert means([record(1), record(2, step_ms=1000.0, tgs=1000.0), slow]).tgs == 400


def lines(folder: Path, records: Sequence[StepRecord]) -> list[Line2D]:
    """Those of the picture of losses."""
    picture = next(p for p in run_page(make_run(folder, records)).pictures if p.name == "loss")
    return list(picture.draw().axes[0].lines)


def test_gaps(tmp_path: Path) -> None:
    """Catches a line drawn through a loss that was not finite, or over a skipped step."""
    records = [
        record(1, loss=5.0),
        record(2, loss=math.nan),
        record(3, loss=4.0, skipped=True),
        record(4, loss=math.inf, val_loss=3.0),
        record(5, loss=3.5, val_loss=math.nan),
    ]
    found = [line.get_ydata() for line in lines(tmp_path / "run", records)]
    training, held_out, skips = [[None if math.isnan(y) else y for y in ys] for ys in found]
    assert training == [5.0, None, None, None, 3.5]
    assert held_out == [3.0, None]
    assert len(skips) == 1


def test_value_between_gaps_is_seen(tmp_path: Path) -> None:
    """Catches a lone value that a line without marks does not show."""
    losses = [1.0] * 100
    losses[49] = losses[51] = math.nan
    records = [record(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    (line,) = lines(tmp_path / "run", records)
    assert line.get_markevery() == [50]


@pytest.mark.parametrize(
    "records",
    [
        [record(1, loss=math.nan, val_loss=math.nan)],
        [record(step, loss=math.nan, skipped=True) for step in (1, 2)],
        [record(step, expert_load=1.5 * step, unused_experts=0) for step in (1, 2)],
        [record(1, comm_ms=0.0, exposed_ms=0.0), record(2, comm_ms=0.0, exposed_ms=0.0)],
    ],
    ids=["one without a loss", "all skipped", "experts", "nothing travels"],
)
def test_little_to_draw(records: list[StepRecord], tmp_path: Path) -> None:
    """Catches pictures, or a sentence, that need two steps, a finite loss or a transfer."""
    page = run_page(make_run(tmp_path / "run", records))
    for picture in page.pictures:
        to_svg(picture)
    assert ("Experts" in page.to_html()) == (records[-1].expert_load is not None)
    assert ("Nothing is exposed" in page.to_html()) == (records[-1].comm_ms == 0)


def test_command_of_a_run(tmp_path: Path) -> None:
    """Catches a command that invents the ranks of several machines, or of somebody's program."""
    folder = make_run(tmp_path / "run", RECORDS)
    two = replace(Environment.of([RankPlace("a", "CPU"), RankPlace("b", "CPU")]), command=COMMAND)
    for environment, command in (
        (two, "isp train 'my job.yaml' --training.steps 6    # by torchrun, on 2 machines"),
        (replace(two, command=["python", "own.py"]), "python own.py"),
    ):
        folder.environment_file.write_text(environment.to_json())
        assert run_page(folder).command == command


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["report", *words]) == 2
    return capsys.readouterr().err


def test_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or an empty page, where there is nothing to report."""
    assert "does not exist" in refusal(capsys, str(tmp_path / "absent"))
    assert "holds neither metrics.jsonl nor profile.json" in refusal(capsys, str(tmp_path))
    empty = make_run(tmp_path / "run", [])
    assert "contains no step yet" in refusal(capsys, str(empty.path))
    empty.metrics_file.write_text("{}\n")
    assert "line 1 is not a record" in refusal(capsys, str(empty.path))
    empty.metrics_file.write_text(RECORD.to_json() + "\n")
    empty.environment_file.write_text('{"world_size": 2}')
    assert "env.json: not an environment" in refusal(capsys, str(empty.path))
    assert not (empty.path / "report").exists()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_packages_of_the_report_are_missing(
    package: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a traceback where the report's packages are not installed."""
    folder = make_run(tmp_path / "run", RECORDS)
    monkeypatch.setitem(sys.modules, package, None)
    message = refusal(capsys, str(folder.path))
    assert f"a report needs the {package} package: bash tools/setup_env.sh report" in message
