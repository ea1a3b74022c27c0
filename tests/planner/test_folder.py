"""Plans of models in a folder: planned transfers and memory equal those of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from isp.cli import main
from isp.config import JobConfig, load_config
from isp.core.comm import Mesh
from isp.core.micro_batch import MicroBatch
from isp.core.mixers import key_choice
from isp.models.moe.dispatch import ExpertExchange
from isp.planner import rehearsal
from isp.planner.case import PlanCase
from isp.planner.counts import traffic
from isp.planner.memory import memory, states
from isp.planner.record import Compute, Work
from isp.step.job_models import trained_model
from isp.step.train_step import TrainStep, make_train_step
from tests.models.folders import small_config, write_folder, write_job
from tests.planner.cases import Counts, counted, share
from tests.planner.live import live_bytes, tensors_here
from tests.ranks import run_ranks

WORLD = 4
LAYOUTS = (
    (
        *("--parallel.tensor.size=2", "--parallel.weight.size=4", "--data.micro_num=2"),
        *("--parallel.weight.vocab_parallel_loss", "--parallel.weight.embed_split_hidden"),
        "--model.loss_chunk_tokens=24",
    ),
    ("--parallel.weight.size=2", "--model.checkpoint=1.0", "--parallel.zero1.size=1"),
    (
        *("--parallel.tensor.size=2", "--parallel.tensor.mode=mtp", "--data.micro_num=2"),
        "--model.loss_chunk_tokens=9",
    ),
    ("--parallel.tensor.size=2", "--parallel.tensor.mode=fsp", "--model.checkpoint=1.0"),
)
HYBRIDS = (
    ("--parallel.tensor.size=4", "--parallel.weight.size=2", "--parallel.sequence_scan=heads"),
    ("--parallel.tensor.size=4", "--model.checkpoint=1.0", "--parallel.sequence_scan=state"),
    (
        *("--parallel.tensor.size=4", "--parallel.weight.size=4", "--parallel.sequence_scan=state"),
        *("--parallel.sequence_2D.enable=true", "--parallel.sequence_2D.head_size=2"),
    ),
)
"""Layouts of hybrids; in the last two each rank has other documents."""
STAGES = ("--parallel.pipeline.size=2", "--parallel.weight.size=2", "--data.micro_num=4")
PIPELINES = (
    (*STAGES, "--parallel.tensor.size=2"),
    (*STAGES, "--model.checkpoint=1.0"),
    (
        *STAGES,
        *("--parallel.pipeline.schedule=Interleaved1F1B", "--parallel.pipeline.num_chunks=2"),
    ),
)
DEEP = {"num_hidden_layers": 4, "tie_word_embeddings": True}
SPREAD = (
    ("--parallel.weight.size=4", "--parallel.expert.size=4"),
    (
        *("--parallel.tensor.size=2", "--parallel.weight.size=4", "--parallel.expert.size=2"),
        "--model.checkpoint=1.0",
    ),
    ("--parallel.tensor.size=2", "--parallel.tensor.mode=mtp", "--parallel.expert.size=2"),
)
"""Layouts in which tokens are exchanged between experts' ranks."""
_routes = ExpertExchange._routes


def _even_routes(exchange: ExpertExchange, parts: Sequence[torch.Tensor]) -> Any:
    """Route equally many tokens to each expert, as plans assume, regardless of the router."""
    turns = [torch.arange(x.numel()).remainder(exchange.bounds[-1]).view_as(x) for x in parts]
    return _routes(exchange, [turn.to(x) for turn, x in zip(turns, parts, strict=True)])


def _batches(config: JobConfig) -> list[MicroBatch]:
    rows = torch.arange(config.row_tokens)[None]
    ends = torch.arange(0, config.row_tokens + 1, config.data.seq_len, dtype=torch.int32)
    return [MicroBatch(rows, rows, rows, ends) for _ in range(config.data.num_micro_batches)]


