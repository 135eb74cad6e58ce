"""Runs submitted by submitit: jobs of Slurm, or processes of this machine.

python docs/examples/studies/submitit_launch.py local runs/rates 0.02 0.1
python docs/examples/studies/submitit_launch.py slurm runs/rates 0.02 0.1
"""

from __future__ import annotations

import sys
from pathlib import Path

import submitit

import mpifl

TASKS = {"local": 1, "slurm": 5}  # ranks of a run: the server and four workers
WORLD = {
    "name": "rate",
    "rounds": 5,
    "algorithm": "fedavg",
    "model": {"name": "mlp", "hidden": [16]},
    "data": {"source": "digits", "scenario": {"name": "rotated", "angles": [0, 180], "clients": 8}},
}


def train(lr: float, folder: str) -> float | None:
    """Return the final accuracy of a run on rank 0, None elsewhere; every task of a job calls.

    A job that ran out of time is submitted again as it is: the run goes on from its checkpoint.

    Args:
        lr: learning rate of the clients.
        folder: parent of the run folders.
    """
    output = {"folder": folder, "id": str(lr), "existing": "reuse"}
    run = mpifl.run(WORLD, local={"lr": lr}, output=output)
    return None if run is None else float(run.summary["accuracy_mean"])


def main(cluster: str, folder: str, *rates: str) -> dict[float, float]:
    """Submit a job for each learning rate; return their accuracies.

    Args:
        cluster: `slurm`, or `local` for processes of this machine.
        folder: parent of the run folders, which all nodes see.
        rates: the learning rates.
    """
    executor = submitit.AutoExecutor(Path(folder) / "jobs", cluster=cluster)
    executor.update_parameters(
        timeout_min=30,
        tasks_per_node=TASKS[cluster],
        cpus_per_task=1,
        slurm_array_parallelism=4,
        slurm_srun_args=["--mpi=pmix"],
    )
    values = [*map(float, rates)]
    jobs = executor.map_array(train, values, [folder] * len(values))
    found = {lr: job.results()[0] for lr, job in zip(values, jobs, strict=True)}  # of rank 0
    for lr, accuracy in found.items():
        print(f"lr {lr:g}: accuracy {accuracy:.3f}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
