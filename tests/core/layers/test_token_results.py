"""Per-token results of a head against plain torch, in float64: outputs and every gradient.

B batch, S sequence, V vocabulary, m labels
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.comm import Channel, Mesh
from isp.core.layers.token_results import (
    AllLogits,
    DivergenceRules,
    PickedLogits,
    ResultRules,
    RowLabels,
    TokenLossRules,
    TokenScoreRules,
    TopLogits,
    results_of_head,
    results_of_logits,
)
from isp.core.layers.vocab_loss import IGNORED, LogitShard
from isp.core.mesh import Axis, Mode
from tests.core.layers.test_head_loss import VOCAB, B, S, V, close, loss_of, plain, solo_head
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes

CHUNKS = (0, 1, 5, 18)
TEMPERATURE = 0.7


def _row_labels() -> RowLabels:
    """Return labels of all rows but one, unsorted: one for each, and three more for two rows."""
    random = torch.Generator().manual_seed(5)
    rows = torch.cat([torch.arange(1, B * S), torch.tensor([4, 17, 4, 17, 4, 17])])
    rows = rows[torch.randperm(len(rows), generator=random)]
    tokens = torch.randint(V, (len(rows),), generator=random)
    tokens[::7] = IGNORED
    return RowLabels(tokens, rows)


LABELS = _row_labels()
WEIGHTS = torch.randn(len(LABELS.rows), 3, generator=torch.Generator().manual_seed(6)).double()
"""Gradients of the results."""


def plain_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log-probability, log-sum-exp and entropy for labels [m], given the logits of their
    rows.
    """
    log_p = logits.log_softmax(-1)
    of_label = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    found = [of_label, logits.logsumexp(-1), -(log_p.exp() * log_p).sum(-1)]
    return torch.stack(found, -1).masked_fill((labels == IGNORED).unsqueeze(-1), 0)


