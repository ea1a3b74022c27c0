"""`DataConfig` refuses values that its types and ranges alone would allow."""

from typing import Any

import pytest

from isp.config.data import DataConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"valid_fraction": 1.0}, "data.valid_fraction=1.0 must be below 1"),
        ({"valid_fraction": 0.1, "valid_source": "b"}, "both say what is held out"),
        ({"source": ""}, 'data.source="" names nothing to read'),
        ({"source": []}, "data.source=[] names nothing to read"),
        ({"source": ["a", ""]}, 'data.source=["a", ""] names nothing to read'),
        ({"valid_source": []}, "data.valid_source=[] names nothing to read"),
        ({"eos_token": "</s>"}, "data.eos_token=</s> has no meaning with data.tokenizer=bytes"),
    ],
)
def test_values_that_would_fail_later_are_refused(values: dict[str, Any], message: str) -> None:
    """Catches a value that would fail in the middle of a run, with another message."""
    with pytest.raises(ValueError, match=r"^data\.") as refused:
        DataConfig(**{"source": "a", **values})
    assert message in str(refused.value)
