"""The cross entropy over a split vocabulary against torch's, with every gradient."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from isp.core.comm import Channel, CommLog
from isp.core.layers.compiled import compiles
from isp.core.layers.vocab_loss import LogitShard, losses_and_gradient
from isp.tensor_parallel import IGNORED, vocab_parallel_cross_entropy
from tests.core.megatron.layers import CLOSE, WORLDS, B, Made, S, drawn, group, slice_of
from tests.ranks import run_each, run_ranks


def _loss(rank: int, case: tuple[float, int]) -> None:
    smoothing, vocab = case
    log = CommLog()
    log.collect()
    channel = group(log)
    logits = drawn(S, B, vocab) * 5
    target = torch.randint(vocab, (S, B), generator=torch.Generator().manual_seed(7))
    target[0, 0] = target[3] = IGNORED
    dloss = drawn(S, B, seed=2)
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(
        leaf.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="none"
    ).view(S, B)
    expected.backward(dloss)
    assert leaf.grad is not None
    size = -(-vocab // channel.size)
    first = min(vocab, rank * size)
    own = slice(first, min(vocab, first + size))
    for reuse in (False, True):
        local = logits[..., own].contiguous()
        before = local.clone()
        head = local.clone().requires_grad_()
        local = head * 1  # not a leaf, like a layer's output
        kept = local.detach()
        loss = vocab_parallel_cross_entropy(
            local, target, smoothing, channel=channel, first=first, reuse_logits=reuse
        )
        assert torch.equal(kept, before) is not reuse
        moves = log.take()
        assert len(moves) == (0 if channel.size == 1 else 3)
        loss.backward(dloss)
        assert not log.take()
        torch.testing.assert_close(loss, expected.detach(), **CLOSE)
        torch.testing.assert_close(head.grad, leaf.grad[..., own], **CLOSE)


@pytest.mark.parametrize("world", WORLDS)
def test_the_loss_equals_torchs(world: int) -> None:
    """Catches smoothing over a rank's part only, an unknown reduction, and overwritten logits."""
    run_each(world, _loss, {str(case): case for case in product((0.0, 0.1), (48, 45))})


def _reused(rank: int, smoothing: float) -> list[int]:
    """Return how many buffers like the logits backward allocates, without and with
    `reuse_logits`.
    """
    channel, counts = group(), []
    target = torch.arange(S)
    for reuse in (False, True):
        head = slice_of(drawn(S, 48), 1, channel).requires_grad_()
        loss = vocab_parallel_cross_entropy(
            head * 1, target, smoothing, channel=channel, reuse_logits=reuse
        ).sum()
        with Made(tuple(head.shape)) as made:
            (once,) = torch.autograd.grad(loss, head, retain_graph=True)
        counts.append(made.count)
        if reuse:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            assert torch.equal(once, torch.autograd.grad(loss, head)[0])
    return counts


def test_reuse_logits_writes_the_gradient_over_the_logits() -> None:
    """Catches a second buffer of the size of the logits, and a wrong gradient in a second
    backward.
    """
    for of_ranks in run_each(2, _reused, {"plain": 0.0, "smoothed": 0.1}).values():
        assert all(reused == kept - 1 for kept, reused in of_ranks)


def test_a_smoothing_outside_0_to_1_is_refused() -> None:
    """Catches a percentage passed as a fraction."""
    with pytest.raises(ValueError, match="label_smoothing=10"):
        vocab_parallel_cross_entropy(
            torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), 10, channel=Channel.solo()
        )


def _wide_inside(rank: int) -> None:
    """Check that the loss of bfloat16 logits is that of float32, and its gradient bfloat16."""
    channel = group()
    logits = (drawn(S, B, 48) * 50).bfloat16()
    target = torch.randint(48, (S, B), generator=torch.Generator().manual_seed(7))
    local = slice_of(logits, 2, channel).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, channel=channel)
    loss.sum().backward()
    expected = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.flatten(), expected)
    assert local.grad is not None
    assert local.grad.dtype == torch.bfloat16


def test_bfloat16_logits_are_computed_in_float32() -> None:
    """Catches a softmax in the dtype of the logits."""
    run_ranks(4, _wide_inside)


def _in_passes(
    rank: int, dtype: torch.dtype, length: int = S, device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor]]:
    """Return losses and gradient for this rank's logits, compiled and eager.

    One target in four is ignored, and the gradient of the loss is not 1. The gradient is written
    over the logits.
    """
    channel, found = group() if dist.is_initialized() else Channel.solo(), []
    target = torch.randint(48, (B, length), generator=torch.Generator().manual_seed(7)).to(device)
    target[:, ::4] = IGNORED
    expected = torch.tensor(0.7, dtype=torch.float64, device=device)
    for compiled in (True, False):
        logits = slice_of(drawn(B, length, 48) * 5, 2, channel).to(device, dtype)
        first = 48 // channel.size * channel.rank
        shard = LogitShard(channel, first, 48, compile=compiled)
        losses, gradient = losses_and_gradient(logits.clone(), target, expected, shard)
        alone, none = losses_and_gradient(logits, target, None, shard)
        assert none is None
        assert torch.equal(alone, losses)
        assert gradient is not None
        assert not gradient[:, ::4].any()
        found.append([losses, gradient])
    return found[0], found[1]


def _check_passes(rank: int, dtype: torch.dtype, length: int = S, device: str = "cpu") -> None:
    # one rounding of the gradient, where the eager one has several; of 2^-9 each in bfloat16
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
    for a, b in zip(*_in_passes(rank, dtype, length, device), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def _eager_passes(rank: int, dtype: torch.dtype) -> None:
    with torch.compiler.set_stance("force_eager"):
        _check_passes(rank, dtype)


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_losses_equal_eager_ones(world: int) -> None:
    """Catches another formula, a target that another rank holds, and a gradient for ignored
    targets.
    """
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    run_each(world, _eager_passes, {str(dtype): dtype for dtype in dtypes})


def _check_kernels(device: str) -> None:
    # The first call compiles a probe, which is not counted here.
    assert compiles(True, torch.empty(0, device=device).device)
    before, graphs = counters["stats"]["unique_graphs"], []
    for length in (3, 16, 50):
        _check_passes(0, torch.bfloat16, length, device)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [2] * 3  # the sum, the gradient
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # compilers are slow on a busy machine
def test_one_loss_kernel_serves_all_lengths() -> None:
    """Catches a kernel that computes something else, and one compiled for each length."""
    _check_kernels("cpu")


@pytest.mark.gpu
def test_loss_kernels_match_on_a_gpu() -> None:
    """Catches triton kernels that compute something else, or that are compiled for each length."""
    _check_kernels("cuda")
