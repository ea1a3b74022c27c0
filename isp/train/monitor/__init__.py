"""Reports of a run while it trains: metrics, trackers, warnings, memory."""
