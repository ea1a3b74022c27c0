"""Frozen weights, and adapters of PEFT, on 4 ranks against plain loops."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.models.huggingface.expert_adapters import pass_factors
from isp.models.huggingface.interface import interface_of
from tests.models.models import (
    TOLERANCE,
    Rows,
    assert_trained_as,
    job,
    packed_rows,
    tiny,
    trained,
    trained_plainly,
)
from tests.models.own import Own
from tests.ranks import run_each

DOCUMENTS = [[64], [20, 44]]


def _with_lora(seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    model = tiny("llama", seed=seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=8)
    adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zeros to begin with, with which A would have no gradient
            nn.init.normal_(parameter, std=0.1)
    return adapted.double()


def _half_frozen() -> nn.Module:
    model = Own().double()
    for part in (model.tokens, model.positions, model.blocks[0], model.blocks[1].up):
        part.requires_grad_(False)
    return model


def _train(rank: int, case: tuple[nn.Module, JobConfig, list[Rows], Path]) -> Any:
    model, config, data, folder = case
    run = isp.parallelize(model, config)
    run.mesh.log.collect()
    found = trained(run, data)
    sent = Counter(t.label for t in run.mesh.log.take() if t.kind == "reduce_scatter")
    run.save_pretrained(folder)
    return found, sent


def _together(label: str) -> Iterator[str]:
    """Yield the parameters whose gradients a transfer contains: two for `q+k.weight.grad`."""
    parent, linears, local, _ = label.rsplit(".", 3)
    yield from (f"{parent}.{linear}.{local}" for linear in linears.split("+"))


def test_frozen_weights_stay_and_the_rest_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Catches adapters that each rank trains alone; frozen weights that decay, or whose gradients
    are reduced; a folder that PEFT cannot load, and one that contains the whole model.
    """
    from peft import PeftModel
    from safetensors.torch import load_file

    data = [packed_rows(2, 64, DOCUMENTS, seed) for seed in range(3)]
    models = {"lora": _with_lora(), "half frozen": _half_frozen()}
    cases = {
        name: (copy.deepcopy(model), job(2, 4, recompute=0.5), data, tmp_path / name)
        for name, model in models.items()
    }
    expected = {name: trained_plainly(model, data) for name, model in models.items()}
    for name, of_ranks in run_each(4, _train, cases).items():
        before = dict(models[name].named_parameters())
        own = {n for n, p in before.items() if p.requires_grad}
        for found, sent in of_ranks:
            assert_trained_as(expected[name], [found], name)
            changed = {n for n, w in found.weights.items() if not torch.equal(w, before[n])}
            assert changed == own
            matrices = {n for n in own if before[n].dim() == 2}
            reduced = {name for label in sent for name in _together(label)}
            assert matrices <= reduced <= own
            assert set(sent.values()) == {len(data)}
    assert {file.name for file in (tmp_path / "lora").iterdir()} >= {"adapter_config.json"}
    saved = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert len(saved) == 3 * 2 * 2
    loaded = PeftModel.from_pretrained(
        tiny("llama"), tmp_path / "lora", autocast_adapter_dtype=False
    )
    for name, weight in loaded.double().named_parameters():
        assert (weight - expected["lora"].weights[name]).abs().max() < TOLERANCE


def _of_experts() -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=names)
    adapted: Any = get_peft_model(tiny("qwen3_moe"), config, autocast_adapter_dtype=False)
    adapted.add_adapter("second", LoraConfig(r=3, target_parameters=names))
    adapted.add_adapter("third", LoraConfig(r=1, target_modules=["o_proj"]))
    adapted.base_model.set_adapter(["default", "second", "third"])
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).double()
    return adapted


def _merged(rank: int, config: JobConfig) -> Any:
    run = isp.parallelize(_of_experts(), config)
    found = trained(run, EXPERT_DATA)
    return found, dict(run.named_weights(merge_adapters=True))


EXPERT_DATA = [packed_rows(4, 24, [[24], [10, 1, 13], [3, 21], [24]], seed) for seed in range(2)]


def test_adapters_of_experts_train_and_merge_as_in_peft() -> None:
    """Catches factors added to a shard, gradients of one rank only, one of two adapters that is not
    merged, and one of two that is not added.
    """
    expected = trained_plainly(_of_experts(), EXPERT_DATA)
    plain = _of_experts()
    plain.load_state_dict(expected.weights, strict=False)
    whole = plain.merge_and_unload()
    published = interface_of(whole).published(whole, dict(whole.state_dict()))
    cases = {"isp": job(2, 4), "recomputed, spread": job(2, 2, expert=2, recompute=1.0)}
    for name, of_ranks in run_each(4, _merged, cases).items():
        for found, merged in of_ranks:
            assert_trained_as(expected, [found], name)
            assert merged.keys() == published.keys()
            for key, weight in published.items():
                assert (merged[key] - weight).abs().max() < TOLERANCE, key


def _renamed(on_experts: bool) -> Any:
    """Return a model whose names in a folder differ, and whose folder stores experts one by one."""
    from peft import LoraConfig, get_peft_model

    names = ["experts.gate_up_proj", "experts.down_proj"] if on_experts else None
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    model: Any = get_peft_model(tiny("mixtral"), config, autocast_adapter_dtype=False)
    return model


def _named(rank: int, on_experts: bool) -> list[str]:
    """Return the weights that differ by name or value from the model's state dict."""
    model = _renamed(on_experts)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = dict(isp.parallelize(model, job(2, 2)).named_weights())
    same = (n for n in before.keys() & found.keys() if torch.equal(before[n], found[n]))
    return sorted((before.keys() | found.keys()) - set(same))


def test_weights_of_a_model_with_adapters_have_the_names_of_peft() -> None:
    """Catches names of the folder's format, with experts one by one, among those of the adapted
    model.
    """
    cases = {"attention": False, "attention and experts": True}
    assert run_each(2, _named, cases) == {name: [[], []] for name in cases}


def test_adapters_of_experts_compute_as_in_peft() -> None:
    """Catches adapters that still apply when switched off, or apply twice when merged."""
    models = _of_experts(), _of_experts()
    pass_factors(models[1])
    ids, found = EXPERT_DATA[0].input_ids, list[list[Tensor]]()
    with torch.no_grad():
        for model in models:
            logits = [model(ids).logits]
            with model.disable_adapter():
                logits.append(model(ids).logits)
            model.merge_adapter()
            found.append([*logits, model(ids).logits])
    for expected, y in zip(*found, strict=True):
        assert (y - expected).abs().max() < TOLERANCE
    assert (found[0][0] - found[0][1]).abs().max() > 0.01
