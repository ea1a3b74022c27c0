"""The logits of a head in each of their layouts, against whole ones.

B batch, S sequence, V vocabulary; /p = split over the ranks of a sequence. The weights of heads and
embeddings are among the cases of `tests.core.weights.test_parameters`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.internevo import HeadWeightParallelCommunicator
from isp.core.mesh import Axis
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from tests.ranks import run_ranks
from tests.toolkit import CPU, topology

B, S, V = 2, 8, 12


def _forms(rank: int) -> None:
    mesh = Mesh(topology(4, tensor=4), rank)
    weight, tensor = mesh[Axis.WEIGHT], mesh[Axis.TENSOR]
    runtime = ISPCommunicator(weight, ISPCommModelConfig(device=CPU))
    logits, dy = torch.randn(2, B, S, V, generator=torch.Generator().manual_seed(2))

    def part(x: Tensor, dim: int) -> Tensor:
        return x.chunk(4, dim)[rank]

    # V/p for all tokens, V for all tokens, or V for a rank's own tokens
    for retain, expected, grad in (
        (True, part(logits, 2), part(dy, 2)),
        (False, logits, dy),
        (None, part(logits, 1), part(dy, 1)),
    ):
        head = HeadWeightParallelCommunicator(runtime, weight, tensor, retain_out_sharded=retain)
        assert torch.equal(head.output_hook(part(logits, 1)).wait(), expected)
        assert torch.equal(head.grad_output_hook(grad).wait(), part(dy, 1))
    head = HeadWeightParallelCommunicator(runtime, weight, tensor, retain_out_sharded=True)
    with pytest.raises(ValueError, match="is not divisible by the 4 ranks"):
        head.output_hook(torch.zeros(B, S // 4, V + 1))
    assert (head.communication_mode, head.gathers_weights) == ("isp", True)
    with head.recomputing():
        assert runtime.is_recomputing
        assert head.is_recomputing
    assert not head.is_recomputing


def test_logits_convert_between_their_layouts() -> None:
    """Catches logits or their gradient split along the wrong dim, or counted once for each rank."""
    run_ranks(4, _forms)
