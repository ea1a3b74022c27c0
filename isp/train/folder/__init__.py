"""The folder of a run: its files, its log files, and the environment it ran in."""
