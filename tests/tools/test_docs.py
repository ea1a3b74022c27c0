"""The documentation's site: its pages are the READMEs, and the reference of the code."""

from __future__ import annotations

import re
import runpy

import pytest
import yaml

import isp
from isp.config import JobConfig
from tests.train.jobs import ROOT

SITE = runpy.run_path(str(ROOT / "docs" / "pages.py"))


@pytest.mark.parametrize("source", SITE["PAGES"])
def test_links_of_a_page_stay_on_the_site(source: str) -> None:
    """Catches a link to a file that the site lacks, and a README that has no page."""
    text = SITE["page"](source)
    for target in re.findall(r"[^!]\[[^\[\]]*\]\((?!http|#)([^)#]*)", text):
        assert target in SITE["PAGES"].values(), target
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [page for entry in nav for page in entry.values()]
    assert sorted(pages) == sorted([*SITE["PAGES"].values(), "reference.md", "api.md"])


def test_the_reference_has_all_commands_and_sections() -> None:
    """Catches a reference that says less than the command line does."""
    text = SITE["reference"]()
    titles = re.findall(r"^### (.*)", text, re.MULTILINE)
    assert {"isp train", "isp data prepare", *JobConfig.__dataclass_fields__} <= set(titles)
    assert "usage: isp layouts" in text
    assert "reshard_after_forward: true or false" in text


def test_the_api_has_all_public_names_with_types() -> None:
    """Catches a public name without a signature or a docstring on its page."""
    text = SITE["api"]()
    sections = re.split(r"^## (?=isp\.)", text, flags=re.MULTILINE)[1:]
    found = {section.partition("\n")[0]: section for section in sections}
    assert set(found) == {f"isp.{name}" for name in [*isp.__all__, "attention"]}
    for name, section in found.items():
        signature, _, description = section.partition("```python\n")[2].partition("\n```\n")
        assert signature.startswith(f"{name}("), name
        assert description.strip(), name
    assert "parallelize(model: nn.Module, config: JobConfig | str | Path" in text
    assert "### ParallelRun.log_probs" in text
