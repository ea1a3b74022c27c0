"""One training step, its objectives, and what a loop needs around it."""
