"""The trainer: from a configuration to a trained model."""
