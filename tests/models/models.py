"""Tiny models of transformers, and plain loops that train them, with which ranks are compared."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.config.sections import TrainingConfig
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh.config import (
    ExpertConfig,
    Mode,
    ParallelConfig,
    Sequence2DConfig,
    TensorConfig,
    WeightConfig,
)
from isp.core.optim.config import OptimizerConfig
from isp.loop.parallel_run import ParallelRun
from isp.loop.token_query import TokenScores
from isp.models.huggingface.tiny import kept_in_float64
from isp.models.known_code import local_layers
from isp.models.runtime.stage_module import StageModule
from isp.models.traced_model import TracedModel
from model.config import ModelConfig

VOCAB = 96
TOLERANCE = 1e-9  # float64, sums in another order; AdamW divides by the root of squares

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_DEEPSEEK = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 4,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
OF_ITS_OWN = {
    "cohere": {"use_qk_norm": True},
    "gpt2": {
        "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, "index_topk": 7, "index_n_heads": 3, "index_head_dim": 8},
    "glm4_moe": {
        **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    },
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **HYBRID},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4,
        "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4,
    },
}  # fmt: skip


def tiny(name: str, *, seed: int = 0, kind: str = "CausalLM", **sizes: Any) -> Any:
    """Return a model of this architecture in float64 whose vectors are not all ones or zeros.

    `kind`: the suffix of the AutoModelFor class.
    """
    import transformers

    torch.manual_seed(seed)
    sizes = {**SIZES, **OF_ITS_OWN.get(name, {}), **sizes}
    config = transformers.AutoConfig.for_model(name, **sizes)
    # Before transformers 5.23 its sdpa leaves out the soft cap of scores; eager never does.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    keys = {"attn_implementation": "eager"} if capped else {}
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config, **keys)
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter += 0.1 * torch.randn_like(parameter)
            else:
                parameter *= 3
    return kept_in_float64(model).train()


def job(
    tensor: int = 1,
    weight: int = 1,
    *,
    mode: Mode = Mode.ISP,
    context: int = 1,
    expert: int = 1,
    recompute: float = 0.0,
    dtype: str = "float64",
    **keys: Any,
) -> JobConfig:
    """Return a configuration with these sizes; `keys` are those of the optimizer."""
    return JobConfig(
        model=ModelConfig(checkpoint=recompute),
        data=DataConfig(source="python-stdlib"),
        parallel=ParallelConfig(
            tensor=TensorConfig(size=tensor, mode=mode),
            weight=WeightConfig(size=weight),
            sequence_2D=Sequence2DConfig(enable=context > 1, context_size=context),
            expert=ExpertConfig(size=expert),
        ),
        training=TrainingConfig(dtype=dtype, max_norm=1.0),
        optimizer=OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.1, **keys}),
    )


class Rows(NamedTuple):
    """Whole rows [B, S]."""

    input_ids: Tensor
    labels: Tensor | None = None
    position_ids: Tensor | None = None

    def part(self, index: int, count: int) -> Rows:
        """Return every `count`-th part of the rows."""
        return Rows(*(None if x is None else x.chunk(count)[index] for x in self))  # type: ignore[arg-type]


def packed_rows(rows: int, length: int, documents: list[list[int]], seed: int = 0) -> Rows:
    """Return random tokens in documents of these lengths; a few tokens have no label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    labels = ids.masked_fill(positions == 0, IGNORED)
    labels[:, 5:9] = IGNORED
    return Rows(ids, labels, positions)


class Trained(NamedTuple):
    """Losses, gradient norms and weights of a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def plain_loss(model: nn.Module, rows: Rows, *, total: bool = False) -> Tensor:
    """Return the mean loss of the unmodified model, or with `total` the sum."""
    labels = _labels(rows)
    losses = F.cross_entropy(
        plain_logits(model, rows)[:, :-1].flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return losses if total else losses / (labels != IGNORED).sum()


def plain_scores(model: nn.Module, rows: Rows, temperature: float) -> TokenScores:
    """Return the unmodified model's scores of each token that has a label."""
    logits, labels = plain_logits(model, rows)[:, :-1] / temperature, _labels(rows)
    log_probs = logits.log_softmax(-1)
    scores = (
        log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1),
        logits.logsumexp(-1),
        -(log_probs.exp() * log_probs).sum(-1),
    )
    return TokenScores(*(F.pad(x * (labels != IGNORED), (1, 0)) for x in scores))


