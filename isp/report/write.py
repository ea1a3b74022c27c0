"""`write_report`: the files of a report, from what a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from isp.run_folder import RunFolder

__all__ = ["Report", "write_report"]

REPORT_FOLDER = "report"


class Report(NamedTuple):
    """The files that were written."""

    html: Path
    pictures: tuple[Path, ...]
    """PNG files, one a picture of the page."""


def write_report(source: str | Path, output: str | Path | None = None) -> Report:
    """Write the report of the run whose folder is `source`, to `output` or `source`/report.

    Raises ValueError if there is nothing to report there, or the packages of the report are not
    installed; OSError if a file cannot be written.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name that of a run, outputs/<job>/<time>")
    run = RunFolder(folder)
    if not run.metrics_file.is_file():
        raise ValueError(
            f"{folder} holds no {run.metrics_file.name}: name the folder of a run that has done"
            f" a step, such as outputs/<job>/latest"
        )
    _require_packages()
    from isp.report.run import run_page
    from isp.report.style import to_png

    page = run_page(run)
    text = page.to_html()
    target = folder / REPORT_FOLDER if output is None else Path(output)
    target.mkdir(parents=True, exist_ok=True)
    html = target / "report.html"
    html.write_text(text, encoding="utf-8")
    pictures = []
    for picture in page.pictures:
        path = target / f"{picture.name}.png"
        to_png(picture, path)
        pictures.append(path)
    return Report(html, tuple(pictures))


def _require_packages() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"a report needs {error.name}, which is not installed: pip install -e '.[report]',"
            f" or bash tools/setup_env.sh report"
        ) from error
