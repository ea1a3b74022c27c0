"""Log files and terminal: which line goes where, and what happens on failures."""

import io
import logging
import threading
import warnings
from pathlib import Path

import pytest

from isp.train.folder.log_files import run_logging
from tests.disk import no_file_larger_than

logger = logging.getLogger("isp.something")


@pytest.fixture
def terminal() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank_0.log"


def test_lines_of_rank_0_go_to_terminal_and_file(path: Path, terminal: io.StringIO) -> None:
    """Catches a step's line with a prefix, and a warning that looks like a step's line."""
    with run_logging(path, rank=0, terminal=terminal):
        logger.info("step: %d", 1)
        logger.warning("careful")
        logger.debug("detail")
        logging.getLogger("another.library").info("chatter")
    assert terminal.getvalue() == "step: 1\nwarning: careful\n"
    lines = path.read_text().splitlines()
    assert [line.split(" rank 0 ")[1] for line in lines] == [
        "INFO isp.something: step: 1",
        "WARNING isp.something: careful",
    ]
    assert all(line[:2] == "20" for line in lines)


def test_other_ranks_are_silent(
    path: Path, terminal: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches every line on the terminal once for each rank."""
    with run_logging(path, rank=3, terminal=terminal):
        logger.info("one")
        warnings.warn("two", stacklevel=1)
    assert terminal.getvalue() == ""
    assert capfd.readouterr() == ("", "")
    assert "rank 3 INFO isp.something: one" in path.read_text()
    assert "two" in path.read_text()


def test_a_resumed_run_appends_to_its_log(path: Path, terminal: io.StringIO) -> None:
    """Catches the log of the first part overwritten by the second."""
    for text in ("one", "two"):
        with run_logging(path, rank=0, terminal=terminal):
            logger.info(text)
    assert [line.split(": ")[1] for line in path.read_text().splitlines()] == ["one", "two"]


def test_logging_is_restored_at_the_end(path: Path, terminal: io.StringIO) -> None:
    """Catches handlers that accumulate, so that lines are doubled."""
    root = logging.getLogger()
    before = (list(root.handlers), logging.getLogger("isp").level, threading.excepthook)
    with run_logging(path, rank=0, terminal=terminal):
        assert len(root.handlers) == len(before[0]) + 2
    assert (root.handlers, logging.getLogger("isp").level, threading.excepthook) == before


def test_an_exception_is_written_to_the_file(path: Path, terminal: io.StringIO) -> None:
    """Catches a rank that dies without a traceback, or whose traceback is shown twice."""
    with pytest.raises(ZeroDivisionError), run_logging(path, rank=0, terminal=terminal):
        _ = 1 // 0
    text = path.read_text()
    assert "CRITICAL isp.train.folder.log_files: the run ended by an exception" in text
    assert "Traceback" in text
    assert "_ = 1 // 0" in text
    assert terminal.getvalue() == ""


def test_a_regular_exit_is_not_logged_as_a_failure(path: Path, terminal: io.StringIO) -> None:
    """Catches an exit code taken for a crash."""
    with pytest.raises(SystemExit), run_logging(path, rank=0, terminal=terminal):
        raise SystemExit(0)
    assert path.read_text() == ""


def test_an_exception_of_a_thread_is_written_to_the_file(
    path: Path, terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a reader or writer thread that dies unnoticed, and a replaced excepthook."""
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    with run_logging(path, rank=0, terminal=terminal):
        thread = threading.Thread(target=lambda: 1 // 0, name="reader")
        thread.start()
        thread.join()
    assert "thread reader ended by an exception" in path.read_text()
    assert "ZeroDivisionError" in path.read_text()
    assert [failure.exc_type for failure in failures] == [ZeroDivisionError]


def test_a_full_disk_is_reported_once(
    path: Path, terminal: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a run ended, or a terminal flooded, by a log that cannot be written."""
    # so that the size limit only affects the log, not the file of stderr
    path.write_text("x" * 10**6)
    with no_file_larger_than(10**6 + 50), run_logging(path, rank=0, terminal=terminal):
        for step in range(500):
            logger.info("step: %d", step)
    assert terminal.getvalue().splitlines()[-1] == "step: 499"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: lines of the log are lost: ")
    assert str(path) in line


def test_a_closed_terminal_does_not_end_the_run(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a run ended or flooded with tracebacks because the reader of its output has gone."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    with run_logging(path, rank=0, terminal=Closed()):
        logger.info("one")
        logger.info("two")
    assert len(path.read_text().splitlines()) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path, terminal: io.StringIO) -> None:
    """Catches training that starts without the log that was requested."""
    path = tmp_path / "missing" / "rank_0.log"
    with pytest.raises(FileNotFoundError, match="missing"), run_logging(path, rank=0):
        pytest.fail("entered")
