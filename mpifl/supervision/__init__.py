"""Supervision of a running process: progress, logs, signals, exit codes, stopped processes."""
