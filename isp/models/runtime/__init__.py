"""A traced model on one rank: its modules, its weights, its calls."""
