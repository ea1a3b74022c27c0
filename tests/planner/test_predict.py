"""Predicted times: properties that hold on any machine, and measurements on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isp.config import ConfigError
from isp.core.comm.tag import Tag, Transfer
from isp.core.mesh import Axis, Mode, Topology, WeightConfig
from isp.core.mesh.config import LaunchPoint, OverlapUnit, ParallelConfig, TensorConfig
from isp.core.optim.config import OptimizerConfig
from isp.planner.case import PlanCase
from isp.planner.costs import Costs
from isp.planner.declared import shape_of
from isp.planner.fabric import DeviceSpec, Fabric, HostSpec, LinkSpec, known_fabrics, load_fabric
from isp.planner.predict import Prediction, predict
from isp.planner.record import Compute, Work
from isp.planner.rehearsal import records_of
from isp.planner.walk import Clock
from model.build import language_model
from model.config import ModelConfig
from tests.planner.cases import plan_case
from tests.train.runs import Layout

MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    num_layers=8,
    num_heads=8,
    intermediate_size=704,
    sliding_window=1,
)
"""The model of tools/bench_overlap.py, without attention; its matmuls sleep."""
TOKENS = 2048
GFLOPS, LATENCY = 40e9, 50e-6


def _device(tflops: float = GFLOPS / 1e12) -> DeviceSpec:
    return DeviceSpec(
        name="sleeps",
        kind="cpu",
        memory_gib=64,
        tflops=tflops,
        wide_tflops=tflops,
        efficiency=1,
        attention_efficiency=1,
        gb_per_second=1e9,
    )


def _fabric(bytes_per_second: float, latency_us: float = 0.0, **more: Any) -> Fabric:
    link = LinkSpec(gb_per_second=bytes_per_second / 1e9, latency_us=latency_us)
    fields: dict[str, Any] = {"devices_per_node": 64, "device": _device(), "inside": link}
    return Fabric(name="test", **{**fields, **more})


def _case(layout: Layout, model: ModelConfig = MODEL, tokens: int = TOKENS) -> PlanCase:
    return plan_case(layout, model, tokens=tokens)


MEASURED = {
    "none": (WeightConfig(overlap=False), (1.285, 1.539, 1.777, 2.039)),
    "wqkv": (WeightConfig(launch_allgather_before=LaunchPoint.WQKV), (1.035, 1.030, 1.042, 1.060)),
    "wo": (WeightConfig(), (1.029, 1.034, 1.042, 1.061)),
    "w1": (WeightConfig(launch_allgather_before=LaunchPoint.W1), (1.034, 1.038, 1.051, 1.060)),
    "module": (WeightConfig(forward_overlap_per=OverlapUnit.MODULE), (1.041, 1.090, 1.131, 1.190)),
}
"""Measured steps of two ranks, relative to compute, on a quiet machine (tools/README.md)."""


@pytest.mark.parametrize("name", MEASURED)
def test_predicted_steps_match_those_measured_on_a_limited_link(name: str) -> None:
    """Catches a prediction that waits where a run does not, or overlaps what a run cannot."""
    weight, measured = MEASURED[name]
    case = _case(Layout(weight=2, data=2, options=weight))
    unlimited = predict(case, _fabric(1e18))
    sent = 3 * (language_model(MODEL, "float32").num_parameters - MODEL.hidden_size * 17) * 4 / 2
    for ratio, found in zip((0.25, 0.5, 0.75, 1.0), measured, strict=True):
        fabric = _fabric(sent / (ratio * unlimited.step), LATENCY * 1e6)
        predicted = predict(case, fabric).step / unlimited.step
        assert abs(predicted / found - 1) < 0.1, (ratio, predicted, found)


def test_with_an_infinitely_fast_link_a_step_is_its_compute() -> None:
    """Catches compute that is left out or counted twice, and waits without a transfer."""
    case = _case(Layout(weight=2, data=2, micro=3))
    found = predict(case, _fabric(1e18))
    params = 8 * (4 * 256 * 256 + 3 * 256 * 704) + 512 * 256
    assert found.step == pytest.approx(3 * 6 * params * TOKENS / GFLOPS, rel=1e-3)
    assert found.exposed == pytest.approx(0, abs=1e-6)
    again = predict(_case(Layout(weight=2, data=2), replace(MODEL, checkpoint=1.0)), _fabric(1e18))
    blocks = params - 512 * 256
    assert again.step == pytest.approx((6 * params + 2 * blocks) * TOKENS / GFLOPS, rel=1e-3)


def test_many_micro_batches_extrapolate_from_few() -> None:
    """Catches steps of many micro-batches extrapolated from the wrong one."""
    fabric = _fabric(2e8, 50)
    steps = [predict(_case(Layout(weight=2, data=2, micro=n)), fabric).step for n in (4, 5, 9)]
    assert steps[2] - steps[1] == pytest.approx(4 * (steps[1] - steps[0]), rel=1e-6)


STAY = WeightConfig(reshard_after_forward=False)


def test_predicted_steps_with_weights_that_stay_match_measurements() -> None:
    """Catches gathers of backward counted although weights that stay need none."""
    case = _case(Layout(weight=2, data=2, options=STAY))
    unlimited = predict(case, _fabric(1e18))
    sent = 3 * (language_model(MODEL, "float32").num_parameters - MODEL.hidden_size * 17) * 4 / 2
    for ratio, found in ((1, 1.069), (1.5, 1.218)):  # in docs/measurements/overlap.md
        fabric = _fabric(sent / (ratio * unlimited.step), LATENCY * 1e6)
        assert predict(case, fabric).step / unlimited.step == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_weights_that_stay_are_waited_for_once_a_step(pipeline: int) -> None:
    """Catches gathers of the first micro-batch counted for all of them, or for none."""

    def of(micro_num: int, options: WeightConfig = STAY) -> Prediction:
        layout = Layout(weight=2, data=2, pipeline=pipeline, micro=micro_num, options=options)
        return predict(_case(layout), _fabric(4e6, 50))

    few, more, many = of(8), of(16), of(64)
    for name in ("step", "exposed", "communication"):
        short, longer, whole = (getattr(found, name) for found in (few, more, many))
        assert whole - longer == pytest.approx(6 * (longer - short), rel=1e-6), name
    assert many.exposed + many.bubble < many.step
    freed = of(64, WeightConfig())
    assert many.step < freed.step
    assert 2 * many.communication < freed.communication


def test_a_pipeline_idles_as_long_as_its_formula_says() -> None:
    """Catches a lost bubble: 1F1B of equal stages idles (P - 1) / m of its work."""
    model = replace(MODEL, vocab_size=8)
    layout = Layout(mode=Mode.MTP, pipeline=4, micro=12)
    found = predict(_case(layout, model), _fabric(1e18))
    assert found.bubble / (found.step - found.bubble) == pytest.approx(3 / 12, rel=0.05)


def test_transfers_within_and_between_nodes_have_their_own_speeds() -> None:
    """Catches a group assumed to be in one node, and a node's links counted as one."""
    outside = LinkSpec(gb_per_second=1, latency_us=10)
    fabric = replace(_fabric(10e9, 1.0), devices_per_node=4, between=outside)
    parallel = ParallelConfig(tensor=TensorConfig(size=4), weight=WeightConfig(size=16))
    case = replace(
        _case(Layout(tensor=4, weight=16, data=4)), topology=Topology.create(64, parallel)
    )

    def seconds(kind: str, axis: Axis) -> float:
        return fabric.seconds(case, Transfer(kind, axis.value, Tag(), 10**9))

    assert seconds("all_to_all", Axis.TENSOR) == pytest.approx(0.1 + 2e-6)
    assert seconds("all_gather", Axis.WEIGHT) == pytest.approx(1 / 4 + 12e-6 + 3 * 10e-6)  # a ring
    assert seconds("all_reduce", Axis.TENSOR) == pytest.approx(0.1 + 6e-6)
    assert seconds("all_reduce", Axis.WEIGHT_DATA) == pytest.approx(1 + 4 * 10e-6)  # a tree
    assert fabric.wire(case, Axis.TENSOR) == "inside"
    assert fabric.wire(case, Axis.DATA) == "between"


