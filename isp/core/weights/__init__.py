"""Sharded weights: when they are gathered, waited for and freed, and who does it."""