def _labels(rows: Rows) -> Tensor:
    """Return labels [B, S - 1], the next token at each position; none across documents."""
    labels = (rows.input_ids if rows.labels is None else rows.labels).clone()
    for row in range(len(labels)):
        labels[row, [document.start for document in documents_of(rows, row)]] = IGNORED
    return labels[:, 1:]


def plain_logits(model: Any, rows: Rows) -> Tensor:
    """Return logits [B, S, V] of the unmodified model, each document alone."""
    of_rows = []
    for row, ids in enumerate(rows.input_ids):
        of_documents = []
        for document in documents_of(rows, row):
            tokens = ids[None, document]
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
            if hasattr(model, "config"):
                out = model(input_ids=tokens, position_ids=positions, use_cache=False)
                of_documents.append(out.logits[0])
            else:
                of_documents.append(model(tokens, positions)[0])
        of_rows.append(torch.cat(of_documents))
    return torch.stack(of_rows)


def documents_of(rows: Rows, row: int) -> list[slice]:
    length = rows.input_ids.shape[1]
    starts = [0]
    if rows.position_ids is not None:
        starts = (rows.position_ids[row] == 0).nonzero().flatten().tolist()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], length], strict=True)]


def decayed(model: nn.Module) -> set[str]:
    """Return the names of the weights that transformers' Trainer decays, without vectors."""
    from transformers.trainer import Trainer

    names = Trainer.get_decay_parameter_names(None, model)
    return {n for n, p in model.named_parameters() if n in names and p.dim() > 1}


def trained_plainly(
    model: nn.Module,
    data: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], Tensor] = plain_loss,
    **keys: Any,
) -> Trained:
    """Train the unmodified model in a plain loop with torch's AdamW."""
    model = copy.deepcopy(model)
    settings = job(**keys).optimizer
    own, names = [p for p in model.parameters() if p.requires_grad], decayed(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": 0.1 if name in names else 0.0}
            for name, p in model.named_parameters()
            if p.requires_grad
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    losses, norms = [], []
    for rows in data:
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(own, 1.0).item())
        losses.append(loss.item())
        optimizer.step()
    return Trained(losses, norms, {n: p.detach() for n, p in model.named_parameters()})


def trained(
    run: ParallelRun,
    data: list[Rows],
    before: Callable[[ParallelRun, Rows], object] = lambda *_: None,
) -> Trained:
    """Train a parallelized model on a rank's part of each step's rows; call `before` with that
    part.
    """
    losses, norms = [], []
    for rows in data:
        part = rows.part(run.dp_rank, run.dp_size)
        before(run, part)
        outcome = run.step(run.loss(*part))
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    return Trained(losses, norms, whole_weights(run))


def whole_weights(run: ParallelRun) -> dict[str, Tensor]:
    """Return all weights of a model, gathered from its ranks."""
    run.train_step.drain()
    found = {item.name: run.weights.whole(item).clone() for item in run.train_step.built.parameters}
    run.train_step.weights_changed()
    return found


def assert_trained_as(expected: Trained, of_ranks: Iterable[Trained], what: object = None) -> None:
    """Check that every rank's results equal `expected`."""
    for found in of_ranks:
        assert worst(found, expected) < TOLERANCE, what


def worst(found: Trained, expected: Trained) -> float:
    """Return the largest difference of two runs; those of weights are relative to the largest
    value.
    """
    numbers = zip(found.losses + found.norms, expected.losses + expected.norms, strict=True)
    assert found.weights.keys() == expected.weights.keys()
    return max(
        *(abs(a - b) for a, b in numbers),
        *(
            ((found.weights[name] - w).abs().max() / w.abs().max().clamp(min=1e-30)).item()
            for name, w in expected.weights.items()
        ),
    )


def instead_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, model: str, text: str
) -> None:
    """Replace a modeling file by `text`, written into `folder`, for one test.

    name: the module of transformers; model: the class in it that builds models.
    """
    package = importlib.import_module(name.rpartition(".")[0])
    getattr(package, model)  # loaded before the copy, which would stay after the test otherwise
    file = folder / "modeling.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, changed)
    spec.loader.exec_module(changed)
    monkeypatch.setattr(package, model, getattr(changed, model))


def alone(traced: TracedModel) -> StageModule:
    """Return the model on one rank in float64, its weights not initialized."""
    layers = local_layers()
    (chunk,) = traced.build(layers)
    return chunk
