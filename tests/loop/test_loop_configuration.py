"""The configuration of a user's training loop: optional sections, and keys without effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.mesh import Mode, ParallelConfig, PipelineConfig
from isp.core.optim.config import ParamGroupConfig
from isp.loop.token_query import TokenScores
from isp.models.meta import parameters_on_meta
from isp.step import host_memory
from isp.step.host_memory import check_memory_of_states
from tests.models.models import TOLERANCE, VOCAB, Rows, job, plain_loss, tiny
from tests.models.own import Own
from tests.ranks import run_each, run_programs


def test_a_file_needs_only_the_sections_it_changes(tmp_path: Path) -> None:
    """Catches a library that requires the data or sizes which the user's loop provides."""
    (tmp_path / "own.yaml").write_text("optimizer: {lr: 0.01}")
    run = isp.parallelize(Own(), tmp_path / "own.yaml")
    assert run.config.optimizer.lr == 0.01


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "training: {global_batch_size: 8}",
            r"training\.global_batch_size=8 has no effect in .* leave the key out",
        ),
        ("model: {compile: true}", r"model\.compile=true .* the Own that .* use auto or false"),
        ("model: {mlp_tile_tokens: 8}", r"model\.mlp_tile_tokens=8: .* of Own can .* use 0"),
        (
            "model: {hf: there, adapter: {r: 4, target_modules: [q]}}",
            r"model\.adapter has no effect on the Own .* peft\.get_peft_model .* leave the key out",
        ),
    ],
)
def test_keys_without_effect_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    """Catches an ignored key: the user's sequences are the batch, and the model is the user's."""
    (tmp_path / "own.yaml").write_text(keys)
    with pytest.raises(ValueError, match=message):
        isp.parallelize(Own(), tmp_path / "own.yaml")
    assert not dist.is_initialized()


FILES = {
    "isp 3": "data: {seq_len: 100}\nvalidation: {freq: 10}\nparallel: {tensor: {size: 3}}",
    "mtp 3": "parallel: {tensor: {mode: mtp, size: 3}}",  # as many do not divide 32 heads
}


def _of_file(rank: int, path: Path) -> float:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    run = isp.parallelize(tiny("llama", **heads), path)
    return run.step(run.loss(torch.arange(12).unsqueeze(0))).loss


def test_unused_sections_and_sizes_are_not_checked(tmp_path: Path) -> None:
    """Catches a refusal of sizes, lengths or defaults that the loop does not use."""
    cases = {name: tmp_path / name for name in FILES}
    for name, path in cases.items():
        path.write_text(FILES[name] + "\ntraining: {dtype: float64}\n")
    losses = [x for of_ranks in run_each(3, _of_file, cases).values() for x in of_ranks]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-9)  # float64, sums in another order


PROMISED = {
    "pipeline": "parallel: {pipeline: {size: 2}}",
    "chunks": "parallel: {pipeline: {size: 2, schedule: Interleaved1F1B, num_chunks: 2}}",
    "experts": "parallel: {weight: {size: 2}, expert: {size: 2}}",
    "recompute": "model: {checkpoint: 1.0, checkpoint_offload: true, checkpoint_segment: 2}",
    "muon": "optimizer: {name: muon, muon: {lr: 0.01}}",
    "lora": "parallel: {tensor: {size: 2}}\noptimizer: {lr: 0.01}",
    "isp train": "parallel: {tensor: {size: 2}}\nlr_scheduler: {warmup_steps: 1000}\n"
    "model: {hf: /no/such/folder, num_heads: 7, num_kv_heads: 2, experts_per_token: 99}\n"
    "data: {source: /no/such/file, micro_num: 1}\nvalidation: {freq: 10}",
}
"""Files with the features of a loop, and one of a run of `isp train`."""
TOKENS = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


def _promised_model(name: str) -> Any:
    model = tiny("mixtral" if name == "experts" else "llama", num_hidden_layers=4)
    if name != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return get_peft_model(model, settings, autocast_adapter_dtype=False)


def _mean(scores: TokenScores, _: Mapping[str, Any]) -> Tensor:
    return -scores.log_probs.sum() / TOKENS[:, 1:].numel()


def _promised(rank: int, path: Path) -> list[float]:
    """Return the losses of two steps on the same rows, passed to pipelines as micro-batches."""
    run, losses = isp.parallelize(_promised_model(path.stem), path), []
    for _ in range(2):
        if run.config.parallel.pipeline.size > 1:
            run.forward_backward([{"input_ids": row[None]} for row in TOKENS], _mean, last=True)
            losses.append(run.step().loss)
        else:
            losses.append(run.step(run.loss(TOKENS.chunk(run.dp_size)[run.dp_rank])).loss)
    return losses


