"""How a model that text is generated from is split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from isp.parallel.config import Mode, ParallelConfig

if TYPE_CHECKING:
    from isp.models.model import TracedModel

__all__ = ["decoding_layout"]


def decoding_layout(model: TracedModel, parallel: ParallelConfig) -> ParallelConfig:
    """The layout that decodes tokens if `parallel` reads prompts: itself, or mtp in place of isp.

    Gathering weights for each token would cost as much as for a whole prompt. It is done all the
    same where the model's features cannot be split, or where mtp would give a rank other heads than
    those whose keys it has: where a model's plan cuts its attention, but not by heads.
    """
    tensor = parallel.tensor
    if tensor.mode.splits_features or tensor.size == 1:
        return parallel
    found = ParallelConfig(tensor=replace(tensor, mode=Mode.MTP))
    try:
        model.check_layout(found, tensor.size)
    except ValueError:
        return parallel
    alike = model.cache_bytes(1, 1, tensor.size) == model.cache_bytes(1, 1, 1, tensor.size)
    return found if alike else parallel
