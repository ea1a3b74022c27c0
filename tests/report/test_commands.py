"""From the command line to the page, on a model that is really run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isp.cli import main
from isp.profile import Profile
from tests.ranks import run_isp
from tests.report.html_page import HtmlPage

JOB = """
job: {{name: small, dump_folder: {folder}}}
model: {{preset: tiny, hidden_size: 16, num_heads: 2, num_kv_heads: 2, num_layers: 2}}
data: {{source: {folder}/text.txt, seq_len: 16}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a text that is long enough for a few steps. " * 40)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(folder=tmp_path))
    return path


def test_profile_with_its_page(job: Path) -> None:
    """Catches --html that makes no page, or a page of other numbers than the profile's."""
    options = ["--modes", "isp", "--warmup", "0", "--steps", "1", "--no-torch", "--html"]
    (done,) = run_isp(1, "profile", str(job), *options)
    assert done.code == 0, done.err
    (folder,) = (job.parent / "small" / "profile").iterdir()
    page = folder / "report" / "profile.html"
    assert str(page) in done.out
    text = HtmlPage(page.read_text()).text
    (mode,) = Profile.load(folder / "profile.json").modes
    assert mode.losses[0] is not None
    assert f" {mode.losses[0]:.5f} " in text
    assert f"isp profile {job} --modes isp" in text


def test_profile_without_the_packages(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a profile of many steps whose page cannot be made in the end."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["profile", str(job), "--html", "--nproc", "2"]) == 2
    assert "bash tools/setup_env.sh report" in capsys.readouterr().err
    assert not (job.parent / "small").exists()