def _step(rank: int, config: JobConfig) -> TrainStep:
    setattr(ExpertExchange, "_routes", _even_routes)  # noqa: B010
    mesh = Mesh(config.topology(WORLD), rank)
    return make_train_step(
        trained_model(config),
        config,
        mesh,
        torch.device("cpu"),
    )


def _counted(rank: int, configs: list[JobConfig]) -> list[tuple[Counts, int]]:
    """Return the transfers of a step, and the bytes of weights."""
    found = []
    for config in configs:
        step = _step(rank, config)
        step(_batches(config), 0.1)  # its first gathers were launched before the log was cleared
        step.mesh.log.collect()
        share(_batches(config), step.mesh)
        step(_batches(config), 0.1)
        weights = sum(p.parameter.nbytes for p in step.built.parameters)
        found.append((counted(step.mesh.log), weights))
        step.drain()
    return found


@pytest.mark.parametrize(
    ("kind", "sizes", "layouts"),
    [
        ("gpt2", {}, LAYOUTS[:1]),
        ("qwen3_moe", DEEP, (*LAYOUTS[2:4], PIPELINES[0], PIPELINES[2])),
        ("gpt_oss", {"num_local_experts": 8}, SPREAD[1:]),
        ("qwen3_next", {}, HYBRIDS[:2]),
        ("nemotron_h", {}, HYBRIDS[1:]),
        ("deepseek_v32", {}, (LAYOUTS[1], *HYBRIDS[1:])),
    ],
)
def test_planned_transfers_and_weights_equal_those_of_a_run(
    tmp_path: Path, kind: str, sizes: dict[str, int], layouts: tuple[tuple[str, ...], ...]
) -> None:
    """Catches a plan of ISP's own decoder with these sizes in place of the folder's model.

    With token exchange: biases summed over the wrong ranks in mtp. Hybrids: halos and states
    planned for other documents, and for no recomputation. Chosen keys: gradients planned for an
    indexer, which has none. Pipelines: blocks, tied weights or hidden states of another stage.
    """
    job = write_job(tmp_path, write_folder(tmp_path / "model", kind, weights=False, **sizes))
    configs = [load_config(job, words) for words in layouts]
    _ = trained_model(configs[0])  # traced once, for all ranks
    of_ranks = run_ranks(WORLD, _counted, configs)
    for n, config in enumerate(configs):
        case = PlanCase.of(config, WORLD, on_cpu=True)
        for rank in {n % WORLD, WORLD - 1 - n % WORLD}:
            sent, weights = of_ranks[rank][n]
            assert traffic(case, rank).by_channel == sent
            assert states(case, case.place(rank)).weights == weights


def _peaks(rank: int, configs: list[JobConfig]) -> list[int]:
    """Return the peak bytes of tensors in a step."""
    found = []
    for config in configs:
        earlier = tensors_here().keys()
        step = _step(rank, config)
        batches = _batches(config)
        step(batches, 0.1)
        # Pools are full in the second step.
        live = live_bytes(partial(step, batches, 0.1), earlier=earlier)
        step.drain()
        found.append(live.peak)
        del step
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "layouts"),
    [
        ("gpt_oss", {"num_local_experts": 8, "intermediate_size": 64}, SPREAD),
        ("nemotron_h", {"mamba_head_dim": 32, "ssm_state_size": 16}, HYBRIDS[:2]),
        ("deepseek_v32", {"index_topk": 64}, (LAYOUTS[1], *HYBRIDS[1:])),
    ],
)
def test_the_planned_peak_equals_the_measured_one(
    tmp_path: Path, kind: str, sizes: dict[str, int], layouts: tuple[tuple[str, ...], ...]
) -> None:
    """Catches experts planned whole or as kept by the graph, products planned without memory, and
    tokens that other ranks send left out.

    Hybrids: a scan's saved tensors planned as those of a short scan, or of all tokens on each rank.
    Chosen keys: blocks of logits planned without memory.
    """
    sizes = {"vocab_size": 512, "hidden_size": 64, **sizes}
    keys = ["--data.seq_len=256", "--training.dtype=float32"]
    job = write_job(tmp_path, write_folder(tmp_path, kind, weights=False, **sizes))
    configs = [load_config(job, [*words, *keys]) for words in layouts]
    _ = trained_model(configs[0])  # traced once, for all ranks
    of_ranks = run_ranks(WORLD, _peaks, configs, timeout_seconds=100)
    for n, config in enumerate(configs):
        for rank, found in enumerate(of_ranks):
            planned = memory(PlanCase.of(config, WORLD, on_cpu=True), rank)
            assert planned.total == pytest.approx(found[n], rel=0.1), (layouts[n], planned.moment)


