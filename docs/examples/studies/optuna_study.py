"""An Optuna study: each trial is a run, which ends early where the study prunes it.

python docs/examples/studies/optuna_study.py runs/study 20
"""

from __future__ import annotations

import sys
from typing import Any

import optuna

import mpifl

WORLD = {
    "name": "study",
    "rounds": 12,
    "algorithm": "fedavg",
    "model": {"name": "mlp", "hidden": [16]},
    "data": {"source": "digits", "scenario": {"name": "rotated", "angles": [0, 180], "clients": 8}},
}


class Reports:
    """Reports each evaluation of a run to its trial, and ends the run once the trial should be pruned.

    Args:
        trial: the trial.

    Attributes:
        pruned: whether it was.
    """

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.pruned = trial, False

    def on_evaluation(self, found: Any) -> Any:
        """Report the mean accuracy; STOP leaves a complete run, of the rounds that were taken."""
        self.trial.report(found.metrics["accuracy_mean"], found.step)
        self.pruned = self.trial.should_prune()
        return mpifl.STOP if self.pruned else None


def objective(trial: optuna.Trial, folder: str) -> float:
    """Return the final accuracy of a run with the learning rate and epochs of a trial.

    Args:
        trial: the trial.
        folder: parent of the run folders.
    """
    local = {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "epochs": trial.suggest_int("epochs", 1, 3),
    }
    output = {"folder": folder, "id": f"trial-{trial.number}", "existing": "replace"}
    reports = Reports(trial)
    run = mpifl.run(WORLD, local=local, output=output, callbacks=[reports])
    assert run is not None, "one process; optuna_jobs.py is for the ranks of mpirun"
    trial.set_user_attr("folder", str(run.folder))
    if reports.pruned:
        raise optuna.TrialPruned
    return float(run.summary["accuracy_mean"])


def main(folder: str = "runs/study", trials: str = "20") -> optuna.Study:
    """Run a study and print its best trial; return the study.

    Args:
        folder: parent of the run folders.
        trials: number of trials.
    """
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
    )
    study.optimize(lambda trial: objective(trial, folder), n_trials=int(trials))
    print(f"best: trial {study.best_trial.number}, {study.best_params}, accuracy {study.best_value:.3f}")
    return study


if __name__ == "__main__":
    main(*sys.argv[1:])
