"""The pages of `isp layouts` and `isp plan`: their numbers and their pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from isp.cli import main
from tests.report.html_page import HtmlPage

pytestmark = pytest.mark.filterwarnings("error")  # a picture that does not fit
CONFIG = """
job: {name: "<b>job"}
model: {preset: tiny, num_layers: 1}
data: {source: python-stdlib, seq_len: 1024, micro_num: 2}
parallel: {tensor: {size: 2}, weight: {size: 2}}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, Path]:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG)
    return str(config), tmp_path / "pages" / "page.html"


def made(page: Path, *words: str, code: int = 0) -> tuple[HtmlPage, dict[str, float]]:
    """The page of a command, and the last number under the mouse for each bar of its pictures."""
    assert main([*words, "--html", str(page)]) == code
    parsed = HtmlPage(page.read_text())
    bars = (re.fullmatch(r"(.*) ([\d.,]+)(?: \w+)?", hover) for hover in parsed.hovers)
    return parsed, {bar[1]: float(bar[2].replace(",", "")) for bar in bars if bar}


def test_layouts_by_part(files: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches bars that are not those of the layouts, and parts that do not add up."""
    config, file = files
    page, bars = made(file, "layouts", config, "--world", "2", "--top", "3", "--json")
    assert page.tags["svg"] == 2  # step and memory
    assert "Machine: 8 x H100" in page.text
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    seconds = best["seconds"]
    (name,) = {bar.split(":")[0] for bar in bars if re.match(r"1\W", bar)}
    assert best["mode"] in name
    parts = {part: bars[f"{name}: {part}"] for part in ("compute", "exposed", "bubble")}
    assert sum(parts.values()) == pytest.approx(1e3 * seconds["step"], abs=0.2)
    assert parts["exposed"] == pytest.approx(1e3 * seconds["exposed"], abs=0.1)
    for owner, size in best["memory_bytes"].items():
        assert bars[f"{name}: {owner}"] == pytest.approx(size / 2**20, abs=0.06)


def test_nothing_fits(files: tuple[str, Path]) -> None:
    """Catches a page that needs a layout that fits."""
    config, file = files
    alone = ["--world", "1", "--parallel.tensor.size", "1", "--parallel.weight.size", "1"]
    page, _ = made(file, "layouts", config, *alone, "--data.seq_len", "16777216", code=1)
    assert "No layout fits." in page.text
    assert page.tags["svg"] == 0


@pytest.mark.parametrize("longest", [False, True])
def test_memory_by_part(files: tuple[str, Path], longest: bool) -> None:
    """Catches a plan without its bars, or without those of the longest rows."""
    config, file = files
    words = ["--max-seq-len", "--memory", "0.5"] if longest else []
    page, bars = made(file, "plan", config, *words)
    assert page.tags["svg"] == 1
    assert "1,024 tokens fit: " in page.text
    assert bars["as it is, 1,024 tokens: weights"] > 0
    assert any("recompute" in bar for bar in bars) is longest


def test_a_plan_that_the_host_has_no_memory_for(files: tuple[str, Path]) -> None:
    """Catches a lead that says "do not fit" with the memory of a device, where that suffices."""
    config, file = files
    words = ["--host-memory", "0.001", "--optimizer.offload_states"]
    page, _ = made(file, "plan", config, *words, code=1)
    assert re.search(r"1,024 tokens do not fit: .* of a rank's part of the host\.", page.text)
