"""Prepares a step: devices, the world of ranks, checks of parameter groups."""

from __future__ import annotations

import os

import torch

from isp.config import JobConfig
from isp.core.comm import World
from isp.core.comm.cuda import check_registers
from isp.core.optim.matrices import matrices_of
from isp.core.optim.torch_optimizer import check_elementwise, optimizer_of
from isp.core.optim.update_rules import check_groups, values_of
from isp.core.torch_private import Store
from isp.models.build import trained_layouts
from isp.models.traced_model import TracedModel

__all__ = ["check_device", "check_devices", "check_param_groups", "device_of", "make_world"]


def check_devices(config: JobConfig, ranks: int) -> None:
    """Raise ValueError if this machine lacks what `ranks` ranks of it are to compute on."""
    check_device(config.training.device, ranks)
    on_cpu = config.training.device == "cpu" or not torch.cuda.is_available()
    if config.parallel.weight.nccl_ub:
        check_registers("parallel.weight.nccl_ub", "cpu" if on_cpu else "cuda")
    if on_cpu:
        config.model.attention_backend.check_fits(
            "cpu", config.training.dtype, deterministic=config.training.deterministic
        )


def check_device(name: str, ranks: int) -> None:
    """Raise ValueError if this machine lacks the devices `name` (auto, cpu, cuda) for `ranks`."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            "training.device=cuda, but torch finds no CUDA device: use cpu or auto, or install a"
            " torch build for your CUDA driver"
        )
    if name != "cpu" and available and ranks > (count := torch.cuda.device_count()):
        raise ValueError(
            f"this machine has {count} CUDA devices and {ranks} ranks need one each: start at most"
            f" {count} ranks on it, or use training.device=cpu"
        )


def check_param_groups(config: JobConfig, model: TracedModel | None = None) -> None:
    """Raise ValueError for one of `optimizer.param_groups` that no parameter would be in, or whose
    `split` does not fit, or for an optimizer of torch that looks at more than single elements.

    `model`: what is trained; None: what `config` describes.
    """
    if not (config.optimizer.is_torchs or config.optimizer.param_groups):
        return
    layouts = trained_layouts(config.language_model if model is None else model)
    decayed = {name for name, layout in layouts.items() if layout.decays}
    if (make := optimizer_of(config.optimizer, decayed)) is not None:
        dims = {name: len(layout.global_shape) for name, layout in layouts.items()}
        check_elementwise(make, dims, torch.device("cpu"))
    check_groups(layouts, config.optimizer)
    for name, layout in layouts.items():
        if values_of(name, layout, config.optimizer).rule == "muon":
            matrices_of(name, layout, config.optimizer)


def device_of(name: str) -> torch.device:
    """The device of this rank.  Raises ValueError if it is asked for and not there."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    check_device(name, local_rank + 1)
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def make_world(config: JobConfig, store: Store | None = None) -> World:
    """Return this process among all, on its device.  Raises ValueError if that is not there."""
    check_devices(config, int(os.environ.get("LOCAL_RANK", "0")) + 1)
    return World(
        device_of(config.training.device),
        timeout_seconds=config.comm.init_timeout_seconds,
        expands_segments=not config.parallel.weight.nccl_ub,
        store=store,
    )
