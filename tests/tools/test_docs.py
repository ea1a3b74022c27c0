"""The documentation: its pages are on the site, and what they name and link exists."""

from __future__ import annotations

import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import isp
import isp.data_parallel
import isp.tensor_parallel
from isp.cli import main
from isp.config import JobConfig
from tests.train.jobs import ROOT

SITE = runpy.run_path(str(ROOT / "docs" / "pages.py"))
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READMES = sorted(ROOT.glob("*.md")) + [
    page for folder in ("configs", "isp", "tools") for page in sorted((ROOT / folder).rglob("*.md"))
]
FROM_ROOT = {page: source for source, page in SITE["FROM_ROOT"].items()}
FILES = [f for d in ("isp", "model", "tools", "tests") for f in (ROOT / d).rglob("*.[ps][yh]")]
SOURCES = [f for folder in ("isp", "model", "tools") for f in sorted((ROOT / folder).rglob("*.py"))]


def _name(page: Path) -> str:
    """Return the name of a page in the ids of tests."""
    return str(page.relative_to(ROOT))


def _pages_of(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the navigation, in order."""
    for below in entry.values() if isinstance(entry, dict) else entry:
        yield from [below] if isinstance(below, str) else _pages_of(below)


def test_the_navigation_has_every_page() -> None:
    """Catches a page that nobody finds, and an entry without a page."""
    nav = [*_pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    made = {*SITE["FROM_ROOT"].values(), *SITE["GENERATED"]}
    files = {str(page.relative_to(DOCS)) for page in PAGES}
    assert sorted(nav) == sorted(made | files)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="needs pip install -e '.[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    """Catches what mkdocs warns of: a page outside of the navigation, a link, an anchor."""
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def test_links_of_generated_pages_stay_on_the_site() -> None:
    """Catches a link of README.md, say, to a page that the site lacks."""
    for source, name in SITE["FROM_ROOT"].items():
        for target in re.findall(r"\]\((?!https?:|#)([^)#]*)", SITE["page"](source)):
            found = {*SITE["FROM_ROOT"].values(), *SITE["GENERATED"]}
            assert target in found or (DOCS / target).is_file(), (name, target)


def test_the_reference_has_all_commands_and_sections() -> None:
    """Catches a reference that says less than the command line does."""
    text, keys = SITE["commands"](), SITE["keys"]()
    assert {"isp train", "isp data prepare"} <= {*re.findall(r"^## (.*)", text, re.MULTILINE)}
    assert "usage: isp layouts" in text
    assert [*JobConfig.__dataclass_fields__] == re.findall(r"^## (.*)", keys, re.MULTILINE)
    assert "reshard_after_forward: true or false" in keys


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


def _text(page: Path) -> str:
    """Return the text of a page, made from the code if it is no file."""
    name = str(page.relative_to(DOCS)) if page.is_relative_to(DOCS) else ""
    return str(SITE["GENERATED"][name]() if name in SITE["GENERATED"] else page.read_text())


def _without_code(text: str) -> str:
    """Return the text without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    titles = re.findall(r"^#+ (.*)", _without_code(_text(page)), re.MULTILINE)
    return {SITE["anchor"](title) for title in titles}


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Catches a file that was moved, a section with another title, a way out of the site."""
    text = _without_code(page.read_text())
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", text):
        found = (page.parent / target).resolve() if target else page
        if page in PAGES and str(found.relative_to(ROOT)) not in SITE["FROM_ROOT"]:
            assert found.is_relative_to(DOCS), f"{target}: name the file in backticks instead"
        name = str(found.relative_to(DOCS)) if found.is_relative_to(DOCS) else ""
        name = FROM_ROOT.get(name, name)
        found = ROOT / name if name in SITE["FROM_ROOT"] else found
        assert found.exists() or name in SITE["GENERATED"], target
        assert not anchor or anchor in _headings(found), (target, anchor)


def _found(page: Path, line: str, name: str) -> Path | None:
    """Return the file or folder that a line names.

    It is relative to the page, the root, `isp/`, or the folder of its row in a table; or it is the
    end of a path, as where a page is about one package.
    """
    folders = [page.parent, ROOT, ROOT / "isp"]
    if row := re.match(r"\| `([\w./]+/)`", line):
        folders += [folder / row[1] for folder in folders]
    ends = (file for file in FILES if f"/{file}".endswith(f"/{name}"))
    return next((f / name for f in folders if (f / name).exists()), None) or next(ends, None)


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=_name)
def test_files_exist(page: Path) -> None:
    """Catches a page that names a file which is no longer there."""
    missing = []
    for line in _without_code(page.read_text()).splitlines():
        named = re.findall(r"`([\w./-]+(?:\.py|\.sh|\.md|/))`", line)
        if page.parent.name == "guides":  # which name files of users
            named = [n for n in named if re.match(r"(isp|model|tests|tools|docs)/.", n)]
        if page.parent.name == "from":  # and of other projects
            named = [n for n in named if re.match(r"(isp|docs)/.", n)]
        missing += [name for name in named if _found(page, line, name) is None]
    assert set(missing) <= {"tb/", "memory_snapshot/"}  # in the folder of a run


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=_name)
def test_python_names_exist(page: Path) -> None:
    """Catches a dotted name of `isp` that was moved or renamed."""
    if page.name == "CHANGELOG.md":  # which names what was removed
        return
    for name in re.findall(r"`(isp(?:\.\w+)+)[`(]", page.read_text()):
        pkgutil.resolve_name(name)


def test_names_in_files_exist() -> None:
    """Catches a design page that names something in a file which is no longer there."""
    checked = 0
    for page in (DOCS / "design").glob("*.md"):
        for line in page.read_text().splitlines():
            named = [
                (name, [file]) for name, file in re.findall(r"`(\w+)` of `([\w/]+\.py)`", line)
            ]
            for file, inside in re.findall(r"`([\w/]+\.py)` \(([^()]*)\)", line):
                named += [(name, [file]) for name in re.findall(r"`(\w+)`", inside)]
            if line.startswith("|"):  # a table of objects and their files
                objects, *rest = line.strip("|").split("|")
                files = re.findall(r"`([\w/]+\.py)`", rest[0])
                named += [(name, files) for name in re.findall(r"`(\w+)`", objects) if files]
            for name, files in named:
                found = [_found(page, line, file) for file in files]
                text = "".join(file.read_text() for file in found if file is not None)
                assert name in text, (page.name, files, name)
            checked += len(named)
    assert checked > 50


def _notes(text: str) -> set[str]:
    """Return the names of notes in a text."""
    found = re.findall(r"\[Note: ([^]]*)\]", text)
    return {re.sub(r"[\s#]+", " ", name) for name in found}


def test_each_note_is_somewhere() -> None:
    """Catches a reference to a [Note: Name] that is in no notes page."""
    titles: list[str] = []
    for page in (DOCS / "design" / "notes").glob("*.md"):
        titles += re.findall(r"^## (.*)", page.read_text(), re.MULTILINE)
    assert len(titles) == len({*titles})
    texts = [file.read_text() for file in SOURCES]
    named = set[str]().union(*(_notes(text) for text in texts))
    named |= set[str]().union(
        *(_notes(page.read_text()) for page in (DOCS / "design").rglob("*.md"))
    )
    assert named - {*titles} == {"Name"}  # which the pages about notes use


def test_commands_exist() -> None:
    """Catches a command that was renamed."""
    # The change log names commands that were removed since.
    pages = [page for page in (*READMES, *PAGES) if page.name != "CHANGELOG.md"]
    text = "".join(page.read_text() for page in pages)
    named = {*re.findall(r"`isp (\w+)", text)}
    assert {"train", "profile", "layouts", "prefetch"} <= named
    for name in named:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0, name
