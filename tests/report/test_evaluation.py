"""The report of an evaluation: its numbers, its pictures, and what it does without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from isp.cli import main
from isp.metrics.evaluation import Evaluation, Passkeys, PositionBucket, TextLosses
from isp.report.evaluation import _draw_passkeys, evaluation_page
from tests.report.html_page import HtmlPage

pytestmark = pytest.mark.filterwarnings("error")  # a picture that does not fit
EVALUATION = Evaluation(
    model="<b>run</b>, 800 steps",
    dtype="float32",
    layout="2 ranks, isp, decoding in mtp",
    trained_length=256,
    command="isp evaluate run",
    text=TextLosses(
        source="book.txt",
        rows=2,
        length=1024,
        buckets=(
            PositionBucket(begin=0, end=256, tokens=512, loss=2.0),
            PositionBucket(begin=256, end=512, tokens=256, loss=10.0),
            PositionBucket(begin=512, end=1024, tokens=1024, loss=None),
        ),
    ),
    passkeys=Passkeys(
        digits=3,
        keys=4,
        seed=0,
        lengths=(128, 256, 512),
        depths=(0.0, 1.0),
        found=((4, 4), (4, 3), (1, 0)),
    ),
)


@pytest.mark.parametrize("trained", [256, None])
def test_page_has_the_numbers(trained: int | None) -> None:
    page = HtmlPage(evaluation_page(replace(EVALUATION, trained_length=trained)).to_html())
    assert page.tags["svg"] == 2
    assert "256-511 256 10.0000 2.203e+04 4.6667" in page.text  # (512 x 2 + 256 x 10) / 768
    assert "512 tokens, depth 0%: 1 of 4 keys found" in page.hovers
    if trained is None:
        assert "67% of the passkeys found at all lengths." in page.text  # 16 of 24
    else:
        assert "94% of the passkeys found within 256 tokens." in page.text
        assert "12% of the passkeys found beyond 256 tokens." in page.text


def test_report_reads_the_file_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "evaluation.json"
    file.write_text(EVALUATION.to_json())
    assert Evaluation.load(file) == EVALUATION
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report" / "evaluation.html").stat().st_size > 10_000
    for name in ("loss_by_position", "passkeys"):
        png = (tmp_path / "report" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
    file.write_text(EVALUATION.to_json(indent=1).replace('"version": 1', '"version": 9'))
    assert main(["report", str(tmp_path)]) == 2
    assert "an evaluation of version 9" in capsys.readouterr().err
    file.write_text('{"version": 1}')
    assert main(["report", str(tmp_path)]) == 2
    assert "not an evaluation: model: Field required" in capsys.readouterr().err


def test_no_key_found_is_a_light_cell() -> None:
    """Catches a map of zeros that is one block of a strong colour."""
    passkeys = EVALUATION.passkeys
    assert passkeys is not None
    cells = _draw_passkeys(passkeys, None).axes[0].patches
    found = [count for row in passkeys.found for count in row]
    lightness = [min(cell.get_facecolor()[:3]) for cell in cells]
    assert len(found) == len(cells)
    assert all((light > 0.9) == (count == 0) for light, count in zip(lightness, found, strict=True))


def test_a_part_may_be_left_out() -> None:
    none = evaluation_page(replace(EVALUATION, text=None, passkeys=None))
    assert not list(none.pictures)
    assert "Nothing was asked for." in none.to_html()
