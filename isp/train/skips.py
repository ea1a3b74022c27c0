"""Steps whose gradients were not finite: what is told about them, and when they are too many."""

from __future__ import annotations

from contextlib import suppress

from isp.checkpoint import Checkpointer, CheckpointError
from isp.optim import Zero1Optimizer

__all__ = ["check_skips", "describe_skip"]


def describe_skip(optimizer: Zero1Optimizer, *, step: int, grad_norm: float) -> str:
    """A line about step number `step`, which the optimizer has just skipped."""
    count = optimizer.num_skipped
    text = (
        f"step {step}: the gradient norm is {grad_norm}, so the weights were left as they are"
        f" ({count} {'step was' if count == 1 else 'steps were'} skipped so far)"
    )
    scaler = optimizer.scaler
    return text if scaler is None else f"{text}; the next loss scale is {scaler.scale:.8g}"


def check_skips(
    optimizer: Zero1Optimizer, limit: int, *, step: int, checkpointer: Checkpointer
) -> None:
    """Raise ValueError if the last `limit` steps, `step` among them, were skipped; 0: never.

    A collective over the world then: a save in flight is waited for, so that it can be named.
    Skips that only lower the loss scale are not counted, see `Zero1Optimizer.skipped_in_a_row`.
    """
    skipped = optimizer.skipped_in_a_row
    if not limit or skipped < limit:
        return
    with suppress(CheckpointError):  # told when it happened; older checkpoints are there
        checkpointer.close()
    folder = checkpointer.folder
    before = [saved for saved in folder.steps() if saved <= step - skipped]
    way_out = "there is no checkpoint from before them: begin anew with"
    if before:
        way_out = (
            f"the last checkpoint from before them is {folder.published(before[0])}: go on from"
            f" there (checkpoint.load_step={before[0]}) with"
        )
    raise ValueError(
        f"step {step}: the gradients of {skipped} steps in a row were not finite, which is the"
        f" limit optimizer.max_skipped_steps={limit}; {way_out} a smaller optimizer.lr, a longer"
        f" warm-up or other data"
    )
