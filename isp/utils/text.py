"""Text for users: without credentials and control characters; times; suggestions for misspellings.

Everything that is printed, logged or kept goes through `shown` or `redacted`. See
[Note: Text that leaves] in docs/design/notes/train.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TypeVar

__all__ = [
    "check_complete",
    "counted",
    "first_line",
    "format_duration",
    "nearest",
    "parse_duration",
    "printable",
    "redacted",
    "redacted_values",
    "shown",
    "suggest",
]

T = TypeVar("T")

_LEFT_OUT = "***"
"""Replacement of credentials."""

# Texts may come from unknown sources: each pattern must take a time that is linear in their length.
_USER = re.compile(r"://[^/?#\s\"'<>]*@")
"""User and password before the host of a URL."""
_QUERY = re.compile(r"[?#][^\s\"'<>\\]*")
"""Query and fragment of a URL."""
_PARAMETER = re.compile(r"(?<=[?&;#])([\w.%-]+)=([^&;#]*)")
"""A parameter, as name and value, in a query or fragment."""
_AFTER_URL = ":,.)]}"
"""Punctuation after a URL that belongs to the sentence around it."""
_SECRET = re.compile(
    r"^x-(amz|goog|oss|cos|ms|obs)-|token(?!iz|s$)|secret|passw|pwd|signature|credential|session"
    r"|(api|access|account|private|shared)[-_]?key|auth|^(sig|key|jwt|code)$"
    r"|^(aws|oss)accesskeyid$|^googleaccessid$|^key-pair-id$|^q-(sign|ak|signature|key)",
    re.IGNORECASE,
)
"""Names of URL parameters whose values grant access, or belong to a signature."""
_SIGNATURE = re.compile(r"signature|^sig$", re.IGNORECASE)
"""Names of URL parameters that are a signature."""
_SIGNED = re.compile(
    r"^(expires|policy|s[eprstvs]|spr|srt|sip|ses|sdd|sk(oid|tid|t|e|s|v)|s[acu]oid|scid)$",
    re.IGNORECASE,
)
"""Names of parameters that change with a signature, in CloudFront, S3 (version 2) and Azure. They
are removed only next to a signature, as other URLs may have parameters of these names."""
_MARKED = re.compile(r"://\*\*\*@|=\*\*\*(?=[&;#]|$)")
"""Places in a URL where `redacted` has replaced credentials."""

_OBEYED = re.compile(
    # These are control characters, except tab and line feed.
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    # These have no width, or set the direction of the text.
    r"\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    # These are line separators, halves of surrogate pairs, and tags.
    r"\u2028\u2029\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that a terminal interprets, except joiners, which some scripts and emoji need."""

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")
_MAX_SECONDS = 10_000 * 24 * 3600
_MOST_LISTED = 300
"""Number of characters up to which an error lists all names; above, it names a command instead."""


def first_line(error: BaseException) -> str:
    """Return the type of `error` and the first line of its text, which may have many lines."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def redacted(text: str) -> str:
    """Return `text` with *** in place of users, passwords and secret parameters in its URLs.

    URLs that differ only in their signature give the same text. Redacting twice changes nothing.
    """
    text = _USER.sub(f"://{_LEFT_OUT}@", text)
    return _QUERY.sub(_redacted_query, text)


def _redacted_query(query: re.Match[str]) -> str:
    """Return the query or fragment of a URL with *** in place of secret values."""
    names = [name for name, _ in _PARAMETER.findall(query[0])]
    signed = any(map(_SIGNATURE.search, names))

    def instead(parameter: re.Match[str]) -> str:
        """Return the parameter, with *** as its value if it is secret."""
        name, value = parameter.groups()
        secret = _SECRET.search(name) or (signed and _SIGNED.search(name))
        after = value[len(value.rstrip(_AFTER_URL)) :]  # keep punctuation after the URL
        return f"{name}={_LEFT_OUT}{after}" if secret else parameter[0]

    return _PARAMETER.sub(instead, query[0])


def redacted_values(value: T) -> T:
    """Return a copy of `value`, with `redacted` applied to all strings in its lists and dicts."""
    found: object = value
    if isinstance(value, str):
        found = redacted(value)
    elif isinstance(value, dict):
        found = {name: redacted_values(below) for name, below in value.items()}
    elif isinstance(value, list | tuple):
        found = type(value)(map(redacted_values, value))
    return found  # type: ignore[return-value]


def check_complete(key: str, url: str) -> None:
    """Raise ValueError for the value `url` of `key` if `redacted` has replaced its credentials.

    The config.yaml in a run's folder has such URLs, and a user may pass that file to a command.
    """
    if _MARKED.search(url):
        raise ValueError(
            f"{key}={url}: its credentials were left out ({_LEFT_OUT}) when it was written: give"
            f" the whole URL, such as with --{key}"
        )


def printable(text: str) -> str:
    """Return `text` with an escape such as \\x1b for each character that a terminal interprets.

    Tabs and line feeds stay.
    """
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def shown(text: object) -> str:
    """Return `text` as a string for a terminal or a log: `redacted`, then `printable`."""
    return printable(redacted(str(text)))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, plural if it is not 1: `1 document`, `1,234 documents`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def parse_duration(value: int | str) -> int:
    """Return seconds, given as a number or as `[days-][hours:]minutes:seconds`.

    Raises ValueError for another form, and for a time not above 0 or above 10,000 days. Unlike in
    Slurm, a plain number is in seconds, not minutes, and after days all of hours, minutes and
    seconds must follow.
    """
    seconds = value if isinstance(value, int) else _seconds(value.strip())
    if seconds <= 0:
        raise ValueError("must be above 0")
    if seconds > _MAX_SECONDS:
        raise ValueError("must be at most 10000-00:00:00")
    return seconds


def format_duration(seconds: float) -> str:
    """Return a time as text, rounded to seconds: `1:23:45`, or from a day on `1-12:00:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}"


def _seconds(text: str) -> int:
    """Return the seconds that `text` means, see `parse_duration`; raise ValueError otherwise."""
    if text.isdecimal():
        return int(text)
    match = _CLOCK.fullmatch(text)
    if match is None or (match["days"] and not match["hours"]):
        raise ValueError("must be seconds, or written as HH:MM:SS or D-HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    # Only the first field may be large: 36:00:00 is a day and a half, but 1:90 must be a mistake.
    if seconds > 59 or (match["hours"] and minutes > 59) or (match["days"] and hours > 23):
        raise ValueError("has a field that is too large: write HH:MM:SS or D-HH:MM:SS")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def nearest(name: str, known: Sequence[str], cutoff: float = 0.75) -> list[str]:
    """Return the name in `known` that is closest to `name`, as a list; empty if none is close."""
    return difflib.get_close_matches(name, known, n=1, cutoff=cutoff)


def suggest(name: str, known: Sequence[str], *, section: str, paths: Sequence[str] = ()) -> str:
    """Return the end of an error about a `name` that `section` lacks.

    It is `; did you mean ..?`, or the names that the section has if none is close. `known`: names
    in the section. `paths`: full names of all keys, tried if no name in the section is close.
    """
    # The most likely first: a misspelled name, a key of another section, then looser matches.
    near = nearest(name, known)
    near = near or [path for path in paths if path.split(".")[-1] == name]
    near = near or nearest(f"{section}.{name}".lstrip("."), paths, 0.8) or nearest(name, known, 0.6)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    listed = ", ".join(known)
    if len(listed) > _MOST_LISTED:
        return f"; `isp config --help-keys {section}` lists the keys of {section}"
    return f"; {section or 'the configuration'} has {listed}"
