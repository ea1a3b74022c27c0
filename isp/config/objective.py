"""`training.objective`: what it needs of other sections, and its second model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from isp.config.models import language_model
from isp.models.huggingface.config_json import check_model_folder

if TYPE_CHECKING:
    from isp.config.job import JobConfig
    from isp.models.traced_model import TracedModel

__all__ = ["check_logits", "check_objective", "second_model"]


def check_objective(config: JobConfig) -> None:
    """Raise ValueError for sections that `training.objective` cannot have."""
    objective, dpo = config.training.objective, config.training.dpo
    teacher = config.training.distill.teacher
    if (objective == "distill") != (teacher is not None):
        raise ValueError(
            f"training.objective={objective} and training.distill.teacher={teacher}: distill needs"
            f" the folder of a teacher, and no other objective takes one"
        )
    if teacher is not None:
        check_model_folder(teacher, config.parallel)
    if objective not in ("dpo", "reward"):
        return
    if config.model.hf is None:
        raise ValueError(
            f"training.objective={objective} needs model.hf, the folder of the initial model:"
            f" write one with `isp checkpoint export`"
        )
    if objective == "reward" and config.model.adapter is not None:
        raise ValueError(
            "training.objective=reward trains all weights of a reward model: leave out"
            " model.adapter"
        )
    if not config.data.pack:
        raise ValueError(f"training.objective={objective} needs data.pack=true")
    if dpo.label_smoothing and dpo.loss_type == "ipo":
        raise ValueError(
            f"training.dpo.label_smoothing={dpo.label_smoothing} is not defined for"
            f" training.dpo.loss_type=ipo: use 0, or sigmoid"
        )


def second_model(config: JobConfig) -> TracedModel | None:
    """The frozen model of the objective, the reference or the teacher; None without.

    Raises ValueError for a teacher that is of other tokens, or cannot be split as the model is.
    """
    training = config.training
    if training.objective in ("sft", "reward"):
        return None
    if training.objective == "dpo":
        return config.language_model.frozen()
    how = replace(config.model, hf=training.distill.teacher, hf_overrides=None, adapter=None)
    teacher = language_model(how, training.dtype, trains=False)
    if teacher.vocab_size != config.language_model.vocab_size:
        raise ValueError(
            f"training.distill.teacher={training.distill.teacher} has {teacher.vocab_size}"
            f" logits a token, and the model {config.language_model.vocab_size}: distill between"
            f" models of one tokenizer"
        )
    if training.distill.top_k > teacher.vocab_size:
        raise ValueError(
            f"training.distill.top_k={training.distill.top_k} is more than the teacher's"
            f" {teacher.vocab_size} logits of a token"
        )
    teacher.check_layout(config.parallel, config.row_tokens)
    teacher.check_length(config.parallel, config.row_tokens)
    return teacher.frozen()


def check_logits(config: JobConfig, model: TracedModel) -> None:
    """Raise ValueError for a model whose logits are not those of `training.objective`."""
    from isp.models.huggingface.interface import LogitsOf

    rewards = model.host.logits_of(model.model) is LogitsOf.ROW_LABELS
    if (config.training.objective == "reward") != rewards or (rewards and model.vocab_size != 1):
        given = f"{model.vocab_size} labels of a sequence" if rewards else "a token's vocabulary"
        raise ValueError(
            f"training.objective={config.training.objective}: the logits of"
            f" {type(model.model).__name__} are of {given}: reward takes the folder of a"
            f" ...ForSequenceClassification with num_labels=1, and nothing else does"
        )
