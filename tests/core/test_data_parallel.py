"""Data-parallel wrappers against the sum of the replicas' gradients in one process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isp.core.comm import Channel, CommLog
from isp.data_parallel import DataParallelBucket, DataParallelNaive
from tests.ranks import run_ranks

WIDTH = 4


class Net(nn.Module):
    """Three linears, one of them used twice, one used on request, and a frozen one."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name in ("first", "shared", "optional", "last", "frozen"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, dtype=dtype))
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, use_optional: bool) -> Tensor:
        x = self.shared(torch.tanh(self.shared(self.first(x))))
        if use_optional:
            x = self.optional(x)
        return self.frozen(self.last(x))


def net(seed: int, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def batch(rank: int, index: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + index)
    return torch.randn(3, WIDTH, generator=generator, dtype=dtype)


def wrap(kind: str, module: nn.Module, log: CommLog | None = None) -> Any:
    channel = Channel(torch.distributed.group.WORLD, log=log)
    if kind == "naive":
        return DataParallelNaive(module, channel)
    return DataParallelBucket(module, channel, bucket_bytes=0 if kind == "each" else 256)


def _gradients(
    rank: int, kind: str, dtype: torch.dtype = torch.float64
) -> dict[str, tuple[list, list]]:
    """Return p.grad and main gradients after two micro-batches, in the second of two steps."""
    model = wrap(kind, net(rank, dtype))
    for _ in range(2):
        model.reset()
        with model.no_sync():
            model(batch(rank, 0, dtype), rank == 0).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
        model(batch(rank, 1, dtype), False).square().sum().backward()
    trained = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    return {
        n: (p.grad.double().tolist(), model.main_grad(p).double().tolist())
        for n, p in trained.items()
    }


def reference() -> dict[str, Tensor]:
    """Return the sum over two ranks and two micro-batches, from the weights of rank 0."""
    module = net(0)
    for rank in range(2):
        module(batch(rank, 0), rank == 0).square().sum().backward()
        module(batch(rank, 1), False).square().sum().backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["naive", "each", "bucket"])
def test_gradients_are_the_sum_of_the_replicas(kind: str):
    """Catches means, lost micro-batches, unequal initial weights, and parameters that a rank
    skips.
    """
    first, second = run_ranks(2, _gradients, kind)
    assert first == second
    expected = reference()
    assert first.keys() == expected.keys()
    for name, (grad, main) in first.items():
        assert grad == main
        found = torch.tensor(grad, dtype=torch.float64)
        # the four partial sums are added in another order
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12)


def test_overlap_changes_no_bit():
    """Catches buckets reduced before their last gradient is there."""
    assert run_ranks(2, _gradients, "each") == run_ranks(2, _gradients, "naive")


def test_bfloat16_weights_get_float32_sums():
    """Catches sums over ranks or micro-batches in bfloat16."""
    first, _ = run_ranks(2, _gradients, "bucket", torch.bfloat16)
    fine = 0
    for grad, main in first.values():
        rounded = torch.tensor(main).bfloat16().double()
        assert torch.equal(rounded, torch.tensor(grad, dtype=torch.float64))
        fine += int((rounded != torch.tensor(main, dtype=torch.float64)).sum())
    assert fine > 0


def _launches(rank: int, kind: str) -> tuple[list[int], list[str]]:
    """Return all-reduces in flight when backward reaches `last` and `first`; and all in order."""
    log = CommLog()
    model = wrap(kind, net(rank), log)
    seen: list[int] = []
    for name in ("last", "first"):
        module = model.module.get_submodule(name)
        module.register_full_backward_pre_hook(lambda *_: seen.append(len(log.transfers)))
    log.collect()
    x = batch(rank, 0).requires_grad_()
    model(x, True).square().sum().backward()
    return seen, [t.label.removeprefix("gradients ") for t in log.take()]


def test_buckets_are_reduced_during_backward():
    """Catches reductions that all start at the end, and buckets of the wrong size."""
    (seen, labels), _ = run_ranks(2, _launches, "bucket")
    assert labels == ["last.bias .. optional.weight", "shared.bias .. first.weight"]
    assert seen == [0, 1]
    (seen, labels), _ = run_ranks(2, _launches, "naive")
    assert labels[:2] == ["last.bias .. last.bias", "last.weight .. last.weight"]
    assert (len(labels), seen) == (8, [0, 0])


def _nothing_on_rank_1(rank: int) -> list:
    model = wrap("bucket", net(0))
    if rank == 0:
        model(batch(0, 0), False).square().sum().backward()
    model.finish()
    return model.module.last.weight.grad.tolist()


def test_a_rank_without_gradients_joins_the_reductions():
    """Catches ranks that wait forever for a rank without gradients."""
    first, second = run_ranks(2, _nothing_on_rank_1)
    module = net(0)
    module(batch(0, 0), False).square().sum().backward()
    assert first == second == module.last.weight.grad.tolist()


def solo(module: nn.Module) -> DataParallelBucket:
    return DataParallelBucket(module, Channel.solo())


def test_a_step_after_a_failed_backward_is_complete():
    """Catches gradients of a failed backward that enter the next step."""
    model, plain = solo(net(0)), net(0)
    broken = model.module.first.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0, 0).requires_grad_(), False).sum().backward()
    broken.remove()
    model.reset()
    model(batch(0, 1), False).sum().backward()
    plain(batch(0, 1), False).sum().backward()
    for one, other in zip(model.module.parameters(), plain.parameters(), strict=True):
        expected = torch.zeros_like(one) if other.grad is None else other.grad
        assert one.grad is None or torch.equal(one.grad, expected)
    assert model.module.first.weight.grad is not None


def test_a_step_without_reset_is_refused():
    """Catches gradients of two steps that are summed unnoticed."""
    model = solo(net(0))
    model(batch(0, 0), False).sum().backward()
    with pytest.raises(RuntimeError, match="came after its last one"):
        model(batch(0, 0), False).sum().backward()
    model.reset()
    assert all(p.grad is None for p in model.parameters())
    model(batch(0, 0), False).sum().backward()


def test_a_reentrant_checkpoint_is_refused():
    """Catches the end of a nested backward taken for the end of the step."""
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)])
    model = solo(module)
    x = batch(0, 0).requires_grad_()
    for block in module:
        x = checkpoint(block, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="came after its last one"):
        x.sum().backward()
    model.reset()
    x = batch(0, 0).requires_grad_()
    for block in module:
        x = checkpoint(block, x, use_reentrant=False)
    x.sum().backward()
    assert module[0].weight.grad is not None


def _unwrapped(rank: int, kind: str) -> bool:
    """Return whether a module keeps its own gradients after its wrapper is dropped."""
    module = net(0)
    wrapped = wrap(kind, module)
    wrapped.reset()
    wrapped(batch(rank, 0), True).sum().backward()
    del wrapped
    gc.collect()
    module.zero_grad()
    module(batch(rank, 1), True).sum().backward()
    found = [p.grad for p in module.parameters() if p.requires_grad]
    alone = net(0)
    alone(batch(rank, 1), True).sum().backward()
    expected = [p.grad for p in alone.parameters() if p.requires_grad]
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["naive", "buckets"])
def test_a_dropped_wrapper_removes_its_hooks(kind: str) -> None:
    """Catches hooks that keep a wrapper alive and go on collecting the module's gradients."""
    assert run_ranks(2, _unwrapped, kind) == [True, True]
