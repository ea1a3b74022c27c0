"""The lifetime of a gathered weight: never stale, never leaked, never freed too early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import pytest
import torch
from torch import Tensor

from isp.core.mesh.config import OverlapUnit
from isp.core.mesh.phase import Phase
from isp.core.weights.communicator import ISPCommunicator
from isp.core.weights.uses import sequential_actions
from tests.core.weights.echo import D, Net, echo_layers, echo_net, leased_bytes, plain_linear

IDS = torch.tensor([[1, 2, 3, 1], [4, 5, 6, 7]])
ONE = sequential_actions(1)
REFUSAL = r"a collective of this communicator failed .*connection lost.*: its ranks are no longer"


def forward(net: Net) -> Tensor:
    """Return the output, after a check that it is that of the current weights."""
    y = net(IDS)
    torch.testing.assert_close(y, net.plainly(IDS), rtol=1e-12, atol=1e-12)
    return y


def train(net: Net, communicator: ISPCommunicator) -> dict[str, Tensor]:
    """Run forward, backward and finish; return the gradients and clear them."""
    forward(net).square().sum().backward()
    communicator.finish()
    return taken_gradients(net, communicator)


def taken_gradients(net: Net, communicator: ISPCommunicator) -> dict[str, Tensor]:
    assert leased_bytes(communicator) == 0
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return grads


@torch.no_grad()
def update(net: Net) -> None:
    for p in net.parameters():
        p.mul_(1.25)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def expected_gradients(
    num_updates: int = 0, *, num_recomputed: int = 0, bias: bool = True
) -> dict[str, Tensor]:
    """Return the gradients of an undisturbed step after this many updates."""
    net, communicator, _ = echo_net(bias=bias, num_recomputed=num_recomputed)
    for _ in range(num_updates):
        update(net)
    communicator.begin(ONE)
    return train(net, communicator)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("announced", [False, True])
def test_evaluation_between_steps_changes_nothing(
    mode: Callable[[], AbstractContextManager[None]], announced: bool
) -> None:
    """Catches an evaluation that consumes, or leaves behind, weights gathered for the step."""
    net, communicator, _ = echo_net(bias=True)
    communicator.begin(ONE)
    for num_updates in range(3):
        with mode():
            if announced:
                communicator.begin(sequential_actions(2, training=False))
            for _ in range(2):
                forward(net)
            if announced:
                communicator.begin(ONE)
        assert_same(train(net, communicator), expected_gradients(num_updates))
        update(net)
        communicator.begin(ONE)


@pytest.mark.parametrize("automatic", [False, True])
def test_evaluation_between_forward_and_backward_changes_nothing(automatic: bool) -> None:
    """Catches a forward out of order that frees weights that the backward needs."""
    net, communicator, _ = echo_net(bias=True)
    if not automatic:
        communicator.begin(ONE)
    loss = forward(net).square().sum()
    with torch.no_grad():
        forward(net)
    loss.backward()
    communicator.finish()
    assert_same(taken_gradients(net, communicator), expected_gradients())


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("num_recomputed", [0, 3])
def test_a_step_after_a_failed_forward_is_correct(automatic: bool, num_recomputed: int) -> None:
    """Catches weights prefetched by the failed step used, although stale, in the next step."""
    net, communicator, channel = echo_net(bias=True, num_recomputed=num_recomputed)
    for failing in (net.blocks[0], net.blocks[2]):
        net.fail_in = failing
        if not automatic:
            communicator.begin(ONE)
        with pytest.raises(ArithmeticError):
            net(IDS)
    net.fail_in = None
    assert any(e.startswith("gather c") for e in channel.events)
    update(net)
    if not automatic:
        communicator.begin(ONE)
    expected = expected_gradients(1, num_recomputed=num_recomputed)
    assert_same(train(net, communicator), expected)


def test_a_step_after_a_failed_backward_is_correct() -> None:
    """Catches gradients of a failed backward added to those of the next step."""
    net, communicator, _ = echo_net(bias=True)
    communicator.begin(ONE)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("bad gradient")

    y = net.embedding(IDS)
    y.register_hook(fail)
    for block in net.blocks:
        y = block(y)
    with pytest.raises(ArithmeticError):
        net.head(y).square().sum().backward()
    communicator.finish()  # reductions in flight must end before they are discarded
    taken_gradients(net, communicator)
    communicator.begin(ONE)
    assert_same(train(net, communicator), expected_gradients())


@pytest.mark.parametrize("declared", [False, True])
def test_an_exception_inside_a_layer_frees_its_weight(declared: bool) -> None:
    """Catches the weight of a failed use kept for the layer's next use, or never freed."""
    net, communicator, channel = echo_net(bias=True)
    layer = net.blocks[1].wo
    if not declared:
        layer = echo_layers(communicator, channel).row(4, 4, bias=True, std=0.5)
        with torch.no_grad():
            layer.weight.fill_(0.5)
            layer.bias.zero_()  # type: ignore[union-attr]
    communicator.begin(ONE)
    x = torch.ones(1, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"shapes|size"):
        layer(torch.ones(1, 5, dtype=torch.float64))
    with torch.no_grad():
        layer.weight.mul_(2)
    y = layer(x) - layer.bias.repeat(2)  # type: ignore[union-attr]
    torch.testing.assert_close(y, x @ layer.weight.repeat(2, 1).T)
    with pytest.raises(RuntimeError, match=r"shapes|size"):
        layer(torch.ones(1, 5, dtype=torch.float64))
    communicator.drain()
    assert leased_bytes(communicator) == 0


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_weight_changed_after_its_gather_is_gathered_again(which: str) -> None:
    """Catches a stale prefetched weight, which the version check must find."""
    net, communicator, channel = echo_net(bias=True)
    communicator.begin(ONE)
    assert "gather a.wo" in channel.events
    with torch.no_grad():
        net.blocks[0].wo.get_parameter(which).add_(1)  # a.wo is being gathered, b.wo is not
        net.blocks[1].wo.get_parameter(which).add_(1)
    train(net, communicator)
    gathers = [e for e in channel.taken() if e in ("gather a.wo", "gather b.wo")]
    assert gathers == ["gather a.wo"] * 2 + ["gather b.wo"] * 2 + ["gather a.wo"]


