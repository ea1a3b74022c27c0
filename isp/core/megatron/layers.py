"""Column, row and embedding layers with Megatron-LM's options.

S sequence, B batch, I in features, O out features, V vocabulary, D model size; p ranks of the
group, /p = sharded over them. Activations are [S, B, ..] unless `sequence_dim` says otherwise.

As in Megatron-LM, a linear returns two values, `y, bias = layer(x)`. The bias is None unless
`skip_bias_add` leaves the addition to the caller, e.g. to fuse it with the next operation.

Source: Megatron-LM, core/tensor_parallel/layers (Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.layers.embedding import look_up
from isp.core.layers.linear import ParallelLinear, Role, moves_for
from isp.core.layers.module import ParallelModule
from isp.core.megatron.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from isp.core.mesh import Axis, Mode
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.partition import chunk_range
from isp.core.weights.gradients import OutputGradient, ProductSink
from isp.core.weights.wp_communicator import (
    LocalWeights,
    ShardedLayer,
    WeightGradientRoute,
    WPCommunicator,
)

__all__ = [
    "ColumnParallelLinear",
    "IntoMainGradients",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]

InitMethod = Callable[[Tensor], object]
"""A function that fills a full weight, float32 on CPU, as those of `torch.nn.init`."""

FIRST_DIM = 0
CPU = torch.device("cpu")


def _normal(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.02)


class _Initialized(ParallelModule):
    """A layer that is initialized with its part of a master weight, equal for all group sizes.

    Each rank fills the full weight from torch's default CPU generator and keeps its part. So that
    generator must be in the same state on all ranks (`torch.manual_seed`).
    """

    init_method: InitMethod

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the full weight by `init_method` and keep this rank's part; set the bias to zero."""
        for name, parameter in self.named_parameters(recurse=False):
            layout = self.layouts[name]
            # Fill in float32 on CPU, so that values depend on neither dtype, device nor group size.
            full = torch.zeros(layout.global_shape, dtype=torch.float32, device=CPU)
            if name != "bias":
                self.init_method(full)
            parameter.copy_(layout.shard(full))


class IntoMainGradients:
    """A route that adds the product of a weight gradient to the main gradient, without making dW.

    `gradients` has a method `add_product`, like `MainGradients`. Use it only for weights that stay
    on their rank: the gradient of a gathered weight must be reduced over the weight group first.
    """

    def __init__(self, gradients: ProductSink) -> None:
        self._gradients = gradients

    def __call__(
        self, layer: ShardedLayer, weight: nn.Parameter, dy: OutputGradient, x: Tensor
    ) -> None:
        assert not layer.communicator.gathers_weights, "a gathered weight's gradient is reduced"
        self._gradients.add_product(weight, dy, x)


class _Linear(_Initialized, ParallelLinear):
    """A linear with its own communicator, and so with its own route of the weight gradient."""

    @property
    def weight_gradients(self) -> WeightGradientRoute | None:
        """Route of the weight gradient, `IntoMainGradients` or `DeferredWeightGradients`; None:
        autograd delivers it."""
        return self.communicator.route

    @weight_gradients.setter
    def weight_gradients(self, route: WeightGradientRoute | None) -> None:
        self.communicator.route = route


