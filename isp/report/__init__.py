"""Pages and pictures of what was measured: one HTML file that needs no network, and PNGs."""

from isp.report.write import Report, require_packages, write_profile_report, write_report

__all__ = ["Report", "require_packages", "write_profile_report", "write_report"]
