"""FLOPs of models of transformers against written-out ones."""

from __future__ import annotations

import transformers

from isp.models.model import TracedModel
from tests.models.folders import small_config


def test_convolutions_and_scans_count() -> None:
    """Catches a hybrid whose tflops and mfu are those of its linears alone."""
    sizes = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "conv_kernel": 4}
    model = TracedModel(
        transformers.AutoModelForCausalLM.from_config(small_config("mamba2", **sizes))
    )
    channels, states = 4 * 16 + 2 * 2 * 8, 4 * 16 * 8
    mixing = 2 * channels * 4 + 4 * states  # a state's change, and what is asked of it
    assert model.flops([10, 5]) == 15 * (6 * model.trace.multiplied + 3 * 2 * mixing)
