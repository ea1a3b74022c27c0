"""Functions that benchmarks on a GPU share: building a step, freeing memory, saving results."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gpu_steps import write_whole

from isp.config import JobConfig
from isp.core.comm import Mesh
from isp.core.comm.cuda import expand_segments
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.step.job_models import trained_model
from isp.step.train_step import TrainStep, make_train_step
from isp.utils.text import first_line

__all__ = [
    "OUT_OF_MEMORY",
    "draw_weights",
    "fault_of",
    "free_memory",
    "make_step",
    "prepare",
    "save",
]

OUT_OF_MEMORY = "out of memory"


def prepare(device: torch.device) -> None:
    """Prepare this process for a benchmark.

    Log lines are printed, as they name what each `auto` key chose. On CUDA, torch's memory segments
    can grow.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if device.type == "cuda":
        expand_segments()


def make_step(config: JobConfig, device: torch.device) -> TrainStep:
    """Build the training step of a run of one rank, with random weights drawn on the device."""
    mesh = Mesh(config.topology(1), 0)
    step = make_train_step(
        trained_model(config),
        config,
        mesh,
        device,
        initial_weights=False,
    )
    draw_weights(step.built.parameters)
    step.optimizer.take_up_weights()
    step.weights_changed()
    return step


def draw_weights(parameters: Iterable[ShardedParameter]) -> None:
    """Fill `parameters` on their device: matrices with random numbers, norms with 1, biases with 0.

    A training run draws weights on the host tile by tile, so that they are the same in every
    layout. That takes 15 s for 2e9 parameters, and a benchmark needs no particular values.
    """
    with torch.no_grad():
        for item in parameters:
            if item.parameter.dim() > 1:
                item.parameter.normal_(0, 0.02)
            else:
                item.parameter.fill_(0 if item.name.endswith("bias") else 1)


def fault_of(error: Exception) -> str:
    """Return an error as one line of at most 200 characters, for a table."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return first_line(error)[:200]


def free_memory() -> None:
    """Release unused memory of this process to the device, and reset its peak."""
    gc.collect()  # a step that failed is in reference cycles with its traceback
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def save(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write the rows measured so far as JSON to `path`, if there is one.

    Called after each row, so that a benchmark that is stopped keeps its rows.
    """
    if path is not None:
        write_whole(path, json.dumps(rows, indent=1))
