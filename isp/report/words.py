"""Numbers and names as a page writes them."""

from __future__ import annotations

__all__ = ["kind_name", "mib", "moment", "ms", "share"]


def ms(milliseconds: float) -> str:
    """Such as `12.3`; three digits where there are fewer before the point."""
    return f"{milliseconds:,.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def moment(milliseconds: float) -> str:
    """A place in time, such as `3.4`; without its unit."""
    return f"{milliseconds:.1f}"


def mib(num_bytes: float) -> str:
    """Bytes in MiB, such as `1.25`; without its unit."""
    return f"{num_bytes / 2**20:,.2f}"


def share(part: float, whole: float) -> str:
    """Such as `36%`; `0%` where there is no whole."""
    return f"{part / whole:.0%}" if whole else "0%"


def kind_name(kind: str) -> str:
    """The collective as people write it: `all-gather` for all_gather."""
    return kind.replace("_", "-")
