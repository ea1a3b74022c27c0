"""Layers that mix tokens by convolutions and scans, over sequences that are split over ranks."""
