"""The memory pool's leases, counters and poison, without a communicator."""

from __future__ import annotations

import pytest
import torch

from isp.core.weights.pool import MemoryPool

CPU = torch.device("cpu")
FLOAT, HALF = torch.float32, torch.bfloat16


def test_a_buffer_is_reused_for_any_shape_of_its_size() -> None:
    """Catches a pool that allocates for every lease, and one that leases a buffer twice."""
    pool = MemoryPool()
    first, second = pool.lease((4, 6), FLOAT, CPU), pool.lease((4, 6), FLOAT, CPU)
    address = first.tensor.data_ptr()
    assert second.tensor.data_ptr() != address
    first.release()
    third = pool.lease((3, 8), FLOAT, CPU)
    assert third.tensor.data_ptr() == address
    assert third.tensor.shape == (3, 8)
    assert third.tensor.is_contiguous()
    assert pool.reserved_bytes == pool.leased_bytes == 192
    assert (pool.allocations, pool.reuses) == (2, 1)


@pytest.mark.parametrize("other", [((4, 6), HALF), ((4, 7), FLOAT), ((12,), torch.float64)])
def test_a_buffer_is_reused_only_for_its_dtype_and_size(
    other: tuple[tuple[int, ...], torch.dtype],
) -> None:
    """Catches a key that ignores the dtype or the size, or that counts bytes."""
    pool = MemoryPool()
    lease = pool.lease((4, 6), FLOAT, CPU)
    address = lease.tensor.data_ptr()
    lease.release()
    shape, dtype = other
    assert pool.lease(shape, dtype, CPU).tensor.data_ptr() != address
    assert pool.reuses == 0


def test_misuse_raises() -> None:
    """Catches a lease used or returned after its end, when the buffer may be leased again."""
    pool = MemoryPool()
    lease = pool.lease((2,), FLOAT, CPU)
    lease.release()
    with pytest.raises(RuntimeError, match="was released: another transfer may be writing"):
        _ = lease.tensor
    heir = pool.lease((2,), FLOAT, CPU)
    with pytest.raises(RuntimeError, match="released already: it may be leased to another"):
        lease.release()
    heir.tensor.fill_(1.0)
    assert pool.lease((2,), FLOAT, CPU).tensor.data_ptr() != heir.tensor.data_ptr()
    assert pool.leased_bytes == 16


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, HALF, torch.float64])
def test_poison_fills_freed_buffers_with_nan(dtype: torch.dtype, reuse: bool) -> None:
    """Catches a read of a freed buffer that goes unnoticed; integers have no NaN."""
    pool = MemoryPool(reuse=reuse, poison=True)
    lease, numbers = pool.lease((3,), dtype, CPU), pool.lease((3,), torch.int64, CPU)
    late, late_numbers = lease.tensor.fill_(1), numbers.tensor.fill_(1)
    lease.release()
    numbers.release()
    assert late.isnan().all()
    assert late_numbers.tolist() == [1, 1, 1]


def test_reset_lazy_pools_keeps_leased_buffers() -> None:
    """Catches a reset that drops leased buffers, keeps free ones, or miscounts."""
    pool = MemoryPool()
    kept, dropped = pool.lease((4,), FLOAT, CPU), pool.lease((8,), FLOAT, CPU)
    kept.tensor.fill_(7)
    dropped.release()
    assert pool.reserved_bytes == 48
    pool.reset_lazy_pools()
    assert pool.reserved_bytes == 16
    assert kept.tensor.tolist() == [7] * 4
    pool.lease((8,), FLOAT, CPU)
    assert pool.reserved_bytes == pool.leased_bytes == 48
    assert (pool.allocations, pool.reuses) == (3, 0)
    kept.release()
    assert pool.lease((4,), FLOAT, CPU).tensor.data_ptr() == kept._tensor.data_ptr()


def test_a_buffer_made_in_inference_mode_works_in_training() -> None:
    """Catches inference tensors in the pool, which torch forbids training to write to."""
    pool = MemoryPool()
    with torch.inference_mode():
        pool.lease((2,), FLOAT, CPU).release()
    lease = pool.lease((2,), FLOAT, CPU)
    assert pool.reuses == 1
    lease.tensor.fill_(1.0)
    (lease.tensor * torch.ones(2, requires_grad=True)).sum().backward()
