"""What exposed time is explained by."""

from __future__ import annotations

from dataclasses import replace

from isp.comm.tag import Purpose
from isp.profile import Cause, Collective, ModeProfile
from tests.profile.example import example_profile


def on_one_rank(mode: ModeProfile, *collectives: Collective) -> ModeProfile:
    rank = mode.ranks[0]
    timeline = replace(rank.timeline, collectives=collectives)
    return replace(mode, ranks=(replace(rank, timeline=timeline),))


def test_each_millisecond_has_one_cause():
    """Catches an edge that counts as one that could be hidden, and a rank that is left out."""
    mtp, isp = example_profile().modes
    both = {Cause.LAST: 8.0, Cause.COULD_HIDE: 6.0, Cause.FIRST: 4.0}  # two ranks
    assert list(isp.exposed_by_cause.items()) == list(both.items())
    assert mtp.exposed_by_cause == {Cause.AT_ONCE: 32.0}


def test_other_ranks_are_told_apart():
    """Catches time that is counted twice, or put down to a transfer that had not begun."""
    mtp = example_profile().modes[0]
    first, second = mtp.ranks[0].timeline.collectives
    late = replace(first, others_ms=6.0)
    outside = replace(second, purpose=Purpose.CONTROL)
    assert on_one_rank(mtp, late, outside).exposed_by_cause == {
        Cause.AT_ONCE: 10.0,
        Cause.OTHER_RANKS: 6.0,
    }


def test_nothing_is_exposed():
    """Catches causes of nothing, whose shares cannot be told."""
    assert on_one_rank(example_profile().modes[0]).exposed_by_cause == {}
