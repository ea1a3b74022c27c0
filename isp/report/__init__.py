"""Pages and pictures of what was measured: one HTML file that needs no network, and PNGs."""

from isp.report.write import Report, write_report

__all__ = ["Report", "write_report"]
