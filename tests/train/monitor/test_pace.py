"""The predicted time of the rest of a run, from the times of its steps."""

from __future__ import annotations

import pytest

from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.config.sections import CheckpointConfig, TrainingConfig, ValidationConfig
from isp.core.mesh.phase import Phase
from isp.step.phases import PhaseTimes
from isp.train.monitor.watch import Pace
from model.config import ModelConfig


def job(*, freq: int = 0, interval: int = 0) -> JobConfig:
    return JobConfig(
        model=ModelConfig(
            vocab_size=260, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24
        ),
        data=DataConfig(source="python-stdlib", valid_fraction=0.1),
        training=TrainingConfig(steps=10),
        validation=ValidationConfig(freq=freq),
        checkpoint=CheckpointConfig(interval=interval),
    )


def times(step: float, *, evaluation: float = 0.0, save: float = 0.0) -> PhaseTimes:
    """Return phase times with half of `step` in forward and backward, and half elsewhere."""
    found = dict.fromkeys(Phase, 0.0)
    found[Phase.FORWARD_BACKWARD] = found[Phase.OTHER] = step / 2
    found[Phase.EVALUATION], found[Phase.CHECKPOINT] = evaluation, save
    return found


def test_the_first_step_is_ignored() -> None:
    """Catches a prediction of hours because the first step loaded kernels."""
    pace = Pace(job())
    pace.count(times(60.0))
    assert pace.seconds_left(1) is None
    pace.count(times(1.0))
    assert pace.seconds_left(2) == pytest.approx(8.0)
    pace.count(times(3.0))
    assert pace.seconds_left(3) == pytest.approx(7 * 2.0)
    assert pace.seconds_left(10) is None


@pytest.mark.parametrize(
    ("step", "evaluations", "saves"), [(2, 4, 3), (3, 3, 3), (4, 3, 2), (8, 2, 1), (9, 1, 1)]
)
def test_remaining_evaluations_and_saves_are_counted(
    step: int, evaluations: int, saves: int
) -> None:
    """Catches the last one counted twice or not at all, whether or not the last step is a
    multiple.
    """
    pace = Pace(job(freq=3, interval=4))
    pace.count(times(1.0))
    pace.count(times(1.0, evaluation=100.0, save=10000.0))
    expected = (10 - step) * 1.0 + evaluations * 100.0 + saves * 10000.0
    assert pace.seconds_left(step) == pytest.approx(expected)


def test_a_run_without_evaluations_only_counts_its_last_save() -> None:
    """Catches evaluations counted in a run that has none."""
    pace = Pace(job())
    pace.count(times(1.0))
    pace.count(times(2.0, save=5.0))
    pace.count(times(1.0))
    assert pace.seconds_left(3) == pytest.approx(7 * 1.5 + 5.0)
    assert pace.seconds_to_stop() == pytest.approx(2.0 + 5.0)


def test_the_last_save_counts_in_full() -> None:
    """Catches a run that exceeds its limit because background saves seem to take no time."""
    pace = Pace(job(interval=4))
    pace.count(times(1.0))
    pace.count(times(1.0, save=0.25), write_seconds=30.0)
    pace.count(times(1.0), write_seconds=20.0)
    assert pace.seconds_to_stop() == pytest.approx(1.0 + 30.0)
    assert pace.seconds_left(3) == pytest.approx(7 * 1.0 + 2 * 0.25 + 30.0)
