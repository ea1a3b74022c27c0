"""Column, row and embedding layers with Megatron-LM's options: the layers of the modes, made ready.

S sequence, B batch, I in features, O out features, V vocabulary, D model size; /p = split over the
group. Activations are [S, B, ..] unless `sequence_dim` says otherwise.

Source: Megatron-LM, core/tensor_parallel/layers (Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.layers.embedding import look_up
from isp.core.layers.linear import ParallelLinear, Role, WeightGradientRoute, moves_for
from isp.core.layers.module import ParallelModule
from isp.core.megatron.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from isp.core.mesh import Axis, Mode
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.partition import chunk_range
from isp.core.weights.wp import LocalWeights, WPCommunicator

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]

InitMethod = Callable[[Tensor], object]
"""Fills a whole weight, float32 on CPU, as the functions of `torch.nn.init` do."""

FIRST_DIM = 0
CPU = torch.device("cpu")


def _normal(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.02)


class _Initialised(ParallelModule):
    """Begins with its part of one master weight, so that every group size begins alike.

    [Note: Master weight] Every rank fills the whole weight from torch's default CPU generator and
    keeps its part: that generator must be in the same state on all ranks (`torch.manual_seed`).
    """

    init_method: InitMethod

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the master weight [Note: Master weight]; a bias is zero."""
        for name, parameter in self.named_parameters(recurse=False):
            layout = self.layouts[name]
            full = torch.zeros(layout.global_shape, dtype=torch.float32, device=CPU)
            if name != "bias":
                self.init_method(full)
            parameter.copy_(layout.shard(full))


class ColumnParallelLinear(_Initialised, ParallelLinear):
    """y = x W^T + b with the outputs split: x [S, B, I] -> y [S, B, O/p], W [O/p, I], b [O/p].

    forward   x as it is, or all-gathered along S (`sequence_parallel`: x is [S/p, B, I])
    backward  dx all-reduced, or reduce-scattered along S; its transfer, and that of x which is
              gathered again rather than kept, are hidden behind the weight gradient

    `gather_output` gives [S, B, O] on every rank. `stride` is the number of fused outputs of equal
    size (q, k and v in one), each of which is split by itself.
    With `skip_bias_add` the bias is returned, gathered if y is, and not added. With
    `skip_weight_param_allocation` the layer has no weight of its own: it is called with one,
    [O/p, I].
    Raises ValueError if outputs do not divide by p, or options contradict each other.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: Channel,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        stride: int = 1,
        sequence_parallel: bool = False,
        sequence_dim: int = FIRST_DIM,
        skip_weight_param_allocation: bool = False,
        weight_gradients: WeightGradientRoute | None = None,
        init_method: InitMethod = _normal,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        segments = _segments("output_size", output_size, stride, group)
        mode = Mode.FSP if sequence_parallel else Mode.MTP
        super().__init__(
            _split((output_size, input_size), dim=0, segments=segments, group=group),
            bias_layout=_split((output_size,), dim=0, segments=segments, group=group)
            if bias
            else None,
            moves=moves_for(mode, Role.COLUMN, group, sequence_dim=sequence_dim),
            communicator=LocalWeights(),
            skip_bias_add=skip_bias_add,
            weight_gradients=weight_gradients,
            has_weight=not skip_weight_param_allocation,
            device=device,
            dtype=dtype,
        )
        self.group, self.gather_output, self.init_method = group, gather_output, init_method
        self.reset_parameters()

    def forward(  # type: ignore[override]  # as users of Megatron-LM expect it
        self, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [S, B, I] -> y [S, B, O/p] or [S, B, O], and the bias [O/p] or [O] if not added."""
        y = super().forward(x, weight)
        bias: Tensor | None = self.bias if self.skip_bias_add else None
        if self.gather_output:
            y, bias = self._gathered(y), None if bias is None else self._gathered(bias)
        return y, bias

    def _gathered(self, y: Tensor) -> Tensor:
        """[.., O/p] to [.., O], not rank by rank but segment by segment."""
        y = gather_from_tensor_model_parallel_region(y, self.group)
        num_segments = len(self.layouts["weight"].segments)
        parts = y.unflatten(-1, (self.group.size, num_segments, -1))  # [.., p, segments, n]
        joined: Tensor = parts.transpose(-3, -2).flatten(-3)
        return joined


