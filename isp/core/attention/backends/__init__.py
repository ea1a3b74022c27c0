"""Attention on one device, by kernel."""
