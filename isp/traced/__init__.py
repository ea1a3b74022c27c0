"""Models that were not written for isp: traced once, then run as they are."""
