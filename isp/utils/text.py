"""Text that leaves this program: without credentials, and without what a terminal obeys.

[Note: Text that leaves] Names of files, of tensors and of jobs, what a model generates and what a
server answers may hold escape codes, which clear a screen, hide a line or type a command. URLs may
hold passwords and signatures. So everything printed or logged goes through `shown`; files that are
kept, and trackers, get `redacted` values.
"""

from __future__ import annotations

import re
from typing import TypeVar

__all__ = ["check_complete", "first_line", "printable", "redacted", "redacted_values", "shown"]

T = TypeVar("T")

_LEFT_OUT = "***"

# Each pattern reads any text in one pass: it comes from files of others, too.
_USER = re.compile(r"://[^/?#\s\"'<>]*@")
"""The user, and the password, before the host of a URL."""
_QUERY = re.compile(r"[?#][^\s\"'<>\\]*")
_PARAMETER = re.compile(r"(?<=[?&;#])([\w.%-]+)=([^&;#]*)")
_AFTER_URL = ":,.)]}"
"""Marks of a sentence that follow a URL."""
_SECRET = re.compile(
    r"^x-(amz|goog|oss|cos|ms|obs)-|token(?!iz|s$)|secret|passw|pwd|signature|credential|session"
    r"|(api|access|account|private|shared)[-_]?key|auth|^(sig|key|jwt|code)$"
    r"|^(aws|oss)accesskeyid$|^googleaccessid$|^key-pair-id$|^q-(sign|ak|signature|key)",
    re.IGNORECASE,
)
"""Names of parameters that let their reader in, or belong to a signature."""
_SIGNATURE = re.compile(r"signature|^sig$", re.IGNORECASE)
_SIGNED = re.compile(
    r"^(expires|policy|s[eprstvs]|spr|srt|sip|ses|sdd|sk(oid|tid|t|e|s|v)|s[acu]oid|scid)$",
    re.IGNORECASE,
)
"""Names that change with a signature: CloudFront's, S3's second version's and Azure's."""
_MARKED = re.compile(r"://\*\*\*@|=\*\*\*(?=[&;#]|$)")

_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    r"\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, width
    r"\u2028\u2029\ud800-\udfff\U000e0000-\U000e007f]"  # lines, half characters, tags
)
"""Characters that change how other text is shown; joiners stay: scripts and emoji need them."""


def first_line(error: BaseException) -> str:
    """Return the type of `error` and the first line of its text: libraries add pages to it."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def redacted(text: str) -> str:
    """Return `text` with *** for the user and the secret parameters of each URL in it.

    The same URL with another signature gives the same text. Applied twice it changes nothing.
    """
    text = _USER.sub(f"://{_LEFT_OUT}@", text)
    return _QUERY.sub(_redacted_query, text)


def _redacted_query(query: re.Match[str]) -> str:
    names = [name for name, _ in _PARAMETER.findall(query[0])]
    signed = any(map(_SIGNATURE.search, names))

    def instead(parameter: re.Match[str]) -> str:
        name, value = parameter.groups()
        secret = _SECRET.search(name) or (signed and _SIGNED.search(name))
        after = value[len(value.rstrip(_AFTER_URL)) :]
        return f"{name}={_LEFT_OUT}{after}" if secret else parameter[0]

    return _PARAMETER.sub(instead, query[0])


def redacted_values(value: T) -> T:
    """Return plain values, in lists and mappings, with `redacted` texts."""
    found: object = value
    if isinstance(value, str):
        found = redacted(value)
    elif isinstance(value, dict):
        found = {name: redacted_values(below) for name, below in value.items()}
    elif isinstance(value, list | tuple):
        found = type(value)(map(redacted_values, value))
    return found  # type: ignore[return-value]


def check_complete(key: str, url: str) -> None:
    """Raise ValueError for a URL whose credentials `redacted` has left out.

    Such as in the config.yaml of a run, which is given to another command.
    """
    if _MARKED.search(url):
        raise ValueError(
            f"{key}={url}: its credentials were left out ({_LEFT_OUT}) when it was written: give"
            f" the whole URL, such as with --{key}"
        )


def printable(text: str) -> str:
    """Return `text` with an escape such as \\x1b for each character that a terminal obeys.

    Tabs and line feeds stay.
    """
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def shown(text: object) -> str:
    """Return the text of `text` as people may see it: `redacted`, and `printable`."""
    return printable(redacted(str(text)))
