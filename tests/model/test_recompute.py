"""Keys of recomputation that do not fit a layout."""

from __future__ import annotations

from typing import Any

import pytest

from isp.parallel import Mode, ParallelConfig, TensorConfig, WeightConfig
from model.config import ModelConfig

S, D = 16, 32
SIZES: dict[str, Any] = {"vocab_size": 52, "hidden_size": D, "num_layers": 3, "num_heads": 4}
DISTRIBUTED: dict[str, Any] = {"checkpoint": 1.0, "checkpoint_distribute_activations": True}


def _parallel(mode: Mode, tensor: int, weight: int) -> ParallelConfig:
    return ParallelConfig(
        tensor=TensorConfig(size=tensor, mode=mode), weight=WeightConfig(size=weight)
    )


@pytest.mark.parametrize("mode", [Mode.MSP, Mode.FSP, Mode.ISP])
def test_only_replicated_activations_are_distributed(mode: Mode) -> None:
    """Catches pieces of different tokens that would be put together as one input."""
    config = ModelConfig(**SIZES, **DISTRIBUTED)
    with pytest.raises(ValueError, match="checkpoint_distribute_activations is for mtp mode"):
        config.check_layout(_parallel(mode, 4, 4), S)
    config.check_layout(_parallel(Mode.MTP, 4, 4), S)


def test_sizes_and_switches_that_do_not_fit_are_refused() -> None:
    """Catches a switch that does nothing, and elements that do not divide."""
    with pytest.raises(ValueError, match=r"set model.checkpoint above 0"):
        ModelConfig(**SIZES, checkpoint_distribute_activations=True)
    odd = {**SIZES, "hidden_size": 33, "num_heads": 8, "head_dim": 8}
    config = ModelConfig(**odd, checkpoint=1.0, checkpoint_distribute_activations=True)
    with pytest.raises(
        ValueError, match=r"size=8 must divide the 5 tokens of a sequence times .*=33"
    ):
        config.check_layout(_parallel(Mode.MTP, 8, 1), 5)
