"""`DataConfig`: what is refused, and that the boundary values are not."""

import dataclasses
from typing import Any

import pytest

from isp.data.config import DataConfig


def test_smallest_values_are_accepted() -> None:
    """Catches a check that is off by one at the lower end."""
    config = DataConfig(source=["a"], seq_len=1, micro_bsz=1, micro_num=1, valid_fraction=0.0)
    assert (config.seq_len, config.micro_bsz, config.micro_num) == (1, 1, 1)
    assert DataConfig(source="a", valid_fraction=0.999).valid_fraction == 0.999


def test_is_frozen() -> None:
    """Catches a config that a run could change behind the back of what was logged."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataConfig(source="a").seq_len = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seq_len": 0}, "data.seq_len=0 must be at least 1"),
        ({"micro_bsz": 0}, "data.micro_bsz=0 must be at least 1"),
        ({"micro_num": -2}, "data.micro_num=-2 must be at least 1"),
        ({"valid_fraction": 1.0}, "data.valid_fraction=1.0 must be below 1"),
        ({"valid_fraction": -0.1}, "data.valid_fraction=-0.1 must be"),
        ({"valid_fraction": float("nan")}, "data.valid_fraction=NaN must be finite"),
        ({"valid_fraction": 0.1, "valid_source": "b"}, "both say what is held out"),
        ({"source": ""}, 'data.source="" names nothing to read'),
        ({"source": []}, "data.source=[] names nothing to read"),
        ({"source": ["a", ""]}, 'data.source=["a", ""] names nothing to read'),
        ({"valid_source": []}, "data.valid_source=[] names nothing to read"),
        ({"text_key": ""}, 'data.text_key="" must not be empty (default: "text")'),
        ({"tokenizer": ""}, 'data.tokenizer="" must not be empty (default: "bytes")'),
        ({"eos_token": "</s>"}, "data.eos_token=</s> has no meaning with data.tokenizer=bytes"),
    ],
)
def test_refuses_what_cannot_work(values: dict[str, Any], message: str) -> None:
    """Catches a value that would fail later, in the middle of a run, with another message."""
    with pytest.raises(ValueError, match=r"^data\.") as refused:
        DataConfig(**{"source": "a", **values})
    assert message in str(refused.value)


def test_reports_all_faults_at_once() -> None:
    """Catches a user having to start a run once for each mistake."""
    with pytest.raises(ValueError, match=r"(?s)seq_len=0.*micro_bsz=0"):
        DataConfig(source="a", seq_len=0, micro_bsz=0)
