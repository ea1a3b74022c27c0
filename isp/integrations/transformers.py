"""`Trainer`: that of transformers, for any layout of ISP without pipeline stages.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from isp.config import LoopConfig, load_loop_config
from isp.core.layers.vocab_loss import IGNORED
from isp.integrations.accelerate import RunAccelerator
from isp.loop.parallel_run import ParallelRun
from isp.loop.parallelize import parallelize

__all__ = ["Trainer", "TrainerMixin"]

_STATE = "isp"
"""Name of the folder with the run's own checkpoint, inside a checkpoint of the Trainer."""
_REFUSED = {
    "activation_checkpointing": "set model.checkpoint in isp_config",
    "auto_find_batch_size": "set per_device_train_batch_size",
    "bf16_full_eval": "set training.dtype in isp_config",
    "deepspeed": "the layout in isp_config takes its place",
    "eval_use_gather_object": "leave it out",
    "fp16": "set training.dtype in isp_config",
    "fp16_full_eval": "set training.dtype in isp_config",
    "fsdp": "the layout in isp_config takes its place",
    "neftune_noise_alpha": "leave it out",
    "torch_compile": "leave it out",
    "use_liger_kernel": "logits are never whole in isp: leave it out",
}
"""Names of `TrainingArguments` that would change the model of the run, with the remedy for each."""


class _Outputs(dict[str, Any]):
    """Outputs of `RunModel`, by key and by attribute; `logits` are computed on first access."""

    def __init__(self, logits: Callable[[], Tensor], **found: Tensor) -> None:
        super().__init__(found)
        self._logits = logits

    def __missing__(self, key: str) -> Any:
        if key != "logits":
            raise KeyError(key)
        self[key] = self._logits()
        return self[key]

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


class RunModel(nn.Module):
    """Wrapper of a run's model that is called as transformers calls a model.

    Ranks with the same data rank pass the same rows. `loss` is the sum of the losses of their
    labels, divided by `num_items_in_batch` if given, else by the number of labels; `logits`
    [B, S, V] come from `run.logits`. `gives_logits`: compute logits in the forward also if there
    are labels.
    """

    def __init__(self, run: ParallelRun) -> None:
        super().__init__()
        self.run, self.model, self.gives_logits = run, run.model, False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **others: Any,
    ) -> _Outputs:
        """Return the outputs `loss`, if there are labels, and `logits`.

        Raises ValueError for other arguments of a model, and for labels of rows that are padded on
        the left.
        """
        given = {key for key, value in others.items() if value is not None and value is not False}
        if foreign := sorted(given - _IDLE):
            raise ValueError(
                f"a batch has {', '.join(foreign)}: the isp Trainer takes input_ids,"
                f" attention_mask, position_ids and labels"
            )
        if labels is not None and attention_mask is not None and not attention_mask[:, 0].all():
            raise ValueError(
                "a batch with labels is padded on the left, for which the Trainer counts one"
                " label too many per sequence: set the tokenizer's padding_side='right'"
            )
        packed = position_ids is not None
        # The default of transformers: positions count padding, too.
        if position_ids is None and attention_mask is not None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        where: Any = {"position_ids": position_ids, "attention_mask": attention_mask}
        outputs = _Outputs(lambda: self.run.logits(input_ids, **where))
        if labels is None or self.gives_logits:
            # Compute logits now: an evaluation iterates over the outputs, which would not compute
            # them (`_Outputs` computes them only when the key is looked up).
            _ = outputs["logits"]
        if labels is not None:
            # With logits, compute the loss from them: `log_probs` would be a second forward. Not
            # for packed rows, whose documents must not predict the next document's first token.
            if self.gives_logits and not packed:
                logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            else:
                total = -self.run.log_probs(input_ids, labels, **where).log_probs.sum()
            if num_items_in_batch is None:
                num_items_in_batch = (labels[:, 1:] != IGNORED).sum()
            outputs["loss"] = total / num_items_in_batch
        return outputs

    def _get_name(self) -> str:
        """Return the class name of the model; the Trainer decides by it how to shift labels."""
        inner: Any = self.model
        return type(inner.get_base_model() if hasattr(inner, "peft_config") else inner).__name__

    def __getattr__(self, name: str) -> Any:
        # The Trainer reads attributes of the model, such as `config`, from this wrapper.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


_IDLE = {"use_cache", "return_dict"}
"""Arguments of a forward that `RunModel` accepts and ignores."""


class _RunOptimizer(torch.optim.Optimizer):
    """The optimizer that the Trainer and its scheduler get: `step` is `ParallelRun.step`."""

    def __init__(self, run: ParallelRun) -> None:
        # Do not call torch's __init__, which requires parameters: groups are those of the run.
        assert run.optimizer is not None
        self._run, self.defaults = run, run.optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the parameter groups of the run's optimizer, which loading replaces."""
        assert self._run.optimizer is not None
        return self._run.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._run.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `ParallelRun.step` clears the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: the run's own checkpoint has the states."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: `ParallelRun.load` loads the states."""


