"""Code that mixes tokens, in forward or only in backward; no ranks are started."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.models.traced_model import TracedModel
from tests.models.own import Own

Mix = Callable[[Tensor], Tensor]


class _Mixing(nn.Module):
    """A module that applies `mix` to tokens [B, S, D]."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


def followed_by(mix: Mix) -> Any:
    """Return a model with one norm followed by `mix`."""
    model = Own()
    model.blocks[1].norm2 = nn.Sequential(model.blocks[1].norm2, _Mixing(mix))
    return model


PLACE = r"blocks\.1\.norm2\.1 \(_Mixing\)"


class _Function(torch.autograd.Function):
    """Identity whose backward mixes the gradients of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].norm(dim=1, keepdim=True)


def _hooked(hook: Mix) -> Mix:
    def mix(x: Tensor) -> Tensor:
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(hook)
        return y

    return mix


def chunks_of(size: int) -> Mix:
    """Return a function that subtracts the mean of each complete chunk of tokens."""

    def mix(x: Tensor) -> Tensor:
        parts = x.split(size, 1)
        return torch.cat([c - c.mean(1, keepdim=True) * (c.shape[1] == size) for c in parts], 1)

    return mix


MIXING: dict[str, Mix] = {
    # features whose maximum is not at the changed token but in the middle of the row
    "maximum": lambda x: x * x[..., 3:4].amax(1, keepdim=True),
    "minimum": lambda x: x * x[..., 7:8].amin(1, keepdim=True),
    "median": lambda x: x * x[..., 3:4].median(1, keepdim=True).values,
    "the logarithm of the length": lambda x: x * max(1.0, math.log(x.shape[1], 40)),
    "chunks": chunks_of(40),
    "a branch": lambda x: x + 1 if x.shape[1] > 40 else x,
}


@pytest.mark.parametrize("name", MIXING)
def test_code_that_mixes_tokens_is_found(name: str) -> None:
    """Catches mixing that does not show when one token changes and only a part of the row is
    computed.
    """
    with pytest.raises(ValueError, match=rf"^{PLACE} mixes or counts tokens outside of attention"):
        TracedModel(followed_by(MIXING[name]))


def _hooked_module() -> nn.Module:
    model = followed_by(lambda x: x)
    part: nn.Module = model.blocks[1].norm2[1]
    part.register_full_backward_hook(lambda _, given, __: (given[0] / given[0].norm(dim=1),))
    return model


MIXED_GRADIENTS: dict[str, Callable[[], nn.Module]] = {
    "a hook of a tensor": lambda: followed_by(_hooked(lambda g: g / g.norm(dim=1, keepdim=True))),
    "a hook of a module": _hooked_module,
    "an autograd function": lambda: followed_by(_Function.apply),
    "the mean": lambda: followed_by(_hooked(lambda g: g - g.mean(1, keepdim=True))),
}


@pytest.mark.parametrize("name", MIXED_GRADIENTS)
def test_code_that_mixes_gradients_is_found(name: str) -> None:
    """Catches code that mixes tokens only in backward."""
    said = rf"^{PLACE} mixes or counts tokens outside of attention in its backward pass"
    with pytest.raises(ValueError, match=said):
        TracedModel(MIXED_GRADIENTS[name]())


class _Sign(torch.autograd.Function):
    """The sign of x @ weight with a straight-through gradient; reads the weight in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (own,) = gradients
        return own @ weight.T, x.flatten(0, 1).T @ own.flatten(0, 1)


class _Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x: Tensor) -> Tensor:
        signed: Tensor = _Sign.apply(x, self.weight)
        return signed


class _Table(nn.Module):
    """Angles of positions from a cached table that grows with the row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0, 32)

    def forward(self, positions: Tensor) -> Tensor:
        if positions.shape[1] > len(self.table):
            places = torch.arange(8192.0, device=positions.device)
            self.table = (places[:, None] / torch.arange(1, 33, device=positions.device)).cos()
        return self.table[positions]


class _Growing(Own):
    def __init__(self) -> None:
        super().__init__()
        self.positions = _Table()  # type: ignore[assignment]


class _WithoutGradient(Own):
    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return super().forward(ids, positions).detach().round()


class _InPlace(Own):
    """A model that writes in place into the outputs of its tables."""

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.tokens(ids).mul_(2.0).add_(self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).clamp_(-10, 10)


class _ShortTable(Own):
    """A model with angles for 32 positions only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(32.0)[:, None] / torch.arange(1, 33))

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.tokens(ids) + self.get_buffer("angles")[positions].cos()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _signed() -> nn.Module:
    model = Own()
    model.blocks[0].norm2 = nn.Sequential(model.blocks[0].norm2, _Signed())
    return model


class _Dropping(nn.Module):
    """A module with its own dropout in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.1) if self.training else x


def _dropping() -> nn.Module:
    model = Own()
    model.blocks[0].norm2 = nn.Sequential(model.blocks[0].norm2, _Dropping())
    return model


def _in_tiles(x: Tensor) -> Tensor:
    return torch.cat([F.relu(tile) for tile in x.split(40, 1)], 1)


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[1] % 7))[:, : x.shape[1]]


def _of_each_token(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm(dim=-1, keepdim=True)


NEAR: dict[str, Callable[[], nn.Module]] = {
    "the maximum of features": lambda: followed_by(lambda x: x * x.amax(-1, keepdim=True)),
    "tiles of tokens": lambda: followed_by(_in_tiles),
    "padding": lambda: followed_by(_padded),
    "one row of all": lambda: followed_by(lambda x: x.reshape(-1, x.shape[-1]).view(x.shape)),
    "a norm of each gradient": lambda: followed_by(_hooked(_of_each_token)),
    "an autograd function of a token": _signed,
    "dropout of its own": _dropping,
    "no gradient": _WithoutGradient,
    "in place": _InPlace,
    "a table that grows": _Growing,
    "a short table": _ShortTable,
}


@pytest.mark.parametrize("name", NEAR)
def test_code_that_treats_each_token_alone_is_accepted(name: str) -> None:
    """Catches models that are refused although they compute each token alone."""
    TracedModel(NEAR[name]())


def _elsewhere(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        raise NotImplementedError("no kernel for the CPU")
    return x.cumsum(1)


UNCHECKED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another device": (lambda: followed_by(_elsewhere), "no kernel for the CPU"),
    "not a number": (lambda: followed_by(lambda x: x * math.nan), "its logits are not numbers"),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_model_that_cannot_be_checked_is_refused_unless_it_is_allowed(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a model accepted without a check, and a key that does not allow it."""
    make, said = UNCHECKED[name]
    with pytest.raises(ValueError, match=rf"{said}\. .* or set model\.allow_unchecked: true"):
        TracedModel(make())
    TracedModel(make(), allow_unchecked=True)
    assert "was not checked for code that mixes" in caplog.text
    assert said in caplog.text
