"""Losses of models of transformers in chunks of tokens, against the unmodified models."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import isp
from isp.traced.model import TracedModel
from tests.ranks import run_ranks
from tests.traced.models import Rows, job, packed_rows, plain_loss, tiny
from tests.traced.own import Own

pytest.importorskip("transformers", minversion="5.23")
CHUNK = 5
"""Tokens, of rows of 32."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},
}
"""A plain head, a soft cap, two scales, and a head with a bias."""


def _job(**sizes: Any) -> Any:
    config = job(**sizes)
    return replace(
        config,
        model=replace(config.model, loss_chunk_tokens=CHUNK),
        training=replace(config.training, max_norm=1e9),
    )


def _trained(rank: int, names: list[str], rows: Rows, sizes: dict[str, int]) -> dict[str, Any]:
    """Of each model the loss, an evaluation, every shard's gradient, and what moves of the head."""
    found = {}
    for name in names:
        run = isp.parallelize(tiny(name, **MODELS[name]), _job(**sizes))
        part = rows.part(run.dp_rank, run.dp_size)
        run.mesh.log.collect()
        with torch.no_grad():
            evaluated = run.loss(*part).item()
        run.mesh.log.take()
        loss = run.loss(*part)
        run.step(loss, lr=0.0)
        gradients = run.train_step.gradients
        grads = {
            i.name: (gradients.whole(i.parameter).numpy().copy(), i.layout)
            for i in run.train_step.built.trained
        }
        head = run.train_step.chunks[0].trace.head  # type: ignore[attr-defined]
        moved = [t.label for t in run.mesh.log.take() if t.label.startswith(f"{head}.weight")]
        found[name] = loss.item(), evaluated, grads, moved
        run.train_step.drain()
    return found


@pytest.mark.parametrize("sizes", [{"tensor": 1, "weight": 1}, {"tensor": 2, "weight": 2}], ids=str)
def test_what_a_model_does_to_its_logits_is_done_to_every_chunk(sizes: dict[str, int]) -> None:
    """Catches a soft cap, a scale or a bias that is lost, and a weight moved for each chunk."""
    rows = packed_rows(2, 32, [[20, 12], [32]])
    of_ranks = run_ranks(sizes["tensor"], _trained, list(MODELS), rows, sizes)
    for name in MODELS:
        model = tiny(name, **MODELS[name])
        expected = plain_loss(model, rows)
        expected.backward()
        for loss, evaluated, grads, moved in (of_rank[name] for of_rank in of_ranks):
            assert loss == pytest.approx(expected.item(), rel=1e-9), name
            assert evaluated == pytest.approx(expected.item(), rel=1e-9), name
            assert sum(not label.endswith(".grad") for label in moved) <= 1, (name, moved)
            assert sum(label.endswith(".grad") for label in moved) <= 1, (name, moved)
            for parameter, (gradient, layout) in grads.items():
                plain = model.get_parameter(parameter).grad
                assert plain is not None
                found, own = torch.from_numpy(gradient), layout.shard(plain)
                far = 1e-9 * plain.abs().max().clamp(min=1e-3).item()
                assert torch.allclose(found, own, rtol=0, atol=far), (name, parameter)


def test_logits_that_are_made_of_more_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a parameter behind the head that gets no gradient, and whole logits in silence."""
    own = TracedModel(Own())  # divides its logits by a parameter
    assert own.trace.head is None
    assert TracedModel(tiny("llama")).trace.head == "lm_head"
    model = Own()
    with caplog.at_level(logging.WARNING):
        run = isp.parallelize(model, _job())
    assert "the logits of Own exist as a whole, model.loss_chunk_tokens=5" in caplog.text
    run.train_step.drain()


def test_logits_never_exist_as_a_whole() -> None:
    """Catches logits that are made by the forward, or by what lies behind the head."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == 96:
                self.numel = max(self.numel, out.numel())
            return out

    run = isp.parallelize(tiny("gemma2"), _job())
    with Largest() as largest:
        run.step(run.loss(*packed_rows(1, 32, [[32]])))
    assert largest.numel == CHUNK * 96
