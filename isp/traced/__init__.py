"""Models that were not written for isp: traced once, then driven as they are."""
