"""Numbers in, labels out: distances between clients and groupings of them. NumPy, float64, pure functions."""
