"""`FlexAttention`: flex_attention uncompiled on the CPU, and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex

from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.backends.flex import FlexAttention
from isp.core.attention.mask import AttentionMask
from tests.core.attention.reference import (
    attend,
    make_mask,
    random_inputs,
    visible,
    with_gradients,
)

TOLERANCE = 1e-12
CAP = 1.5


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> FlexAttention:
    """Return FlexAttention without the compiler, and with gradients on the CPU.

    flex_attention refuses gradients on the CPU because its compiled form has none there.
    """
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    attention = FlexAttention(scale=0.4, softcap=CAP)
    attention._attend = flex.flex_attention
    return attention


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize(
    ("mask", "queries", "keys"),
    [
        (AttentionMask(), 200, 200),
        (AttentionMask(causal=False), 200, 200),
        (AttentionMask(window=50), 300, 300),
        (AttentionMask(window=50, causal=False), 300, 300),
        (make_mask([7, 150, 143], batch=2), 300, 300),
        (make_mask([7, 150, 143], window=20, batch=2), 300, 300),
        (AttentionMask(), 30, 400),
        (AttentionMask(), 300, 90),
        (AttentionMask.of_documents([30, 60, 1], [130, 60, 0], window=40), 91, 190),
    ],
)
def test_capped_logits_follow_the_definition(
    mask: AttentionMask, queries: int, keys: int, heads: tuple[int, int], as_written: FlexAttention
) -> None:
    """Catches a cap applied before the scale, another alignment, and queries that see no key."""
    batch = 2 if mask.cu_seqlens_k is None else 1
    inputs, dout = random_inputs(batch, queries, *heads, keys=keys)
    out = attend(*inputs, mask, scale=0.4, softcap=CAP)
    expected = with_gradients(out, inputs, dout)
    found = with_gradients(as_written(*inputs, mask=mask), inputs, dout)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) < TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 130, 1000])
@pytest.mark.parametrize(
    ("documents", "keys"), [([700], [700]), ([5, 300, 395], [5, 300, 395]), ([100, 3], [900, 1])]
)
def test_blocks_follow_the_mask(
    documents: list[int],
    keys: list[int],
    window: int | None,
    causal: bool,
    as_written: FlexAttention,
) -> None:
    """Catches a missing block, a partial block computed without its mask, and blocks that no query
    sees.
    """
    mask = AttentionMask.of_documents(documents, keys, causal=causal, window=window)
    made = as_written._blocks(mask, (1, sum(documents), sum(keys)), torch.device("cpu"))
    seen = torch.block_diag(
        *(visible(q, k, causal, window).double() for q, k in zip(documents, keys, strict=True))
    )
    rows, columns = (-(-n // 128) for n in seen.shape)
    padded = torch.zeros(rows * 128, columns * 128).double()
    padded[: seen.shape[0], : seen.shape[1]] = seen
    counts = padded.view(rows, 128, columns, 128).sum((1, 3))
    for row in range(rows):
        inside = min(128, seen.shape[0] - 128 * row) * 128
        partial = made.kv_indices[0, 0, row, : made.kv_num_blocks[0, 0, row]].tolist()
        full = made.full_kv_indices[0, 0, row, : made.full_kv_num_blocks[0, 0, row]].tolist()
        assert full == (counts[row] == inside).nonzero().flatten().tolist()
        wanted = ((counts[row] > 0) & (counts[row] < inside)).nonzero().flatten().tolist()
        assert set(wanted) <= set(partial)
        assert len(set(partial) - set(wanted)) <= len(documents)  # gaps between runs
    assert made.seq_lengths == tuple(seen.shape)


def test_block_masks_are_made_once_for_all_layers(as_written: FlexAttention) -> None:
    """Catches a block mask that each layer makes again."""
    (q, k, v), _ = random_inputs(1, 40, 2, 2)
    for mask in (AttentionMask(), AttentionMask(window=9)) * 3:
        as_written(q, k, v, mask=mask)
    info = as_written._blocks.cache_info()
    assert info.misses == 2


def test_other_lengths_and_masks_do_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches compilation for each micro-batch, and a second cap that becomes a symbol, which
    breaks the graph.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    counter = CompileCounterWithBackend("aot_eager")
    for number, softcap in enumerate((1.5, 2.5)):
        attention = FlexAttention(softcap=softcap)
        attention._attend = torch.compile(flex.flex_attention, backend=counter, fullgraph=True)
        for length in (200, 300, 400):
            inputs, _ = random_inputs(1, length, 2, 1, dtype=torch.float32)
            for mask in (AttentionMask(window=7), make_mask([5, length - 5])):
                attention(*inputs, mask=mask)
        assert counter.frame_count == 2 + number  # for one length, for all, with another cap


def test_all_tensor_kinds_of_a_run_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that ends at the 9th kind of tensors, and the other kernel that few queries
    use, with which backends would be tried when a model is built.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    kernels: list[str] = []

    def compiled(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        arguments = [x for node in graph.graph.nodes for x in node.args]
        kernels.extend(x["BACKEND"] for x in arguments if isinstance(x, dict))
        return graph

    attention = FlexAttention(softcap=CAP)
    attention._attend = torch.compile(flex.flex_attention, backend=compiled, fullgraph=True)
    for mode in (torch.enable_grad, torch.inference_mode):
        for heads in ((2, 1), (4, 2), (6, 3)):
            for length in (48, 300):
                inputs, _ = random_inputs(1, length, *heads, dtype=torch.float32)
                with mode():
                    attention(*inputs, mask=AttentionMask())
    assert kernels == ["TRITON"] * 12


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("size", [64, 256])
def test_capped_logits_on_a_gpu_follow_the_definition(heads: tuple[int, int], size: int) -> None:
    """Catches compiled code with another cap or mask; one more length compiles it for all
    lengths.
    """
    attention = FlexAttention(softcap=CAP)
    for length in (1024, 1300, 1500):
        # Also float64 is computed there: a host takes seconds for each length.
        inputs, dout = random_inputs(1, length, *heads, size, device="cuda")
        for mask in (
            AttentionMask(),
            AttentionMask(window=100),
            AttentionMask.of_documents([300, 1, length - 301]),
        ):
            out = ExplicitAttention(softcap=CAP)(*inputs, mask=mask)
            expected = with_gradients(out, inputs, dout)
            narrow = [x.detach().bfloat16().requires_grad_() for x in inputs]
            found = with_gradients(attention(*narrow, mask=mask), narrow, dout.bfloat16())
            for a, b in zip(found, expected, strict=True):
                # bfloat16 keeps 8 bits; inputs, weights and outputs are each rounded once
                assert float((a.double() - b).norm() / b.norm()) < 0.03
