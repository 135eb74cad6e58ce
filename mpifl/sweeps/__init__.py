"""Sweeps: cases of one configuration, shared, continued, gathered in tables; the sweeps of the papers."""
