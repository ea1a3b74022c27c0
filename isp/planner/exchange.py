"""Choice of how context ranks exchange keys and values, where the configuration says auto."""

from __future__ import annotations

from dataclasses import replace

from isp.config import JobConfig
from isp.core.mesh import ContextExchange
from isp.planner.lengths import Planned
from isp.step.job_models import trained_model

__all__ = ["choose_exchange", "with_exchange"]

GIB = 2**30


def choose_exchange(
    config: JobConfig, world_size: int, usable_bytes: int | None, *, on_cpu: bool
) -> tuple[JobConfig, str]:
    """Return `config` with gather or ring instead of `auto`, and the reason for logs.

    Ring is chosen if the plan with gather exceeds the `usable_bytes` of a rank (None: no known
    limit) and ring takes less. Gather is chosen for a model that cannot be planned. The reason is
    empty without a context group.
    """
    asked = config.parallel.sequence_2D.exchange
    if config.topology(world_size).context == 1:
        return (config, "")
    if asked is not ContextExchange.AUTO:
        # Attention with a window gathers keys even if `ring` is asked for: tell so in the reason.
        windows = trained_model(config).attention_windows
        gathers = asked is ContextExchange.RING and all(window for window, _ in windows)
        note = ", but all layers have a window, and those gather" if gathers else ""
        return (config, f"{asked}, as configured{note}")
    if not on_cpu and config.training.dtype not in ("bfloat16", "float16"):
        return (config, f"gather (auto): no kernel merges ring blocks of {config.training.dtype}")
    gather, ring = (
        with_exchange(config, kind) for kind in (ContextExchange.GATHER, ContextExchange.RING)
    )
    if usable_bytes is None:
        return (gather, "gather (auto): the memory limit of a rank is not known")
    try:
        taken, in_ring = (
            Planned(c, world_size, on_cpu).peak(c.data.seq_len).total for c in (gather, ring)
        )
    except ValueError as error:
        return (gather, f"gather (auto): {error}")
    sizes = f"{taken / GIB:.1f} GiB of {usable_bytes / GIB:.1f}"
    if taken <= usable_bytes or in_ring >= taken:
        return (gather, f"gather (auto): planned to take {sizes}")
    return (ring, f"ring (auto), {in_ring / GIB:.1f} GiB; a gather would take {sizes}")


def with_exchange(config: JobConfig, exchange: ContextExchange) -> JobConfig:
    """Return `config` with this exchange of keys and values."""
    two = replace(config.parallel.sequence_2D, exchange=exchange)
    return replace(config, parallel=replace(config.parallel, sequence_2D=two))
