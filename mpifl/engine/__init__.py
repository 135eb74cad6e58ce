"""Rounds: who visits when, where the work goes, what it costs."""
