"""Forecasts for a run: memory, transfers and time of every layout, without starting ranks."""

from isp.planner.fabric import Fabric, load_fabric
from isp.planner.report import as_json, as_text
from isp.planner.search import Candidate, Found, evaluate, search

__all__ = [
    "Candidate",
    "Fabric",
    "Found",
    "as_json",
    "as_text",
    "evaluate",
    "load_fabric",
    "search",
]
