"""Code that computes differently from some row length on; no ranks are started."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import isp
from isp.core.mesh import ParallelConfig
from isp.core.mesh.config import TensorConfig
from isp.models.traced_model import TracedModel
from tests.models.models import job
from tests.models.tracing.test_probe import NEAR, PLACE, Mix, chunks_of, followed_by


def _logn(x: Tensor) -> Tensor:
    return x * max(1.0, math.log(x.shape[1], 100))


def _clipped(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 100:] *= 2
    return x


LONG: dict[str, tuple[Mix, str]] = {
    "the logarithm of the length": (_logn, "calls `mul` with 1.2"),
    "a branch": (lambda x: x + 1 if x.shape[1] > 100 else x, "calls `add`, and "),
    "chunks": (chunks_of(100), "`split` gives [[1, 100, 32], [1, 100, 32], [1, 56, 32]], and "),
    "a constant of the length": (lambda x: x / max(100, x.shape[1]), "calls `div` with 256, and"),
    "later tokens": (_clipped, "gives [1, 156, 32], and [1, 0, 32] in a row of 64"),
}


@pytest.mark.parametrize("name", LONG)
def test_code_that_depends_on_the_row_length_is_refused(name: str) -> None:
    """Catches results that depend on the length of a row, or of a rank's part of it."""
    mix, said = LONG[name]
    traced = TracedModel(followed_by(mix))
    traced.check_length(ParallelConfig(), 90)
    message = rf"^{PLACE} computes something else in a row of 256 tokens: .*\(test_\w+\.py:"
    with pytest.raises(ValueError, match=message) as raised:
        traced.check_length(ParallelConfig(tensor=TensorConfig(size=4)), 256)
    assert said in str(raised.value)


def test_a_users_loop_is_refused_at_its_first_long_row() -> None:
    """Catches lengths that no configuration has, and a check that draws a run's random numbers."""
    model = followed_by(lambda x: _logn(x) * (1 + 0 * torch.rand(1).to(x.device)))
    run = isp.parallelize(model, job())
    run.loss(torch.ones(1, 64, dtype=torch.int64))
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"computes something else in a row of 128 tokens"):
        run.loss(torch.ones(1, 128, dtype=torch.int64))
    assert torch.equal(torch.get_rng_state(), before)
    run.train_step.drain()


def test_rows_too_long_to_be_compared_are_refused() -> None:
    """Catches code for long rows only, which no comparison on the CPU reaches."""
    traced = TracedModel(followed_by(lambda x: F.relu(x) + 1 if x.shape[1] > 5000 else x))
    traced.check_length(ParallelConfig(), 4999)
    with pytest.raises(ValueError, match=r"rows of more than 4,096 tokens are not compared"):
        traced.check_length(ParallelConfig(), 1 << 16)


@pytest.mark.parametrize("name", NEAR)
def test_code_that_does_not_depend_on_the_row_length_is_accepted(name: str) -> None:
    """Catches models refused for sizes that depend on the length, or for tiles."""
    TracedModel(NEAR[name]()).check_length(ParallelConfig(), 256)
