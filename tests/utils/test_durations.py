"""Lengths of time, read and written."""

import pytest

from isp.utils.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        ("90", 90),
        ("1:30", 90),
        ("00:45", 45),
        ("01:30:00", 5400),
        ("36:00:00", 129600),
        ("1-12:00:00", 129600),
        (" 2-00:00:01 ", 172801),
        ("0090:00", 5400),
    ],
)
def test_what_is_read(text: int | str, seconds: int) -> None:
    """Catches fields taken for others, such as minutes for hours."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "1h", "-5", 0, "0:00", "1:2:3:4", "1-2", "1-30:00", "1:90", "1:60:00", -1]
)
def test_what_is_refused(text: int | str) -> None:
    """Catches a slip that is obeyed as some other length."""
    with pytest.raises(ValueError, match=r"must be|too large"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.6, "0:01:00"),
        (5025, "1:23:45"),
        (86399, "23:59:59"),
        (129600, "1-12:00:00"),
    ],
)
def test_what_is_written(seconds: float, text: str) -> None:
    """Catches 60 seconds in a minute's place, and lengths that do not read back."""
    assert format_duration(seconds) == text
    if seconds:
        assert parse_duration(text) == round(seconds)
