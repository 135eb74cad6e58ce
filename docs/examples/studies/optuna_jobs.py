"""An Optuna study over the ranks of mpirun: each batch of trials is a sweep, whose cases run at a time.

mpirun -n 4 python docs/examples/studies/optuna_jobs.py runs/study 5 2

Rank 0 asks for the trials of a batch. Each becomes a case with a callback that reports to its trial through
the study's journal, a file that all groups of ranks see, and ends the case where the trial should be pruned.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import mpifl

WORLD = {
    "name": "batch",
    "rounds": 12,
    "algorithm": "fedavg",
    "model": {"name": "mlp", "hidden": [16]},
    "data": {"source": "digits", "scenario": {"name": "rotated", "angles": [0, 180], "clients": 8}},
}
NAME = "study"


def opened(journal: str) -> optuna.Study:
    """Return the study in a journal; the first call makes it."""
    return optuna.create_study(
        study_name=NAME,
        storage=JournalStorage(JournalFileBackend(journal)),
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=2),
    )


class Prunes:
    """The callback of a case: reports to a trial, and ends the case once the trial should be pruned.

    Args:
        journal: file of the study.
        trial: identifier of the trial in it.
    """

    def __init__(self, journal: str, trial: int) -> None:
        self.trial = optuna.Trial(opened(journal), trial)

    def on_evaluation(self, found: Any) -> Any:
        """Report the mean accuracy."""
        self.trial.report(found.metrics["accuracy_mean"], found.step)
        return mpifl.STOP if self.trial.should_prune() else None


def case(trial: optuna.Trial, journal: str) -> dict[str, Any]:
    """Return the part of the configuration in which the case of a trial differs.

    Args:
        trial: the trial.
        journal: file of the study.
    """
    callback = {"name": f"{Path(__file__).resolve()}:Prunes", "journal": journal, "trial": trial._trial_id}
    return {
        "local": {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True)},
        "output": {"callbacks": [callback]},
    }


def main(folder: str = "runs/study", batches: str = "5", jobs: str = "2") -> optuna.Study | None:
    """Run batches of trials; return the study on rank 0, None elsewhere. Every rank calls.

    Args:
        folder: parent of the sweeps, and of the journal.
        batches: number of batches.
        jobs: number of trials in a batch, which run at a time, each on a group of the ranks.
    """
    from mpi4py import MPI

    study, journal = None, str(Path(folder).resolve() / "journal.log")
    if MPI.COMM_WORLD.rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        study = opened(journal)
    at_a_time = min(int(jobs), MPI.COMM_WORLD.size)
    for _ in range(int(batches)):
        trials = [study.ask() for _ in range(int(jobs))] if study is not None else []
        rows = {f"trial {trial.number}": case(trial, journal) for trial in trials}
        output = {"folder": folder, "id": str(trials[0].number) if trials else None}
        found = mpifl.sweep(WORLD, vary={"rows": rows}, output=output, jobs=at_a_time)  # as rank 0 says
        for trial in trials:
            assert study is not None
            assert found is not None
            run = found.runs[f"trial {trial.number}"]
            state = optuna.trial.TrialState.PRUNED if run.ended else optuna.trial.TrialState.COMPLETE
            value = None if run.ended else run.summary["accuracy_mean"]
            study.tell(trial, value, state)
    if study is not None:
        print(f"best: trial {study.best_trial.number}, {study.best_params}, accuracy {study.best_value:.3f}")
    return study


if __name__ == "__main__":
    main(*sys.argv[1:])
