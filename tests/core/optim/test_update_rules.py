"""Every update rule against a plain one, and the states that it declares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isp.core.optim.config import OptimizerConfig
from isp.core.optim.update_rules import Rows, update_rule
from tests.core.optim.plain_muon import PlainMuon

RULES = ("adamw", "lion")
STEPS = 6


class PlainLion(torch.optim.Optimizer):
    """The update rule as algorithm 2 of Chen et al. 2023 writes it."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                c = beta1 * m + (1 - beta1) * w.grad
                w.sub_(lr * (c.sign() + decay * w))
                m.copy_(beta2 * m + (1 - beta2) * w.grad)


def plain_optimizer(groups: list[Any], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `config` describes, for whole parameters in one process."""
    values = {"lr": config.lr, "weight_decay": config.weight_decay}
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return PlainMuon(groups, config)
    if config.name == "lion":
        return PlainLion(groups, {"betas": betas, **values})
    return torch.optim.AdamW(groups, betas=betas, eps=config.eps, fused=True, **values)


def _random(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = [(5, 3), (7,), (1, 2)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _rows(rule_name: str, masters: list[Tensor]) -> Rows:
    kinds = update_rule(OptimizerConfig(name=rule_name)).states(torch.float64)  # type: ignore[arg-type]
    states = {k: [torch.zeros_like(m, dtype=d) for m in masters] for k, d in kinds.items()}
    names = [str(number) for number in range(len(masters))]
    return Rows(masters, [torch.empty_like(m) for m in masters], states, names)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_equals_a_plain_one(name: str, beta1: float) -> None:
    """Catches a wrong momentum, which a sign can hide for long, and rows that affect each other."""
    config = OptimizerConfig(name=name, lr=0.1, beta1=beta1)  # type: ignore[arg-type]
    rule, plain = update_rule(config), [x.requires_grad_() for x in _random(0)]
    rows = _rows(name, _random(0))
    optimizer = plain_optimizer([{"params": plain}], config)
    for step in range(1, STEPS + 1):
        for p, grad, new in zip(plain, rows.grads, _random(step), strict=True):
            p.grad = new * (torch.arange(new.numel()).view(new.shape) != 2)  # no gradient for one
            grad.copy_(p.grad)
        optimizer.step()
        for part in (slice(0, 2), slice(2, 3)):  # some rows at a time
            states = {kind: tensors[part] for kind, tensors in rows.states.items()}
            some = Rows(rows.masters[part], rows.grads[part], states, rows.names[part])
            numbers, decay = [step] * len(some.names), config.weight_decay
            rule.step(some, lr=config.lr, weight_decay=decay, numbers=numbers)
    kept = [[s for s in optimizer.state[p].values() if s.numel() == p.numel()] for p in plain]
    for i, p in enumerate(plain):
        found = [rows.masters[i], *(tensors[i] for tensors in rows.states.values())]
        # adamw is torch's own kernel; the momentum of lion is rounded in another order
        error = 0.0 if name == "adamw" else 1e-12
        torch.testing.assert_close(found, [p.detach(), *kept[i]], rtol=error, atol=error)
