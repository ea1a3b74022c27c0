"""Shared parts of benchmarks on a GPU: weights drawn there, rows saved one by one, faults."""

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
    """Prepare a process that measures: log what `auto` chooses, and let memory segments grow."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if device.type == "cuda":
        expand_segments()


def make_step(config: JobConfig, device: torch.device) -> TrainStep:
    """Build the training step of one rank, with weights that the device draws."""
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
    """Fill `parameters` on their device: matrices at random, norms with 1, biases with 0.

    A run draws them on the host tile by tile, so that they are the same in every layout. That takes
    15 s for 2e9 parameters, and a benchmark needs no particular values.
    """
    with torch.no_grad():
        for item in parameters:
            if item.parameter.dim() > 1:
                item.parameter.normal_(0, 0.02)
            else:
                item.parameter.fill_(0 if item.name.endswith("bias") else 1)


def fault_of(error: Exception) -> str:
    """Return what went wrong, in a line for the row of a contestant."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return first_line(error)[:200]


def free_memory() -> None:
    """Give the memory of the last contestant back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def save(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write the rows so far as JSON, if a path is given."""
    if path is not None:
        write_whole(path, json.dumps(rows, indent=1))