def test_first_and_last_block_of_a_kind_represent_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches memory planned for a block that is left out, and a kind without a block."""
    sizes = {"num_hidden_layers": 6, "mlp_only_layers": [2, 3, 4]}
    job = write_job(tmp_path, write_folder(tmp_path, "qwen3_moe", weights=False, **sizes))
    cases = [PlanCase.of(load_config(job, words), WORLD, on_cpu=True) for words in LAYOUTS[:2]]
    found = [memory(case, 0).total for case in cases]
    rehearsal._rehearsed.cache_clear()
    monkeypatch.setattr(rehearsal, "_first_and_last", lambda kinds: range(len(kinds)))
    try:
        assert [memory(case, 0).total for case in cases] == pytest.approx(found, rel=0.01)
    finally:
        rehearsal._rehearsed.cache_clear()


def test_the_first_tile_of_a_key_choice_represents_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches products of an indexer that are not planned, or planned as if all tiles were
    equal.
    """
    job = write_job(tmp_path, write_folder(tmp_path / "m", "deepseek_v32", weights=False))
    case = PlanCase.of(load_config(job, LAYOUTS[0]), WORLD, on_cpu=True)
    found = []
    for most in (key_choice._MOST_SCORES, 3 * 32 * 5):  # a tile of 16 queries, or of 5 and 1
        monkeypatch.setattr(key_choice, "_MOST_SCORES", most)
        rehearsal._rehearsed.cache_clear()
        records = rehearsal.rehearsal(case, case.place(0)).records.values()
        events = [event for record in records for event in (*record.forward, *record.backward)]
        products = (e for e in events if isinstance(e, Compute) and e.kind is Work.PRODUCT)
        found.append(sum(event.amount for event in products))
    rehearsal._rehearsed.cache_clear()
    assert found[0] == found[1]


def test_layouts_of_a_folder_are_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a search that fails because of a key that folders lack, or because of experts."""
    kind = "qwen3_moe"
    job = write_job(tmp_path, write_folder(tmp_path / kind, kind, weights=False))
    assert main(["layouts", str(job), "--world=2", "--fabric=cpu"]) == 0
    said = capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_config(small_config(kind))
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in said
    assert "--data.micro_bsz" in said


def test_each_step_of_a_folders_ladder_is_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan that fails because of a key of ISP's own decoder, and a step lost with it."""
    job = write_job(tmp_path, write_folder(tmp_path / "model", "llama", weights=False))
    words = ["--parallel.tensor.size", "2", "--parallel.weight.size", "2", "--fabric", "cpu"]
    assert main(["plan", str(job), *words, "--max-seq-len", "--memory", "0.1"]) == 0
    said = capsys.readouterr().out
    ladder = said.split("the ladder")[1]
    parts = "norms and activations", "all but attention", "all"
    names = "no option", *(f"recompute {part}" for part in parts)
    lengths = re.findall(rf"^({'|'.join(names)}) .*?(\d+,\d+) ", ladder, re.MULTILINE)
    assert tuple(name for name, _ in lengths) == names
    found = [int(length.replace(",", "")) for _, length in lengths]
    assert found == sorted(set(found))
