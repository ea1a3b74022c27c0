"""The record of software and machines in a run's folder."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from isp.train.folder.environment import Environment, RankPlace, _git_commit


def test_the_environment_of_a_run_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a record without the versions, the machine or the number of ranks of a run."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    places = [RankPlace("b", "X100"), RankPlace("b", "X100"), RankPlace("a", "CPU")]
    environment = json.loads(Environment.of(places).to_json())
    assert environment["world_size"] == 3
    assert environment["hostnames"] == ["b", "a"]
    assert environment["devices"] == {"X100": 2, "CPU": 1}
    assert environment["torch"] == torch.__version__
    assert environment["packages"]["torch"].split("+")[0] in torch.__version__
    assert environment["python"].startswith("3.")
    assert len(environment["command"]) > 1
    assert environment["variables"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "PATH" not in environment["variables"]


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    command = ["git", *identity, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_the_source_is_recorded(tmp_path: Path) -> None:
    """Catches the commit of a repository that only contains an installation, and unnoticed
    changes.
    """
    source, other = tmp_path / "source.py", tmp_path / "installed.py"
    source.write_text("1")
    other.write_text("1")
    assert _git_commit(source) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "source.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert _git_commit(source) == commit
    assert _git_commit(other) is None
    source.write_text("2")
    assert _git_commit(source) == f"{commit}-dirty"


def test_a_run_works_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a run that fails where git is not installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _git_commit(Path(__file__)) is None
    assert re.search(r'"git_commit": null', Environment.of([]).to_json())
