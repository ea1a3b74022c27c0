"""Losses of transformers models in chunks of tokens, against the unmodified models."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

import isp
from isp.config import JobConfig
from isp.core.mesh import Mode, WeightConfig
from isp.models.traced_model import TracedModel
from tests.models.models import Rows, job, packed_rows, plain_loss, tiny
from tests.models.own import Own
from tests.ranks import run_ranks
from tests.toolkit import Operations

pytest.importorskip("transformers")
CHUNK = 24
"""Tokens of a chunk, which divide neither those of a row nor those of a rank."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": False},
    "phi": {},
    "gpt2": {},
}
"""A plain head, a soft cap, a scale, a head with a bias, and learned positions."""


def _tiny(name: str) -> Any:
    return tiny(name, num_hidden_layers=1, n_layer=1, num_key_value_heads=4, **MODELS[name])


class Layout(NamedTuple):
    """Split of a model over ranks."""

    mode: Mode
    size: int
    keys: dict[str, bool] = {}  # noqa: RUF012 - read alone
    """Keys of `parallel.weight`, in isp mode."""

    def job(self, chunk: int = CHUNK) -> JobConfig:
        """Return a configuration with this layout."""
        config = job(self.size, mode=self.mode)
        weight = WeightConfig(size=self.size, **self.keys) if self.mode is Mode.ISP else None
        return replace(
            config,
            model=replace(config.model, loss_chunk_tokens=chunk),
            training=replace(config.training, max_norm=1e9),
            parallel=replace(config.parallel, weight=weight or config.parallel.weight),
        )


VOCAB_PARALLEL = {"vocab_parallel_loss": True}
HIDDEN = {"embed_split_hidden": True}


ENDS = {}, VOCAB_PARALLEL, VOCAB_PARALLEL | HIDDEN
LAYOUTS = [*(Layout(Mode.ISP, 2, keys) for keys in ENDS)]
LAYOUTS += [Layout(mode, 2) for mode in (Mode.MTP, Mode.MSP, Mode.FSP)]


class Found(NamedTuple):
    """Results of one step of a model on a rank."""

    loss: float
    evaluated: float
    grads: dict[str, Any]
    """Gradients by name, with their layouts."""
    moved: list[str]
    """Transfers of the head's weight."""


def _trained(rank: int, rows: Rows) -> dict[Any, Found]:
    """Return results of one model in every layout, and of others where logits or a table are
    split.
    """
    found = {}
    for name, layout in product(MODELS, LAYOUTS):
        if name != "gemma2" and layout not in LAYOUTS[2:4]:
            continue
        if name == "gpt2" and layout.mode is not Mode.ISP:  # its plan does not cut attention
            continue
        run = isp.parallelize(_tiny(name), layout.job())
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
        found[name, str(layout)] = Found(loss.item(), evaluated, grads, moved)
        run.train_step.drain()
    return found


@pytest.mark.slow
def test_a_models_operations_on_logits_apply_to_every_chunk() -> None:
    """Catches a lost soft cap, scale or bias; tokens, logits or features of another rank; a weight
    sent for each chunk; and a table wrongly cut by rows.
    """
    rows = packed_rows(2, 32, [[20, 12], [32]])
    of_ranks = run_ranks(2, _trained, rows, timeout_seconds=110)
    plain = {name: _tiny(name) for name in MODELS}
    expected = {name: plain_loss(model, rows) for name, model in plain.items()}
    for loss in expected.values():
        loss.backward()
    for case, found in (item for of_rank in of_ranks for item in of_rank.items()):
        name, layout = case
        assert found.loss == pytest.approx(expected[name].item(), rel=1e-9), case
        assert found.evaluated == pytest.approx(expected[name].item(), rel=1e-9), case
        assert sum(not label.endswith(".grad") for label in found.moved) <= 1, case
        assert sum(label.endswith(".grad") for label in found.moved) <= 1, case
        if Mode.ISP in layout:
            by_hidden = any(cut.dim == 1 for _, cut in found.grads.values())
            assert by_hidden == ("embed_split_hidden" in layout)
        for parameter, (gradient, cut) in found.grads.items():
            dw = plain[name].get_parameter(parameter).grad
            assert dw is not None
            own, far = torch.from_numpy(gradient), 1e-9 * dw.abs().max().clamp(min=1e-3).item()
            assert torch.allclose(own, cut.shard(dw), rtol=0, atol=far), (case, parameter)


def test_logits_with_unknown_operations_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a parameter after the head without a gradient, and whole logits without a warning."""
    own = TracedModel(Own())  # divides its logits by a parameter
    assert own.trace.head is None
    assert TracedModel(tiny("llama")).trace.head == "lm_head"
    with pytest.raises(ValueError, match=r"vocab_parallel_loss=true needs logits .* use false"):
        own.check_layout(Layout(Mode.ISP, 2, VOCAB_PARALLEL).job().parallel, 48)
    model = Own()
    with caplog.at_level(logging.WARNING):
        run = isp.parallelize(model, Layout(Mode.ISP, 1).job())
    assert "model.loss_chunk_tokens=24 has no effect: Own computes" in caplog.text
    run.train_step.drain()


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    """Catches logits split unevenly for an exchange of equal parts."""
    parallel = Layout(Mode.ISP, 4, VOCAB_PARALLEL).job().parallel
    with pytest.raises(ValueError, match="size=4 must divide the vocabulary of 98 logits"):
        TracedModel(tiny("llama", vocab_size=98)).check_layout(parallel, 48)


def _largest(rank: int) -> dict[str, int]:
    """Return the size of the largest logits tensor, whose last dim is 200, or a rank's 100."""
    found = {}
    for layout in LAYOUTS:
        run = isp.parallelize(tiny("gemma2", vocab_size=200), layout.job(chunk=80))
        sizes: list[int] = []

        def note(_: str, __: Any, out: Any, sizes: list[int] = sizes) -> None:
            if not isinstance(out, torch.Tensor) or out.is_meta:  # of the check of a row's length
                return
            if out.dim() > 2 and out.shape[-1] in (100, 200):
                sizes.append(out.numel())

        with Operations(note):
            run.step(run.loss(*packed_rows(1, 320, [[320]])))
        found[str(layout)] = max(sizes)
        run.train_step.drain()
    return found


def test_logits_never_exist_as_a_whole() -> None:
    """Catches whole logits made by the forward, or by the operations after the head."""
    for found in run_ranks(2, _largest):
        assert len(found) == 6
        own, *split = found.values()  # the first layout has one rank
        assert own == 80 * 200
        assert set(split) == {80 * 100}
