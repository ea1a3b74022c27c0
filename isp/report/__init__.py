"""Pages and pictures of what was measured or planned: HTML files that need no network, and PNGs."""

from isp.report.write import Report, require_packages, write_page, write_report

__all__ = ["Report", "require_packages", "write_page", "write_report"]
