"""The communicator's events in a step and their order, written out one by one.

`gather` and `reduce` are launches, `wait` and `sum` the moments at which results are requested,
`free` a buffer that returns to the pool. Line breaks only help the reader.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from isp.core.comm import Channel
from isp.core.layers.module import named_parameters
from isp.core.mesh import Axis
from isp.core.mesh.config import LaunchPoint, OverlapUnit, Prefetch
from isp.core.mesh.phase import Phase
from isp.core.optim.main_grads import MainGradients
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.prefetch_plan import PlanCursor, plan
from isp.core.weights.uses import sequential_actions
from isp.core.weights.wp_communicator import LocalWeights
from tests.core.weights.echo import CPU, Net, echo_net, leased_bytes
from tests.core.weights.schedules import decoder

IDS = torch.tensor([[1, 2, 3, 1], [4, 5, 6, 7]])
LAYER, MODULE = OverlapUnit
SQUARE = 4 * 4 * 8


def listed(text: str) -> list[str]:
    return [event.strip() for event in text.strip().replace("\n", ",").split(",") if event.strip()]


def step(net: Net, communicator: ISPCommunicator, micro_batches: int = 1) -> list[Tensor]:
    """Take a step without an update; return the outputs."""
    communicator.begin(sequential_actions(micro_batches))
    outputs = []
    for m in range(micro_batches):
        outputs.append(net(IDS.roll(m)))
        outputs[-1].square().sum().backward()
    communicator.finish()
    assert leased_bytes(communicator) == 0
    return outputs


FORWARD_PER_LAYER = """
    gather embedding, gather a.wqkv, gather a.wo
    wait embedding, free embedding
    wait a.wqkv, free a.wqkv
    wait a.wo, gather b.wqkv, gather b.wo, free a.wo
    wait b.wqkv, free b.wqkv
    wait b.wo, gather c.wqkv, gather c.wo, free b.wo
    wait c.wqkv
    wait c.wo, gather head
    wait head
"""
SUMS = """
    sum head
    sum c.wo, sum c.wqkv
    sum b.wo, sum b.wqkv
    sum a.wo, sum a.wqkv
    sum embedding
"""
PER_LAYER = (
    FORWARD_PER_LAYER
    + """
    reduce head, free head
    gather b.wo, reduce c.wo, free c.wo
    gather b.wqkv, reduce c.wqkv, free c.wqkv
    gather a.wo, reduce b.wo, wait b.wo, free b.wo
    gather a.wqkv, reduce b.wqkv, wait b.wqkv, free b.wqkv
    reduce a.wo, wait a.wo, free a.wo
    reduce a.wqkv, wait a.wqkv, free a.wqkv
    reduce embedding
"""
    + SUMS
)
PER_LAYER_RECOMPUTED = (
    FORWARD_PER_LAYER
    + """
    reduce head, free head
    gather b.wqkv, gather b.wo
    reduce c.wo, free c.wo
    reduce c.wqkv, free c.wqkv
    wait b.wqkv
    wait b.wo, gather a.wqkv, gather a.wo
    reduce b.wo, free b.wo
    reduce b.wqkv, free b.wqkv
    wait a.wqkv
    wait a.wo
    reduce a.wo, free a.wo
    reduce a.wqkv, free a.wqkv
    reduce embedding
"""
    + SUMS
)
FORWARD_PER_MODULE = """
    gather embedding, gather a.wqkv
    wait embedding, free embedding
    wait a.wqkv, gather a.wo, free a.wqkv
    wait a.wo, gather b.wqkv, free a.wo
    wait b.wqkv, gather b.wo, free b.wqkv
    wait b.wo, gather c.wqkv, free b.wo
    wait c.wqkv, gather c.wo, free c.wqkv
    wait c.wo, gather head
    wait head
"""
PER_MODULE = (
    FORWARD_PER_MODULE
    + """
    reduce head, free head
    gather c.wqkv, reduce c.wo, free c.wo
    gather b.wo, reduce c.wqkv, wait c.wqkv, free c.wqkv
    gather b.wqkv, reduce b.wo, wait b.wo, free b.wo
    gather a.wo, reduce b.wqkv, wait b.wqkv, free b.wqkv
    gather a.wqkv, reduce a.wo, wait a.wo, free a.wo
    reduce a.wqkv, wait a.wqkv, free a.wqkv
    reduce embedding
