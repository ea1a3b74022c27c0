"""The head's loss in chunks of tokens against F.linear and F.cross_entropy, in float64.

B batch, S sequence, D hidden size, V vocabulary
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.layers.head import HeadLoss, num_loss_chunks
from isp.core.layers.linear import ParallelLinear
from isp.core.layers.token_results import TokenLossRules, results_of_head
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis, Mode, WeightConfig
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.wp_communicator import LocalWeights
from tests.ranks import run_ranks
from tests.toolkit import CPU, Operations, ToolkitLayers
from tests.train.runs import Layout, Meshes

B, S, D, V = 2, 12, 8, 52
CHUNKS = (0, 1, 5, 7, 18, 1000)
"""Tokens of a chunk; a chunk has B rows, so 1 means one position of each row."""
VOCAB = WeightConfig(vocab_parallel_loss=True)


class Full(NamedTuple):
    """A stand-in for `isp.core.weights.wp_communicator.FullWeights`."""

    weight: Tensor
    bias: Tensor | None


class NeedsGrad(NamedTuple):
    """Inputs, losses and gradients computed by plain torch."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    losses: Tensor
    loss: Tensor
    dx: Tensor
    dw: Tensor


@torch.enable_grad()
def plain() -> NeedsGrad:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(B, S, D, generator=random, dtype=torch.float64).requires_grad_()
    weight = torch.randn(V, D, generator=random, dtype=torch.float64).requires_grad_()
    labels = torch.randint(V, (B, S), generator=random)
    labels[0, 3:8] = IGNORED
    logits = F.linear(x, weight).flatten(0, 1)
    flat = F.cross_entropy(logits, labels.flatten(), reduction="none")
    losses = flat.detach().view(B, S)
    dx, dw = torch.autograd.grad(flat.sum(), (x, weight))
    return NeedsGrad(x.detach(), weight.detach(), labels, losses, losses.sum(), dx, dw)


def loss_of(
    mesh: Mesh, mode: Mode, *, vocab_parallel: bool, chunk_tokens: int
) -> tuple[HeadLoss, ToolkitLayers, ISPCommunicator | None]:
    runtime = None
    if mode is Mode.ISP:
        config = ISPCommModelConfig(device=CPU)
        runtime = ISPCommunicator(mesh[Axis.WEIGHT], config, poison=True)
    layers = ToolkitLayers(
        mode=mode,
        tensor=mesh[Axis.TENSOR],
        weight=mesh[Axis.WEIGHT],
        communicator=runtime or LocalWeights(),
        vocab_parallel_loss=vocab_parallel,
    )
    head = layers.head(D, V, std=1.0)
    head.name = "head"
    found = layers.head_loss(head, V, chunk_tokens=chunk_tokens)
    return found, layers, runtime


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _check(mesh: Mesh, mode: Mode, options: WeightConfig, chunk: int) -> None:
    wanted, tensor = plain(), mesh[Axis.TENSOR]
    of_head, layers, runtime = loss_of(
        mesh, mode, vocab_parallel=options.vocab_parallel_loss, chunk_tokens=chunk
    )
    head: Any = of_head.head
    with torch.no_grad():
        head.weight.copy_(head.layouts["weight"].shard(wanted.weight))

    def own(t: Tensor) -> Tensor:
        """Return this rank's tokens in the layout of the head's input."""
        return t.chunk(tensor.size, 1)[tensor.rank] if mode is not Mode.MTP else t

    x = own(wanted.x).clone().requires_grad_()
    labels = wanted.labels if layers.splits_logits else own(wanted.labels)
    mesh.log.collect()
    # Given another gradient than was announced.
    loss = of_head.total(x * 1, labels, torch.tensor(0.25, dtype=torch.float64))
    (3 * loss).backward()
    if runtime is not None:
        runtime.finish()
    moved = [t.label for t in mesh.log.take()]
    travels = mode is Mode.ISP and mesh[Axis.WEIGHT].size > 1
    weights = [label for label in moved if label.startswith("head.weight")]
    assert weights == (["head.weight", "head.weight.grad"] if travels else [])
    summed = loss.detach()
    if not layers.splits_logits:
        summed = tensor.all_reduce(summed).wait()
    close(summed, wanted.loss)
    assert x.grad is not None
    assert head.weight.grad is not None
    close(x.grad, 3 * own(wanted.dx))
    close(head.weight.grad, 3 * head.layouts["weight"].shard(wanted.dw))
    with torch.no_grad():
        evaluated = of_head.total(x, labels)
    close(evaluated, loss.detach())
    each = results_of_head(of_head, x, labels, TokenLossRules()).squeeze(-1)
    close(each, wanted.losses if layers.splits_logits else own(wanted.losses))


