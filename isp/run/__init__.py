"""What a run is besides its steps: its folder, its log files, its signals, its machine."""