class ColumnParallelLinear(_Linear):
    """A linear y = x W^T + b with sharded outputs: W [O/p, I], b [O/p].

        y, bias = layer(x)

    x       [S, B, I], or [S/p, B, I] with `sequence_parallel`
    y       [S, B, O/p], or [S, B, O] on all ranks with `gather_output`
    bias    None; with `skip_bias_add` b, not added to y: [O/p], or [O] with `gather_output`

    forward   x is used as it is, or all-gathered along S with `sequence_parallel`
    backward  dx is all-reduced, or reduce-scattered along S, while the weight gradient is computed;
              a gathered x is not saved but gathered again, while dx is computed

    `stride` is the number of fused outputs of equal size (3 for q, k and v in one), each of which
    is sharded separately. With `skip_weight_param_allocation` the layer has no weight of its own
    and is called with one, [O/p, I].
    Raises ValueError if the outputs are not divisible by p, or options contradict each other.
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
        # fsp instead of msp: Megatron-LM also gathers x again in backward instead of saving it.
        mode = Mode.FSP if sequence_parallel else Mode.MTP
        super().__init__(
            _split((output_size, input_size), dim=0, segments=segments, group=group),
            bias_layout=_split((output_size,), dim=0, segments=segments, group=group)
            if bias
            else None,
            moves=moves_for(mode, Role.COLUMN, group, sequence_dim=sequence_dim),
            communicator=LocalWeights(),
            skip_bias_add=skip_bias_add,
            has_weight=not skip_weight_param_allocation,
            device=device,
            dtype=dtype,
        )
        self.weight_gradients = weight_gradients
        self.group, self.gather_output, self.init_method = group, gather_output, init_method
        self.input_size = input_size
        self.reset_parameters()

    def forward(  # type: ignore[override]  # as users of Megatron-LM expect it
        self, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y, bias): x [S, B, I] or [S/p, B, I] -> y [S, B, O/p] or [S, B, O].

        bias is None, or with `skip_bias_add` [O/p] or [O] like y.
        Raises ValueError if x does not have I features, or the given weight is not [O/p, I].
        """
        features, p = x.shape[-1], self.group.size
        if features != self.input_size:
            instead = "pass x with all its features"
            if features * p == self.input_size:
                instead = (
                    f"it is 1/{p} of them, as from another ColumnParallelLinear: use"
                    " RowParallelLinear(.., input_is_parallel=True), or gather_output=True there"
                )
            raise _wrong_features(self, x, f"input_size={self.input_size}", instead)
        y = super().forward(x, weight)
        bias: Tensor | None = self.bias if self.skip_bias_add else None
        if self.gather_output:
            y, bias = self._gathered(y), None if bias is None else self._gathered(bias)
        return y, bias

    def _gathered(self, y: Tensor) -> Tensor:
        """Gather [.., O/p] to [.., O], in the order of the fused segments, such as q, k and v.

        With `stride`, each rank has a part of every segment.
        """
        # The gathered features are rank by rank, so reorder them by segment.
        y = gather_from_tensor_model_parallel_region(y, self.group)
        num_segments = len(self.layouts["weight"].segments)
        parts = y.unflatten(-1, (self.group.size, num_segments, -1))  # [.., p, segments, n]
        joined: Tensor = parts.transpose(-3, -2).flatten(-3)
        return joined


