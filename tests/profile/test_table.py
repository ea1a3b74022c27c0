"""A profile as text."""

from dataclasses import replace

from isp.profile.table import describe
from tests.profile.example import example_profile


def _shown(*advice: str) -> list[str]:
    """Return the lines below the worst waits of modes, one for each of `advice`."""
    profile = example_profile()
    mode = profile.modes[0]
    wait = mode.waits[0]
    waits = tuple(replace(wait, advice=text) for text in advice)
    text = describe(replace(profile, modes=(replace(mode, waits=waits),) * 2))
    return [
        line.strip() for line in text.splitlines() if line.startswith("    ") and " of " not in line
    ]


def test_advice_is_said_once() -> None:
    """Catches an advice repeated below each wait, and numbers of a wait that are lost with it."""
    longer = "it takes {} ms: {}x the tokens per micro-batch would hide it"
    first = "mtp needs it at once: isp mode sends weights"
    again = "msp needs it at once: isp mode sends weights"
    found = _shown(longer.format(3, 2.5), first, longer.format(4, 1.5), again, "7 ms")
    said = [longer.format(3, 2.5), first, "it takes 4 ms", "7 ms"]
    assert found == [*said, "it takes 3 ms", "it takes 4 ms", "7 ms"]
