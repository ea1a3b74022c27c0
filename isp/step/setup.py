"""Preparation of a step: devices, the world of ranks, checks of parameter groups."""

from __future__ import annotations

import os

import torch

from isp.config import LoopConfig
from isp.core.comm import World
from isp.core.comm.cuda import check_registers
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.matrices import matrices_of
from isp.core.optim.torch_optimizer import check_elementwise, optimizer_of
from isp.core.optim.update_rules import check_groups, values_of
from isp.core.torch_private import Store
from isp.models.build import trained_layouts
from isp.models.traced_model import TracedModel

__all__ = ["check_device", "check_devices", "check_param_groups", "device_of", "make_world"]


def check_devices(config: LoopConfig, ranks: int) -> None:
    """Raise ValueError if this machine lacks devices, or features of them, for `ranks` ranks.

    Checks the number of devices, registered buffers (`parallel.weight.nccl_ub`), and, on the CPU,
    the attention backend.
    """
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


def check_param_groups(config: OptimizerConfig, model: TracedModel) -> None:
    """Check the parameter groups and the torch optimizer of `config` against the trained model.

    Raises ValueError for a group in `optimizer.param_groups` that matches no parameter, for a
    `split` that does not fit a matrix, and for a torch optimizer that does not update each element
    independently.
    """
    layouts = trained_layouts(model)
    decayed = {name for name, layout in layouts.items() if layout.decays}
    if (make := optimizer_of(config, decayed)) is not None:
        dims = {name: len(layout.global_shape) for name, layout in layouts.items()}
        check_elementwise(make, dims, torch.device("cpu"))
    check_groups(layouts, config)
    for name, layout in layouts.items():
        if values_of(name, layout, config).rule == "muon":
            # Called only for its check: it raises if the `split` of a group does not fit.
            matrices_of(name, layout, config)


def device_of(name: str) -> torch.device:
    """Return the device of this rank; `name` is auto, cpu or cuda.

    Raises ValueError if this machine lacks it. The CUDA device's number is LOCAL_RANK.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    check_device(name, local_rank + 1)
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def make_world(config: LoopConfig, store: Store | None = None) -> World:
    """Return the world of ranks as this process sees it, on its device; connects nothing yet.

    Raises ValueError if this machine lacks the device.
    """
    check_devices(config, int(os.environ.get("LOCAL_RANK", "0")) + 1)
    return World(
        device_of(config.training.device),
        timeout_seconds=config.comm.init_timeout_seconds,
        expands_segments=not config.parallel.weight.nccl_ub,
        store=store,
    )