"""
    + SUMS
)
NO_OVERLAP = """
    gather embedding, wait embedding, free embedding
    gather a.wqkv, wait a.wqkv, free a.wqkv
    gather a.wo, wait a.wo, free a.wo
    gather b.wqkv, wait b.wqkv, free b.wqkv
    gather b.wo, wait b.wo, free b.wo
    gather c.wqkv, wait c.wqkv
    gather c.wo, wait c.wo
    gather head, wait head
    reduce head, sum head, free head
    reduce c.wo, sum c.wo, free c.wo
    reduce c.wqkv, sum c.wqkv, free c.wqkv
    reduce b.wo, sum b.wo, gather b.wo, wait b.wo, free b.wo
    reduce b.wqkv, sum b.wqkv, gather b.wqkv, wait b.wqkv, free b.wqkv
    reduce a.wo, sum a.wo, gather a.wo, wait a.wo, free a.wo
    reduce a.wqkv, sum a.wqkv, gather a.wqkv, wait a.wqkv, free a.wqkv
    reduce embedding, sum embedding
"""


@pytest.mark.parametrize(
    ("unit", "recomputed", "overlap", "expected"),
    [
        (LAYER, 0, True, PER_LAYER),
        (LAYER, 3, True, PER_LAYER_RECOMPUTED),
        (MODULE, 0, True, PER_MODULE),
        (LAYER, 0, False, NO_OVERLAP),
    ],
    ids=["layer", "layer, recomputed", "module", "no overlap"],
)
def test_a_step_has_the_events_of_its_plan(
    unit: OverlapUnit, recomputed: int, overlap: bool, expected: str
) -> None:
    """Catches events in another order: gathers too late, frees too early, overlap although it is
    off.
    """
    net, communicator, channel = echo_net(unit=unit, num_recomputed=recomputed, overlap=overlap)
    for keyword, expected_overlap in ((None, overlap), (True, True), (False, False)):
        config = ISPCommModelConfig(device=CPU)
        made = ISPCommunicator(channel, config, prefetch=communicator.prefetch, overlap=keyword)
        assert made.prefetch == Prefetch(unit=unit, overlap=expected_overlap)
    for _ in range(2):  # the second step must not differ
        step(net, communicator)
        assert channel.taken() == listed(expected)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("wqkv", "wait a.wqkv, NEXT, free a.wqkv, wait a.wo, free a.wo, wait a.w1, free a.w1"),
        ("attn", "wait a.wqkv, free a.wqkv, NEXT, wait a.wo, free a.wo, wait a.w1, free a.w1"),
        ("wo", "wait a.wqkv, free a.wqkv, wait a.wo, NEXT, free a.wo, wait a.w1, free a.w1"),
        ("w1", "wait a.wqkv, free a.wqkv, wait a.wo, free a.wo, wait a.w1, NEXT, free a.w1"),
    ],
)
def test_gathers_start_at_the_launch_point(launch: str, expected: str) -> None:
    """Catches an ignored launch point, and one without a weight (attn) that goes unnoticed."""
    net, communicator, channel = echo_net(launch=LaunchPoint(launch), mlp=True, num_blocks=2)
    step(net, communicator)
    events = channel.taken()
    first, last = events.index("wait a.wqkv"), events.index("free a.w1")
    following = "gather b.wqkv, gather b.wo, gather b.w1"
    assert events[first : last + 1] == listed(expected.replace("NEXT", following))


def test_a_block_at_the_end_of_backward_stays_for_the_next_forward() -> None:
    """Catches block a, and its bias, gathered again between two micro-batches."""
    net, communicator, channel = echo_net(bias=True, num_blocks=2)
    step(net, communicator, micro_batches=2)
    events = channel.taken()
    seam = events[events.index("free head") + 1 :]
    assert seam[: seam.index("wait head")] == listed(
        """
        gather a.wo, gather a.wo.bias, reduce b.wo, reduce b.wo.bias, free b.wo, free b.wo.bias
        gather a.wqkv, gather a.wqkv.bias
        reduce b.wqkv, reduce b.wqkv.bias, free b.wqkv, free b.wqkv.bias
        gather embedding, reduce a.wo, reduce a.wo.bias, wait a.wo
        reduce a.wqkv, reduce a.wqkv.bias, wait a.wqkv
        reduce embedding
        wait embedding, free embedding
        wait a.wqkv.bias, free a.wqkv, free a.wqkv.bias
        gather b.wqkv, gather b.wqkv.bias, gather b.wo, gather b.wo.bias
        wait a.wo.bias, free a.wo, free a.wo.bias
        wait b.wqkv, wait b.wqkv.bias
        wait b.wo, gather head, wait b.wo.bias
        """
    )


@pytest.mark.parametrize("unit", list(OverlapUnit))
def test_overlap_off_gathers_nothing_more_often(unit: OverlapUnit) -> None:
    """Catches a weight that backward gathers without the bias that the next forward reads."""
    counts = []
    for overlap in (True, False):
        net, communicator, channel = echo_net(bias=True, num_blocks=2, unit=unit, overlap=overlap)
        step(net, communicator, micro_batches=3)
        counts.append(Counter(event for event in channel.taken() if event.startswith("gather")))
    assert counts[0] == counts[1]


def test_bounded_reductions_are_summed_oldest_first() -> None:
    """Catches an exceeded bound on the bytes in flight, and a wait for the newest reduction."""
    net, communicator, channel = echo_net(max_reduce_bytes=2 * SQUARE)
    step(net, communicator)
    events = [e for e in channel.taken() if e.startswith(("reduce", "sum"))]
    assert events == listed(
        """
        reduce head, sum head, reduce c.wo, reduce c.wqkv, sum c.wo, reduce b.wo
        sum c.wqkv, reduce b.wqkv, sum b.wo, reduce a.wo, sum b.wqkv, reduce a.wqkv
        sum a.wo, sum a.wqkv, reduce embedding, sum embedding
        """
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_first_sums_are_received_directly_in_main_gradients(micro_batches: int) -> None:
    """Catches a buffer and a copy for each gradient, and sums that overwrite those in flight."""
    net, communicator, _ = echo_net()
    step(net, communicator, micro_batches)
    apart, communicator, _ = echo_net()
    gradients = MainGradients(named_parameters(apart), {axis: Channel.solo(axis) for axis in Axis})
    communicator.deliver_to(gradients)
    gradients.zero()
    step(apart, communicator, micro_batches)
    gradients.reduce()
    assert bool(communicator.reduce_pool.allocations) is (micro_batches > 1)
    for p, q in zip(net.parameters(), apart.parameters(), strict=True):
        assert torch.equal(p.grad, gradients.grad(q))


def test_switches_change_no_bit() -> None:
    """Catches overlap, pool, unit, launch point or recomputation that changes an output or
    gradient.
    """
    wanted: list[Tensor] = []
    options = [{"overlap": o, "pool": p} for o in (True, False) for p in (True, False)]
    options += [
        {"unit": unit, "launch": launch, "num_recomputed": n, "max_reduce_bytes": b}
        for unit, launch, n, b in itertools.product(OverlapUnit, LaunchPoint, (0, 2, 3), (0, 300))
    ]
    for option in options:
        net, communicator, _ = echo_net(bias=True, mlp=True, **option)  # type: ignore[arg-type]
        found = [y.detach() for _ in range(2) for y in step(net, communicator, 2)]
        found += [p.grad for p in net.parameters() if p.grad is not None]
        assert len(found) == 4 + len(list(net.parameters()))
        assert all(t.isfinite().all() for t in found), option
        wanted = wanted or found
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), option


def test_buffers_are_reused_after_the_first_step() -> None:
    """Catches a pool that grows from step to step, and reuse that stays on when switched off."""
    for pool in (True, False):
        net, communicator, _ = echo_net(pool=pool)
        step(net, communicator)
        allocations, reuses = communicator.pool.allocations, communicator.pool.reuses
        reserved_bytes = communicator.pool.reserved_bytes
        step(net, communicator)
        assert (communicator.pool.allocations == allocations) is pool
        assert (communicator.pool.reuses > reuses) is pool
        assert communicator.pool.reserved_bytes == (reserved_bytes if pool else 0)


def test_the_cursor_searches_only_the_next_block() -> None:
    """Catches a use out of order matched with one far ahead, which would skip all entries
    between.
    """
    chunks = decoder(2)
    order = sequential_actions(2)
    planned = plan(chunks, order, Prefetch())
    places = [step.site[1:] for step in planned.entries]
    expected = [(step.site[1:], step.site.phase) for step in planned.entries]
    cursor = PlanCursor(planned.entries, expected)
    forward = places[: places.index((0, 3, 0)) + 1]
    for place in forward:
        assert cursor.arrive(place, Phase.FORWARD) is not None
    position = cursor.position
    assert cursor.arrive(forward[0], Phase.FORWARD) is None  # this use is of F1, after all of B0
    assert cursor.arrive((0, 2, 0), Phase.BACKWARD) is None  # not B0's first
    assert cursor.position == position
    assert cursor.arrive((0, 3, 0), Phase.BACKWARD) is not None
    skipped = cursor.position
    found = cursor.arrive((0, 1, 0), Phase.BACKWARD)  # inside B0 the cursor searches
    assert found is not None
    assert [step.site.block for step in planned.entries[skipped:found]] == [2, 2, 2, 2, 1, 1, 1]


def test_launch_points_must_be_declared() -> None:
    """Catches a launch point announced under another key than it was declared with."""
    net, communicator, _ = echo_net()
    assert communicator.pass_by(net.a.core) is None  # type: ignore[func-returns-value]
    with pytest.raises(KeyError, match="no use is declared with this key: add DeclaredUse"):
        communicator.pass_by("attn")
    LocalWeights().pass_by("attn")  # gathers nothing, so there is no plan to follow


@pytest.mark.parametrize("wrong", [4, None, [4], "F0"])
def test_begin_takes_a_sequence_of_actions(wrong: object) -> None:
    """Catches a number of micro-batches accepted as actions, and an error that names neither.

    A refused call leaves the communicator unchanged.
    """
    net, communicator, channel = echo_net()
    with pytest.raises(TypeError, match=r"actions must be .*: pass isp.sequential_actions\(n\)"):
        communicator.begin(wrong)  # type: ignore[arg-type]
    assert channel.taken() == []
    step(net, communicator)


def test_an_unknown_model_chunk_is_refused() -> None:
    """Catches a chunk number that is not checked."""
    _, communicator, _ = echo_net()
    communicator.switch_current_model_chunk(0)
    for chunk in (-1, 1):
        with pytest.raises(ValueError, match=f"chunk {chunk} is not one of the 1 model chunks"):
            communicator.switch_current_model_chunk(chunk)


def test_converted_weights_are_followed_and_new_ones_refused() -> None:
    """Catches declared weights that are stale after a conversion or move, and new weights that are
    silently left out.
    """
    net, communicator, _ = echo_net(bias=True)
    net.float()
    step(net, communicator)
    torch.testing.assert_close(net(IDS), net.plainly(IDS))
    net.b.wo.bias = torch.nn.Parameter(net.b.wo.bias + 1)  # type: ignore[union-attr,operator]
    with pytest.raises(RuntimeError, match=r"b\.wo has another parameter than when the model"):
        net(IDS)
    net.load_state_dict({name: x + 1 for name, x in net.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="embedding has another parameter than when the model"):
        net(IDS)


def test_two_weights_of_one_name_are_refused() -> None:
    """Catches layers without names that silently share the gathered weight of the first one."""
    donor, _, channel = echo_net()
    donor.b.wo.name = donor.a.wo.name  # type: ignore[union-attr]
    communicator = ISPCommunicator(channel, ISPCommModelConfig(device=CPU))
    with pytest.raises(ValueError, match=r"2 weights are named a\.wo\.weight: call bind_names"):
        communicator.declare([donor.declared()])


def test_autograd_gets_none_for_gradients_in_flight() -> None:
    """Catches zeros returned to autograd in place of a gradient that is still in flight."""
    net, communicator, _ = echo_net(bias=True, num_recomputed=1)
    weights = dict(net.named_parameters())
    seen: list[Tensor | None] = []
    for parameter in weights.values():
        parameter.register_hook(seen.append)
    communicator.begin(sequential_actions(1))
    net(IDS).square().sum().backward()
    assert seen == [None] * len(weights)  # each hook ran, with no gradient
    assert [name for name, p in weights.items() if p.grad is not None] == []
    communicator.finish()
    for name, p in weights.items():
        assert p.grad is not None, name
        assert p.grad.count_nonzero() > 0, name


def test_an_embedding_is_prefetched_and_not_gathered_in_backward() -> None:
    """Catches a table gathered only at its use, or again in backward, which does not read it."""
    net, communicator, channel = echo_net(num_blocks=2)
    communicator.begin(sequential_actions(2))
    assert channel.taken()[0] == "gather embedding"  # before there is any data
    ids = torch.tensor([[1, 2, 3]])
    loss = net(ids).sum()
    forward = channel.taken()
    assert forward[:2] == ["wait embedding", "free embedding"]
    assert "gather embedding" not in forward
    loss.backward()
    backward = channel.taken()
    # for the second micro-batch, after the work of block a
    ahead = backward.index("gather embedding")
    assert backward.index("reduce b.wqkv") < ahead < backward.index("reduce a.wo")
    assert "wait embedding" not in backward
    net(ids).sum().backward()
    assert "gather embedding" not in channel.taken()
    communicator.finish()