@torch.enable_grad()
def plain_row_scores() -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of `LABELS`, and the gradients of input and weight, by plain torch."""
    x, weight = (t.clone().requires_grad_() for t in (plain().x, plain().weight))
    logits = F.linear(x, weight).flatten(0, 1)[LABELS.rows] / TEMPERATURE
    found = plain_scores(logits, LABELS.tokens)
    dx, dw = torch.autograd.grad((found * WEIGHTS).sum(), (x, weight))
    return found.detach(), dx, dw


def _own_labels(labels: RowLabels, parts: int, part: int) -> tuple[RowLabels, Tensor]:
    """Return the labels of a rank's slice of each sequence, and their indices among all labels."""
    size = S // parts
    batch, place = labels.rows // S, labels.rows % S
    (own,) = (place // size == part).nonzero(as_tuple=True)
    rows = batch[own] * size + place[own] - part * size
    return RowLabels(labels.tokens[own], rows), own


def _check_rows(mesh: Mesh, layout: Layout, chunk: int) -> None:
    expected, dx, dw = plain_row_scores()
    tensor, mode = mesh[Axis.TENSOR], layout.mode
    of_head, layers, runtime = loss_of(
        mesh, mode, vocab_parallel=layout.options.vocab_parallel_loss, chunk_tokens=chunk
    )
    head: Any = of_head.head
    with torch.no_grad():
        head.weight.copy_(head.layouts["weight"].shard(plain().weight))

    def own_tokens(t: Tensor) -> Tensor:
        """Return this rank's tokens in the layout of the head's input."""
        return t.chunk(tensor.size, 1)[tensor.rank] if mode is not Mode.MTP else t

    labels, own = LABELS, torch.arange(len(LABELS.rows))
    if not layers.splits_logits:
        labels, own = _own_labels(LABELS, tensor.size, tensor.rank)
    x = own_tokens(plain().x).clone().requires_grad_()
    rules = TokenScoreRules(TEMPERATURE, entropy=True)
    found = results_of_head(of_head, x * 1, labels, rules)
    close(found, expected[own])
    (found * WEIGHTS[own]).sum().backward()
    if runtime is not None:
        runtime.finish()
    assert x.grad is not None
    assert head.weight.grad is not None
    close(x.grad, own_tokens(dx))
    close(head.weight.grad, head.layouts["weight"].shard(dw))


def _all(rank: int, layouts: list[Layout]) -> None:
    meshes = Meshes(rank)
    for layout in layouts:
        for chunk in CHUNKS:
            _check_rows(meshes.of(layout), layout, chunk)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_several_labels_of_a_row_score_as_in_plain_torch(world: int) -> None:
    """Catches a label of another row or chunk, and a row whose softmax counts only one label."""
    isp = Layout(tensor=world, weight=world)
    layouts = [Layout(mode=mode, tensor=world) for mode in (Mode.MTP, Mode.MSP, Mode.FSP)]
    run_ranks(world, _all, [isp, Layout(tensor=world, weight=world, options=VOCAB), *layouts])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_one_label_a_row_gives_the_bits_of_per_token_labels(chunk: int, entropy: bool) -> None:
    """Catches a second code path for the same scores that rounds differently."""
    wanted, rules = plain(), TokenScoreRules(entropy=entropy)
    given = WEIGHTS[:1, : 2 + entropy]
    found = []
    for labels in (wanted.labels, RowLabels(wanted.labels.flatten(), torch.arange(B * S))):
        head, of_head = solo_head(chunk, torch.float32)
        x = wanted.x.float().requires_grad_()
        scores = results_of_head(of_head, x, labels, rules).view(B, S, -1)
        (scores * given).sum().backward()
        assert x.grad is not None
        assert head.weight.grad is not None
        found.append((scores, x.grad, head.weight.grad))
    for by_token, by_row in zip(*found, strict=True):
        assert torch.equal(by_token, by_row)


def test_whole_logits_allow_several_labels_a_row() -> None:
    """Catches rows in another order where the logits exist as a whole."""
    expected, dx, _ = plain_row_scores()
    x = plain().x.clone().requires_grad_()
    logits = F.linear(x, plain().weight)
    shard = LogitShard(Channel.solo(), 0, V)
    found = results_of_logits(logits, LABELS, TokenScoreRules(TEMPERATURE, entropy=True), shard)
    close(found, expected)
    (found * WEIGHTS).sum().backward()
    assert x.grad is not None
    close(x.grad, dx)


RULES: dict[str, tuple[ResultRules, Tensor]] = {
    "all": (AllLogits(), plain().labels),
    "picked": (PickedLogits(), torch.arange(3).expand(B, S, 3)),
    "top": (TopLogits(2), plain().labels),
    "loss": (TokenLossRules(), plain().labels),
    "scores": (TokenScoreRules(TEMPERATURE, entropy=True), plain().labels),
    "divergence": (DivergenceRules(TEMPERATURE), torch.zeros(B, S, 4)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_do_not_change_the_logits(name: str, dtype: torch.dtype) -> None:
    """Catches a rule that overwrites bfloat16 logits, which are not copied first."""
    rules, beside = RULES[name]
    logits = F.linear(plain().x, plain().weight).to(dtype)
    before = logits.clone()
    results_of_logits(logits, beside, rules, LogitShard(Channel.solo(), 0, V))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("by_row", [False, True])
def test_labels_changed_before_backward_are_an_error(by_row: bool) -> None:
    """Catches gradients for labels other than those of the results."""
    labels = plain().labels.clone()
    given = RowLabels(labels.flatten(), torch.arange(B * S)) if by_row else labels
    logits = F.linear(plain().x, plain().weight).requires_grad_()
    found = results_of_logits(logits, given, TokenScoreRules(), LogitShard(Channel.solo(), 0, V))
    labels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_only_scores_allow_several_labels_a_row() -> None:
    """Catches several labels a row passed to rules that do not support them."""
    _, of_head = solo_head(0)
    with pytest.raises(AssertionError):
        results_of_head(of_head, plain().x, LABELS, PickedLogits())


@pytest.mark.parametrize("number", [0, 3])
def test_loss_chunks_may_have_no_labels(number: int) -> None:
    """Catches a chunk without labels that fails, or shifts the labels of the next one."""
    _, of_head = solo_head(1)
    tokens, x = torch.arange(number), plain().x.clone().requires_grad_()
    labels = RowLabels(tokens, torch.full_like(tokens, 7))
    found = results_of_head(of_head, x, labels, TokenScoreRules())
    logits = F.linear(plain().x, plain().weight).flatten(0, 1)[labels.rows]
    close(found, plain_scores(logits, tokens)[:, :2])
    found.sum().backward()
    assert x.grad is not None
    reached = x.grad.flatten(0, 1).abs().sum(-1).nonzero().flatten().tolist()
    assert reached == [7][:number]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_losses_of_tokens_have_gradients(chunk: int) -> None:
    """Catches per-token losses with a wrong gradient, or one that ignores the user's token
    weights.
    """
    wanted, (head, of_head) = plain(), solo_head(chunk)
    weights = torch.rand(B, S, generator=torch.Generator().manual_seed(1)).double()
    x = wanted.x.clone().requires_grad_()
    rules: ResultRules = TokenLossRules()
    losses = results_of_head(of_head, x, wanted.labels, rules).squeeze(-1)
    close(losses, wanted.losses)
    (losses * weights).sum().backward()
    plain_x, weight = wanted.x.clone().requires_grad_(), wanted.weight.clone().requires_grad_()
    logits = F.linear(plain_x, weight).flatten(0, 1)
    alone = F.cross_entropy(logits, wanted.labels.flatten(), reduction="none")
    (alone.view(B, S) * weights).sum().backward()
    for found, expected in ((x.grad, plain_x.grad), (head.weight.grad, weight.grad)):
        assert found is not None
        assert expected is not None
        close(found, expected)