class RowParallelLinear(_Linear):
    """A linear y = x W^T + b with sharded inputs: W [O, I/p], and b [O] on all ranks.

        y, bias = layer(x)

    x       [S, B, I], which the layer shards; or [S, B, I/p] with `input_is_parallel`, as
            `ColumnParallelLinear` returns it
    y       [S, B, O], or [S/p, B, O] with `sequence_parallel`
    bias    None; with `skip_bias_add` b [O], not added to y

    forward   y is all-reduced, or reduce-scattered along S with `sequence_parallel`
    backward  dy is used as it is, or all-gathered along S

    The bias is added once, to the sum. With `sequence_parallel` each rank computes the bias
    gradient of its tokens, and these are all-reduced.
    Raises ValueError if the inputs are not divisible by p, or options contradict each other.
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
                "sequence_parallel=True needs input_is_parallel=True: x has its features split, and"
                " only y its tokens"
            )
        segments = _segments("input_size", input_size, stride, group)
        if stride > 1 and not input_is_parallel:
            raise ValueError(
                f"stride={stride} needs input_is_parallel=True: this layer splits a whole input as"
                " one, not each of its fused parts"
            )
        mode = Mode.MSP if sequence_parallel else Mode.MTP
        super().__init__(
            _split((output_size, input_size), dim=1, segments=segments, group=group),
            bias_layout=ParameterLayout(global_shape=(output_size,), reduce_over=Axis.DATA)
            if bias
            else None,
            bias_after_move=True,  # added after the sum over ranks, or each rank would add it
            moves=moves_for(mode, Role.ROW, group, sequence_dim=sequence_dim),
            communicator=LocalWeights(),
            skip_bias_add=skip_bias_add,
            device=device,
            dtype=dtype,
        )
        self.weight_gradients = weight_gradients
        self.group, self.init_method = group, init_method
        self.input_size, self.input_is_parallel = input_size, input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.reset_parameters()

    def forward(  # type: ignore[override]  # as users of Megatron-LM expect it
        self, x: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y, bias): x [S, B, I] or [S, B, I/p] -> y [S, B, O] or [S/p, B, O].

        bias is None, or with `skip_bias_add` [O].
        Raises ValueError if x does not have I features, or I/p with `input_is_parallel`.
        """
        self._check_input(x)
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.group)
        y = self.multiply(x, weight)
        bias: Tensor | None = self.bias
        if bias is not None and self.sequence_parallel:
            # Each rank adds the bias to its own tokens, so backward all-reduces the bias gradient.
            bias = copy_to_tensor_model_parallel_region(bias, self.group)
        if bias is None or self.skip_bias_add:
            return y, bias
        return y + bias.to(y.dtype), None  # under autocast y is narrower than the bias

    def _check_input(self, x: Tensor) -> None:
        """Raise ValueError unless x has I features, or I/p with `input_is_parallel`."""
        features, p, size = x.shape[-1], self.group.size, self.input_size
        if features == (size // p if self.input_is_parallel else size):
            return
        of_rank = size // p
        if self.input_is_parallel:
            expected = f"input_size={size} / {p} ranks = {of_rank}"
            instead = "pass this rank's features, as ColumnParallelLinear returns them"
            if features == size:
                instead = "x is whole: make the layer with input_is_parallel=False, or split x"
        else:
            expected, instead = f"input_size={size}", "pass x with all its features"
            if features == of_rank:
                instead = (
                    f"it is 1/{p} of them, as from ColumnParallelLinear with gather_output=False:"
                    " make the layer with input_is_parallel=True"
                )
        raise _wrong_features(self, x, expected, instead)


class VocabParallelEmbedding(_Initialized):
    """An embedding sharded by vocabulary: ids [S, B] -> y [S, B, D], table [V/p, D].

    With `reduce_scatter_embeddings` y is [S/p, B, D]. One value is returned, not (y, bias).

    forward   each rank looks up the ids in its rows; the sum is all-reduced, or reduce-scattered
              along `sequence_dim`
    backward  dy is used as it is, or all-gathered

    If V is not divisible by p, ranks have ceil(V/p) rows, and the last one fewer.
    `deterministic` adds the gradients of a row in a fixed order, on CUDA too.
    With several ranks an id outside of the vocabulary gives zeros: to detect it, the host would
    have to wait for the device.
    Raises ValueError if a rank would have no row.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None = None
    padding_idx = -1
    """Index of the embedding that gets no gradient; -1: all get one."""

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
        """Return the embeddings of ids: [S, B] -> [S, B, D] or [S/p, B, D]."""
        return look_up(ids, self.weight, self)


def _wrong_features(layer: ParallelModule, x: Tensor, expected: str, instead: str) -> ValueError:
    """Return the error for x with another number of features than `expected`.

    `instead` says what the user can do.
    """
    return ValueError(
        f"{layer.title}: x of shape {list(x.shape)} has {x.shape[-1]} features, expected"
        f" {expected}: {instead}"
    )


def _split(
    shape: tuple[int, ...], *, dim: int, group: Channel, segments: tuple[int, ...] = ()
) -> ParameterLayout:
    """Return the `ParameterLayout` of a parameter that is cut along `dim` over `group`."""
    return ParameterLayout(
        global_shape=shape,
        dim=dim,
        segments=segments,
        parts=group.size,
        index=group.rank,
        reduce_over=Axis.DATA,
    )


def _segments(name: str, size: int, stride: int, group: Channel) -> tuple[int, ...]:
    """Return the sizes of the `stride` fused parts of a dim.

    Raises ValueError if a part is not divisible by the group's size.
    """
    check_channel("group", group)
    if size % (stride * group.size):
        times = f"stride={stride} times " if stride > 1 else ""
        raise ValueError(
            f"{name}={size} is not divisible by {times}the {group.size} ranks of its group: pad it"
        )
    return (size // stride,) * stride
