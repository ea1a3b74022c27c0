"""The progress bar and the log lines that appear above it."""

import errno
import io
import logging
import sys
from pathlib import Path

import pytest

from isp.metrics import ProgressBar, watched_stream
from isp.train.folder.log_files import run_logging

logger = logging.getLogger("isp.something")


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        """Return the visible rows: text after a carriage return overwrites the text before it."""
        rows = []
        for line in self.getvalue().split("\n"):
            row: list[str] = []
            for piece in line.split("\r"):
                row[: len(piece)] = piece
            rows.append("".join(row).rstrip())
        return rows


def test_lines_appear_above_the_bar(tmp_path: Path) -> None:
    """Catches lines written into the bar, and fragments of the bar between lines."""
    terminal = Terminal()
    with (
        run_logging(tmp_path / "log", rank=0, terminal=terminal),
        ProgressBar(total=3, done=1, stream=terminal) as bar,
    ):
        for step in (2, 3):
            bar.show(loss=2.5, eta_seconds=None if step == 3 else 5025.0)
            bar._bar.refresh()  # as if the last refresh had been long ago
            logger.info("step: %d", step)
            logger.warning("careful")
    rows = terminal.rows()
    assert rows[:4] == ["step: 2", "warning: careful", "step: 3", "warning: careful"]
    assert rows[4].startswith("100%|")
    assert rows[4].endswith("| 3/3, loss: 2.5000")
    assert rows[5:] == [""]
    assert "2/3, loss: 2.5000  eta: 1:23:45" in terminal.getvalue()


def test_a_bar_is_only_shown_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bar in a file, and none in a terminal whose other stream goes to a file."""
    for streams, watched in ((("err", "out"), "err"), (("out",), "out"), ((), None)):
        made = {name: Terminal() if name in streams else io.StringIO() for name in ("err", "out")}
        monkeypatch.setattr(sys, "stderr", made["err"])
        monkeypatch.setattr(sys, "stdout", made["out"])
        assert watched_stream() is (None if watched is None else made[watched])


def test_a_closed_terminal_only_ends_the_bar() -> None:
    """Catches a run ended by a closed window."""

    class Closed(Terminal):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")  # as after the terminal was closed

    with ProgressBar(total=2, done=0, stream=Closed()) as bar:
        bar.show(loss=1.0, eta_seconds=1.0)
