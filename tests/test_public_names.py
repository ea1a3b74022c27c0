"""The names that users import from `isp`."""

from __future__ import annotations

import pytest

import isp


@pytest.mark.parametrize("name", isp.__all__)
def test_public_name_is_what_it_says(name: str) -> None:
    """A name that moved away from where `isp` looks for it."""
    assert getattr(isp, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    """A typo that surfaces as something else than what `hasattr` and import expect."""
    with pytest.raises(AttributeError, match="nothing"):
        isp.nothing  # noqa: B018
