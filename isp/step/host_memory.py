"""Checks, before a run, that this machine has enough memory for what can be counted in advance.

On the host: block inputs, optimizer states, copies for background saves. On the device (or on the
host, for CPU ranks): weights, gradients, optimizer states.
"""

from __future__ import annotations

import logging
import math
from collections import Counter

import torch

from isp.config import JobConfig, LoopConfig
from isp.core.comm.pinned_memory import attainable_bytes, available_bytes, total_bytes
from isp.core.mesh import Mode, Topology
from isp.core.optim.buckets import master_dtype
from isp.core.optim.states import kept
from isp.core.optim.update_rules import update_rule
from isp.core.pipeline.order import PipelineOrder
from isp.core.weights.uses import ActionKind
from isp.models.build import shape_only
from isp.models.runtime.stage_module import StageModule
from isp.step.job_models import trained_model

__all__ = ["check_host_memory", "check_memory_of_states", "input_bytes_on_host"]

logger = logging.getLogger(__name__)

GIB = 2**30


def input_bytes_on_host(config: JobConfig, topology: Topology, stage: int) -> int:
    """Return the peak bytes of block inputs in host memory, of a rank on pipeline rank `stage`.

    These are the inputs of recomputed blocks; 0 without `model.checkpoint_offload`.
    """
    model, data, mode = config.model, config.data, topology.mode
    if not model.checkpoint_offload:
        return 0
    # A rank keeps 1/p of a block's input: either the mode splits the sequence, so the input has
    # only the rank's tokens, or the elements are distributed. Otherwise it keeps the whole input.
    shared = mode.splits_sequence or model.checkpoint_distribute_activations
    elements = (1 if data.pack else data.micro_bsz) * config.row_tokens * model.hidden_size
    item: int = getattr(torch, config.training.dtype).itemsize
    one = elements // (topology.tensor if shared else 1) * item  # bytes of one block's input
    order = PipelineOrder(config.parallel.pipeline)
    counts = [
        sum(block.recomputed and block.input_kept for block in chunk.weight_blocks())
        for chunk in _chunks(config, stage)
    ]
    # A forward adds the inputs of its chunk's recomputed blocks, and its backward frees them. The
    # second half of a split backward (W) needs none.
    live = most = 0
    for kind, _, chunk in order.actions(stage, data.num_micro_batches):
        here = counts[chunk]
        live += {ActionKind.FORWARD: here, ActionKind.BACKWARD: -here}.get(kind, 0)
        most = max(most, live)
    return most * one


def check_host_memory(config: JobConfig, topology: Topology, ranks: int, first: int = 0) -> None:
    """Raise ValueError if this machine has too little memory for its ranks.

    Checks host memory for what ranks keep there, and the memory of the machine or of its devices
    for weights, gradients and optimizer states. This machine has `ranks` ranks, the first with
    number `first`. If a size of memory cannot be read, it is not checked.
    """
    _check_model(config, topology, ranks, first)
    _check(_needs(config, topology, ranks, first), ranks)


def _check_model(config: JobConfig, topology: Topology, ranks: int, first: int) -> None:
    """Raise ValueError if weights, gradients and optimizer states alone do not fit in memory."""
    on_cpu = config.training.device == "cpu" or not torch.cuda.is_available()
    needs = [
        (count, _model_bytes(config, topology, stage, on_cpu=on_cpu))
        for stage, count in _stages_here(topology, ranks, first).items()
    ]
    if on_cpu:
        room, needed = total_bytes(), sum(count * size for count, size in needs)
        who, owner = f"{ranks} ranks" if ranks > 1 else "a rank", "this machine"
    else:
        # Each rank has its own device, so the largest need is compared, not the sum.
        devices = range(torch.cuda.device_count())
        room = max(torch.cuda.get_device_properties(i).total_memory for i in devices)
        needed = max(size for _, size in needs)
        who, owner = "a rank", "its device"
    if room is None or needed <= room:
        return
    shards = "weight" if topology.mode.gathers_weights else "tensor"
    raise ValueError(
        f"{who} would take at least {needed / GIB:.1f} GiB for weights, gradients and optimizer"
        f" states, and {owner} has {room / GIB:.1f} GiB: use a larger parallel.{shards}.size or"
        f" parallel.pipeline.size over more {'machines' if on_cpu else 'devices'}, or a smaller"
        f" model; isp plan CONFIG shows what a rank takes"
    )


def _model_bytes(config: JobConfig, topology: Topology, stage: int, *, on_cpu: bool) -> int:
    """Return the bytes of a rank's weights, gradients and optimizer states on its compute device.

    Offloaded states are included only if the ranks compute on the CPU.
    """
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    elements = _elements(config, topology, stage, trained=True)
    size = _elements(config, topology, stage) * dtype.itemsize
    size += elements * master_dtype(dtype).itemsize  # adds the main gradients
    if on_cpu or not config.optimizer.offload_states:
        size += _state_bytes(config, topology, elements)
    return size


