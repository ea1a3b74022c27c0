"""`profile.json`: what is written is what is read, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from isp.profile import Profile
from tests.profile.example import example_profile


def test_a_loss_that_is_not_finite_stays_readable(tmp_path):
    """Catches NaN in the file, which no JSON reader but Python's takes."""
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
        ({"version": 1}, "version 1, this program reads version 2"),
        ({"version": 1, "modes": [{}]}, "version 1, this program reads version 2"),  # other fields
        ({"modes": [{}]}, "modes.0.mode"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_other_files_are_refused(change, message):
    """Catches a file of another version or with unknown keys being read as if it were ours."""
    values = json.loads(example_profile().to_json()) | change
    with pytest.raises(ValueError, match=message):
        Profile.from_json(json.dumps(values))


def test_derived_numbers():
    """Catches a share or a bound made of the wrong parts."""
    mtp, isp = (mode.summary for mode in example_profile().modes)
    assert (mtp.exposed_share, mtp.bound_ms, mtp.exposed_over_bound) == (0.16, 16.0, 1.0)
    assert (isp.exposed_share, isp.bound_ms, isp.exposed_over_bound) == (0.09, 6.0, 1.5)
    nothing = dataclasses.replace(mtp, comm_ms=0.0, exposed_ms=0.0, chain_ms=0.0)
    assert (nothing.exposed_share, nothing.exposed_over_bound) == (0.0, None)
