"""Backward passes that need some gradients only, against plain torch in float64.

B batch, S sequence, D and F sizes, V vocabulary.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.comm import Mesh
from isp.core.layers.module import bind_names, named_parameters
from isp.core.mesh import Axis, Mode
from isp.core.optim.main_grads import MainGradients
from isp.core.recompute.recompute import Recomputer
from isp.core.rng import RngStatesTracker
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.wp_communicator import DeferredWeightGradients, LocalWeights
from tests.ranks import run_ranks
from tests.toolkit import CPU, ToolkitLayers, topology

B, S, D, F_, V = 2, 4, 6, 8, 10
ROUTES = AT_ONCE, INTO, DEFERRED = ("at once", "into main gradients", "deferred")
Full = dict[str, Tensor]


class Net(nn.Module):
    """Embedding, two linears that may be recomputed, and head; also returns the hidden states."""

    def __init__(self, layers: ToolkitLayers, *, recomputes: bool) -> None:
        super().__init__()
        self.embedding = layers.embedding(V, D, std=1.0)
        self.up = layers.column(D, (F_,), bias=True, std=0.5)
        self.down = layers.row(F_, D, bias=True, std=0.5)
        self.head = layers.head(D, V, std=0.5)
        self.recomputing = layers.recomputing if recomputes else None
        bind_names(self)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        if self.recomputing is None:
            return self.head(self._between(x)), x
        again = Recomputer(tracker=RngStatesTracker(x.device), announce=self.recomputing)
        return self.head(again(self._between, x)), x

    def _between(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def plainly(ids: Tensor, p: Full) -> tuple[Tensor, Tensor]:
    x = F.embedding(ids, p["embedding.weight"])
    wide = torch.tanh(F.linear(x, p["up.weight"], p["up.bias"]))
    y = x + F.linear(wide, p["down.weight"], p["down.bias"])
    return F.linear(y, p["head.weight"]), x


class Bench:
    """A net in one mode on this rank, the expected results, and the objects that deliver
    gradients.
    """

    def __init__(self, mesh: Mesh, mode: Mode, route: str, *, recomputes: bool) -> None:
        self.mesh = mesh
        self.communicator: ISPCommunicator | LocalWeights = LocalWeights()
        if mode is Mode.ISP:
            self.communicator = ISPCommunicator(mesh[Axis.WEIGHT], ISPCommModelConfig(device=CPU))
        layers = ToolkitLayers(
            mode=mode,
            tensor=mesh[Axis.TENSOR],
            weight=mesh[Axis.WEIGHT],
            communicator=self.communicator,
        )
        self.net = Net(layers, recomputes=recomputes)
        self.items = list(named_parameters(self.net))
        random = torch.Generator().manual_seed(3)
        self.full: Full = {}
        for item in self.items:
            name, parameter, layout = item.name, item.parameter, item.layout
            value = 0.5 * torch.randn(layout.global_shape, generator=random, dtype=torch.float64)
            self.full[name] = value.requires_grad_()
            with torch.no_grad():
                parameter.copy_(layout.shard(value))
        self.gradients = MainGradients(self.items, mesh)
        if mode is Mode.ISP or route == INTO:
            self.communicator.deliver_to(self.gradients)
        self.put_off = DeferredWeightGradients(self.gradients)
        if route == DEFERRED:
            self.communicator.route = self.put_off
        all_ids = torch.randint(V, (B * mesh[Axis.DATA].size, S), generator=random)
        y, x = plainly(all_ids, self.full)
        expected = torch.autograd.grad(y.square().sum(), [x, *self.full.values()])
        self.expected = dict(zip(self.full, expected[1:], strict=True))
        self.x_wanted = self._own(expected[0])
        self.y, self.x = self.net(self._own(all_ids) if mode is Mode.ISP else self._rows(all_ids))
        whole = mode is not Mode.ISP  # features of all tokens, of which a rank has some
        logits = self._rows(y).chunk(mesh[Axis.TENSOR].size, 2)[mesh[Axis.TENSOR].rank]
        close(self.y, logits if whole else self._own(y), "y")

    def _rows(self, t: Tensor) -> Tensor:
        data = self.mesh[Axis.DATA]
        return t.chunk(data.size)[data.rank]

    def _own(self, t: Tensor) -> Tensor:
        """Return this rank's part of the hidden states."""
        if self.mesh.topology.mode is Mode.MTP:
            return self._rows(t)
        tensor = self.mesh[Axis.TENSOR]
        return self._rows(t).chunk(tensor.size, 1)[tensor.rank]

    def settle(self) -> None:
        """Deliver gradients that are in flight or deferred."""
        self.put_off.drain()
        if isinstance(self.communicator, ISPCommunicator):
            self.communicator.finish()

    def check(self, name: str, found: Tensor, times: int = 1) -> None:
        """Check that a gradient is `times` the expected one."""
        layout = next(item.layout for item in self.items if item.name == name)
        summed = self.mesh[layout.reduce_over].all_reduce(found.clone()).wait()
        close(summed, times * layout.shard(self.expected[name]), name)


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}"
    )


def request_gradients(bench: Bench) -> None:
    """Request gradients of an activation, of all parameters, of some of both, and of everything."""
    loss, net = bench.y.square().sum(), bench.net
    (found,) = torch.autograd.grad(loss, bench.x, retain_graph=True)
    close(found, bench.x_wanted, "x")
    some = torch.autograd.grad(loss, [net.up.weight, net.down.bias], retain_graph=True)
    bench.check("up.weight", some[0])
    bench.check("down.bias", some[1])
    parameters = [item.parameter for item in bench.items]
    all_found = torch.autograd.grad(loss, parameters, retain_graph=True)
    for item, found in zip(bench.items, all_found, strict=True):
        bench.check(item.name, found)
    bench.settle()
    assert all(bench.gradients.grad(parameter).eq(0).all() for parameter in parameters)
    loss.backward(inputs=[bench.x, net.up.weight, net.up.bias], retain_graph=True)
    bench.settle()
    close(bench.x.grad, bench.x_wanted, "x.grad")  # type: ignore[arg-type]
    for item in bench.items:
        name, parameter = item.name, item.parameter
        bench.check(name, bench.gradients.grad(parameter), name.startswith("up."))
    loss.backward()
    bench.settle()
    for item in bench.items:
        name, parameter = item.name, item.parameter
        bench.check(name, bench.gradients.grad(parameter), 1 + name.startswith("up."))


def run_all(rank: int, world: int) -> int:
    runs = 0
    for mode in (Mode.ISP, Mode.MTP, Mode.FSP):
        weight = world if mode is Mode.ISP else 1
        mesh = Mesh(topology(world, mode=mode, tensor=world, weight=weight), rank)
        for route, recomputes in itertools.product(ROUTES, (False, True)):
            try:
                request_gradients(Bench(mesh, mode, route, recomputes=recomputes))
            except Exception as error:
                raise AssertionError(f"{mode=} {route=} {recomputes=}") from error
            runs += 1
    return runs


@pytest.mark.parametrize("world", [1, 2])
def test_only_requested_gradients_are_computed(world: int) -> None:
    """Catches gradients of weights that were not requested, and None for requested ones."""
    assert run_ranks(world, run_all, world) == [18] * world
