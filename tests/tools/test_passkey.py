"""The passkey data."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from isp.config import load_config

FOLDER = Path(__file__).parents[2] / "configs" / "passkey"


def test_only_the_repeated_key_and_the_answer_are_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a label that cannot be predicted, and an example that is truncated."""
    file = tmp_path / "train.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(file), "--examples", "50"])
    runpy.run_path(str(FOLDER / "make_data.py"), run_name="__main__")
    config, digits = load_config(FOLDER / "passkey.yaml"), set()
    assert config.topology(4).world_size == 4
    hybrid = load_config(FOLDER / "hybrid.yaml")
    assert hybrid.topology(2).world_size == 2
    assert hybrid.data == config.data
    for line in file.read_text().splitlines():
        tokens, labels = (json.loads(line)[key] for key in ("input_ids", "labels"))
        assert len(tokens) == len(labels) <= config.data.seq_len
        assert all(label in (-100, token) for token, label in zip(tokens, labels, strict=True))
        key = re.findall(r"\d+", bytes(tokens).decode())[0]
        assert bytes(label for label in labels if label != -100).decode() == f"{key} {key}."
        assert bytes(labels[-len(key) - 2 :]).decode() == f" {key}."
        digits.add(len(key))
    assert digits == {1, 2, 3}
