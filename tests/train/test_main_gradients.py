"""Weight gradients of a trainer that are accumulated into main gradients, or computed
separately.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.mesh import Mode
from isp.core.weights.wp_communicator import LocalWeights
from isp.step.train_step import TrainStep
from model.config import ModelConfig
from tests.core.megatron.layers import Made
from tests.train.runs import Layout, Task, make_run

SIZES = {"vocab_size": 40, "hidden_size": 24, "num_layers": 2, "intermediate_size": 56}
TASK = Task(model=ModelConfig(num_heads=4, num_kv_heads=2, qkv_bias=True, **SIZES))


def _gradients(micro: int, *, beside: bool) -> tuple[dict[str, Tensor], int]:
    """Return the sums of a step's micro-batches, and the number of tensors created with gate's
    shape.
    """
    layout = Layout(mode=Mode.MTP, micro=micro)
    run = make_run(Mesh(layout.topology(), 0), layout, TASK, dtype=torch.float32)
    step: TrainStep = run.step
    if beside:
        assert isinstance(step.built.weights, LocalWeights)
        step.built.weights.deliver_to(None)
    work = step.start([TASK.batch(1, place) for place in range(micro)])
    with Made((56, 24)) as made:
        for index in range(micro):
            step.backward(step.forward(work, index), last=index == micro - 1)
    step.gradients.reduce()
    return {i.name: step.gradients.grad(i.parameter) for i in run.parameters}, made.count


@pytest.mark.parametrize("micro", [1, 3])
def test_a_trainer_accumulates_products_into_main_gradients(micro: int) -> None:
    """Catches a route that is not taken, and one that changes more than the order of a sum.

    The first micro-batch has the same bits; later ones are added inside the product.
    """
    into, made = _gradients(micro, beside=False)
    beside, made_beside = _gradients(micro, beside=True)
    assert made == 0
    assert made_beside >= 2 * micro
    for name, gradient in into.items():
        if micro == 1:
            assert torch.equal(gradient, beside[name]), name
        torch.testing.assert_close(gradient, beside[name], rtol=1e-5, atol=1e-6)
