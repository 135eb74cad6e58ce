"""Distances between clients and clusterings of them: pure functions on NumPy arrays, float64."""
