"""Helpers for text, files, limits and the environment, without torch or other packages of ISP."""
