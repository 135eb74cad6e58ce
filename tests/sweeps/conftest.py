"""Sweeps of these tests draw no figure."""

from support.undrawn import drawn, undrawn

__all__ = ["drawn", "undrawn"]
