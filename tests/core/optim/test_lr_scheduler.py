"""The learning rate on both sides of every boundary of its phases."""

from __future__ import annotations

import pytest

from isp.core.optim.config import LRSchedulerConfig
from isp.core.optim.update_rules import learning_rate


def rates(total: int, **config) -> list[float]:
    scheduler = LRSchedulerConfig(**config)
    return [
        learning_rate(i, peak=2.0, total_steps=total, config=scheduler) for i in range(total + 1)
    ]


def test_decay_begins_after_the_warm_up():
    """Catches one step too many at zero or at the peak."""
    config = {"warmup_steps": 2, "decay_type": "linear", "min_lr_factor": 0.5}
    assert rates(6, **config) == pytest.approx([1, 2, 1.75, 1.5, 1.25, 1, 1])


def test_decay_covers_the_last_fraction_of_steps():
    """Catches a stable phase of the wrong length."""
    config = {"warmup_steps": 1, "decay_type": "linear", "decay_ratio": 0.25, "min_lr_factor": 0}
    assert rates(8, **config) == pytest.approx([2] * 6 + [1, 0, 0])


@pytest.mark.parametrize(("shape", "middle"), [("cosine", 1.0), ("linear", 1.0), ("sqrt", 0.5858)])
def test_decay_shapes_end_at_the_minimum(shape: str, middle: float):
    """Catches a decay that does not end at the configured rate."""
    found = rates(4, decay_type=shape, min_lr_factor=0)
    assert found[1] == pytest.approx(middle, abs=1e-4)
    assert found[3] == pytest.approx(0)


def test_phases_without_steps_are_allowed():
    """Catches a division by the length of an empty phase."""
    assert rates(2, warmup_steps=2, min_lr_factor=0.1) == pytest.approx([1, 2, 0.2])
    assert rates(2, decay_ratio=0.0, min_lr_factor=0.1) == pytest.approx([2, 2, 0.2])
