"""Convolutions and scans that mix the tokens of sequences which are split over ranks."""
