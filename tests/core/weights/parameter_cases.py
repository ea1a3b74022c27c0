"""Small models, each with one arrangement of parameters that users have.

B batch, S sequence, D model size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.weights.declare import WeightHolder
from tests.toolkit import ToolkitLayers

B, S, D, V = 3, 4, 6, 9
Full = dict[str, Tensor]
"""Full parameters by name."""


class PlainLayers:
    """Builds torch's own layers by the methods of `ToolkitLayers`, which builds sharded ones."""

    def column(self, size: int, sizes: tuple[int, ...], **options: Any) -> nn.Linear:
        return self.row(size, sum(sizes), **options)

    def row(self, size: int, out: int, *, bias: bool = False, std: float) -> nn.Linear:
        return nn.Linear(size, out, bias=bias, dtype=torch.float64)

    def embedding(self, vocab: int, size: int, *, std: float) -> nn.Embedding:
        return nn.Embedding(vocab, size, dtype=torch.float64)

    def head(
        self, size: int, vocab: int, *, std: float, tied_to: nn.Embedding | None = None
    ) -> nn.Linear:
        head = nn.Linear(size, vocab, bias=False, dtype=torch.float64)
        head.weight = head.weight if tied_to is None else tied_to.weight
        return head


class Case(nn.Module):
    """A small model of sharded or plain layers.

    `uses`: the uses of a forward, each a block of its own; by default the layers.
    """

    tokens = False
    """Whether the input is [B, S] ids instead of [B, S, D] activations."""
    input_grad = True
    """Whether the input needs a gradient."""

    def uses(self) -> Sequence[WeightHolder]:
        return list(self.children())  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def plainly(case: type[Case], x: Tensor, full: Full) -> Tensor:
    """Return the output for x of torch's own layers with these weights."""
    y: Tensor = torch.func.functional_call(case(PlainLayers()), full, (x,))  # type: ignore[call-arg]
    return y


def linear(x: Tensor, p: Full, name: str) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


class Bias(Case):
    """Catches a bias not gathered, gathered in parts, or with a gradient that is not reduced."""

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.one = layers.column(D, (8,), bias=True, std=0.5)
        self.two = layers.row(8, D, bias=True, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class CalledTwice(Case):
    """Catches a second call of a module that finds its weight freed, or gets the first call's
    gradient.
    """

    times_declared = 2

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.one = layers.column(D, (D,), std=0.5)
        self.shared = layers.column(D, (D,), bias=True, std=0.5)
        self.two = layers.column(D, (D,), std=0.5)

    def uses(self) -> Sequence[WeightHolder]:
        again = (self.shared,) if self.times_declared == 2 else ()
        return (self.one, self.shared, self.two, *again)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(self.one(x)))
        return self.shared(torch.sin(self.two(x)))


class CalledTwiceDeclaredOnce(CalledTwice):
    """Catches an undeclared call that consumes the weight or gradient of a declared one."""

    times_declared = 1


class FirstCalledTwice(Case):
    """Catches a second call of the first layer taken for the start of a new step."""

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.one = layers.column(D, (D,), bias=True, std=0.5)
        self.two = layers.column(D, (D,), std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(torch.sin(self.one(x)))))


class Tied(Case):
    """Catches a tied table gathered for one of its users only, and a gradient lost or doubled."""

    tokens = True
    input_grad = False

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.embedding = layers.embedding(V, D, std=1.0)
        self.one = layers.column(D, (D,), std=0.5)
        self.head = layers.head(D, V, std=0.5, tied_to=self.embedding)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.one(self.embedding(x))))


class SharedWeight(Case):
    """Catches the bias of the first layer that reads a shared weight used for the other layers."""

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.one, self.two, self.three = (layers.row(D, D, bias=True, std=0.5) for _ in range(3))
        self.three.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.three(torch.tanh(self.two(self.one(x))))


class Untied(Case):
    """Catches an embedding or a head split wrongly; `SPLIT_HIDDEN` has the other split."""

    tokens = True
    input_grad = False

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.embedding = layers.embedding(V, D, std=1.0)
        self.head = layers.head(D, V, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)))


class Frozen(Case):
    """Catches a gradient computed, promised or stored for a frozen weight."""

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.one = layers.column(D, (D,), bias=True, std=0.5)
        self.still = layers.column(D, (D,), bias=True, std=0.5)
        self.third = layers.column(D, (D,), bias=True, std=0.5)
        self.last = layers.column(D, (D,), std=0.5)
        frozen = (*self.still.parameters(), self.third.weight, self.last.weight)
        for parameter in frozen:
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.still(torch.tanh(self.one(x))))
        return self.last(torch.sin(self.third(x)))


class Adapters(Case):
    """Catches adapters on frozen weights that wait for a gradient of the weights, or get none.

    The input needs no gradient, so the first base layer and `a1` have no input gradient.
    """

    input_grad = False

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        for i in (1, 2):
            base = layers.column(D, (D,), bias=True, std=0.5)
            for parameter in base.parameters():
                parameter.requires_grad_(False)
            self.add_module(f"base{i}", base)
            self.add_module(f"a{i}", layers.column(D, (2,), std=0.5))
            self.add_module(f"b{i}", layers.column(2, (D,), std=0.5))

    def forward(self, x: Tensor) -> Tensor:
        for i in (1, 2):
            base, a, b = (self.get_submodule(f"{n}{i}") for n in ("base", "a", "b"))
            x = torch.tanh(base(x) + b(a(x)))
        return x


class UnevenRows(Case):
    """Catches padding that is read, enters a gradient, or is missing: 7, 3 and 1 rows."""

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.seven = layers.column(D, (7,), bias=True, std=0.5)
        self.three = layers.column(7, (3,), bias=True, std=0.5)
        self.one = layers.column(3, (1,), bias=True, std=0.5)
        self.wide = layers.row(1, 5, bias=True, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.three(torch.tanh(self.seven(x))))
        return self.wide(self.one(x))


class Undeclared(Case):
    """Catches an undeclared layer without weight or gradient, or one that disturbs other layers."""

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.one = layers.column(D, (D,), std=0.5)
        self.stranger = layers.column(D, (D,), bias=True, std=0.5)
        self.two = layers.column(D, (D,), std=0.5)

    def uses(self) -> Sequence[WeightHolder]:
        return (self.one, self.two)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.stranger(torch.sin(self.one(x)))))


CASES: tuple[type[Case], ...] = (
    Bias,
    CalledTwice,
    CalledTwiceDeclaredOnce,
    FirstCalledTwice,
    Tied,
    SharedWeight,
    Untied,
    Frozen,
    Adapters,
    UnevenRows,
    Undeclared,
)
