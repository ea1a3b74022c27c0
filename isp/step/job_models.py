"""The model that a run trains, and the one it compares with, made from its configuration."""

from __future__ import annotations

from dataclasses import replace

from isp.config.job import JobConfig
from isp.models.huggingface.interface import LogitsOf
from isp.models.traced_model import TracedModel
from isp.step.setup import check_param_groups
from model.build import language_model

__all__ = ["check_models", "second_model", "trained_model"]


def trained_model(config: JobConfig) -> TracedModel:
    """Return the model that `config.model` describes; a model of `model.hf` is traced only once.

    Raises ValueError if the model cannot be made, or if its logits do not fit the objective.
    """
    objective = config.training.objective
    model = language_model(config.model, config.training.dtype)
    rewards = model.interface.logits_of(model.model) is LogitsOf.ROW_LABELS
    if (objective == "reward") != rewards or (rewards and model.vocab_size != 1):
        given = f"{model.vocab_size} labels of a sequence" if rewards else "a token's vocabulary"
        raise ValueError(
            f"training.objective={objective}: the logits of {type(model.model).__name__} are for"
            f" {given}: use objective reward with the folder of a ...ForSequenceClassification with"
            f" num_labels=1, and other objectives with other models"
        )
    return model if objective == "sft" else model.with_options(gives_scores=True)


def second_model(config: JobConfig) -> TracedModel | None:
    """Return the frozen model of the objective, reference or teacher; None for other objectives.

    Raises ValueError for a teacher that has another vocabulary than the model, or that cannot be
    split over ranks as configured.
    """
    training = config.training
    if training.objective in ("sft", "reward"):
        return None
    model = trained_model(config)
    if training.objective == "dpo":
        return model.frozen()
    how = replace(config.model, hf=training.distill.teacher, hf_overrides=None, adapter=None)
    teacher = language_model(how, training.dtype, trains=False)
    if teacher.vocab_size != model.vocab_size:
        raise ValueError(
            f"training.distill.teacher={training.distill.teacher} has {teacher.vocab_size}"
            f" logits a token, and the model {model.vocab_size}: use a teacher with the model's"
            f" tokenizer"
        )
    if training.distill.top_k > teacher.vocab_size:
        raise ValueError(
            f"training.distill.top_k={training.distill.top_k} is more than the teacher's"
            f" {teacher.vocab_size} logits of a token: use at most this number"
        )
    teacher.check_layout(config.parallel, config.row_tokens)
    teacher.check_length(config.parallel, config.row_tokens)
    return teacher.frozen()


def check_models(config: JobConfig) -> None:
    """Raise ValueError if the model of `model.hf` cannot be made, split or updated as configured.

    Checks the teacher as well. A model that the configuration itself describes is checked by
    `JobConfig`; here only its parameter groups are.
    """
    if config.training.objective == "distill":
        second_model(config)
    if config.model.hf is not None:
        _check_folder(config)
    if config.optimizer.is_torchs or config.optimizer.param_groups:
        check_param_groups(config.optimizer, trained_model(config))


def _check_folder(config: JobConfig) -> None:
    """Raise ValueError if the model of `model.hf` cannot be made, or split as configured."""
    model = trained_model(config)
    model.check_layout(config.parallel, config.row_tokens)
    model.check_length(config.parallel, config.row_tokens)
    positions = model.learned_positions
    if positions is not None and config.data.seq_len > positions:
        raise ValueError(
            f"data.seq_len={config.data.seq_len} is longer than the position embeddings of"
            f" model.hf={config.model.hf}: use at most {positions}"
        )
