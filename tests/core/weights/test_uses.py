"""The sequence of uses in a step, before any weight is planned."""

from __future__ import annotations

import pytest

from isp.core.weights.uses import (
    Block,
    Use,
    inputs_kept,
    recomputed_blocks,
    sequential_actions,
    step_spans,
)
from tests.core.weights.schedules import EMBEDDING, HEAD, actions, block


def used(chunks: tuple[tuple[Block, ...], ...], order: str) -> list[str]:
    return [
        f"{site.phase} {chunks[site.chunk][site.block].uses[site.use].name} reads {weight}"
        for span in step_spans(chunks, actions(order))
        for site, weight in zip(span.sites, span.reads, strict=True)
    ]


def test_backward_recomputes_block_by_block() -> None:
    """Catches a wrong order, a use of `attn` in backward, and an embedding read in backward."""
    chunks = ((EMBEDDING, block("a", ("wqkv", "attn", "wo"), recomputed=True), HEAD),)
    assert used(chunks, "F0 B0") == [
        "forward embedding reads embedding",
        "forward wqkv reads a.wqkv",
        "forward attn reads None",
        "forward wo reads a.wo",
        "forward head reads head",
        "backward head reads head",
        "recompute wqkv reads a.wqkv",
        "recompute attn reads None",
        "recompute wo reads a.wo",
        "backward wo reads a.wo",
        "backward wqkv reads a.wqkv",
        "backward embedding reads None",
    ]


def test_recompute_and_backward_are_one_span() -> None:
    """Catches a recomputed block that would be gathered once for each of the two."""
    spans = step_spans(((block("a", recomputed=True),),), actions("F0 B0"))
    assert [len(span.sites) for span in spans] == [5, 5 + 4]


def test_missing_inputs_are_recomputed_first() -> None:
    """Catches a block recomputed twice, out of order, or needlessly as the last of its segment."""
    names = "abcde"
    kept = inputs_kept((True,) * 4 + (False,), segment=3)
    assert kept == (True, False, False, True, True)
    blocks = [
        block(name, ("wqkv",), recomputed=name != "e", input_kept=k)
        for name, k in zip(names, kept, strict=True)
    ]
    chunks = (tuple(blocks),)
    spans = [span for span in step_spans(chunks, actions("F0 B0")) if span.action.kind == "B"]
    passed = [names[span.block] + ("'" if span.computes_again else "") for span in spans]
    assert passed == ["e", "d", "a'", "b'", "c", "b", "a"]
    assert used(chunks, "F0 B0")[5:10] == [
        "backward wqkv reads e.wqkv",
        "recompute wqkv reads d.wqkv",
        "backward wqkv reads d.wqkv",
        "recompute wqkv reads a.wqkv",
        "recompute wqkv reads b.wqkv",
    ]
    assert inputs_kept((True,) * 3, segment=0) == (True,) * 3


def test_selective_recompute_precedes_the_backward_of_each_part() -> None:
    """Catches a recomputation expected at a use that it skips, or expected after a backward."""
    kept = Use("attn", in_recompute=False)
    chunks = ((Block("a", (Use("wqkv", "q"), kept, Use("wo", "o")), recomputed=True),),)
    assert used(chunks, "F0 B0")[3:] == [
        "recompute wo reads o",
        "backward wo reads o",
        "recompute wqkv reads q",
        "backward wqkv reads q",
    ]


def test_the_weight_gradient_half_of_a_backward_reads_no_weight() -> None:
    """Catches weights gathered for weight gradients, which only need activations."""
    chunks = ((block("a"), block("b")),)
    split = actions("F0 F1 B0 B1 W0 W1")
    assert step_spans(chunks, split) == step_spans(chunks, split[:4])


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0 F0", "F0 occurs twice"),
        ("B0 F0", "B0 comes before F0"),
        ("F0 W0 B0", "W0 comes before B0"),
        ("F0.1", "there are 1 chunks"),
        ("F0 B1 F1", "B1 comes before F1"),
    ],
)
def test_an_impossible_order_of_work_is_refused(order: str, message: str) -> None:
    """Catches a schedule with an action missing or doubled."""
    with pytest.raises(AssertionError, match=message):
        step_spans(((HEAD,),), actions(order))


def test_actions_print_as_they_are_written() -> None:
    """Catches names in the table that do not say which chunk they belong to."""
    assert " ".join(map(str, actions("F0 F1.2 B0 W0"))) == "F0 F1.2 B0 W0"
    assert sequential_actions(2) == actions("F0 B0 F1 B1")
    assert sequential_actions(2, training=False) == actions("F0 F1")


@pytest.mark.parametrize(
    ("num_layers", "fraction", "count"),
    [(8, 0, 0), (8, 0.25, 2), (8, 0.5, 4), (8, 1, 8), (5, 0.5, 3), (3, 0.01, 1), (100, 0.07, 7)],
)
def test_a_fraction_rounds_up_to_the_first_layers(
    num_layers: int, fraction: float, count: int
) -> None:
    """Catches rounding down, and 0.07 * 100 taken as slightly more than 7."""
    expected = (True,) * count + (False,) * (num_layers - count)
    assert recomputed_blocks(num_layers, fraction) == expected


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_of_0_to_1_is_refused(fraction: float) -> None:
    """Catches a percentage passed as a fraction."""
    with pytest.raises(ValueError, match=r"model\.checkpoint=.* must be between 0"):
        recomputed_blocks(8, fraction)
