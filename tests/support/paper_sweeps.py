"""The sweeps of the papers, read once in a process: reading all of them takes a second."""

from functools import cache

from mpifl.sweeps import papers


@cache
def paper_sweeps() -> list[papers.Sweep]:
    """Return the sweeps of all papers."""
    return papers.sweeps()
