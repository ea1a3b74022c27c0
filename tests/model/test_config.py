"""Presets, and keys of a model that do not fit each other or a layout."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from isp.config import load_config
from isp.core.mesh import Mode, ParallelConfig, TensorConfig, WeightConfig
from model.decoder import Decoder
from model.presets import PRESETS
from tests.model.decoders import CONFIG, S

DISTRIBUTED: dict[str, Any] = {"checkpoint": 1.0, "checkpoint_distribute_activations": True}

PUBLISHED_PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "internlm2-1.8b": 1_889_110_016,
    "internlm2-7b": 7_737_708_544,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_parameters(name, tmp_path):
    """Catches a wrong size in a preset."""
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {{preset: {name}}}\ndata: {{source: python-stdlib}}\n")
    with torch.device("meta"):
        count = sum(p.numel() for p in Decoder(load_config(path).model).parameters())
    if name in PUBLISHED_PARAMETERS:
        assert count == PUBLISHED_PARAMETERS[name]
    else:
        assert count < 30e6, "small ones of our own"


SHARED = {"intermediate_size": 41, "num_experts": 2, "shared_expert_intermediate_size": 5}


@pytest.mark.parametrize(
    ("mode", "tensor", "changes", "seq_len", "fault"),
    [
        (Mode.MTP, 3, {}, 24, "size=3 must divide model.num_heads=4 in mtp mode: use 1, 2 or 4,"),
        (Mode.MSP, 4, {}, 24, "size=4 must divide model.num_kv_heads=2 in msp mode: use 1 or 2,"),
        (Mode.FSP, 2, {"intermediate_size": 41}, 24, "model.intermediate_size=41 in fsp mode: us"),
        (Mode.MTP, 2, SHARED, 24, "model.shared_expert_intermediate_size=5 in mtp mode: use 1, or"),
        (Mode.MSP, 2, {}, 25, "parallel.tensor.size=2 must divide the sequence of 25 tokens"),
        (Mode.ISP, 5, {}, 24, "parallel.tensor.size=5 must divide the sequence of 24 tokens"),
        (Mode.MTP, 4, {"vocab_size": 9, "num_kv_heads": 4}, 24, "model.vocab_size=9 leaves some"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(mode, tensor, changes, seq_len, fault):
    """Catches a layout that would fail, or train something else, after ranks have started."""
    parallel = ParallelConfig(tensor=TensorConfig(size=tensor, mode=mode))
    with pytest.raises(ValueError, match=re.escape(fault)):
        replace(CONFIG, **changes).check_layout(parallel, seq_len)


def test_isp_mode_accepts_any_number_of_heads_and_any_vocabulary():
    """Catches a rule of mtp, msp and fsp applied to isp, which splits no features."""
    odd = replace(CONFIG, num_heads=6, num_kv_heads=3, head_dim=6, vocab_size=9)
    parallel = ParallelConfig(tensor=TensorConfig(size=4), weight=WeightConfig(size=8))
    odd.check_layout(parallel, S)
    exchanged = replace(parallel, weight=WeightConfig(size=8, vocab_parallel_loss=True))
    with pytest.raises(ValueError, match=r"parallel.tensor.size=4 must divide model.vocab_size=9"):
        odd.check_layout(exchanged, S)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"num_kv_heads": 3}, "model.num_kv_heads=3 must divide model.num_heads=4"),
        ({"num_heads": 5, "num_kv_heads": 5}, "model.num_heads=5 must divide model.hidden_size=32"),
        ({"head_dim": 7}, "even and at least 4, not 7: set"),
        ({"num_experts": 1}, "model.experts_per_token=2 must be at most model.num_experts=1"),
        ({"num_dense_layers": 1}, "model.num_dense_layers=1 needs experts: set"),
        ({"num_experts": 4, "num_dense_layers": 2}, "leaves no block of model.num_layers=2 for"),
        ({"checkpoint": 1.5}, "model.checkpoint=1.5 must be at most 1"),
    ],
)
def test_impossible_models_are_refused(changes, fault):
    """Catches sizes that would fail later, in a matmul far from the wrong key."""
    with pytest.raises(ValueError, match=re.escape(fault)):
        replace(CONFIG, **changes)


def _parallel(mode: Mode, tensor: int, weight: int) -> ParallelConfig:
    return ParallelConfig(
        tensor=TensorConfig(size=tensor, mode=mode), weight=WeightConfig(size=weight)
    )


@pytest.mark.parametrize("mode", [Mode.MSP, Mode.FSP, Mode.ISP])
def test_only_replicated_activations_may_be_distributed(mode: Mode) -> None:
    """Catches parts of different tokens that would be gathered as one input."""
    config = replace(CONFIG, **DISTRIBUTED)
    with pytest.raises(ValueError, match="checkpoint_distribute_activations is for mtp mode"):
        config.check_layout(_parallel(mode, 2, 2), S)
    config.check_layout(_parallel(Mode.MTP, 2, 2), S)


def test_sizes_and_switches_that_do_not_fit_are_refused() -> None:
    """Catches a key without effect, and elements that do not divide."""
    with pytest.raises(ValueError, match=r"set model.checkpoint above 0"):
        replace(CONFIG, checkpoint_distribute_activations=True)
    odd = {"hidden_size": 33, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
    config = replace(CONFIG, **odd, **DISTRIBUTED)
    with pytest.raises(
        ValueError, match=r"size=8 must divide the 5 tokens of a sequence times .*=33"
    ):
        config.check_layout(_parallel(Mode.MTP, 8, 1), 5)