def test_attention_costs_follow_the_number_of_pairs() -> None:
    """Catches ignored causality, packed documents or split heads."""
    model = replace(MODEL, sliding_window=None)
    whole = _case(Layout(), model)
    pairs = 4 * 256 * TOKENS**2 / 2
    assert _attention_flops(whole) == pairs
    assert _attention_flops(replace(whole, documents=4)) == pairs / 4
    assert _attention_flops(_case(Layout(tensor=4, weight=4), model)) == pairs / 4


def _attention_flops(case: PlanCase) -> float:
    """Return the attention FLOPs of a block, as rehearsed."""
    block = shape_of(case, 0).chunks[0][1]
    record = records_of(case, case.place(0), [block])[block.name]
    (flops,) = (
        event.amount
        for event in record.forward
        if isinstance(event, Compute) and event.kind is Work.ATTENTION
    )
    return flops


def test_states_on_the_host_cost_their_copies() -> None:
    """Catches an update planned as if its states were on the device."""
    case = replace(_case(Layout()), optimizer=OptimizerConfig(offload_states=True))
    host = HostSpec(gb_per_second=1.0)
    found = Costs(case, case.place(0), _device(), host).update
    states = 8 * case.language_model.num_parameters  # float32: the weights are the masters
    assert found == pytest.approx(states / 1e9, rel=0.01)
    narrow = replace(case.optimizer, moment_dtype="bfloat16")
    half = Costs(replace(case, optimizer=narrow), case.place(0), _device(), host).update
    assert half == pytest.approx(found / 2, rel=0.01)


