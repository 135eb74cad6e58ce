"""Partitions of a pool into clients."""
