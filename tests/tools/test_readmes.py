"""What the READMEs name is there: files, links, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isp.cli import main

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_files_exist(readme: Path) -> None:
    """Catches a map of the source that shows what is no longer there."""
    missing = []
    for line in readme.read_text().splitlines():
        named = re.findall(r"`([\w./]+(?:\.py|\.sh|/))`", line)
        folders = [readme.parent, ROOT]
        if line.startswith("| `") and named and named[0].endswith("/"):  # files in the row's folder
            folders += [folder / named[0] for folder in folders]
        missing += [name for name in named if not any((f / name).exists() for f in folders)]
    assert set(missing) <= {"tb/", "memory_snapshot/"}  # in the folder of a run


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that was renamed."""
    text = "".join(readme.read_text() for readme in READMES)
    shell = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    named = {*re.findall(r"^isp (\w+)", shell, re.MULTILINE), *re.findall(r"`isp (\w+)", text)}
    assert {"train", "profile", "layouts", "prefetch"} <= named
    for name in named:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0, name