def check_memory_of_states(
    config: LoopConfig, topology: Topology, ranks: int, num_trained: int
) -> None:
    """Raise ValueError if this machine has too little host memory for its ranks' optimizer states.

    For a user's model, which the configuration does not describe, with `num_trained` trained
    elements. Nothing is checked if the states are on the devices.
    """
    if config.optimizer.offload_states:
        # The split into stages is not known here: take an average stage.
        own = num_trained // (topology.weight * topology.pipeline)
        _check({_STATES: ranks * _state_bytes(config, topology, own)}, ranks)


def _check(needs: dict[str, int], ranks: int) -> None:
    """Raise ValueError if the host memory is too small for `needs`; warn if too little is free."""
    needs = {name: size for name, size in needs.items() if size}
    sizes = " and ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in needs.items())
    ways = ", ".join(way for name in needs for way in _WAYS[name])
    # Other processes may free memory later, so too little free memory is only a warning.
    told = f"{ranks} ranks keep {sizes} in this machine's memory, of which"
    way_out = f"use {ways}, or fewer ranks on a machine"
    needed, most, free = sum(needs.values()), attainable_bytes(), available_bytes()
    if most is not None and needed > most:
        raise ValueError(f"{told} there are {most / GIB:.1f} GiB: {way_out}")
    if free is not None and needed > free:
        logger.warning(
            "%s %.1f GiB are free now: if the machine runs out of memory, %s",
            told,
            free / GIB,
            way_out,
        )


_INPUTS, _STATES, _COPIES = "block inputs", "optimizer states", "copies for background saves"
_WAYS = {
    _INPUTS: ("a larger model.checkpoint_segment", "model.checkpoint_offload=false"),
    _STATES: ("optimizer.moment_dtype=bfloat16", "optimizer.offload_states=false"),
    _COPIES: ("checkpoint.async_mode=disabled",),
}
"""Changes of the configuration that save memory, by what the memory is used for."""


def _needs(config: JobConfig, topology: Topology, ranks: int, first: int) -> dict[str, int]:
    """Return the host memory of all ranks on this machine in bytes, by what it is used for."""
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    checkpoint, needs = config.checkpoint, {_INPUTS: 0, _STATES: 0}
    copies = 0
    for stage, count in _stages_here(topology, ranks, first).items():
        own = _elements(config, topology, stage, trained=True)
        states = _state_bytes(config, topology, own)
        needs[_INPUTS] += count * input_bytes_on_host(config, topology, stage)
        needs[_STATES] += count * states if config.optimizer.offload_states else 0
        copies += count * (states + own * dtype.itemsize)
    # The copies of the state for checkpoints are counted in addition to other needs. If there are
    # no other needs, host memory is not checked.
    if any(needs.values()) and checkpoint.copies_state:
        needs[_COPIES] = copies
    return needs


def _stages_here(topology: Topology, ranks: int, first: int) -> Counter[int]:
    """Return, for each pipeline rank, the number of its ranks on this machine."""
    here = (min(r, topology.world_size - 1) for r in range(first, first + ranks))
    return Counter(rank // topology.stage for rank in here)


def _elements(config: JobConfig, topology: Topology, stage: int, trained: bool = False) -> int:
    """Return the number of weight elements, or of `trained` ones, on a rank of pipeline `stage`."""
    chunks = _chunks(config, stage)
    # By name, so that a weight that several chunks share counts once.
    shapes = {
        item.name: item.layout.global_shape
        for chunk in chunks
        for item in chunk.shards()
        if item.parameter.requires_grad or not trained
    }
    return sum(map(math.prod, shapes.values())) // topology.weight


def _chunks(config: JobConfig, stage: int) -> tuple[StageModule, ...]:
    """Return the model chunks of pipeline rank `stage`, on the meta device."""
    order = PipelineOrder(config.parallel.pipeline)
    stages = order.stages_of(stage)
    return shape_only(trained_model(config), Mode.ISP, stages, order.num_stages)


def _state_bytes(config: LoopConfig, topology: Topology, elements: int) -> int:
    """Return a lower bound of the bytes of optimizer states for `elements` weight elements.

    Parameter groups may have different update rules: for all elements, the rule with the fewest
    bytes is assumed.
    """
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    rules = (update_rule(config.optimizer, name) for name in config.optimizer.rules)
    least = min(sum(kind.itemsize for kind in kept(rule, dtype).values()) for rule in rules)
    return elements // topology.zero1 * least
