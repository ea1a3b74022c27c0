"""Mixtures: shares of tokens, limits of epochs, and orders without state."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from isp.config import ConfigError, load_config
from isp.data.mixture import MixedDataset
from isp.data.prepare import prepare
from isp.data.sources import Datasets, open_datasets
from tests.data.chat_folder import write_lines


def text(path: Path, letter: str, num_tokens: int) -> str:
    path.write_text(letter * (num_tokens - 1))
    return str(path)


def opened(folder: Path, parts: str, *, seed: int = 0) -> Datasets:
    job = folder / "job.yaml"
    job.write_text(f"model: {{preset: tiny}}\ndata:\n  seq_len: 8\n  source: {parts}\n")
    return open_datasets(load_config(job).data, seed=seed)


def test_every_stretch_has_the_configured_shares(tmp_path: Path) -> None:
    """Catches shares that only hold at the end, and a sample that is left out or repeated."""
    a, c = text(tmp_path / "a.txt", "a", 160), text(tmp_path / "c.txt", "c", 800)
    pair = prepare(text(tmp_path / "b.txt", "b", 80), tmp_path / "b").prefix
    parts = f"[{{path: {a}, weight: 3}}, {{path: {pair}, weight: 1, epochs: 2.5}}, {{path: [{c}]}}]"
    train = opened(tmp_path, parts, seed=3).train
    assert isinstance(train, MixedDataset)
    counts: Counter[int] = Counter()
    for index in range(3000):
        source, number = train.place(index)
        assert number == counts[source], "none left out"
        counts[source] += 1
        shares = [0.6, 0.2, 0.2] if counts[1] < 25 else [0.75, 0.0, 0.25]
        if counts[1] < 25:
            drawn = [counts[i] / (index + 1) for i in range(3)]
            assert np.abs(np.subtract(drawn, shares)).max() < 3 / (index + 1)
    assert counts[1] == 25
    assert counts[0] / (counts[0] + counts[2]) == pytest.approx(0.75, abs=0.01)
    name = str(pair).lstrip("/")
    wanted = [line.split()[:2] for line in train.summary.splitlines()]
    assert wanted == [["wanted", f"{share}%,"] for share in ("60.0", "20.0", "20.0")]
    assert f"{name} {25 / 3000:.2%} of tokens (2.50 epochs)" in train.shares(3000)
    first = [chr(train.sample(i).tokens[0]) for i in range(50)]
    assert first == ["abc"[train.place(i)[0]] for i in range(50)]
    other = opened(tmp_path, parts, seed=4).train
    assert isinstance(other, MixedDataset)
    assert [other.place(i) for i in range(9)] != [train.place(i) for i in range(9)]


def test_a_share_counts_tokens_not_padding(tmp_path: Path) -> None:
    """Catches examples of half a sequence counted as whole ones."""
    lines = [{"input_ids": [1, 2, 3, 4, 5]}] * 4  # 5 of 8 tokens a sample
    b = write_lines(tmp_path / "b.jsonl", lines)
    a = text(tmp_path / "a.txt", "a", 160)
    train = opened(tmp_path, f"[{{path: {a}}}, {{path: {b}}}]").train
    assert isinstance(train, MixedDataset)
    counts = Counter(train.place(i)[0] for i in range(1300))
    assert counts[0] * 8 == pytest.approx(counts[1] * 5, rel=0.01)


def test_held_out_samples_come_from_each_entry_and_bad_mixtures_are_refused(tmp_path: Path) -> None:
    """Catches an entry of which nothing is held out, and a mixture that would end within a run."""
    a, b = text(tmp_path / "a.txt", "a", 160), text(tmp_path / "b.txt", "b", 160)
    both = f"[{{path: {a}}}, {{path: {b}, epochs: 1}}]\n  valid_fraction: 0.5"
    valid = opened(tmp_path, both).valid
    assert valid is not None
    assert {chr(valid.sample(i).tokens[0]) for i in range(8)} == {"a", "b"}
    for parts, fault in (
        (f"[{{path: {a}, epochs: 1}}]", "data.source limits every entry by epochs"),
        (
            f"[{{path: {a}, weight: 0}}]",
            "data.source must be text or .* sections of path, weight, epochs",
        ),
        (f"[{{path: {a}, share: 1}}]", "data.source must be text"),
        (f"[{{path: {a}, name: x}}, {{path: {b}, name: x}}]", "has two entries named x: give each"),
        (f"[0.3, {a}, 0.7]", "data.source=.* has to give a weight before each path"),
        (f"[0.3, {a}, {b}, 0.7]", "data.source=.* has to give a weight before each path"),
        (f"{a}\n  valid_source: [{{path: {b}, epochs: 1}}]", "data.valid_source gives epochs"),
    ):
        with pytest.raises(ConfigError, match=fault):
            opened(tmp_path, parts)


def test_a_blend_of_megatron_is_the_same_mixture(tmp_path: Path) -> None:
    """Catches weights assigned to other prefixes, and a prefix that needs its suffix."""
    pairs = [
        prepare(text(tmp_path / f"{x}.txt", x, 400), tmp_path / f"{x}.v1").prefix for x in "ab"
    ]
    a, b = pairs
    blend = opened(tmp_path, f"[0.3, {a}, 7e-1, {b}.bin]").train
    entries = opened(tmp_path, f"[{{path: {a}, weight: 3}}, {{path: {b}, weight: 7}}]").train
    assert isinstance(blend, MixedDataset)
    assert isinstance(entries, MixedDataset)
    assert [blend.place(i) for i in range(99)] == [entries.place(i) for i in range(99)]
    letters = Counter(chr(blend.sample(i).tokens[0]) for i in range(40))
    assert letters["a"] == pytest.approx(12, abs=1)
    alone = opened(tmp_path, str(a)).train
    assert np.array_equal(opened(tmp_path, f"[1, {a}]").train.sample(3)[:3], alone.sample(3)[:3])
