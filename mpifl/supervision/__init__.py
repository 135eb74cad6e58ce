"""Supervision of a running process: progress, logs, outputs, signals, exit codes, stopped processes."""
