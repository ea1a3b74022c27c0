"""The tested versions of transformers; setup.py and the documentation read these constants."""

from __future__ import annotations

import logging
from functools import cache

import torch.distributed as dist

from isp.utils.environment import rank_and_size

__all__ = ["NEWEST_TRANSFORMERS", "OLDEST_TRANSFORMERS", "is_first_rank", "warn_of_version"]

logger = logging.getLogger(__name__)

OLDEST_TRANSFORMERS = "5.17"
NEWEST_TRANSFORMERS = "5.24"


# Cached, so that it warns once per process, however many models are traced.
@cache
def warn_of_version(found: str) -> None:
    """Warn on rank 0 if `found`, a version of transformers, is outside of the tested range."""
    oldest, newest = _minor(OLDEST_TRANSFORMERS), _minor(NEWEST_TRANSFORMERS)
    if is_first_rank() and not oldest <= _minor(found) <= newest:
        logger.warning(
            "transformers %s is not one of the versions that isp was run with, %s to %s: compare"
            " your model with isp check before a long run",
            found,
            OLDEST_TRANSFORMERS,
            NEWEST_TRANSFORMERS,
        )


def is_first_rank() -> bool:
    """Return whether this process is rank 0, by the process group, or without one by `RANK`."""
    return (dist.get_rank() if dist.is_initialized() else rank_and_size()[0]) == 0


def _minor(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version: `5.25.0.dev0` -> (5, 25)."""
    return tuple(int(number) for number in version.split(".")[:2])
