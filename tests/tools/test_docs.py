"""The documentation: its site has the READMEs and the reference, and what they name is there."""

from __future__ import annotations

import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import yaml

import isp
import isp.data_parallel
import isp.tensor_parallel
from isp.cli import main
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
    modules = (isp, isp.tensor_parallel, isp.data_parallel)
    listed = {f"{m.__name__}.{name}" for m in modules for name in m.__all__}
    assert set(found) == listed - {"isp.tensor_parallel.IGNORED"}  # a number
    for name, section in found.items():
        signature, _, description = section.partition("```python\n")[2].partition("\n```\n")
        assert signature.startswith(f"{name}("), name
        assert description.strip(), name
    assert "parallelize(model: nn.Module, config: LoopConfig | str | Path" in text
    assert "### ParallelRun.log_probs" in text


READMES = [
    ROOT / folder / "README.md"
    for folder in ("", "configs", "isp", "isp/metrics", "isp/profile", "isp/models", "tools")
] + [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")]


def _headings(readme: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    titles = re.findall(r"^#+ (.*)", readme.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_links_lead_somewhere(readme: Path) -> None:
    """Catches a file that was moved, and a section with another title."""
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", readme.read_text()):
        found = readme.parent / target if target else readme
        assert found.exists(), target
        assert not anchor or anchor in _headings(found), (target, anchor)


def _found(readme: Path, line: str, name: str) -> Path | None:
    """Return the file or folder that a line names, relative to the README, the root or its row."""
    folders = [readme.parent, ROOT]
    if row := re.match(r"\| `([\w./]+/)`", line):  # files in the row's folder
        folders += [folder / row[1] for folder in folders]
    return next((f / name for f in folders if (f / name).exists()), None)


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_files_exist(readme: Path) -> None:
    """Catches a map of the source that shows what is no longer there."""
    missing = []
    for line in readme.read_text().splitlines():
        named = re.findall(r"`([\w./-]+(?:\.py|\.sh|\.md|/))`", line)
        missing += [name for name in named if _found(readme, line, name) is None]
    assert set(missing) <= {"tb/", "memory_snapshot/"}  # in the folder of a run


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_python_names_exist(readme: Path) -> None:
    """Catches a dotted name of `isp` that was moved or renamed."""
    if readme.name == "CHANGELOG.md":  # which names what was removed
        return
    for name in re.findall(r"`(isp(?:\.\w+)+)[`(]", readme.read_text()):
        pkgutil.resolve_name(name)


def test_names_in_files_exist() -> None:
    """Catches design notes that name something in a file which is no longer there."""
    readme, checked = ROOT / "isp" / "README.md", 0
    for line in readme.read_text().splitlines():
        named = [(file, name) for name, file in re.findall(r"`(\w+)` of `([\w/]+\.py)`", line)]
        for file, inside in re.findall(r"`([\w/]+\.py)` \(([^()]*)\)", line):
            named += [(file, name) for name in re.findall(r"`(\w+)`", inside)]
        for note, file in re.findall(r"(\[Note: [^]]*\]) in `([\w/]+\.py)`", line):
            named.append((file, note))
        for file, name in named:
            found = _found(readme, line, file)
            assert found is not None, file
            assert name in found.read_text(), (file, name)
        checked += len(named)
    assert checked > 20


def test_commands_exist() -> None:
    """Catches a command that was renamed."""
    # The change log names commands that were removed since.
    text = "".join(file.read_text() for file in READMES if file.name != "CHANGELOG.md")
    shell = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    named = {*re.findall(r"^isp (\w+)", shell, re.MULTILINE), *re.findall(r"`isp (\w+)", text)}
    assert {"train", "profile", "layouts", "prefetch"} <= named
    for name in named:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0, name
