"""Pipelines: how layers are cut, in which order a rank works, and one rank's stages at work."""
