"""What a scheduler has given the job of this process."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 20.0  # for each question to the scheduler


@dataclass(frozen=True)
class Given:
    """What a job has got.

    Attributes:
        found: in words.
        problem: what to do about it; empty if nothing is wrong.
    """

    found: str
    problem: str = ""


def given(environment: Mapping[str, str] = os.environ) -> Given | None:
    """Return what the scheduler has given this job; None outside of a job.

    Args:
        environment: the variables of this process.
    """
    if job := environment.get("SLURM_JOB_ID"):
        return of_slurm(_said("scontrol", "show", "job", "-o", job), _script(job), environment)
    if job := environment.get("PBS_JOBID"):
        nodes = environment.get("PBS_NODEFILE", "")
        lines = Path(nodes).read_text().split() if os.path.isfile(nodes) else []
        return Given(f"PBS {job}: {len(lines)} processes on {len({*lines})} nodes")
    if job := environment.get("LSB_JOBID"):
        return Given(f"LSF {job}: {environment.get('LSB_DJOB_NUMPROC', '?')} processes")
    if (job := environment.get("JOB_ID")) and "SGE_ROOT" in environment:
        hosts = environment.get("NHOSTS", "?")
        return Given(f"Grid Engine {job}: {environment.get('NSLOTS', '?')} slots on {hosts} hosts")
    return None


def of_slurm(about: str, script: str, environment: Mapping[str, str]) -> Given:
    """Return what Slurm has given a job.

    Args:
        about: what `scontrol show job -o` prints; empty if Slurm does not answer.
        script: the job's script; empty if unknown.
        environment: the variables of a rank.
    """
    job = environment["SLURM_JOB_ID"]
    fields = dict(word.split("=", 1) for word in about.split() if "=" in word)
    if not fields:
        return Given(f"Slurm {job}, which does not answer (scontrol show job {job})")
    tasks, cores, nodes = (int(fields[name]) for name in ("NumTasks", "NumCPUs", "NumNodes"))
    memory = fields.get("MinMemoryNode") or f"{fields.get('MinMemoryCPU', '0')} a core"
    parts = [
        f"Slurm {job}: {tasks} tasks on {nodes} node{'s' * (nodes > 1)}",
        f"{cores} cores ({fields.get('CPUs/Task', '?')} for a task)",
        "memory without a limit" if memory.startswith("0") else f"memory {memory} a node",
        f"until {fields.get('TimeLimit', '?')}",
    ]
    signals = re.findall(r"^#SBATCH\s+--signal[= ](\S+)", script, re.MULTILINE)
    parts.append(
        f"signal {signals[-1]} unless sbatch said otherwise"
        if signals
        else "no signal before it in the script"
    )
    parts.append("queued again if it must end" if fields.get("Requeue") == "1" else "not queued again")
    space = environment.get("PMIX_NAMESPACE", "")
    by = (
        "srun with PMIx"
        if space.startswith("slurm")
        else "mpirun"
        if space
        else "neither mpirun nor srun --mpi=pmix"
    )
    parts.append(f"ranks started by {by}")
    if cores < tasks:
        remedy = (
            "ranks share its cores: ask for a core each, or for all of the node (--overcommit --exclusive)"
        )
        return Given(", ".join(parts), remedy)
    return Given(", ".join(parts))


def _script(job: str) -> str:
    return _said("scontrol", "write", "batch_script", job, "-")


def _said(*command: str) -> str:
    """Return what a command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
