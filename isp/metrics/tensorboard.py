"""`TensorBoardFile`: the numbers of steps for TensorBoard, under the keys of `metrics.jsonl`."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import AbstractContextManager
from pathlib import Path

from isp.metrics.record import StepRecord

__all__ = ["TensorBoardFile"]

logger = logging.getLogger(__name__)


class TensorBoardFile(AbstractContextManager["TensorBoardFile"]):
    """Writes records to event files in `folder`; needs the tensorboard package.

    TensorBoard passes over what earlier files there say of steps after `last_step`. A disk that is
    full ends the writing, with a warning, and not the run.
    """

    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: SummaryWriter | None = SummaryWriter(
            folder, purge_step=last_step + 1 if last_step else None
        )

    def write(self, record: StepRecord) -> None:
        """Add every number of `record` at its step."""
        values = dataclasses.asdict(record)
        step = values.pop("step")
        try:
            for key, value in values.items():
                if value is not None and self._writer is not None:
                    self._writer.add_scalar(key, value, step)
        except OSError as error:
            self._give_up(error)

    def __exit__(self, *_: object) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as fault:
            self._give_up(fault)

    def _give_up(self, error: OSError) -> None:
        logger.warning(
            "no more is written for TensorBoard (%s): training continues, and metrics.jsonl has all"
            " numbers",
            error.strerror,
        )
        self._writer = None
