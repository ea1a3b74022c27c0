"""Muon on whole parameters in their own dtype; torch's Muon rounds to bfloat16."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isp.core.optim.config import OptimizerConfig
from isp.parity.reference import orthogonal

__all__ = ["PlainMuon"]


class PlainMuon(torch.optim.Optimizer):
    """Muon whose groups have a `rule` (muon or adamw) and `cuts`, the boundaries of their
    matrices.
    """

    def __init__(self, groups: list[Any], config: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": 0.0})
        self.config = config

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                update = self._muon if group["rule"] == "muon" else self._adamw
                w.mul_(1 - group["lr"] * group["weight_decay"])
                w.sub_(group["lr"] * update(w, w.grad, group["cuts"]))

    def _muon(self, w: Tensor, g: Tensor, cuts: tuple[Any, ...]) -> Tensor:
        keys = self.config.muon
        m = self.state[w].setdefault("m", torch.zeros_like(w))
        m.mul_(keys.momentum).add_(g, alpha=1 - keys.momentum)
        u = keys.momentum * m + (1 - keys.momentum) * g if keys.nesterov else m
        out = torch.full_like(w, torch.nan)
        for cut in cuts:
            rows, columns = u[cut].shape
            ratio = math.sqrt(max(1.0, rows / columns))
            if keys.adjust_lr_fn == "match_rms_adamw":
                ratio = 0.2 * math.sqrt(max(rows, columns))
            out[cut] = ratio * orthogonal(u[cut], keys)
        return out

    def _adamw(self, w: Tensor, g: Tensor, _: object) -> Tensor:
        state = self.state[w]
        m, v = (state.setdefault(key, torch.zeros_like(w)) for key in ("m", "v"))
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = self.config.of_adamw("beta1"), self.config.of_adamw("beta2")
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        unbiased = (v / (1 - beta2 ** state["step"])).sqrt()
        return m / (1 - beta1 ** state["step"]) / (unbiased + self.config.of_adamw("eps"))
