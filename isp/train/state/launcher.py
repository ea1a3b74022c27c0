"""Facts about the process that starts ranks and restarts them after a failure: torchrun or ours."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["launch_id", "launcher", "on_one_machine", "process_name", "was_restarted"]


def launch_id() -> str:
    """Return torchrun's name for the launch; "none" if it has none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def was_restarted() -> bool:
    """Return True if this machine's torchrun counts these ranks as restarted.

    On several machines it counts only failures of its own ranks: there ranks may have been
    restarted if this returns False.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def on_one_machine() -> bool:
    """Return True if torchrun started ranks on this machine only."""
    return os.environ.get("GROUP_WORLD_SIZE") == "1"


def launcher() -> str:
    """Return the name of the torchrun process that started this rank; "" if unknown.

    It stays the same when ranks are restarted. Another process has another name.
    """
    return process_name(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""


def process_name(process: int) -> str:
    """Return a name for the process with id `process` that is unique over time; "" off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # Time of its start, as ids are used again. The name of the program, in parentheses, may contain
    # spaces, so count the fields after it.
    ticks = stat.rpartition(")")[2].split()[19]
    return f"process {process} of boot {boot}, started at tick {ticks}"
