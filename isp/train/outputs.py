"""`StepOutputs`: where the numbers of steps go, besides the log."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from isp.checkpoint.agreement import attempt_first
from isp.comm import Channel
from isp.config import JobConfig
from isp.metrics import (
    MetricsFile,
    ProgressBar,
    StepRecord,
    TensorBoardFile,
    watched_stream,
)
from isp.run.folder import RunFolder

__all__ = ["StepOutputs"]


class StepOutputs:
    """On rank 0 the files of metrics, and a progress bar if somebody watches; on others nothing.

    A context that goes on after `last_step`; all ranks of `host` enter it together. Raises
    CheckpointError on all of them if a file cannot be opened, or is none of ours.
    """

    def __init__(
        self, config: JobConfig, folder: RunFolder, host: Channel, *, last_step: int
    ) -> None:
        self._config = config
        self._folder = folder
        self._host = host
        self._last_step = last_step
        self._stack = ExitStack()
        self._files: list[MetricsFile | TensorBoardFile] = []
        self._bar: ProgressBar | None = None

    def record(self, record: StepRecord) -> None:
        """Keep the record of a step."""
        for file in self._files:
            file.write(record)

    def progress(self, *, loss: float, eta_seconds: float | None) -> None:
        """One step more has been done."""
        if self._bar is not None:
            self._bar.show(loss=loss, eta_seconds=eta_seconds)

    def __enter__(self) -> Self:
        attempt_first(self._host, f"writing on in {self._folder.path}", self._open)
        return self

    def _open(self) -> None:
        metrics, last_step = self._config.metrics, self._last_step
        self._files.append(
            self._stack.enter_context(self._folder.open_metrics(last_step=last_step))
        )
        if metrics.enable_tensorboard:
            folder = self._folder.path / metrics.save_tb_folder
            self._files.append(
                self._stack.enter_context(TensorBoardFile(folder, last_step=last_step))
            )
        self._bar = self._open_bar()

    def _open_bar(self) -> ProgressBar | None:
        stream = watched_stream()
        if stream is None:
            return None
        total = self._config.training.steps
        return self._stack.enter_context(
            ProgressBar(total=total, done=self._last_step, stream=stream)
        )

    def __exit__(self, *_: object) -> None:
        self._stack.close()
