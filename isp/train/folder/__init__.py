"""The surroundings of a run's steps: its folder, its log files, its signals, its machine."""
