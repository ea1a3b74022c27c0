"""One training step with its objectives, and the preparation and checks that loops share."""
