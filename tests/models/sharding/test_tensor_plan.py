"""mtp, msp and fsp for transformers models: saved tensors, random numbers and dtypes of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import isp
from isp.core.mesh import Mode
from tests.models.models import job, tiny
from tests.ranks import run_each, run_ranks

IDS = torch.arange(64).view(1, 64)


def _kept(rank: int, mode: Mode) -> int:
    run = isp.parallelize(tiny("llama"), job(2, mode=mode, recompute=1.0))
    run.step(run.loss(IDS))
    (chunk,) = run.train_step.chunks
    return sum(entrance.shown is not None for entrance in chunk.holders.entrances.values())


def test_a_recompute_keeps_no_activations() -> None:
    """Catches activations of all blocks kept after their recomputation."""
    modes = {mode: mode for mode in (Mode.MTP, Mode.MSP, Mode.FSP)}
    assert set(map(tuple, run_each(2, _kept, modes).values())) == {(0, 0)}


def _routers(rank: int) -> list[Tensor]:
    model = tiny("mixtral", router_jitter_noise=0.1)
    torch.manual_seed(0)
    run = isp.parallelize(model, job(2, mode=Mode.MTP))
    for _ in range(2):
        run.step(run.loss(IDS))
    return [p.detach() for n, p in run.model.named_parameters() if n.endswith("gate.weight")]


def test_ranks_with_equal_tokens_draw_equal_random_numbers() -> None:
    """Catches weights replicated on every rank that drift apart."""
    one, other = run_ranks(2, _routers)
    assert one
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=0)


def _dtypes(rank: int) -> set[torch.dtype]:
    from transformers import PhiConfig, PhiForCausalLM

    found = set()

    def note(module: nn.Module, args: Any, y: Tensor) -> None:
        found.add(y.dtype)

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = PhiConfig(vocab_size=96, num_hidden_layers=1, resid_pdrop=0.0, pad_token_id=0, **sizes)
    run = isp.parallelize(PhiForCausalLM(config), job(2, mode=Mode.MSP, dtype="float32"))
    for name, module in run.model.named_modules():
        if name.endswith((".dense", ".fc2")):
            module.register_forward_hook(note)
    with torch.autocast("cpu", torch.bfloat16):
        run.loss(IDS)
    return found


def test_autocast_casts_a_row_linear_with_its_bias() -> None:
    """Catches a float32 bias that makes the output float32."""
    assert run_ranks(2, _dtypes) == [{torch.bfloat16}] * 2
