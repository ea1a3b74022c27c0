"""`parallelize`: shard a user's model for a user's training loop."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from isp.config import JobConfig, LoopConfig, load_loop_config
from isp.core.comm import Mesh
from isp.core.comm.cuda import compute_deterministically
from isp.core.mesh import Topology
from isp.core.optim.torch_optimizer import MakeOptimizer, check_elementwise, optimizer_of
from isp.loop.parallel_run import ParallelRun
from isp.loop.parameter_guard import refuse_data_parallel, refuse_optimizers
from isp.models.build import trained_layouts
from isp.models.forwards import set_forward
from isp.models.huggingface.initial_weights import InitialWeights
from isp.models.huggingface.make import limited_model
from isp.models.known_code import check_code
from isp.models.loading import begun_by_the_model, empty_model
from isp.models.traced_model import TracedModel
from isp.step.host_memory import check_memory_of_states
from isp.step.setup import check_param_groups, make_world
from model.build import how_computed

__all__ = ["ParallelRun", "parallelize", "parallelize_folder"]


def parallelize(
    model: nn.Module,
    config: LoopConfig | str | Path,
    *,
    optimizer: MakeOptimizer | None = None,
) -> ParallelRun:
    """Shard `model` over the ranks, in place; modules and parameter names do not change.

    `model` is a causal language model, token classifier or sequence classifier of transformers,
    with or without PEFT adapters, or a module of `nn.Linear`, `nn.Embedding` and norms that is
    called with tokens and positions and calls `isp.attention`. `config` is an
    `isp.config.LoopConfig` or the path of a file: the sections `parallel`, `training`, `optimizer`,
    `comm`, and the keys of `model` that say how to compute (`checkpoint` and `checkpoint_*`,
    `mlp_tile_tokens`, `loss_chunk_tokens`, `attention_backend`, `compile`, `router_*_loss_coef`,
    `moe_router_bias_update_rate`, `allow_unchecked`). Of a file for `isp train`, or a `JobConfig`,
    the rest is not used. torchrun starts the ranks; each rank calls this. A model on the meta
    device gets the initial weights that `training.seed` determines; each rank creates its shard
    only. Frozen weights (`requires_grad=False`) stay frozen. If all are frozen, as in a reference
    model, results have no gradients, and `loss` needs `torch.no_grad()`.

    `optimizer` replaces the update rule of `config`. It is called with names and this rank's rows
    of the float32 master weights (first a few times with small tensors), and returns a torch
    optimizer that updates each element independently; `run.optimizer` is that optimizer. Raises
    ValueError, before any process group starts, for a model or sizes that are not supported.
    """
    if not isinstance(config, LoopConfig):
        config = load_loop_config(config)
    _check_parameters(model)
    weights = begun_by_the_model(model)
    if weights is not None:
        weights.check()
    return _parallelized(model, weights, config, optimizer)


def parallelize_folder(
    folder: str, config: LoopConfig, *, trains: bool, optimizer: MakeOptimizer | None = None
) -> ParallelRun:
    """Shard a model from a folder that transformers wrote; each rank reads only its shards.

    `trains=False` freezes all weights. Otherwise see `parallelize`. Raises ValueError for a folder
    without weights in safetensors.
    """
    if not any(Path(folder).glob("*.safetensors*")):
        raise ValueError(
            f"{folder} has no *.safetensors: pass a folder that save_pretrained of transformers has"
            f" written"
        )
    with limited_model(folder):
        model, weights = empty_model(folder, getattr(torch, config.training.dtype))
    model.requires_grad_(trains)
    return _parallelized(model, weights, config, optimizer)


def _parallelized(
    model: nn.Module,
    weights: InitialWeights | None,
    config: LoopConfig,
    optimizer: MakeOptimizer | None,
) -> ParallelRun:
    """Shard `model`, as `parallelize` does; its weights are read from `weights`, if given.

    All checks come before a process group starts and before the model is changed.
    """
    _check_config(config, model)
    config = config.for_loop if isinstance(config, JobConfig) else config
    check_code(model, allow_unchecked=config.model.allow_unchecked)
    traced = TracedModel(model, gives_scores=True, weights=weights, **how_computed(config.model))
    # The length of sequences is not known yet: check with the shortest that the ranks can split.
    # Each call of the run checks the length of its own sequences.
    traced.check_layout(config.parallel, config.parallel.tensor.size)
    world = make_world(config)
    optimizer = _checked_optimizer(traced, config, optimizer, world.device)
    topology = Topology.create(world.size, traced.with_head_size(config.parallel))
    trained = sum(p.numel() for p in traced.shape.parameters() if p.requires_grad)
    check_memory_of_states(config, topology, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), trained)
    given = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
    # The caller, or an earlier call, may have started process groups: then they are used.
    backend = world.backend if dist.is_initialized() else None
    if backend is None:
        # Entered without an exit: the process groups live until the process ends, because a second
        # model uses them, too.
        world.__enter__()
    if config.training.deterministic:
        compute_deterministically()
    mesh = Mesh(topology, world.rank, backend=backend)
    try:
        run = ParallelRun(traced, config, mesh, world.device, optimizer)
    except Exception as error:  # any error of the constructor, such as too little memory
        # If the model has other parameters than before, its sharding had begun, so the model cannot
        # be used any more.
        if any(parameter not in given for parameter in model.parameters()):
            _spoil(model)
            error.add_note(
                f"isp.parallelize had begun to shard the {type(model).__name__}, so some of its"
                f" weights are shards now: build it again before you call isp.parallelize again"
            )
        raise
    refuse_optimizers(model, given)
    refuse_data_parallel(model)
    return run


def _checked_optimizer(
    traced: TracedModel, config: LoopConfig, given: MakeOptimizer | None, device: torch.device
) -> MakeOptimizer | None:
    """Return the function that makes the torch optimizer: `given`, or the one of `config`.

    Returns None if an update rule of ISP is used. Raises ValueError for an optimizer that does not
    update each element independently, and for parameter groups that do not fit the model.
    """
    if given is None and not config.optimizer.is_torchs:
        if config.optimizer.param_groups:
            check_param_groups(config.optimizer, traced)
        return None
    if given is None:
        layouts = trained_layouts(traced)
        given = optimizer_of(config.optimizer, {n for n, x in layouts.items() if x.decays})
        assert given is not None
    config.optimizer.check_torchs("isp.parallelize(.., optimizer=..)")
    dims = {name: p.dim() for name, p in traced.shape.named_parameters() if p.requires_grad}
    check_elementwise(given, dims, device)
    return given


def _spoil(model: nn.Module) -> None:
    """Make each forward of a partly sharded model raise; `parallelize` then refuses the model."""

    def forward(*_: object, **__: object) -> None:
        raise RuntimeError(
            f"isp.parallelize failed while it sharded this {type(model).__name__}, so some of its"
            f" weights are shards: build the model again"
        )

    set_forward(model, forward)


def _check_config(config: LoopConfig, model: nn.Module) -> None:
    """Raise ValueError for keys that have no effect with the caller's model and loop."""
    if config.training.global_batch_size is not None:
        raise ValueError(
            f"training.global_batch_size={config.training.global_batch_size} has no effect in"
            f" isp.parallelize, where the batch is what ranks pass to loss: leave the key out"
        )
    given = f"the {type(model).__name__} that isp.parallelize is given"
    config.model.check_beside(given)
    if config.model.adapter is not None and not hasattr(model, "peft_config"):
        raise ValueError(
            f"model.adapter has no effect on {given}: add the adapter to the model with"
            f" peft.get_peft_model before, and leave the key out"
        )


def _check_parameters(model: nn.Module) -> None:
    """Raise ValueError for a model without parameters, or with quantized ones."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name} has dtype {parameter.dtype}: isp trains only floating-point weights, so"
                f" load the model without quantization"
            )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters")
