"""The table that `isp schedule` prints for a plan."""

from __future__ import annotations

from textwrap import dedent

import pytest

from isp.core.mesh.config import OverlapUnit, Prefetch
from isp.core.weights.plan_table import grid
from isp.core.weights.prefetch_plan import plan
from isp.core.weights.uses import Action, Chunks, sequential_actions
from tests.core.weights.schedules import EMBEDDING, HEAD, block, decoder


def shown(
    chunks: Chunks,
    order: tuple[Action, ...],
    unit: OverlapUnit = OverlapUnit.LAYER,
    *,
    compact: bool = True,
) -> str:
    made = plan(chunks, order, Prefetch(unit=unit))
    return grid(made, chunks, order, compact=compact)


def actions_in(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith(("F", "B"))]


def test_the_table_of_a_small_model_shows_its_plan() -> None:
    """Catches a column that does not show what its heading says."""
    chunks = ((EMBEDDING, block("a", ("wqkv", "wo")), block("b", ("wqkv", "wo")), HEAD),)
    assert shown(chunks, sequential_actions(1)) == dedent("""\
        start: gathers embedding, all of a
        action  phase     block      use        ahead  gather    free  held
        F0      forward   embedding  embedding      1            own   2, 3
                          a          wqkv           2            own   1, 2
                                     wo             3  all of b  own   2, 3
                          b          wqkv           1                  1, 2
                                     wo             2  head            2, 3
                          head       head           1                  2, 3
        B0      backward  head       head                        own   2, 3
                          b          wo                a: wo     own   2, 3
                                     wqkv              a: wqkv   own   2, 3
                          a          wo             2            own   1, 2
                                     wqkv           2            own   1, 1
                          embedding  embedding                         0, 0

        ahead   number of uses from a weight's all-gather to the wait for it; empty: no wait
        gather  all-gathers that are launched at this use, for a later one
        free    buffers that are freed at this use; own: those of its own weights
        held    blocks and weights that are gathered or in flight during the use

        8 gathers: 6 for forward, 2 for backward; 0 at the moment of use
        at most 2 blocks and 3 weights gathered""")


def test_a_grid_of_long_names_fits_the_terminal() -> None:
    """Catches: lines that wrap, and short names that two blocks or uses of a block share."""
    uses = ("self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj")
    blocks = [block(f"model.layers.{i}", (*uses, "mlp.down_proj")) for i in range(12)]
    for unit in OverlapUnit:
        text = shown(((EMBEDDING, *blocks, HEAD),), sequential_actions(2), unit)
        assert max(map(len, text.splitlines())) <= 100
        assert " layers.0 " in text
        assert " q_proj+k_proj+v_proj " in text
    same = (block("a.x", ("attn.w", "mlp.w")), block("b.x", ("attn.w", "mlp.w")))
    text = shown(((EMBEDDING, *same, HEAD),), sequential_actions(1))
    assert all(f" {name} " in text for name in ("a.x", "b.x", "attn.w", "mlp.w"))


def test_equal_blocks_are_shown_once() -> None:
    """Catches: a grid of thousands of lines; a line that hides a block which differs."""
    text = shown(decoder(32, 0.5), sequential_actions(1))
    assert "... layers.2 to layers.30: the same" in text
    assert "... layers.29 to layers.17: the same" in text  # goes back, not recomputed
    assert "... layers.13 to layers.1: the same" in text  # goes back, recomputed
    for differs in ("layers.31", "layers.16", "layers.15", "layers.0"):  # on the way back
        assert f" {differs} " in text[text.index("backward") :]


def test_equal_actions_are_shown_once() -> None:
    """Catches a table repeated for each micro-batch, and a first or last action that is hidden."""
    text = shown(decoder(2), sequential_actions(8))
    assert "... B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7: the same" in text
    assert actions_in(text) == ["F0", "B0", "F1", "B7"]


def test_the_full_table_has_a_row_for_every_site() -> None:
    """Catches sites missing although all were requested."""
    chunks, order = decoder(8), sequential_actions(2)
    steps = plan(chunks, order, Prefetch()).entries
    lines = shown(chunks, order, compact=False).splitlines()
    assert len(lines) == len(steps) + len(
        ["start", "header", "", *["legend"] * 4, "", "totals", "peak"]
    )


def test_an_invalid_plan_is_not_shown() -> None:
    """Catches a plausible table for a wrong plan."""
    chunks, order = decoder(2), sequential_actions(1)
    made = plan(chunks, order, Prefetch())
    with pytest.raises(AssertionError, match="entry 0"):
        grid(made._replace(start=()), chunks, order)
