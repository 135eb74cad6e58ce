"""Commands that are repeated after the loss of a rank: what was booked before counts once."""

from __future__ import annotations

import numpy as np
from support import toy

from mpifl.algorithms.fedavg import FedAvg
from mpifl.comm.transport import RankLost
from mpifl.runtime.engine import run_command
from mpifl.runtime.hook_errors import Dropped


def test_clients_that_failed_and_traffic_before_two_losses_count_once(tmp_path, monkeypatch, capsys):
    """A rank is lost after client 3 has failed, and another one in the repetition."""
    step, _ = toy.start(FedAvg(), toy.Tiny(), tmp_path)
    step.dropped.append(Dropped(1, 5, 0, "before"))
    calls, losses = [], [RankLost(), RankLost()]

    def execute(command: str) -> None:
        calls.append(command)
        step.dropped.append(Dropped(2, 3, 0, "no"))
        step.ledger.add_up(2, "model", np.array([0, 1]), 100)
        if losses:
            raise losses.pop()

    monkeypatch.setattr(step, "regroup", lambda: None)
    run_command(step, "step", execute)
    assert calls == ["step"] * 3
    assert [(d.step, d.client) for d in step.dropped] == [(1, 5), (2, 3)]
    assert step.ledger.total("up") == 800
    assert capsys.readouterr().err.count("what it held is done again") == 2


def test_where_a_second_rank_is_lost_before_rows_have_new_owners_the_first_numbers_are_kept(
    tmp_path, monkeypatch
):
    """Of ranks 0 to 3 rank 1 is lost, then rank 2, by then number 1: ranks 0 and 3 are left."""
    step, _ = toy.start(FedAvg(), toy.Tiny(), tmp_path)
    remain, told = [(0, 2, 3), (0, 2)], []

    def regroup_tables(left: tuple[int, ...], nodes: list[int]) -> None:
        told.append(left)
        if len(told) == 1:
            raise RankLost

    monkeypatch.setattr(step.transport, "size", 4)
    monkeypatch.setattr(step.transport, "regroup", lambda: remain.pop(0))
    monkeypatch.setattr(step.scheduler, "regroup", lambda nodes, workers, numbers: None)
    monkeypatch.setattr(step.tables, "regroup", regroup_tables)
    step.regroup()
    assert told == [(0, 2, 3), (0, 3)]
