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
        action  phase     block      use        wait       ahead  gather               free       blocks  weights
        start                                                     embedding, all of a                  2        3
        F0      forward   embedding  embedding  embedding      1                       embedding       2        3
                          a          wqkv       wqkv           2                       wqkv            1        2
                                     wo         wo             3  all of b             wo              2        3
                          b          wqkv       wqkv           1                                       1        2
                                     wo         wo             2  head                                 2        3
                          head       head       head           1                                       2        3
        B0      backward  head       head                                              head            2        3
                          b          wo                           a: wo                wo              2        3
                                     wqkv                         a: wqkv              wqkv            2        3
                          a          wo         wo             2                       wo              1        2
                                     wqkv       wqkv           2                       wqkv            1        1
                          embedding  embedding                                                         0        0

        8 gathers: 6 for forward, 2 for backward; 0 at the moment of use
        at most 2 blocks and 3 weights gathered""")  # noqa: E501


def test_equal_blocks_are_shown_once() -> None:
    """Catches a table of thousands of lines, and a line that hides a block which differs."""
    text = shown(decoder(32, 0.5), sequential_actions(1))
    assert "... layers.2 to layers.30 alike" in text
    assert "... layers.29 to layers.17 alike" in text  # backward, not recomputed
    assert "... layers.13 to layers.1 alike" in text  # backward, recomputed
    for differs in ("layers.31", "layers.16", "layers.15", "layers.0"):  # in backward
        assert f" {differs} " in text[text.index("backward") :]


def test_equal_actions_are_shown_once() -> None:
    """Catches a table repeated for each micro-batch, and a first or last action that is hidden."""
    text = shown(decoder(2), sequential_actions(8))
    assert "... B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 alike" in text
    assert actions_in(text) == ["F0", "B0", "F1", "B7"]


def test_the_full_table_has_a_row_for_every_site() -> None:
    """Catches sites missing although all were requested."""
    chunks, order = decoder(8), sequential_actions(2)
    steps = plan(chunks, order, Prefetch()).entries
    lines = shown(chunks, order, compact=False).splitlines()
    assert len(lines) == len(steps) + len(["header", "start", "", "totals", "peak"])


def test_an_invalid_plan_is_not_shown() -> None:
    """Catches a plausible table for a wrong plan."""
    chunks, order = decoder(2), sequential_actions(1)
    made = plan(chunks, order, Prefetch())
    with pytest.raises(AssertionError, match="entry 0"):
        grid(made._replace(start=()), chunks, order)
