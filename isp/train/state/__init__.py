"""The state of a run between processes: resuming, saving, exporting."""
