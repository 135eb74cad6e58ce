"""Forecasts: what a run will take in time, memory and bytes, before it begins."""
