"""Layers for a user's own model: the documented example, several micro-batches, and misuse."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isp
from isp.core.layers.weight_parallel import ISPEmbedding, ISPLinear, weight_blocks
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.uses import sequential_actions
from tests.ranks import run_programs, run_ranks

EXAMPLE = Path(__file__).parents[3] / "tools" / "examples" / "own_model.py"
CPU = torch.device("cpu")
V, D, MICRO = 10, 6, 2


def _example(rank: int) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_the_example_equals_plain_torch() -> None:
    """Catches an example that does not run; the example itself compares loss and gradients."""
    run_programs(4, _example)


def test_the_example_is_short_and_uses_public_names() -> None:
    """Catches an example that grows, or that imports internal modules."""
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 60
    imported = re.findall(r"^(?:from|import) (isp[\w.]*)", text, re.MULTILINE)
    assert set(imported) <= {"isp", "isp.tensor_parallel", "isp.data_parallel"}


class Net(nn.Module):
    """An embedding, two linears, one with a bias, and a head of the table's size."""

    def __init__(self, embedding: Callable[..., Any], linear: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = embedding(V, D)
        self.hidden = nn.Sequential(linear(D, 7), nn.Tanh(), linear(7, D, bias=False))
        self.head = linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.hidden(self.embedding(ids)))
        return y


def _net(communicator: ISPCommunicator | None) -> Net:
    torch.manual_seed(3)
    if communicator is None:
        return Net(
            partial(nn.Embedding, dtype=torch.float64), partial(nn.Linear, dtype=torch.float64)
        )
    made = {"communicator": communicator, "dtype": torch.float64}
    return Net(partial(ISPEmbedding, **made), partial(ISPLinear, **made))


def _declared(channel: isp.Channel) -> tuple[Net, ISPCommunicator]:
    communicator = ISPCommunicator(channel, ISPCommModelConfig(device=CPU), poison=True)
    net = _net(communicator)
    communicator.declare([weight_blocks(net, [net.embedding, net.hidden, net.head])])
    return net, communicator


def _train(rank: int, world: int) -> None:
    channel = isp.Channel.from_group(dist.group.WORLD) if world > 1 else isp.Channel.solo()
    net, communicator = _declared(channel)
    plain = _net(None)
    ids = torch.randint(V, (MICRO, world, 2, 5), generator=torch.Generator().manual_seed(1))
    communicator.begin(sequential_actions(MICRO))
    for of_ranks in ids:
        for expected, others in ((plain(x), x) for x in of_ranks):
            F.cross_entropy(expected.flatten(0, 1), others.flatten(), reduction="sum").backward()
        found = net(of_ranks[rank])
        torch.testing.assert_close(found, plain(of_ranks[rank]), rtol=1e-12, atol=1e-12)
        F.cross_entropy(found.flatten(0, 1), of_ranks[rank].flatten(), reduction="sum").backward()
    communicator.finish()
    shards = dict(net.named_parameters())
    for name, full in plain.named_parameters():
        owner, _, local = name.rpartition(".")
        layout = net.get_submodule(owner).layouts[local]
        torch.testing.assert_close(shards.pop(name), layout.shard(full), rtol=0, atol=0)
        shard_grad = net.get_parameter(name).grad
        # the ranks' sums are added up in another order
        torch.testing.assert_close(shard_grad, layout.shard(full.grad), rtol=1e-12, atol=1e-12)
    assert not shards


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_users_layers_train_as_in_plain_torch(world: int) -> None:
    """Catches other initial values, rows that do not divide, and a gradient lost or added twice."""
    run_ranks(world, _train, world)


def _optimize(rank: int) -> None:
    channel = isp.Channel.from_group(dist.group.WORLD)
    net, communicator = _declared(channel)
    plain = _net(None)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (net, plain)]
    ids = torch.randint(V, (3, 2, 2, 5), generator=torch.Generator().manual_seed(2))
    for of_ranks in ids:  # a step
        communicator.begin(sequential_actions(1))
        for found, x in ((net(of_ranks[rank]), of_ranks[rank]), (plain(of_ranks), of_ranks)):
            F.cross_entropy(found.flatten(0, -2), x.flatten(), reduction="sum").backward()
        communicator.finish()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, full in plain.named_parameters():
        owner, _, local = name.rpartition(".")
        expected = net.get_submodule(owner).layouts[local].shard(full)
        torch.testing.assert_close(net.get_parameter(name), expected, rtol=1e-10, atol=1e-10)


def test_an_optimizer_of_torch_updates_the_shards() -> None:
    """Catches a step that still reads the weights of the previous step."""
    run_ranks(2, _optimize)


