"""Calls of kernels are compared with the sources of packages, here small ones, and recorded
ones.
"""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_kernels  # noqa: E402

_CALLER = """
def scan(q, k, v):
    kernel = load("fla.ops.rule", "chunk")
    options = {"scale": 1}
    if q.requires_grad:
        options["initial"] = None
    out, state = kernel(*(x.float() for x in (q, k)), v.to(q.dtype).unsqueeze(0), **options)
"""
_FITS = "q, k: Tensor, v, decay=(-1, -1), scale=None, *, initial=None"
_TWO = "return out, state"


def _isp(folder: Path, text: str) -> Path:
    folder = folder / "isp"
    folder.mkdir()
    (folder / "caller.py").write_text(text)
    return folder


def _sources(folder: Path, parameters: str, ending: str, name: str = "chunk") -> Path:
    """Return an unpacked fla-core whose `fla.ops.rule` re-exports the function of another
    module.
    """
    package = folder / "fla_core-9.1" / "fla" / "ops" / "rule"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"from .inside import {name}\n")
    (package / "inside.py").write_text(
        "class Rule(Function):\n"
        "    def forward(ctx, q, state=None):\n"
        "        return q if state is None else (q, state)\n"
        f"@compiled\ndef {name}({parameters}):\n    {ending}\n"
    )
    return folder


@pytest.mark.parametrize(
    ("parameters", "ending", "fault"),
    [
        (_FITS, _TWO, ""),
        (_FITS, "return Rule.apply(q)", ""),
        (_FITS.replace("scale", "scaling"), _TWO, "takes no keyword scale"),
        (f"{_FITS.replace('scale', 'scaling')}, **kwargs", _TWO, "takes no keyword scale"),
        ("q, v, k, scale=None, initial=None", _TWO, "argument 2 is v, isp passes k; argument 3 is"),
        ("q, k, *, v, scale, initial", _TWO, "takes no argument 3 by position, isp passes v"),
        (f"{_FITS}, chunk", _TWO, "needs chunk, which isp does not pass"),
        (_FITS, "return out", "returns 1 values, isp expects 2"),
        (_FITS, "return out, state, None", "returns 3 values, isp expects 2"),
    ],
)
def test_a_call_is_compared_with_the_source(
    parameters: str, ending: str, fault: str, tmp_path: Path
) -> None:
    """Catches a parameter that was renamed or moved, which would otherwise only fail on a GPU."""
    calls = check_kernels.calls_of(_isp(tmp_path, _CALLER))
    found = check_kernels.signature_of(
        _sources(tmp_path, parameters, ending) / "fla_core-9.1", "fla.ops.rule", "chunk"
    )
    (call,) = calls
    assert str(call) == "isp/caller.py scan: (q, k, v, scale=, initial=) -> 2 values"
    assert found is not None
    said = check_kernels.fault_of(call, found)
    assert said.startswith(fault) if fault else said == ""


@pytest.mark.parametrize(("name", "verdict"), [("chunk", "match"), ("moved", "not in the sources")])
@pytest.mark.parametrize("archive", ["folder", "sdist", "wheel"])
def test_archives_are_read(
    archive: str,
    name: str,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Catches an archive that is skipped, and a mismatch that ends with status 0."""
    (given := tmp_path / "from").mkdir()
    root = _sources(given if archive == "folder" else tmp_path, _FITS, _TWO, name) / "fla_core-9.1"
    if archive == "sdist":
        with tarfile.open(given / "fla_core-9.1.tar.gz", "w:gz") as sdist:
            sdist.add(root, root.name)
    elif archive == "wheel":
        with zipfile.ZipFile(given / "fla_core-9.1-py3-none-any.whl", "w") as wheel:
            for file in root.rglob("*.py"):
                wheel.write(file, file.relative_to(root))
    monkeypatch.setattr(check_kernels, "ISP", _isp(tmp_path, _CALLER))
    monkeypatch.setattr(check_kernels, "RESULT", tmp_path / "kernels.json")
    monkeypatch.setattr(sys, "argv", ["check_kernels.py", "--write", "--from", str(given)])
    assert check_kernels.main() == (verdict != "match")
    table = capfd.readouterr().out
    assert "| fla-core | 9.1 | fla.ops.rule.chunk | isp/caller.py scan: (q," in table
    assert f"| {verdict} |" in table
    (row,) = json.loads((tmp_path / "kernels.json").read_text())["functions"]
    assert row["version"] == "9.1"
    assert [*row["calls"].values()] == [verdict]


@pytest.mark.parametrize(
    "text",
    [
        "import fla.ops\n",
        "MODULE = 'mamba_ssm.ops'\n",
        _CALLER.replace("kernel(*", "other(*"),
        _CALLER.replace("(q, k)), v", "given), v"),
        _CALLER.replace("**options", "**given"),
    ],
)
def test_a_call_that_cannot_be_analyzed_is_an_error(text: str, tmp_path: Path) -> None:
    """Catches a new form of kernel call, which would be compared with nothing."""
    with pytest.raises(ValueError, match=r"no call of|cannot find"):
        check_kernels.calls_of(_isp(tmp_path, text))


def test_calls_match_the_recorded_signatures() -> None:
    """Catches a changed call that does not fit the signatures in tools/kernels.json."""
    calls = check_kernels.calls_of(check_kernels.ISP)
    rows = json.loads(check_kernels.RESULT.read_text())["functions"]
    assert {f"{call.module}.{call.function}" for call in calls} == {row["function"] for row in rows}
    for row in rows:
        signature = check_kernels.Signature(**row["signature"])
        for call in calls:
            if f"{call.module}.{call.function}" == row["function"]:
                assert check_kernels.fault_of(call, signature) == "", row["version"]
