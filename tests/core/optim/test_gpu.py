"""Updated weights on a GPU, sent over a link that is slower than compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from isp.core.optim.zero1 import Publisher
from isp.core.weights.sharded_parameter import ShardedParameter
from tests.core.weights.test_gpu import LONG_CYCLES, WireChannel

pytestmark = pytest.mark.gpu


def test_updated_weights_stay_allocated_until_they_are_sent() -> None:
    """Catches memory that is reused while it is sent, because another stream waited first.

    The gather stream waits before compute does; compute fills its next allocation with NaN.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    parameter = nn.Parameter(torch.arange(64.0, device=device).view(8, 8))
    layout = ParameterLayout(global_shape=(8, 8), reduce_over=Axis.WEIGHT_DATA)
    publisher = Publisher(
        [ShardedParameter("w", parameter, layout)], WireChannel(cycles=LONG_CYCLES // 4)
    )
    own = parameter.detach()[4:].clone()  # the rows of rank 1, of two ranks with equal data
    torch.cuda.synchronize()
    publisher.launch()
    with torch.cuda.stream(torch.cuda.Stream()):
        publisher.wait_for(parameter)
    filled = [torch.full((rows, 8), torch.nan, device=device) for rows in [4] * 64 + [8] * 64]
    publisher.wait_for(parameter)
    torch.cuda.synchronize()
    assert torch.equal(parameter.detach(), torch.cat((own, own)))
    assert all(x.isnan().all() for x in filled)
