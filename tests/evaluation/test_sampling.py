"""Tokens are drawn as transformers draws, and text comes whole: a wrong set, a stop that shows."""

from __future__ import annotations

import pytest
import torch

from isp.data.tokenizer import ByteTokenizer
from isp.evaluation.sampling import Sampler, SamplingConfig
from isp.evaluation.text import TextStream

DRAWS = 4000


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 5, 1.0), (2.0, 0, 0.7), (1.5, 7, 0.6)]
)
def test_tokens_have_the_probabilities_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    logits = torch.randn(1, 20, dtype=torch.float64) * 2
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    expected = expected.softmax(-1)[0]
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=1)
    drawn = Sampler(config, DRAWS)(logits.expand(DRAWS, -1))
    found = torch.bincount(drawn, minlength=20) / DRAWS
    assert not found[expected == 0].any()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 / DRAWS**0.5 / 2)


def test_the_likeliest_token_and_the_seed() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert Sampler(SamplingConfig(), 2)(logits).tolist() == [1, 0]
    for temperature in (1e-6, 1e-320):
        assert Sampler(SamplingConfig(temperature=temperature), 2)(logits).tolist() == [1, 0]

    def drawn(seed: int) -> list[list[int]]:
        sampler = Sampler(SamplingConfig(temperature=5.0, seed=seed), 2)
        return [sampler(logits).tolist() for _ in range(12)]

    assert drawn(3) == drawn(3) != drawn(4)


@pytest.mark.parametrize(
    ("values", "told"),
    [({"temperature": -1.0}, "-1.0"), ({"top_k": -1}, "-1"), ({"top_p": 0.0}, "0.0")],
)
def test_values_that_no_draw_has_are_refused(values: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SamplingConfig(**values)  # type: ignore[arg-type]


def shown(text: str | bytes, *stops: str) -> tuple[list[str], bool]:
    """What each byte of `text` makes certain, and the rest."""
    stream, pieces = TextStream(ByteTokenizer(), stops), []
    for token in text.encode() if isinstance(text, str) else text:
        pieces.append(stream.add(token))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.finish()], stream.stopped


def test_letters_come_whole() -> None:
    assert shown("aé€😀b")[0] == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_bytes_that_are_no_letters_hide_none() -> None:
    text = b"\x80\x80\x80\xe2\x82\xac \xf0\x9f\x98\xff\xc3\xa9\xe2"
    assert "".join(shown(text)[0]) == text.decode(errors="replace")


def test_a_stop_ends_the_text_before_it() -> None:
    pieces, stopped = shown("one. two\nthree", "\n\n", "two\n")
    assert ("".join(pieces), stopped) == ("one. ", True)
    pieces, stopped = shown("one. tw", "two")
    assert ("".join(pieces), stopped) == ("one. tw", False)
    assert pieces[:7] == [*"one. ", "", ""]  # held back until it is known
