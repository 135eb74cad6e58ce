"""The results of runs: run folders, metrics, tables, figures and reports."""