def test_each_feature_of_a_loop_can_be_set_in_a_file(tmp_path: Path) -> None:
    """Catches checks of unused sections, which only run for a configuration file."""
    pytest.importorskip("peft")
    cases = {name: tmp_path / f"{name}.yaml" for name in PROMISED}
    for name, path in cases.items():
        path.write_text(PROMISED[name] + "\ntraining: {dtype: float64, steps: 7}\n")
    for name, of_ranks in run_each(2, _promised, cases).items():
        expected = plain_loss(_promised_model(name), Rows(TOKENS)).item()
        for first, second in of_ranks:
            assert abs(first - expected) < TOLERANCE, name
            assert second < first, name


def test_states_that_exceed_host_memory_are_refused_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches an allocation that fails after the rendezvous; frozen weights have no states."""
    monkeypatch.setattr(host_memory, "attainable_bytes", lambda: 2**10)
    config = job(offload_states=True)
    with pytest.raises(ValueError, match=r"ranks keep .* of optimizer states in this machine"):
        isp.parallelize(Own(), config)
    assert not dist.is_initialized()
    check_memory_of_states(config, config.topology(1), 1, num_trained=0)


def test_each_stage_counts_only_the_states_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pipeline that is refused although its states fit."""
    trained = 2**20
    config = job(offload_states=True)
    alone = host_memory._state_bytes(config, config.topology(1), trained)
    monkeypatch.setattr(host_memory, "attainable_bytes", lambda: alone)
    check_memory_of_states(config, config.topology(1), 1, trained)
    staged = replace(
        config,
        data=replace(config.data, micro_num=2),
        parallel=ParallelConfig(pipeline=PipelineConfig(size=2)),
    )
    check_memory_of_states(staged, staged.topology(2), 2, trained)
    with pytest.raises(ValueError, match="optimizer states"):
        check_memory_of_states(config, config.topology(1), 1, 2 * trained)


def _group(**keys: Any) -> dict[str, Any]:
    return {"param_groups": (ParamGroupConfig(**keys),)}


def _unread() -> nn.Module:
    model = Own()
    model.tower = nn.Linear(4, 4)
    return model


def _on_meta() -> nn.Module:
    with parameters_on_meta():
        return Own()


LATE: dict[str, tuple[Callable[[], nn.Module], JobConfig, str]] = {
    "a group of nothing": (Own, job(1, 2, **_group(pattern="nowhere")), "nowhere"),
    "a split": (
        Own,
        job(1, 2, name="muon", **_group(pattern="up", rule="muon", split=(7,))),
        "split",
    ),
    "a weight that no token reads": (_unread, job(2, mode=Mode.MTP), "tensor-parallel plan"),
    "not begun": (_on_meta, job(1, 2), "does not say how to initialize temperature"),
}


def _refused(rank: int, case: tuple[Callable[[], nn.Module], JobConfig, str]) -> None:
    make, config, said = case
    model = make()
    before = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        isp.parallelize(model, config)
    assert not dist.is_initialized()
    after = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    assert all(after[name][0] is p and after[name][1] == of for name, (p, of) in before.items())
    if said != LATE["not begun"][2]:
        assert isp.parallelize(model, job(1, 2)).loss(torch.ones(1, 16, dtype=torch.int64)) > 0


@pytest.mark.parametrize("name", LATE)
def test_a_refusal_leaves_process_groups_and_model_unchanged(name: str) -> None:
    """Catches a process group that remains after a refusal, and a model that is already sharded."""
    run_programs(2, _refused, LATE[name])


def test_a_partly_sharded_model_is_refused() -> None:
    """Catches shards that a second call takes for whole weights, after the first call has
    failed.
    """

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        if sum(p.numel() for _, p in named) > 9000:
            raise MemoryError("too large")
        return torch.optim.SGD([p for _, p in named])

    model = Own()
    with pytest.raises(MemoryError, match="too large") as raised:
        isp.parallelize(model, job(), optimizer=make)
    assert "build it again before you call isp.parallelize again" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="has a forward that is not its class"):
        isp.parallelize(model, job())
    isp.parallelize(Own(), job()).loss(torch.ones(1, 16, dtype=torch.int64))
