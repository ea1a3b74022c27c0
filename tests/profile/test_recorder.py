"""Records of real steps, and the removal of a recorder's hooks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby

import torch

from isp.core.mesh import Mode
from isp.profile.collectives import RankTimes, align
from isp.profile.recorder import RankRecord
from isp.profile.totals import step_collectives, totals
from isp.step.train_step import TrainStep
from isp.train.profiling.recording import recorder_for
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Task, make_run

MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    intermediate_size=24,
    checkpoint=0.3,  # the first block is recomputed
    init_std=0.3,
)
STEPS = 3
"""Recorded steps; the first gathers of the first one were launched before."""


def _record(rank: int, mode: Mode) -> RankRecord:
    """Record some steps, and run one more without the recorder."""
    layout = Layout(mode=mode, tensor=2, weight=2 if mode is Mode.ISP else 1)
    mesh = Meshes(rank).of(layout)
    run = make_run(mesh, layout, Task(model=MODEL), dtype=torch.float32)
    recorder = recorder_for(run.step, torch.device("cpu"))
    num_hooks = _num_hooks(run.step)
    run.numbers(range(1))
    with recorder:
        for step in range(1, 1 + STEPS):
            recorder.begin_step()
            run.numbers(range(step, step + 1))
        recorder.begin_step()
    record = recorder.record()
    assert all(t.wait_began for t in record.transfers), "what is on its way belongs to no step"
    run.numbers(range(1 + STEPS, 2 + STEPS))
    run.close()
    later = [t for t in recorder.record().transfers if t.launched > record.begins[-1]]
    assert not later, "it went on recording"
    assert _num_hooks(run.step) == num_hooks, "hooks were left behind"
    return replace(record, channels=mesh.members)


def _num_hooks(step: TrainStep) -> int:
    modules = [m for c in step.chunks for part in c.parts().values() for m in part.modules()]
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)


def _aligned(mode: Mode) -> list[RankTimes]:
    return align(run_ranks(2, _record, mode))


def test_steps_in_isp_mode_are_recorded():
    """Catches a transfer that is lost, in the wrong phase, block or step, or without its times."""
    for times in _aligned(Mode.ISP):
        for step in range(1, STEPS):
            own = step_collectives(times, step)
            for c in own:
                assert c.launch_ms <= c.start_ms <= c.end_ms
                assert times.begins[step] <= c.wait_ms < times.begins[step + 1]
            gathers = Counter(
                (c.phase, c.block) for c in own if c.channel == "weight" and c.kind == "all_gather"
            )
            # layers.2 and the head stay from forward to backward; layers.0 is gathered for its
            # recomputation, which backward shares.
            assert gathers == {
                ("forward", "model.embed_tokens"): 1,
                ("forward", "model.layers.0"): 4,
                ("forward", "model.layers.1"): 4,
                ("forward", "model.layers.2"): 4,
                ("loss", "lm_head"): 1,
                ("backward", "model.layers.1"): 4,
                ("recompute", "model.layers.0"): 4,
            }
            grads = Counter(c.block for c in own if c.kind == "reduce_scatter")
            assert grads == {"model.embed_tokens": 1, "lm_head": 1} | {
                f"model.layers.{i}": 4 for i in range(3)
            }
            assert {c.phase for c in own if c.kind == "reduce_scatter"} == {"backward"}
            exchanges = Counter((c.phase, c.block) for c in own if c.kind == "all_to_all")
            first = "model.layers.0"
            assert exchanges["recompute", first] == exchanges["forward", first] > 0
        assert totals(times, 1).sent_bytes == totals(times, 2).sent_bytes
        assert totals(times, 1).first_edge_ms >= 0
        _check_marks(times)


def _check_marks(times: RankTimes) -> None:
    begin, end = times.begins[1:3]
    marks = [m for m in times.marks if begin <= m.at < end]
    assert [m.at for m in marks] == sorted(m.at for m in marks)
    order = [key for key, _ in groupby((m.phase, m.block) for m in marks if m.block)]
    parts = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm"]
    assert order == [
        *(("forward", part) for part in parts),
        ("forward", "lm_head"),
        ("loss", "lm_head"),
        *(("backward", part) for part in parts[:0:-1]),
        ("recompute", "model.layers.0"),
        ("backward", "model.layers.0"),
        ("backward", "model.embed_tokens"),
    ]
    sites = [m.site for m in marks if m.site and m.block == "model.layers.1"]
    names = "+".join(site.rpartition(".")[2] for site in sites).split("+")  # fused in isp
    linears = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    assert names == [*linears[:3], "attn", *linears[3:]]
    phases = [phase for phase, _ in groupby(m.phase for m in marks)]
    assert phases.index("forward") < phases.index("loss") < phases.index("optimizer")
    assert all(m.memory_gib > 0 for m in marks if not m.site)


def test_steps_in_mtp_mode_are_recorded():
    """Catches modes without gathers recorded without phases, blocks or recomputation."""
    for times in _aligned(Mode.MTP):
        own = step_collectives(times, 1)
        sums = Counter((c.phase, c.block) for c in own if c.channel == "tensor" and c.block)
        assert sums[("forward", "model.layers.1")] == sums[("backward", "model.layers.1")] == 2
        assert sums[("recompute", "model.layers.0")] >= 1
        _check_marks(times)
