"""`write_report`: the files of a report, from what a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isp.foreign.files import write_whole
from isp.foreign.shown import redacted
from isp.metrics.evaluation import EVALUATION_FILE, Evaluation
from isp.profile import Profile
from isp.run.folder import RunFolder
from isp.settings.packages import require

if TYPE_CHECKING:
    from isp.report.page import Page

__all__ = ["Report", "require_packages", "write_page", "write_report"]

PROFILE_FILE = "profile.json"
REPORT_FOLDER = "report"


class Report(NamedTuple):
    """The files that were written."""

    html: Path
    pictures: tuple[Path, ...]
    """PNG files, one a picture of the page."""


def write_report(source: str | Path, output: str | Path | None = None) -> Report:
    """Write the report of what the folder `source` holds, to `output` or `source`/report.

    The report of a run is made from metrics.jsonl, that of a profile from profile.json, that of an
    evaluation from evaluation.json; the run's goes last. Raises ValueError if there is none, or the
    packages of the report are not installed; OSError if a file cannot be read or written.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; name a run folder, outputs/<job>/<time>")
    require_packages()
    from isp.report.style import to_png

    page = _page_of(folder)
    target = folder / REPORT_FOLDER if output is None else Path(output)
    html = write_page(page, target / f"{page.name}.html")
    pictures = []
    for picture in page.pictures:
        if picture.has_file:
            pictures.append(target / f"{picture.name}.png")
            to_png(picture, pictures[-1])
    return Report(html, tuple(pictures))


def _page_of(folder: Path) -> Page:
    run, profile, evaluation = RunFolder(folder), folder / PROFILE_FILE, folder / EVALUATION_FILE
    if profile.is_file():
        from isp.report.profile import profile_page

        return profile_page(Profile.load(profile))
    if evaluation.is_file():
        from isp.report.evaluation import evaluation_page

        return evaluation_page(Evaluation.load(evaluation))
    if not run.metrics_file.is_file():
        raise ValueError(
            f"{folder} holds neither {run.metrics_file.name} nor {PROFILE_FILE} nor"
            f" {EVALUATION_FILE}: name the folder of a run that has done a step, such as"
            f" outputs/<job>/latest, of a profile, or of an evaluation"
        )
    from isp.report.run import run_page

    return run_page(run)


def write_page(page: Page, file: str | Path) -> Path:
    """Write `page` alone, without PNG files, to `file`. Raises OSError if that fails."""
    text, path = redacted(page.to_html()), Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def require_packages() -> None:
    """Raise ValueError, with what to install, if a report cannot be made here."""
    require("a report", "jinja2", "matplotlib", extra="report")
