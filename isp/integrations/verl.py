"""An engine `isp` for verl, for any layout without pipeline stages.

    import isp.integrations.verl  # registers the engine

With `strategy: isp` in verl's configuration, and an `ISPEngineConfig`, verl's workers train with
`isp.parallelize`. Checked with verl 0.9.1 (`tools/check_with_verl.py`); its interface may change.

S tokens in a micro-batch, one document after the other
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import get_scheduler
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from isp.config import load_loop_config
from isp.core.mesh import Axis
from isp.loop.parallel_run import ParallelRun
from isp.loop.parallelize import parallelize_folder

__all__ = ["ISPEngine", "ISPEngineConfig"]


@dataclass
class ISPEngineConfig(EngineConfig):
    """verl's configuration of an engine, with the path of a configuration file of ISP."""

    strategy: str = "isp"
    isp_config: str = ""
    """Path of a configuration for `isp.parallelize`; `clip_grad` replaces training.max_norm."""


@EngineRegistry.register(model_type="language_model", backend="isp", device=["cuda", "cpu"])
class ISPEngine(BaseEngine):
    """verl's engine of a causal language model, with optimizer and schedule, on a `ParallelRun`."""

    run: ParallelRun

    def __init__(
        self,
        model_config: Any,
        engine_config: ISPEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
        **_: Any,
    ) -> None:
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self._saved: list[str] = []
        """Folders of this engine's checkpoints, the newest last; verl names a new one each time."""

    def initialize(self) -> None:
        """Load and parallelize the model, with AdamW and verl's schedule of learning rates.

        Raises ValueError for a layout with pipeline stages.
        """
        rule, given = self.optimizer_config, self.engine_config
        config = load_loop_config(given.isp_config)
        if config.parallel.pipeline.size > 1:
            raise ValueError(
                f"parallel.pipeline.size={config.parallel.pipeline.size}: verl's losses need the"
                f" log-probabilities of all ranks, so use 1"
            )
        config = replace(config, training=replace(config.training, max_norm=rule.clip_grad))
        folder = self.model_config.local_path or self.model_config.path

        def adamw(named: Any) -> torch.optim.Optimizer:
            own = [parameter for _, parameter in named]
            return torch.optim.AdamW(own, rule.lr, rule.betas, weight_decay=rule.weight_decay)

        trains = not given.forward_only
        self.run = parallelize_folder(
            folder, config, trains=trains, optimizer=adamw if trains else None
        )
        self._scheduler: Any = None
        if self.run.optimizer is not None:
            steps, warmup = rule.total_training_steps, rule.lr_warmup_steps
            if warmup is None or warmup < 0:
                warmup = int(rule.lr_warmup_steps_ratio * steps)
            kind = getattr(rule, "lr_scheduler_type", "constant")
            kind = "constant_with_warmup" if kind == "constant" else kind
            self._scheduler = get_scheduler(kind, self.run.optimizer, warmup, steps)
        self._data = self.run.mesh[Axis.DATA]
        # verl wants a process group also for a single data rank.
        self._group = self._data.group or _group_of_each()

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run forward, and backward unless `forward_only`, over the micro-batches of `data`.

        Returns outputs, losses and metrics in the form of verl's own engines.
        """
        tensor = self.run.mesh[Axis.TENSOR].size
        # verl's losses divide by the number of tokens in the global batch.
        tokens = self._data.all_reduce(data["loss_mask"].sum().to(self.run.device)).wait()
        shared = {"sp_size": tensor, "batch_num_tokens": tokens.item(), "dp_size": self._data.size}
        tu.assign_non_tensor(data, **shared)  # verl's functions below read these from the batch
        batches, indices = prepare_micro_batches(data, self._group, same_micro_num_in_dp=True)
        outputs = []
        for batch in batches:
            batch = batch.to(self.run.device)
            with torch.set_grad_enabled(not forward_only):
                model_output = self._score(batch)
                # Without a loss function verl uses only the log-probabilities; any loss will do.
                loss, metrics = torch.ones(()), {}
                if loss_function is not None:
                    loss, metrics = loss_function(
                        model_output=model_output, data=batch, dp_group=self._group
                    )
            # verl's loss is a mean over data ranks, but the run sums gradients over them.
            if not forward_only:
                self.run.backward(loss / self._data.size)
            found = {name: x.detach() for name, x in model_output.items()}
            outputs.append(
                {"model_output": found, "loss": loss.detach().item(), "metrics": metrics}
            )
        return postprocess_batch_func(outputs, indices, data)

    def _score(self, batch: Any) -> dict[str, Tensor]:
        """Return `log_probs`, and `entropy` if requested, of the tokens, as nested tensors.

        Entry t of a document is about its token t + 1, as verl expects.
        """
        ids, positions = (batch[name].values() for name in ("input_ids", "position_ids"))  # [S]
        temperature = batch["temperature"]
        values = {float(t) for t in torch.as_tensor(temperature).flatten()}
        if len(values) != 1:
            raise ValueError(f"samples of one batch have temperatures {sorted(values)}: give one")
        asks = tu.get_non_tensor_data(data=batch, key="calculate_entropy", default=False)
        scores = self.run.log_probs(
            ids[None], position_ids=positions[None], temperature=values.pop(), entropy=asks
        )
        found = {"log_probs": scores.log_probs}
        if scores.entropy is not None:
            found["entropy"] = scores.entropy
        ends = batch["input_ids"].offsets()
        # In the run's results entry i is about token i, and in verl's it is about token i + 1: move
        # all entries to the left by one. The last entry of each document, which is then about the
        # first token of another document, has no meaning in verl.
        return {
            name: torch.nested.nested_tensor_from_jagged(x[0].roll(-1), ends)
            for name, x in found.items()
        }

    def optimizer_zero_grad(self) -> None:
        self.run.zero_grad()

    def optimizer_step(self) -> float:
        """Clip gradients and update weights; return the gradient norm before clipping.

        The update is skipped if gradients are not finite.
        """
        return self.run.step().grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the next step."""
        self._scheduler.step()
        rate: float = self._scheduler.get_last_lr()[0]
        return rate

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        return _Mode(self, "eval", **kwargs)

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return whole weights for the rollout engine: names of the hub, adapters merged."""
        return self.run.named_weights(merge_adapters=True), None

    def get_data_parallel_size(self) -> int:
        return self.run.dp_size

    def get_data_parallel_rank(self) -> int:
        return self.run.dp_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.run.mesh[Axis.TENSOR].rank == 0

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move the run to `device` if `model`: weights and optimizer states move together."""
        if model:
            self.run.to(device)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write a sharded checkpoint with the schedule, and delete the oldest beyond the limit.

        Raises ValueError for an `hdfs_path`.
        """
        if hdfs_path is not None:
            raise ValueError(
                f"hdfs_path={hdfs_path}: ISP writes checkpoints only to local_path: leave it out"
            )
        schedule = {} if self._scheduler is None else self._scheduler.state_dict()
        extra = {"schedule": schedule, "global_step": global_step}
        self.run.save(local_path, extra)
        self._saved = [p for p in self._saved if p != local_path] + [local_path]
        if max_ckpt_to_keep and dist.get_rank() == 0:
            for old in self._saved[:-max_ckpt_to_keep]:
                shutil.rmtree(old, ignore_errors=True)
        self._saved = self._saved[-max_ckpt_to_keep:] if max_ckpt_to_keep else self._saved

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Load the newest undamaged checkpoint in `local_path`, of any layout; delete nothing."""
        extra: Any = self.run.load(Path(local_path))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(extra["schedule"])

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.run.adapters_off()


class _Mode(BaseEngineCtx):
    """Context in which verl uses an engine, in training or evaluation mode.

    Entering it brings the weights to the device, by verl's base class, and sets the mode.
    """

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.run.train(self.mode == "train")

    def __exit__(self, *error: object) -> None:
        if self.mode == "train" and self.zero_grad_on_exit:
            self.engine.optimizer_zero_grad()
        super().__exit__(*error)


def _group_of_each() -> dist.ProcessGroup:
    """Return a process group of this rank alone, for verl's reductions; a collective."""
    groups: list[dist.ProcessGroup]
    # Every rank has to call `new_group` for every group, also for those it is not in.
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