def step_fused(optimizer: type[torch.optim.Optimizer]) -> Callable[[Net], None]:
    def write(net: Net) -> None:
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer(net.parameters(), lr=0.1, fused=True).step()  # type: ignore[call-arg]
        net.zero_grad()

    return write


def write_data(net: Net) -> None:
    for p in net.parameters():
        p.data.mul_(1.25)


FUSED = [step_fused(torch.optim.SGD), step_fused(torch.optim.AdamW)]


def check_from(net: Net, first: int) -> None:
    """Check output and input gradient from block `first` on against the current weights."""
    x, plain_x = (torch.ones(1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, plain_y = x, plain_x
    for block in net.blocks[first:]:
        y, plain_y = block(y), block.plainly(plain_y)
    y, plain_y = net.head(y), plain_linear(plain_y, net.head)
    torch.testing.assert_close(y, plain_y, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(t.sum(), s)[0] for t, s in ((y, x), (plain_y, plain_x)))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unit", OverlapUnit)
@pytest.mark.parametrize("last", [None, 2], ids=["whole", "fails in c"])
@pytest.mark.parametrize("write", [*FUSED, write_data], ids=["fused SGD", "fused AdamW", ".data"])
def test_weights_changed_without_a_version_are_gathered_again(
    write: Callable[[Net], None], last: int | None, unit: OverlapUnit
) -> None:
    """Catches weights gathered by an unannounced forward used by one that starts at another
    block.
    """
    # A start at the plan's current position could not be told from the planned forward.
    for first in {1, 2, 3} - {last}:
        net, _, _ = echo_net(bias=True, unit=unit)
        net.fail_in = None if last is None else net.blocks[last]
        with torch.no_grad(), nullcontext() if last is None else pytest.raises(ArithmeticError):
            forward(net)
        write(net)
        check_from(net, first)


@pytest.mark.parametrize("automatic", [False, True])
def test_a_forward_without_backward_frees_its_weights(automatic: bool) -> None:
    """Catches buffers kept for a backward that never comes."""
    net, communicator, _ = echo_net(bias=True)
    for _ in range(2):
        if not automatic:
            communicator.begin(ONE)
        forward(net)
        update(net)
    assert leased_bytes(communicator) > 0
    communicator.finish()
    assert leased_bytes(communicator) == 0


def test_two_forwards_may_precede_two_backwards() -> None:
    """Catches a backward out of the planned order that finds no weights, or wrong ones."""
    net, communicator, _ = echo_net(bias=True)
    losses = [forward(net).square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    communicator.finish()
    found = taken_gradients(net, communicator)
    assert_same(found, {name: 2 * g for name, g in expected_gradients().items()})


@pytest.mark.parametrize("num_recomputed", [0, 3])
def test_a_forward_may_skip_a_block(num_recomputed: int) -> None:
    """Catches a plan that loses its position when a use does not happen."""
    net, communicator, channel = echo_net(num_recomputed=num_recomputed)
    net.leave_out = net.blocks[1]
    communicator.begin(ONE)
    grads = train(net, communicator)
    assert not any(name.startswith("b.") for name in grads)
    events = channel.taken()
    assert events.count("wait b.wo") == events.count("gather b.wo")  # drained, not forgotten
    assert events.count("gather c.wo") == 1
    net.leave_out = None
    communicator.begin(ONE)
    assert_same(train(net, communicator), expected_gradients(bias=False))


def test_a_step_without_begin_has_the_same_events() -> None:
    """Catches other events or gradients for users who never announce a step."""
    events = []
    for automatic in (False, True):
        net, communicator, channel = echo_net(bias=True)
        for num_updates in range(3):
            if not automatic:
                communicator.begin(ONE)
            assert_same(train(net, communicator), expected_gradients(num_updates))
            update(net)
        events.append(channel.taken())
    assert events[0] == events[1]


def test_without_begin_gradients_accumulate() -> None:
    """Catches a second forward that discards the gradients of the first backward."""
    net, communicator, _ = echo_net(bias=True)
    for _ in range(3):
        forward(net).square().sum().backward()
    communicator.finish()
    found = taken_gradients(net, communicator)
    for name, g in expected_gradients().items():
        torch.testing.assert_close(found[name], 3 * g, rtol=1e-14, atol=1e-14)


def test_prerequisites_run_before_each_gather() -> None:
    """Catches a gather that does not check whether the optimizer has published its block."""
    net, communicator, channel = echo_net(bias=True, num_recomputed=1)
    names = {id(b.module): b.name for b in net.declared()}

    for who in ("first", "second"):
        communicator.register_prerequisite_for_forward_prefetch_hooks(
            lambda block, who=who: channel.note(f"{who} {names[id(block)]}")
        )
    for begin in (True, True, False):
        if begin:
            communicator.begin(ONE)
        forward(net).square().sum().backward()
        communicator.finish()
    events = channel.taken()
    gathers = [i for i, e in enumerate(events) if e.startswith("gather") and "bias" not in e]
    assert len(gathers) > 3 * 8
    for i in gathers:
        block = events[i].split()[1].split(".")[0]
        # one prerequisite for weights that are gathered together
        while events[i - 1].startswith(f"gather {block}."):
            i -= 1
        assert events[i - 2 : i] == [f"first {block}", f"second {block}"]


def test_prerequisites_follow_the_weight_not_the_layer() -> None:
    """Catches an undeclared layer that reads a declared weight before it is published."""
    net, communicator, _ = echo_net()
    asked: list[object] = []
    communicator.register_prerequisite_for_forward_prefetch_hooks(asked.append)
    with torch.no_grad():
        copy(net.blocks[1].wo)(torch.zeros(1, 4, D, dtype=torch.float64))
    assert asked == [net.blocks[1]]


@pytest.mark.parametrize("fn", [None, "wait", 3])
def test_a_prerequisite_must_be_callable(fn: object) -> None:
    """Catches a mistake that would only show in the middle of a step."""
    _, communicator, _ = echo_net()
    with pytest.raises(TypeError, match=f"must be callable, got {type(fn).__name__}"):
        communicator.register_prerequisite_for_forward_prefetch_hooks(fn)  # type: ignore[arg-type]


def ordinary_events() -> list[str]:
    net, communicator, channel = echo_net(bias=True, num_recomputed=1)
    communicator.begin(ONE)
    train(net, communicator)
    return sorted({e for e in channel.events if not e.startswith("free")})


@pytest.mark.parametrize("event", ordinary_events())
def test_after_a_failed_collective_all_calls_fail(event: str) -> None:
    """Catches a communicator that continues although its ranks are at different collectives."""
    net, communicator, channel = echo_net(bias=True, num_recomputed=1)
    channel.fail_at = event

    def step() -> None:
        communicator.begin(ONE)
        net(IDS).square().sum().backward()
        communicator.finish()

    with pytest.raises(ConnectionError):
        step()
    channel.fail_at = ""
    uses: list[Callable[[], object]] = [
        step,
        communicator.finish,
        communicator.drain,
        lambda: communicator.begin(ONE),
        lambda: net(IDS),
        lambda: net.head(torch.ones(1, 4, dtype=torch.float64)),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=REFUSAL) as caught:
            use()
        assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize("event", ["wait b.wo", "wait b.wqkv"])
def test_a_failed_transfer_without_a_wait_is_reported(event: str) -> None:
    """Catches a failure that only shows when the buffer is freed, and is then ignored."""
    net, communicator, channel = echo_net()
    net.leave_out = net.blocks[1]
    channel.fail_at = event
    communicator.begin(ONE)
    with pytest.raises(ConnectionError):
        net(IDS)
    with pytest.raises(RuntimeError, match=REFUSAL):
        communicator.begin(ONE)


def test_after_a_failed_prerequisite_all_calls_fail() -> None:
    """Catches training that continues after publishing weights, also a collective, has failed."""
    net, communicator, _ = echo_net()

    def fail(_: object) -> None:
        raise ConnectionError("connection lost")

    communicator.register_prerequisite_for_forward_prefetch_hooks(fail)
    with pytest.raises(ConnectionError):
        net(IDS)
    with pytest.raises(RuntimeError, match=REFUSAL):
        communicator.begin(ONE)


@torch.no_grad()
def test_nested_unsharded_weights_stay_until_they_are_left() -> None:
    """Catches a weight that another use, or the end of a step, frees while it is in use."""
    net, communicator, channel = echo_net(bias=True)
    a, b = net.blocks[0].wqkv, net.blocks[0].wo
    communicator.begin(ONE)
    net.embedding(IDS)
    with (
        communicator.unshard(a, Phase.FORWARD, a.weight, a.bias) as first,
        communicator.unshard(b, Phase.FORWARD, b.weight, b.bias) as second,
    ):
        for x in torch.ones(2, 3, 4, dtype=torch.float64):
            y = torch.nn.functional.linear(x, first.weight, first.bias)
            assert torch.equal(y, plain_linear(x, a))
            communicator.drain()
            copy = communicator.weight_hook(a.bias, module=a, is_bias=True)  # type: ignore[arg-type]
            assert torch.equal(second.weight, b.weight.repeat(2, 1))
    assert torch.equal(copy, a.bias.repeat(2))  # type: ignore[union-attr]
    assert leased_bytes(communicator) == 0
    assert channel.events.count("gather a.wo") == 2  # the plan's, and after it was dropped
