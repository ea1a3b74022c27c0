"""`profile.json`: reading returns what was written, and other files are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from isp.core.comm.tag import Purpose
from isp.profile import Cause, Collective, ModeProfile, Profile
from tests.profile.example import example_profile


def test_a_loss_that_is_not_finite_stays_readable(tmp_path):
    """Catches NaN in the file, which only Python's JSON reader accepts."""
    profile = example_profile()
    mode = dataclasses.replace(profile.modes[0], losses=(None,))
    profile = dataclasses.replace(profile, modes=(mode, profile.modes[1]))
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert Profile.load(path) == profile
    assert profile.largest_loss_difference == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "of version 1, and this version of ISP reads version 2"),
        (
            {"version": 1, "modes": [{}]},
            "of version 1, and this version of ISP reads version 2",
        ),  # other fields
        ({"modes": [{}]}, "modes.0.mode"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_other_files_are_refused(change, message):
    """Catches a file of another version or with unknown keys that is read as a profile."""
    values = json.loads(example_profile().to_json()) | change
    with pytest.raises(ValueError, match=message):
        Profile.from_json(json.dumps(values))


def on_one_rank(mode: ModeProfile, *collectives: Collective) -> ModeProfile:
    rank = mode.ranks[0]
    timeline = dataclasses.replace(rank.timeline, collectives=collectives)
    return dataclasses.replace(mode, ranks=(dataclasses.replace(rank, timeline=timeline),))


def test_each_millisecond_has_one_cause():
    """Catches a first or last transfer counted as avoidable, and a rank that is left out."""
    mtp, isp = example_profile().modes
    both = {Cause.LAST: 8.0, Cause.COULD_HIDE: 6.0, Cause.FIRST: 4.0}  # two ranks
    assert list(isp.exposed_by_cause) == list(both)
    assert isp.exposed_by_cause == pytest.approx(both)
    assert mtp.exposed_by_cause == pytest.approx({Cause.AT_ONCE: 32.0})


def test_waits_for_other_ranks_are_counted_separately():
    """Catches time that is counted twice, or attributed to a transfer that had not started."""
    mtp = example_profile().modes[0]
    first, second = mtp.ranks[0].timeline.collectives
    late = dataclasses.replace(first, others_ms=6.0)
    outside = dataclasses.replace(second, purpose=Purpose.CONTROL)
    found = on_one_rank(mtp, late, outside).exposed_by_cause
    assert found == pytest.approx({Cause.AT_ONCE: 10.0, Cause.OTHER_RANKS: 6.0})


def test_a_profile_without_exposed_time_has_no_causes():
    """Catches causes of zero exposed time, whose shares are undefined."""
    assert on_one_rank(example_profile().modes[0]).exposed_by_cause == {}