class TrainerMixin:
    """Mixin that makes `transformers.Trainer`, or a class derived from it, train with ISP.

    Name it before that class, as `Trainer` does. The model is parallelized in place after the
    `__init__` of that class. `per_device_` batch sizes are for each data rank. Optimizer, learning
    rate, clipping and numbers of steps are those of `TrainingArguments`. `isp_config`, a
    configuration or the path of its file, sets layout, dtype and methods. Raises ValueError for
    arguments that contradict each other.
    """

    run: ParallelRun

    def __init__(self, *args: Any, isp_config: LoopConfig | str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own: Any = self
        given = isp_config if isinstance(isp_config, LoopConfig) else load_loop_config(isp_config)
        config = _config(own, given)
        # Do this before `parallelize`, which replaces the model's forward: the Trainer reads the
        # names of columns from the signature of the forward.
        own._set_signature_columns_if_needed()
        self._decay = set(own.get_decay_parameter_names(own.model))
        self.run = parallelize(own.model, config, optimizer=self._make_optimizer)
        RunAccelerator.take_over(own.accelerator, self.run)
        self._run_model = RunModel(self.run)

    def _make_optimizer(self, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the optimizer that `TrainingArguments` name, over the run's parameters `named`.

        The Trainer's rule decides which of them have weight decay.
        """
        own: Any = self
        groups = [
            {
                "params": [p for name, p in named if (name in self._decay) is decays],
                "weight_decay": own.args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        given = own.optimizer_cls_and_kwargs
        make, kwargs = given or own.get_optimizer_cls_and_kwargs(own.args, own.model)
        found: torch.optim.Optimizer = make([g for g in groups if g["params"]], **kwargs)
        return found

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return an optimizer whose step is that of the run; `model` is not used."""
        own: Any = self
        own.optimizer = found = own.optimizer or _RunOptimizer(self.run)
        return found

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of sequences in a step, over all data ranks."""
        own: Any = self
        total: int = own._train_batch_size * args.gradient_accumulation_steps * self.run.dp_size
        return total

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the run has placed the model."""

    def _wrap_model(self, *_: Any, **__: Any) -> nn.Module:
        """Return the `RunModel`, whatever model is given."""
        return self._run_model

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, **keys: Any
    ) -> Any:
        """Evaluate a batch as the Trainer does, with whole logits only if they are returned."""
        own: Any = super()
        self._run_model.gives_logits = not prediction_loss_only
        try:
            return own.prediction_step(model, inputs, prediction_loss_only, **keys)
        finally:
            self._run_model.gives_logits = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model's files to `output_dir`; a collective, in which rank 0 writes.

        It replaces the whole method and not only `_save`, which transformers before 5.23 calls only
        on rank 0: the others must take part, since weights are sharded.
        """
        own: Any = self
        folder = Path(own.args.output_dir if output_dir is None else output_dir)
        self.run.save_pretrained(folder)
        if own.args.should_save:
            if own.processing_class is not None:
                own.processing_class.save_pretrained(folder)
            torch.save(own.args, folder / "training_args.bin")
        if own.args.push_to_hub and not _internal_call:
            own.push_to_hub(commit_message="Model save", revision=own.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the run, with weights and optimizer states, and then the Trainer's scheduler."""
        own: Any = super()
        self.run.save(Path(output_dir) / _STATE)
        own._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that the checkpoint has a run; `_load_optimizer_and_scheduler` loads it."""
        _state_of(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        """Load the Trainer's scheduler, then the run: weights and optimizer states."""
        own: Any = super()
        own._load_optimizer_and_scheduler(checkpoint)
        # Load the run last: loading the scheduler resets the learning rate of the groups.
        self.run.load(_state_of(checkpoint))

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        own: Any = self
        self.run.load(_state_of(own.state.best_model_checkpoint), weights_only=True)


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' `Trainer` with one more argument, `isp_config`; run it on torchrun's ranks."""


def _config(trainer: Any, config: LoopConfig) -> LoopConfig:
    """Return `config` with the clipping that `TrainingArguments` ask for.

    Raises ValueError for arguments of the Trainer that a run does not support.
    """
    args = trainer.args
    for name, remedy in _REFUSED.items():
        if value := getattr(args, name, None):  # transformers before 5.23 lacks some of the names
            raise ValueError(f"{name}={value} cannot be combined with isp_config: {remedy}")
    if args.bf16 and config.training.dtype != "bfloat16":
        raise ValueError(
            f"bf16=True and training.dtype={config.training.dtype} in isp_config: choose one"
        )
    if trainer.model_init is not None:
        raise ValueError(
            "model_init cannot be combined with isp_config: pass model, one for the whole run"
        )
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ValueError(
            "optimizers=.. hold the parameters of the whole model: pass optimizer_cls_and_kwargs,"
            " or optim and lr_scheduler_type in the arguments"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy=batch_rebalance cannot be combined with isp_config: leave it"
            " out"
        )
    if config.parallel.pipeline.size > 1:
        raise ValueError(
            f"parallel.pipeline.size={config.parallel.pipeline.size} in isp_config is not"
            f" supported by the Trainer, which runs backward batch by batch: use 1"
        )
    return replace(config, training=replace(config.training, max_norm=args.max_grad_norm or 0.0))


def _state_of(checkpoint: str) -> Path:
    """Return the folder of the run's own checkpoint in a checkpoint of the Trainer.

    Raises ValueError if there is none.
    """
    folder = Path(checkpoint) / _STATE
    if not folder.is_dir():
        raise ValueError(
            f"{checkpoint} has no folder {_STATE}, which isp.integrations.transformers.Trainer"
            f" saves without save_only_model: to begin from its weights, load them into the model"
        )
    return folder
