"""A trial of a rank's share of a model's features, before ranks start."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isp.attention import AttentionMask, LocalAttention
from isp.comm.channel import DryChannel
from isp.layers.rank_layers import RankLayers
from isp.models.chunk import TracedChunk
from isp.models.recorder import experts_passed
from isp.models.region import OnlyColumnsRead
from isp.models.tensor_plan import TensorPlan
from isp.models.trace import ModelTrace
from isp.parallel import Mode
from isp.weights.wp import LocalWeights

__all__ = ["run_with_a_share"]


def run_with_a_share(
    build: Callable[[RankLayers, LocalAttention], TracedChunk],
    trace: ModelTrace,
    plan: TensorPlan,
    size: int,
) -> None:
    """Run, without values, what `build` makes for a rank of `size` that split features.

    In msp, whichever mode is asked for: there tokens are other than those of a region in shape.
    Raises ValueError, or what the model's code raises, if it does not run with its share.
    """
    tensor, tokens = DryChannel("tensor", size, 0), 8 * size
    layers = RankLayers(
        mode=Mode.MSP,
        tensor=tensor,
        weight=tensor,
        communicator=LocalWeights(),
        device=torch.device("meta"),
        dtype=torch.float32,
    )
    attentions = (call for call in trace.calls if call.sizes is not None)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, sinks: Tensor | None = None
    ) -> Tensor:
        call = next(attentions)
        assert call.sizes is not None
        parts = plan.head_parts(call.block, size)
        heads, kv_heads = call.sizes.num_heads // parts, call.sizes.num_kv_heads // parts
        expected = [(tokens, heads), (tokens, kv_heads), (tokens, kv_heads)]
        found = [tuple(x.shape[1:3]) for x in (q, k, v)]
        if found != expected or (sinks is not None and len(sinks) != heads):
            raise ValueError(f"{call.block} calls attention with heads of other ranks")
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    chunk = build(layers, attend)
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    reads = OnlyColumnsRead(tuple(chunk.holders.entrances.values()))
    with experts_passed(chunk.model), reads, torch.no_grad():
        chunk.logits(chunk(ids, ids, None))
