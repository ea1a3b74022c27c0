"""The process that has started a rank, told from every other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isp.train.state.launcher import launcher, process_name


def test_ranks_of_one_launcher_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two launches taken for one, and a restarted rank that does not know its launch."""
    code = "from isp.train.state.launcher import launcher; print(launcher())"

    def of_rank(*shell: str) -> str:
        command = [*shell, sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert of_rank() == "", "no launcher: two commands of one shell are two launches"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert of_rank() == of_rank() == process_name(os.getpid())
    other = of_rank("sh", "-c", '"$@"; true', "sh")
    assert other not in ("", of_rank())
    assert process_name(2**30) == ""
    assert launcher() == process_name(os.getppid())
