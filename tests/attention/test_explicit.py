"""`ExplicitAttention` against attention written out in full, here and on 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.attention import AttentionMask, DistributedAttention, HeadPlan, explicit
from isp.attention.call import Relative
from isp.attention.call import attention as attend
from isp.attention.explicit import ExplicitAttention
from isp.attention.mask import Chosen
from isp.attention.sdpa import SdpaAttention
from isp.comm import Channel
from tests.attention.reference import make_mask, random_inputs, visible
from tests.ranks import run_ranks

TOLERANCE = 1e-12  # float64, sums of a few dozen terms in another order
LENGTH = 24
SCALE = 0.4
DOCUMENTS = [5, 8, 2, 6, 3]


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [B, S, H, d], k [B, S, K, d], v [B, S, K, e] -> [B, S, H, e], by the definition."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    ends = [0, q.shape[1]] if mask.cu_seqlens is None else mask.cu_seqlens.tolist()
    if mask.cu_seqlens is not None:
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    outs = []
    for a, b in pairwise(ends):
        logits = torch.einsum("bihd,bjhd->bhij", q[:, a:b], k[:, a:b]) * SCALE
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weights = logits.exp() * visible(b - a, b - a, mask.causal, mask.window)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp().view(1, -1, 1, 1)
        outs.append(torch.einsum("bhij,bjhe->bihe", weights / total, v[:, a:b]))
    return torch.cat(outs, 1)


@dataclass(frozen=True)
class Case:
    """What is attended, and what must come out."""

    mask: AttentionMask
    softcap: float | None
    inputs: list[Tensor]
    """q, k, v and, if there are any, sinks."""
    dout: Tensor
    expected: list[Tensor]
    """The output, and the gradients of the inputs."""

    @classmethod
    def of(
        cls,
        heads: tuple[int, int],
        *,
        causal: bool = True,
        window: int | None = None,
        packed: bool = True,
        softcap: float | None = 1.5,
        sinks: bool = True,
        value_size: int = 4,
        batch: int = 2,
    ) -> Case:
        mask = make_mask(DOCUMENTS if packed else None, causal, window, batch)
        inputs, dout = random_inputs(batch, LENGTH, *heads)
        inputs[2] = inputs[2].detach()[..., :value_size].clone().requires_grad_()
        if sinks:
            generator = torch.Generator().manual_seed(1)
            drawn = torch.randn(heads[0], generator=generator, dtype=torch.float64)
            inputs.append(drawn.requires_grad_())
        dout = dout[..., :value_size].contiguous()
        sink = inputs[3] if sinks else None
        out = written_out(*inputs[:3], mask, softcap, sink).view(dout.shape)
        grads = torch.autograd.grad(out, inputs, dout)
        return cls(mask, softcap, inputs, dout, [out.detach(), *grads])


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a - b.reshape(a.shape)).detach().abs().max())
        for a, b in zip(found, expected, strict=True)
    )


CASES = {
    "plain": {"softcap": None, "sinks": False, "packed": False},
    "capped": {"sinks": False},
    "sinks": {"softcap": None},
    "both": {"packed": False},
    "window": {"window": 3},
    "window of a packed row": {"window": 7, "packed": True, "batch": 1},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 3, "packed": False},
}


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("name", CASES)
def test_is_what_the_definition_says(name: str, heads: tuple[int, int]) -> None:
    """Catches a cap, a sink, a window or a document that is left out, in output or a gradient."""
    case = Case.of(heads, **CASES[name])
    attention = ExplicitAttention(scale=SCALE, softcap=case.softcap)
    q, k, v, *sinks = case.inputs
    out = attention(q, k, v, mask=case.mask, sinks=sinks[0] if sinks else None)
    found = [out.detach(), *torch.autograd.grad(out, case.inputs, case.dout)]
    assert _error(found, case.expected) < TOLERANCE
    assert all(x.abs().max() > 0.05 for x in case.expected)


def test_blocks_of_long_rows_join_without_a_seam() -> None:
    """Catches a row of several blocks whose later ones look at the wrong keys."""
    inputs, dout = random_inputs(1, 700, 2, 1)
    wanted = SdpaAttention(scale=SCALE)(*inputs, mask=AttentionMask(window=300))
    found = ExplicitAttention(scale=SCALE)(*inputs, mask=AttentionMask(window=300))
    grads = (torch.autograd.grad(out, inputs, dout) for out in (wanted, found))
    assert _error([found], [wanted]) < TOLERANCE
    assert all(_error([a], [b]) < TOLERANCE for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("with_sinks", [True, False])
def test_a_bias_by_distance_is_what_the_definition_says(with_sinks: bool) -> None:
    """Catches a bias at another distance, in a later block too, and a gradient that lacks it."""
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
def test_a_query_sees_the_keys_that_are_chosen_for_it(
    choices: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches keys of another query, head or document, in blocks of a few queries, too."""
    monkeypatch.setattr(explicit, "_MOST_LOGITS", 6 * 8 * 3)
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
    wanted = torch.einsum("hij,jhd->ihd", logits.softmax(-1), v).view(dout.shape)
    chosen = Chosen(numbers.to(torch.int32), run)
    found = ExplicitAttention(scale=SCALE)(*inputs, mask=mask, chosen=chosen)
    grads = [torch.autograd.grad(out, inputs, dout) for out in (found, wanted)]
    assert _error([found, *grads[0]], [wanted, *grads[1]]) < TOLERANCE


