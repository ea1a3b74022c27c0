"""A run folder of a version with keys that were later removed: resumed, evaluated and exported.

The run in `ARCHIVE` trained a Llama folder named by `model.init_from` on `tables.txt`, and was
stopped after its checkpoint of step 2; `THEN` are that version's results of the next steps.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from isp.cli import main
from isp.config import ConfigError, load_config
from isp.metrics import read_metrics
from isp.train.run import main as train
from tests.ranks import run_programs

ARCHIVE = Path(__file__).with_name("earlier_run.tar.xz")
THEN = [(6.157193899154663, 3.165778739344532), (6.168535232543945, 1.737180816030107)]
"""Loss and gradient norm of steps 3 and 4, in float32."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the run's folder, and change to the working directory in which it was started."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    (found,) = (path for path in Path("runs/tables").glob("2*"))
    return found


def test_an_earlier_run_is_resumed_evaluated_and_exported(run: Path) -> None:
    """Catches a saved key of an earlier version that is refused, and other sizes for the model."""
    config = load_config(run / "config.yaml")
    run_programs(1, lambda rank: train(config))
    found = [(line.loss, line.grad_norm) for line in read_metrics(run / "metrics.jsonl")[2:]]
    for theirs, ours in zip(THEN, found, strict=True):
        # Of another CPU, whose float32 sums of a norm were seen to differ by 2e-6.
        assert ours == pytest.approx(theirs, rel=1e-5)
    step = str(run / "checkpoint" / "step_4")
    assert main(["evaluate", step, "--data", "tables.txt"]) == 0
    assert main(["checkpoint", "export", step, "--hf", "exported"]) == 0


def test_an_earlier_run_without_a_checkpoint_starts_from_its_initial_weights(run: Path) -> None:
    """Catches a run before its first checkpoint that ignores model.init_from."""
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(ConfigError, match=r"no checkpoint to go on from: start a run of model.hf"):
        load_config(run / "config.yaml")
