"""The figure of an evaluation: its numbers, and labels that do not overlap."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure

from isp.cli import main
from isp.cli.evaluation_picture import draw_evaluation
from isp.metrics.evaluation import Evaluation, Passkeys, PositionBucket, TextLosses

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns if the layout does not fit
EVALUATION = Evaluation(
    model="run with $signs$, 800 steps",
    dtype="float32",
    layout="2 ranks, isp",
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
            PositionBucket(begin=1024, end=2048, tokens=0, loss=None),
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


def drawn(evaluation: Evaluation, file: Path) -> Figure:
    """Draw `evaluation` to `file` and return the figure that was saved."""
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as save:
        draw_evaluation(evaluation, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    figure = save.call_args.args[0]
    assert isinstance(figure, Figure)
    return figure


def test_losses_and_passkeys_are_drawn(tmp_path: Path) -> None:
    """Catches a loss at another position, swapped lengths and depths, and a wrong line."""
    figure = drawn(EVALUATION, tmp_path / "both.png")
    losses, passkeys = figure.axes
    assert losses.lines[0].get_ydata()[:2].tolist() == [2.0, 10.0]
    assert [text.get_text() for text in losses.texts] == ["2.00", "10.00", "not finite"]
    names = [text.get_text() for text in losses.get_xticklabels()]
    assert names == ["0-255", "256-511", "512-1,023"]  # positions without tokens have no label
    assert losses.lines[1].get_xdata()[0] == 0.5  # between 0-255 and 256-511
    assert passkeys.images[0].get_array().tolist() == [[100, 100, 25], [100, 75, 0]]
    cells = {text.get_position(): text.get_text() for text in passkeys.texts}
    assert (cells[1, 1], cells[2, 0]) == ("75", "25")
    assert [text.get_text() for text in passkeys.get_xticklabels()] == ["128", "256", "512"]
    assert [text.get_text() for text in passkeys.get_yticklabels()] == ["0", "100"]
    assert passkeys.lines[0].get_xdata()[0] == 1.5


@pytest.mark.parametrize("part", ["text", "passkeys"])
def test_one_part_is_drawn_alone(part: str, tmp_path: Path) -> None:
    """Catches an empty panel, and a line at a length that is not known."""
    other = {"text": "passkeys", "passkeys": "text"}[part]
    found = replace(EVALUATION, trained_length=None, **{other: None})
    (axes,) = drawn(found, tmp_path / "one.png").axes
    assert len(axes.lines) == (part == "text")


def test_labels_do_not_overlap(tmp_path: Path) -> None:
    """Catches labels of long ranges that overlap each other or the label of the axis."""
    assert EVALUATION.text is not None
    ends = [2**power for power in range(14, 21)]
    buckets = tuple(
        PositionBucket(begin=end // 2, end=end, tokens=1, loss=2.0 + end % 3) for end in ends
    )
    found = replace(EVALUATION, text=replace(EVALUATION.text, buckets=buckets), passkeys=None)
    figure = drawn(found, tmp_path / "long.png")
    (axes,) = figure.axes
    figure.draw_without_rendering()  # the resolution of the figure is restored after saving
    names = axes.get_xticklabels()
    assert len(names) == len(ends)
    below = axes.xaxis.label.get_window_extent()
    assert all(not name.get_window_extent().overlaps(below) for name in names)
    # Labels at 25 degrees do not overlap if their ends differ by more than a line's height.
    ends_at = [name.get_window_extent().x1 for name in names]
    height = axes.texts[0].get_window_extent().height
    assert min(b - a for a, b in pairwise(ends_at)) > 2.5 * height


def test_missing_matplotlib_is_reported_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an evaluation that fails only at its end, when it is drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["evaluate", str(tmp_path), "--png", str(tmp_path / "a.png")]) == 2
    error = capsys.readouterr().err
    assert "--png needs the matplotlib package: bash tools/setup_env.sh report" in error
