"""Lengths of time as people and Slurm write them: `1:23:45`, `1-12:00:00`."""

from __future__ import annotations

import re

__all__ = ["format_duration", "parse_duration"]

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")


_MAX_SECONDS = 10_000 * 24 * 3600


def parse_duration(value: int | str) -> int:
    """`value` in seconds: a number of them, or `[days-][hours:]minutes:seconds`.

    Raises ValueError if it is neither, not above 0, or more than 10,000 days. (Slurm's `90`, in
    minutes, is 90 seconds here, and its forms without seconds behind days are refused.)
    """
    seconds = value if isinstance(value, int) else _seconds(value.strip())
    if seconds <= 0:
        raise ValueError("must be above 0")
    if seconds > _MAX_SECONDS:
        raise ValueError("must be at most 10000-00:00:00")
    return seconds


def format_duration(seconds: float) -> str:
    """`1:23:45`, and `1-12:00:00` from a day on; rounded to seconds."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}"


def _seconds(text: str) -> int:
    if text.isdecimal():
        return int(text)
    match = _CLOCK.fullmatch(text)
    if match is None or (match["days"] and not match["hours"]):
        raise ValueError("must be seconds, or written as HH:MM:SS or D-HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    # Only the first field may be large: 36:00:00 is a day and a half, 1:90 is a slip.
    if seconds > 59 or (match["hours"] and minutes > 59) or (match["days"] and hours > 23):
        raise ValueError("has a field that is too large: write HH:MM:SS or D-HH:MM:SS")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