def test_narrow_numbers_are_summed_in_float32() -> None:
    """Catches a softmax or a gradient of sinks that is rounded to bfloat16 on the way."""
    case = Case.of((4, 2))
    leaves = [x.detach().bfloat16().requires_grad_() for x in case.inputs]
    attention = ExplicitAttention(scale=SCALE, softcap=case.softcap)
    out = attention(*leaves[:3], mask=case.mask, sinks=leaves[3])
    grads = torch.autograd.grad(out, leaves, case.dout.bfloat16())
    assert out.dtype == torch.bfloat16
    assert [x.dtype for x in grads] == [torch.bfloat16] * 4
    assert _error([x.double() for x in (out, *grads)], case.expected) < 0.05


ON_RANKS = {
    f"{heads} {name}": Case.of(heads, **options)
    for heads in ((6, 2), (7, 7), (3, 1), (2, 2))  # uneven on 4 ranks; the last leave ranks empty
    for name, options in {
        "sinks": {"value_size": 3},
        "no sinks": {"sinks": False, "window": 5, "value_size": 2},
        "sinks, no cap": {"softcap": None, "packed": False, "causal": False},
    }.items()
}


def _part(x: Tensor, channel: Channel) -> Tensor:
    return x.chunk(channel.size, dim=1)[channel.rank]


def _on_ranks(rank: int, together: int) -> dict[str, float]:
    channel = Channel(dist.group.WORLD, name="sequence")
    errors = {}
    for name, case in ON_RANKS.items():
        local = ExplicitAttention(scale=SCALE, softcap=case.softcap)
        attention = DistributedAttention(local, channel, together_below_bytes=together)
        leaves = [_part(x.detach(), channel).clone().requires_grad_() for x in case.inputs[:3]]
        leaves += [x.detach().clone().requires_grad_() for x in case.inputs[3:]]
        sinks = {"sinks": leaves[3]} if len(leaves) > 3 else {}
        out = attention(*leaves[:3], mask=case.mask, **sinks)
        grads = torch.autograd.grad(out, leaves, _part(case.dout, channel))
        found = [out.detach(), *grads[:3]]
        expected = [_part(x, channel) for x in case.expected[:4]]
        if sinks:  # every rank has the gradient of its heads, to be summed
            found.append(channel.all_reduce(grads[3]).wait())
            expected.append(case.expected[4])
        errors[name] = _error(found, expected)
    return errors


@pytest.mark.parametrize(("world", "together"), [(2, 1 << 40), (4, 1 << 40), (4, 0)])
def test_ranks_attend_as_one_does(world: int, together: int) -> None:
    """Catches the sink of another rank's head, padding of values that is sent back, a rank without
    heads that waits or is waited for.
    """
    assert any(not HeadPlan.of(2, 2, 4).query[rank] for rank in range(4))
    for errors in run_ranks(world, _on_ranks, together):
        assert len(errors) == len(ON_RANKS)
        assert not [(name, error) for name, error in errors.items() if not error < TOLERANCE]
