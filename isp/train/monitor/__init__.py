"""What a run reports while it trains: metrics, trackers, warnings, memory."""
