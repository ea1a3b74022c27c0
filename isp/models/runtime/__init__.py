"""A traced model on one rank: its stage modules, weight holders and calls."""
