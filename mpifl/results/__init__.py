"""A run folder: written and read."""