class RowParallelLinear(_Initialised, ParallelLinear):
    """y = x W^T + b with the inputs split: x [S, B, I/p] -> y [S, B, O], W [O, I/p], b [O] whole.

    forward   y all-reduced, or reduce-scattered along S (`sequence_parallel`: y is [S/p, B, O])
    backward  dy as it is, or all-gathered along S

    The bias is added once, to the sum; with `sequence_parallel` its gradient, a part on each rank,
    is all-reduced. Unless `input_is_parallel` the layer splits x [S, B, I] itself. With
    `skip_bias_add` the bias is returned and not added.
    Raises ValueError if inputs do not divide by p, or options contradict each other.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: Channel,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
        stride: int = 1,
        sequence_parallel: bool = False,
        sequence_dim: int = FIRST_DIM,
        weight_gradients: WeightGradientRoute | None = None,
        init_method: InitMethod = _normal,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if sequence_parallel and not input_is_parallel:
            raise ValueError(
                "sequence_parallel=True needs input_is_parallel=True: features of x are split, and"
                " tokens only in y"
            )
        segments = _segments("input_size", input_size, stride, group)
        if stride > 1 and not input_is_parallel:
            raise ValueError("stride needs input_is_parallel=True: a whole input is split in one")
        mode = Mode.MSP if sequence_parallel else Mode.MTP
        super().__init__(
            _split((output_size, input_size), dim=1, segments=segments, group=group),
            bias_layout=ParameterLayout(global_shape=(output_size,), reduce_over=Axis.DATA)
            if bias
            else None,
            bias_after_move=True,
            moves=moves_for(mode, Role.ROW, group, sequence_dim=sequence_dim),
            communicator=LocalWeights(),
            skip_bias_add=skip_bias_add,
            weight_gradients=weight_gradients,
            device=device,
            dtype=dtype,
        )
        self.group, self.init_method = group, init_method
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.reset_parameters()

    def forward(  # type: ignore[override]  # as users of Megatron-LM expect it
        self, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [S, B, I/p] or [S, B, I] -> y [S, B, O] or [S/p, B, O], and a bias not added [O]."""
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.group)
        y = self.multiply(x, weight)
        bias: Tensor | None = self.bias
        if bias is not None and self.sequence_parallel:
            bias = copy_to_tensor_model_parallel_region(bias, self.group)
        if bias is None or self.skip_bias_add:
            return y, bias
        return y + bias.to(y.dtype), None  # narrower under autocast


class VocabParallelEmbedding(_Initialised):
    """Rows of a table that is split by vocabulary: ids [..] -> [.., D], table [V/p, D].

    forward   each rank looks up the ids it holds; the sum is all-reduced, or reduce-scattered
              along `sequence_dim` (`reduce_scatter_embeddings`)
    backward  the gradient as it is, or all-gathered

    A vocabulary that does not divide is cut into ceil(V/p) rows, fewer on the last rank.
    `deterministic` adds up the gradients of a row in the same order every time, on CUDA too.
    Raises ValueError if a rank would have no row.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None = None
    padding_idx = -1
    """The row that takes no gradient; -1: none."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Channel,
        reduce_scatter_embeddings: bool = False,
        sequence_dim: int = FIRST_DIM,
        deterministic: bool = False,
        init_method: InitMethod = _normal,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_channel("group", group)
        if chunk_range(num_embeddings, group.size, group.size - 1).start == num_embeddings:
            raise ValueError(
                f"num_embeddings={num_embeddings} leaves some of the {group.size} ranks of the"
                f" group without a row: pad it to a multiple of {group.size}"
            )
        mode = Mode.MSP if reduce_scatter_embeddings else Mode.MTP
        super().__init__()
        self.communicator: WPCommunicator = LocalWeights()
        self.deterministic = deterministic
        self.moves = moves_for(mode, Role.ROW, group, sequence_dim=sequence_dim)
        layout = _split((num_embeddings, embedding_dim), dim=0, group=group)
        self.add_shard("weight", layout, device=device, dtype=dtype)
        self.init_method = init_method
        self.reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [..] -> [.., D]."""
        return look_up(ids, self.weight, self)


def _split(
    shape: tuple[int, ...], *, dim: int, group: Channel, segments: tuple[int, ...] = ()
) -> ParameterLayout:
    return ParameterLayout(
        global_shape=shape,
        dim=dim,
        segments=segments,
        parts=group.size,
        index=group.rank,
        reduce_over=Axis.DATA,
    )


def _segments(name: str, size: int, stride: int, group: Channel) -> tuple[int, ...]:
    """Return the sizes of what is fused; each has to divide by the group."""
    check_channel("group", group)
    if size % (stride * group.size):
        times = f"stride={stride} times " if stride > 1 else ""
        raise ValueError(
            f"{name}={size} does not divide by {times}the {group.size} ranks of its group"
        )
    return (size // stride,) * stride
