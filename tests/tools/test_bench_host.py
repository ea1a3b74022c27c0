"""The host's work for a layer, as counts: it grows unnoticed, since CPU tests do not wait
for it.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from bench_host import as_on_device, of_a_layer, rows
from torch import Tensor

ROWS = {row.name: row for row in rows()}


COUNTS = [
    ("isp, tensor 1, weight 2", 12, 60, 560),
    ("isp, tensor 1, weight 2, weights stay", 8, 50, 476),
    ("isp, tensor 2, weight 2", 16, 104, 667),
    ("fsp, tensor 2", 10, 113, 465),
    ("isp, tensor 2, weight 2, recomputed", 18, 145, 894),
]
OTHERS = (
    "msp, tensor 2",
    "mtp, tensor 2, recomputed",
    "isp, tensor 1, weight 2, weights stay, 4 micro-batches",
)


@pytest.mark.parametrize(("name", "collectives", "ops", "own_calls"), COUNTS)
def test_a_layer_stays_within_its_host_operations(
    name: str, collectives: int, ops: int, own_calls: int
) -> None:
    """Catches an additional transfer, torch operations that plain torch does not need, and Python
    calls.
    """
    row = ROWS[name]
    with as_on_device():
        found, plain = (
            of_a_layer(of.build(2), of.build(4), between=2)
            for of in (row, ROWS["plain torch, recomputed" if row.recompute else "plain torch"])
        )
    assert plain.collectives == plain.own_calls == 0
    assert found.collectives == collectives
    assert found.ops <= plain.ops + ops, found
    assert found.own_calls <= own_calls, found


@pytest.mark.parametrize("name", [*(name for name, *_ in COUNTS), *OTHERS])
def test_a_step_leaves_no_tensor_to_garbage_collection(name: str) -> None:
    """Catches cycles that keep activations or buffers until Python collects garbage."""
    with as_on_device():
        step = ROWS[name].build(2)
        step.backward(step.forward())
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            step.before()
            step.backward(step.forward())
            step.before()
            gc.collect()
            assert not [found for found in gc.garbage if isinstance(found, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
