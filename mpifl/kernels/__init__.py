"""Loops in C for small networks and exact sums, and the Python that calls them."""
