"""What happens when a rank is gone."""

from __future__ import annotations


class RankLost(Exception):
    """A rank died or no longer answers; the others can go on once all of them have regrouped."""


class CannotGoOn(RuntimeError):
    """What was lost is not held by any rank that is left: only a checkpoint helps."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; go on from the last checkpoint: mpifl resume RUN")
