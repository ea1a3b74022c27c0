"""`ExplicitAttention` against attention written out in full, on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from isp.core.attention.api import Relative
from isp.core.attention.api import attention as attend
from isp.core.attention.backends import explicit
from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.backends.sdpa import SdpaAttention
from isp.core.attention.heads import HeadSplit
from isp.core.attention.mask import AttentionMask, Chosen
from tests.core.attention.cases import SCALE, Case, wrong_on_ranks
from tests.core.attention.reference import make_mask, random_inputs
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64, sums of a few dozen terms in another order
LENGTH = 24
DOCUMENTS = [5, 8, 2, 6, 3]


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


CASES = {
    "plain": Case(batch=2, explicit=True),
    "capped": Case(DOCUMENTS, batch=2, softcap=1.5),
    "sinks": Case(DOCUMENTS, batch=2, sinks=True),
    "both": Case(batch=2, softcap=1.5, sinks=True),
    "window": Case(DOCUMENTS, batch=2, softcap=1.5, sinks=True, window=3),
    "window of a packed row": Case(DOCUMENTS, softcap=1.5, sinks=True, window=7),
    "not causal": Case(DOCUMENTS, batch=2, softcap=1.5, sinks=True, causal=False),
    "not causal, window": Case(batch=2, softcap=1.5, sinks=True, causal=False, window=3),
}


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("name", CASES)
def test_caps_sinks_and_masks_follow_the_definition(name: str, heads: tuple[int, int]) -> None:
    """Catches a cap, sink, window or document boundary missing in the output or in a gradient."""
    case = replace(CASES[name], heads=heads)
    inputs, dout, expected = case.solved
    assert _error(case.result(case.attention, inputs, dout), expected) < TOLERANCE
    assert all(x.abs().max() > 0.05 for x in expected)


def test_long_rows_in_blocks_follow_the_definition() -> None:
    """Catches a row of several blocks whose later blocks attend to the wrong keys."""
    inputs, dout = random_inputs(1, 700, 2, 1)
    expected = SdpaAttention(scale=SCALE)(*inputs, mask=AttentionMask(window=300))
    found = ExplicitAttention(scale=SCALE)(*inputs, mask=AttentionMask(window=300))
    grads = (torch.autograd.grad(out, inputs, dout) for out in (expected, found))
    assert _error([found], [expected]) < TOLERANCE
    assert all(_error([a], [b]) < TOLERANCE for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("with_sinks", [True, False])
def test_a_distance_bias_follows_the_definition(with_sinks: bool) -> None:
    """Catches a bias at the wrong distance, also in later blocks, and a gradient without the
    bias.
    """
    length, window, heads, num_distances = 600, 300, 4, 290
    inputs, dout = random_inputs(1, length, heads, 2)
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, length, heads, 3), (3, num_distances), (1, length, heads)][: 2 + with_sinks]
    drawn = [torch.randn(x, generator=generator, dtype=torch.float64) for x in sizes]
    leaves = [*inputs, *(x.requires_grad_() for x in drawn)]
    q, k, v, states, profiles, *sinks = leaves
    out = attend(q, k, v, window=window, scale=SCALE, relative=Relative(states, profiles, *sinks))

    back = torch.arange(length).unsqueeze(1) - torch.arange(length)
    at_each = (states @ profiles).transpose(1, 2)  # [1, H, S, E]
    bias = at_each.gather(3, back.clamp(0, num_distances - 1).expand(1, heads, -1, -1))
    bias = bias.where(back < num_distances, 0)
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * SCALE + bias
    logits = logits.masked_fill((back < 0) | (back >= window), -torch.inf)
    columns = [x.transpose(1, 2).unsqueeze(-1) for x in sinks]
    weights = torch.cat([logits, *columns], -1).softmax(-1)[..., :length]
    expected = torch.einsum("bhij,bjhd->bihd", weights, v)

    grads = (torch.autograd.grad(x, leaves, dout) for x in (out, expected))
    assert _error([out], [expected]) < TOLERANCE
    assert all(_error([a], [b]) < TOLERANCE for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(("choices", "run"), [(1, 1), (2, 1), (2, 4)])
def test_a_query_sees_only_its_chosen_keys(
    choices: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches keys chosen for another query, head or document, also in blocks of a few queries."""
    monkeypatch.setattr(explicit, "MOST_LOGITS", 6 * 8 * 3)
    inputs, dout = random_inputs(2, LENGTH, 6, 2)
    mask, length = make_mask(DOCUMENTS, True, None, 2), 2 * LENGTH
    random = torch.Generator().manual_seed(2)
    numbers = torch.randint(-1, 9 // run, (2, LENGTH, choices, 2), generator=random)
    numbers[..., 0] = 0  # that every query sees
    seen = torch.zeros(choices, length, length, dtype=torch.bool)
    for start, stop in pairwise(mask.bounds):
        for i in range(start, stop):
            for c, number in product(range(choices), range(2)):
                first = int(numbers.flatten(0, 1)[i, c, number]) * run
                if first >= 0:
                    seen[c, i, start + first : min(start + first + run, i + 1)] = True
    q, k, v = (x.flatten(0, 1) for x in inputs)
    k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    logits = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    logits = logits.masked_fill(~seen.repeat_interleave(6 // choices, 0), -torch.inf)
    expected = torch.einsum("hij,jhd->ihd", logits.softmax(-1), v).view(dout.shape)
    chosen = Chosen(numbers.to(torch.int32), run)
    found = ExplicitAttention(scale=SCALE)(*inputs, mask=mask, chosen=chosen)
    grads = [torch.autograd.grad(out, inputs, dout) for out in (found, expected)]
    assert _error([found, *grads[0]], [expected, *grads[1]]) < TOLERANCE


def test_bfloat16_is_summed_in_float32() -> None:
    """Catches a softmax or a gradient of sinks with intermediate results rounded to bfloat16."""
    case = CASES["both"]
    inputs, dout, expected = case.solved
    leaves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    found = case.result(case.attention, leaves, dout.bfloat16())
    assert [x.dtype for x in found] == [torch.bfloat16] * 5
    assert _error([x.double() for x in found], expected) < 0.05


ON_RANKS = {
    f"{heads} {name}": replace(case, heads=heads, batch=2)
    for heads in ((6, 2), (7, 7), (3, 1), (2, 2))  # uneven on 4 ranks; the last leave ranks empty
    for name, case in {
        "sinks": Case(DOCUMENTS, softcap=1.5, sinks=True, value_size=3),
        "no sinks": Case(DOCUMENTS, softcap=1.5, window=5, value_size=2),
        "sinks, no cap": Case(sinks=True, causal=False),
    }.items()
}


def test_ranks_compute_the_attention_of_one_process() -> None:
    """Catches the sink of another rank's head, padding of values that is returned, and a rank
    without heads that hangs or makes others hang.
    """
    assert any(not HeadSplit.of(2, 2, 4).query[rank] for rank in range(4))
    apart = {name: replace(case, together=0) for name, case in ON_RANKS.items()}
    plans = [((2, 1), ON_RANKS), ((4, 1), ON_RANKS), ((4, 1), apart)]
    for wrong in run_ranks(4, wrong_on_ranks, plans, TOLERANCE):
        assert not wrong
