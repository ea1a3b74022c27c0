"""`Environment`: the software and machines of a run, as written to `env.json`."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter

from isp.metrics.device import device_name
from isp.utils.text import shown

__all__ = ["Environment", "RankPlace"]

_TUNING = ("CUDA_", "NCCL_", "OMP_NUM_THREADS", "PYTORCH_", "TORCH_")
"""Prefixes of environment variables that change the speed of CUDA, NCCL and torch."""


class RankPlace(NamedTuple):
    """The host and the kind of device of a rank, as strings, which `exchange` can gather."""

    hostname: str
    device: str
    """Name of the kind of device, from `device_name`."""

    @classmethod
    def here(cls, device: torch.device) -> RankPlace:
        """Return the place of this rank, which computes on `device`."""
        return cls(socket.gethostname(), device_name(device))


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The software and machines of a run."""

    python: str
    torch: str
    cuda: str | None
    """Version of CUDA or ROCm that torch was built for; None for neither."""
    platform: str
    command: list[str]
    """Command line of this process, without credentials."""
    git_commit: str | None
    """Commit of the running source, with `-dirty` if it was changed; None if it is installed."""
    world_size: int
    hostnames: list[str]
    """Names of the machines, each once, in the order of their ranks."""
    devices: dict[str, int]
    """Number of ranks computing on each kind of device."""
    packages: dict[str, str]
    """Versions of the installed packages, by name."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of rank 0 that start with one of `_TUNING`; env.json of older runs has
    none."""

    @classmethod
    def of(cls, places: Sequence[RankPlace]) -> Environment:
        """Return the environment of this process, in a run whose ranks are at `places`."""
        devices = [place.device for place in places]
        return cls(
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda or torch.version.hip,
            platform=platform.platform(),
            command=[shown(word) for word in sys.orig_argv],
            git_commit=_git_commit(Path(__file__)),
            world_size=len(places),
            hostnames=list(dict.fromkeys(place.hostname for place in places)),
            devices={name: devices.count(name) for name in dict.fromkeys(devices)},
            packages=_packages(),
            variables={k: shown(v) for k, v in os.environ.items() if k.startswith(_TUNING)},
        )

    def to_json(self) -> str:
        """Return the environment as indented JSON."""
        return TypeAdapter(Environment).dump_json(self, indent=2).decode() + "\n"


def _packages() -> dict[str, str]:
    """Return the versions of installed packages, by name, in alphabetical order."""
    # Read `metadata` once for each package: every access reads and parses its file again.
    found = [d.metadata for d in distributions()]
    named = [m for m in found if m["Name"]]  # leftovers of a broken installation have no name
    return {m["Name"]: m["Version"] for m in sorted(named, key=lambda m: m["Name"].lower())}


def _git_commit(file: Path) -> str | None:
    """Return the commit that `file` is checked out from; None if no repository tracks it."""
    tracked = ["ls-files", "--error-unmatch", file.name]
    described = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        for words in (tracked, described):
            git = ["git", "-C", str(file.parent), *words]
            result = subprocess.run(git, capture_output=True, text=True, timeout=10)
            if result.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):  # git is missing, or its file system hangs
        return None
    return result.stdout.strip()