def _all(rank: int, layouts: list[Layout]) -> None:
    meshes = Meshes(rank)
    for layout in layouts:
        for chunk in CHUNKS:
            mesh = meshes.of(layout)
            _check(mesh, layout.mode, layout.options, chunk)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_chunk_size_gives_loss_and_gradients_of_plain_torch(world: int) -> None:
    """Catches tokens and labels cut or gathered in different orders, a chunk missing or counted
    twice, a gradient that ignores the factor of the loss, and a reduction over each rank alone.
    """
    isp = Layout(tensor=world, weight=world)
    layouts = [Layout(mode=mode, tensor=world) for mode in (Mode.MTP, Mode.MSP, Mode.FSP)]
    run_ranks(world, _all, [isp, Layout(tensor=world, weight=world, options=VOCAB), *layouts])


def solo_head(
    chunk_tokens: int, dtype: torch.dtype = torch.float64
) -> tuple[ParallelLinear, HeadLoss]:
    layers = ToolkitLayers(dtype=dtype)
    head = layers.head(D, V, std=1.0)
    with torch.no_grad():
        head.weight.copy_(plain().weight)
    return head, layers.head_loss(head, V, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("chunk", [0, 5])
def test_only_needed_gradients_are_computed(chunk: int) -> None:
    """Catches products for the gradient of a frozen head or input, and for evaluation."""
    wanted, products = plain(), []

    def note(name: str, *_: Any) -> None:
        if name in ("mm", "addmm"):
            products.append(name)

    head, of_head = solo_head(chunk)
    chunks = num_loss_chunks(wanted.x, wanted.labels.numel(), chunk)
    assert chunks == (6 if chunk else 1)
    assert of_head.total(wanted.x[:0], wanted.labels[:0]) == 0  # no row
    for of_x, of_w, training, number in (
        (True, True, True, 3),
        (True, False, True, 2),
        (False, True, True, 2),
        (True, True, False, 1),
    ):
        head.weight.requires_grad_(of_w)
        x = wanted.x.clone().requires_grad_(of_x)
        products.clear()
        with Operations(note), torch.set_grad_enabled(training):
            loss = of_head.total(x, wanted.labels)
        assert len(products) == number * chunks
        if training:
            loss.backward()
            assert (x.grad is not None, head.weight.grad is not None) == (of_x, of_w)
        head.weight.grad = None


def test_autograd_grad_returns_only_the_requested_gradients() -> None:
    """Catches a gradient for `torch.autograd.grad` that is delivered elsewhere, and an unrequested
    one.
    """
    wanted, (head, of_head) = plain(), solo_head(5)
    x = wanted.x.clone().requires_grad_()
    (dw,) = torch.autograd.grad(of_head.total(x, wanted.labels), head.weight)
    close(dw, wanted.dw)
    (dx,) = torch.autograd.grad(of_head.total(x, wanted.labels), x)
    close(dx, wanted.dx)
    assert x.grad is None
    assert head.weight.grad is None


def test_a_second_backward_is_refused() -> None:
    """Catches gradients that are scaled in place and then returned a second time."""
    wanted, (_, of_head) = plain(), solo_head(5)
    loss = 2 * of_head.total(wanted.x, wanted.labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bfloat16_chunks_are_summed_in_float32() -> None:
    """Catches a sum of chunks in bfloat16, and gradients of another dtype than the weight.

    The sum over 24 chunks must be as close to float64 as one product is.
    """
    wanted, far = plain(), {}
    for chunk in (0, 1):
        head, of_head = solo_head(chunk, torch.bfloat16)
        x = wanted.x.bfloat16().requires_grad_()
        of_head.total(x, wanted.labels).backward()
        assert head.weight.grad is not None
        assert head.weight.grad.dtype == torch.bfloat16
        far[chunk] = (head.weight.grad - wanted.dw).norm() / wanted.dw.norm()
    assert far[1] < 1.1 * far[0] < 0.02


def test_a_loss_scale_is_applied_to_the_gradients_of_logits() -> None:
    """Catches float16 gradients that are computed for a scale of 1, where they vanish, and scaled
    later.
    """
    wanted, (head, of_head) = plain(), solo_head(5, torch.float16)
    x, vanished, found = (3 * wanted.x).half(), {}, {}
    full = Full(head.weight.detach(), None)
    for scale in (1.0, 2.0**12):
        expected = torch.tensor(scale, dtype=torch.float64)
        _, dy = of_head.losses_of_chunk(x, full, wanted.labels, expected)
        assert dy is not None
        vanished[scale] = int((dy[0, :3] == 0).sum())
        leaf = x.clone().requires_grad_()
        (scale * of_head.total(leaf, wanted.labels, expected)).backward()
        assert leaf.grad is not None
        found[scale] = leaf.grad.double() / scale
    assert vanished[2.0**12] < vanished[1.0]
    assert (found[1.0] - found[2.0**12]).norm() < 0.01 * found[1.0].norm()