def test_known_fabrics_can_be_read_and_written() -> None:
    """Catches a shipped file that is not a valid fabric."""
    assert {"h100x8_ib400", "a100x8_hdr", "h200", "cpu"} <= set(known_fabrics())
    for name in known_fabrics():
        assert load_fabric(name).source


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("name: x\ndevices_per_node: 0", "device is missing"),
        ("nam: x", "nam: no such key; did you mean 'name'"),
        ("", "the file is empty"),
    ],
)
def test_a_wrong_fabric_is_refused_with_its_key(tmp_path: Any, text: str, fault: str) -> None:
    """Catches an error about the file that does not name the key."""
    file = tmp_path / "fabric.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        load_fabric(file)


def test_more_ranks_than_a_machine_has_are_refused() -> None:
    """Catches a world over several nodes whose links are not known."""
    with pytest.raises(ConfigError, match="neither a file nor a fabric"):
        load_fabric("abacus")
    load_fabric("h200").check(8)
    with pytest.raises(ConfigError, match=r"--world 16 is more than the 8 devices"):
        load_fabric("h200").check(16)


def test_transfers_queue_on_their_link_and_wait_for_dependencies() -> None:
    """Catches two transfers on one link that are each as fast as one alone."""
    clock = Clock()
    clock.launch("a", "inside", 2.0)
    clock.launch("b", "inside", 3.0)
    clock.launch("c", "between", 1.0)
    clock.launch("d", "between", 1.0, after="a")
    clock.compute(1.0)
    clock.wait("c")
    assert (clock.now, clock.exposed) == (1.0, 0.0)
    clock.wait("d")
    assert (clock.now, clock.exposed) == (3.0, 2.0)
    clock.wait("b")
    assert (clock.now, clock.exposed, clock.busy) == (5.0, 4.0, 7.0)
