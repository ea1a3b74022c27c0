"""The process that starts ranks, and starts them again after a failure: torchrun, or ours."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["launch_id", "launcher", "on_one_machine", "process_name", "was_restarted"]


def launch_id() -> str:
    """Return torchrun's name of the launch; "none" if it gives none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")


def was_restarted() -> bool:
    """Return whether torchrun of this machine counts these ranks as started again.

    On several machines it counts only the failures of its own ranks, so False says nothing there.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def on_one_machine() -> bool:
    """Return whether torchrun started ranks on this machine alone."""
    return os.environ.get("GROUP_WORLD_SIZE") == "1"


def launcher() -> str:
    """Return the name of the process of torchrun that started this rank; "" if unknown.

    Ranks that are started again have the same one, and no other launch has.
    """
    return process_name(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""


def process_name(process: int) -> str:
    """Return a name for `process` of this machine that no other process ever has; "" off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    ticks = stat.rpartition(")")[2].split()[19]  # its start: numbers of processes are used again
    return f"process {process} of boot {boot}, started at tick {ticks}"