def _recompute(rank: int) -> None:
    found = []
    for again in (False, True):
        channel = isp.Channel.from_group(dist.group.WORLD)
        communicator = ISPCommunicator(channel, ISPCommModelConfig(device="cpu"), poison=True)
        net = _net(communicator)
        recomputed = [net.hidden] if again else []
        blocks = weight_blocks(net, [net.embedding, net.hidden, net.head], recomputed=recomputed)
        communicator.declare([blocks])
        communicator.begin(sequential_actions(1))
        x = net.embedding(torch.arange(2 * V).view(2, V) % V)
        if again:
            contexts = partial(_contexts, communicator)
            x = checkpoint(net.hidden, x, use_reentrant=False, context_fn=contexts)
        else:
            x = net.hidden(x)
        net.head(x).square().sum().backward()
        communicator.finish()
        found.append((channel.progress(), [p.grad for p in net.parameters()]))
    (sent, gradients), (sent_again, gradients_again) = found
    assert sent == sent_again
    torch.testing.assert_close(gradients, gradients_again, rtol=0, atol=0)


def _contexts(communicator: ISPCommunicator) -> Any:
    return nullcontext(), communicator.recomputing()


def test_a_recomputed_block_follows_the_plan() -> None:
    """Catches a recomputation that gathers weights in addition to those the plan gathers for
    backward.
    """
    run_ranks(2, _recompute)


def test_layers_on_meta_are_initialized_later_as_in_torch() -> None:
    """Catches a layer that ignores the default device, or draws other values than torch."""
    communicator = ISPCommunicator(isp.Channel.solo(), ISPCommModelConfig(device=CPU))
    with torch.device("meta"):
        linear = ISPLinear(3, 4, communicator=communicator)
        table = ISPEmbedding(5, 2, communicator=communicator)
    assert linear.weight.is_meta
    assert table.weight.is_meta
    for layer, plain in ((linear, partial(nn.Linear, 3, 4)), (table, partial(nn.Embedding, 5, 2))):
        layer.to_empty(device="cpu")
        torch.manual_seed(5)
        layer.reset_parameters()
        torch.manual_seed(5)
        torch.testing.assert_close(layer.weight, plain().weight, rtol=0, atol=0)


def _solo() -> tuple[Net, ISPCommunicator]:
    return _declared(isp.Channel.solo())


def test_a_layer_in_no_block_or_in_two_is_refused() -> None:
    """Catches a weight in no plan, which would be gathered late in every step."""
    net, _ = _solo()
    with pytest.raises(ValueError, match=r"head is in no block, so no plan gathers"):
        weight_blocks(net, [net.embedding, net.hidden])
    with pytest.raises(ValueError, match=r"head is in block head and in head"):
        weight_blocks(net, [net.embedding, net.hidden, net.head, net.head])
    with pytest.raises(TypeError, match="blocks must be modules of the model, got str"):
        weight_blocks(net, ["hidden"])  # type: ignore[list-item]


def test_layers_on_meta_draw_no_random_numbers() -> None:
    """Catches a layer that draws numbers for which it has no memory."""
    _, communicator = _solo()
    before = torch.get_rng_state()
    layer = ISPLinear(4, 4, communicator=communicator, device="meta")
    ISPEmbedding(4, 4, communicator=communicator, device="meta")
    assert layer.weight.is_meta
    assert torch.equal(before, torch.get_rng_state())


def test_a_wrong_argument_is_refused_with_what_to_pass() -> None:
    """Catches an error raised deep inside, where the message does not name the wrong argument."""
    net, _ = _solo()
    config = ISPCommModelConfig(device=CPU)
    with pytest.raises(TypeError, match=r"channel must be an isp.Channel, got int 4: pass isp.Ch"):
        ISPCommunicator(4, config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"reduce_channel must be an isp.Channel, got the method"):
        ISPCommunicator(isp.Channel.solo(), config, reduce_channel=net.forward)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config must be an isp.ISPCommModelConfig, got device"):
        ISPCommunicator(isp.Channel.solo(), CPU)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"communicator must be an isp.ISPCommunicator, got Ch"):
        ISPLinear(4, 4, communicator=isp.Channel.solo())  # type: ignore[arg-type]
    blocks = weight_blocks(net, [net.embedding, net.hidden, net.head])
    for wrong, name in ((net, "Net"), ([net], "Net"), (blocks, "DeclaredBlock"), ([[net]], "Net")):
        communicator = ISPCommunicator(isp.Channel.solo(), config)
        with pytest.raises(TypeError, match=rf"for each model chunk, got {name}: pass \[isp.weig"):
            communicator.declare(wrong)  # type: ignore[arg-type]
