"""What the tests on real schedulers share: a started cluster, jobs that run sleepy.yaml, and their digest."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self, TypeVar

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
FOREIGN = ("OMPI_", "PRTE_", "PMIX_", "MPIFL_")  # variables of the tests' own shell, which jobs do not have
LEAST = 4  # rounds before a disturbance: the first checkpoint is that of round 1


class Cluster(Protocol):
    """A scheduler with its nodes.

    Attributes:
        environment: what the submitting shell has.
        jobs: folder that jobs are submitted from.
    """

    environment: Mapping[str, str]

    @property
    def jobs(self) -> Path: ...

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the scheduler in the folder of the jobs."""

    def log(self, job: str) -> str:
        """Return what a job has printed."""

    def close(self) -> None:
        """End all jobs and daemons."""


Started = TypeVar("Started", bound=Cluster)


@contextmanager
def started(
    name: str, start: Callable[[Path, dict[str, str]], Started], foreign: str, **environment: str
) -> Iterator[Started]:
    """Start a cluster, and end it; its jobs run the package of this checkout.

    Args:
        name: the scheduler, for the name of its folder.
        start: starts it, with its folder and the environment of the submitting shell.
        foreign: how the scheduler's own variables begin.
        environment: further variables.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/var/tmp"))
    folder.chmod(0o755)
    own = {key: value for key, value in os.environ.items() if not key.startswith((foreign, *FOREIGN))}
    own |= OPEN_MPI | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    try:
        cluster = start(folder, own)
        try:
            for file in ("sleepy.py", "sleepy.yaml"):
                shutil.copy(HERE / file, cluster.jobs)
            yield cluster
        finally:
            cluster.close()
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(folder, ignore_errors=True)


def wait_for(what: Callable[[], object], seconds: float, name: str, log: Callable[[], str] = str) -> None:
    """Poll until `what` returns something true; `log` is shown if it does not in time."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds:g} s: {name}\n{log()}"
        time.sleep(0.2)


class SleepyJob(ABC):
    """A submitted job, and its run of sleepy.yaml.

    Args:
        cluster: the scheduler.
        command: submits the job, and prints its number.
        environment: variables of the submitting shell.
    """

    def __init__(self, cluster: Cluster, *command: str, **environment: str) -> None:
        self.cluster, self.name = cluster, environment.get("RUN_ID")
        done = cluster.run(*command, **environment)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.split(".")[0].strip()

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it has not ended."""

    @property
    def log(self) -> str:
        return self.cluster.log(self.id)

    @property
    def folder(self) -> Path:
        return self.cluster.jobs / "runs" / f"sleepy-{self.name or self.id}"

    @property
    def step(self) -> int:
        """The step of the last checkpoint; 0 without one."""
        steps = (self.folder / "checkpoints").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in steps), default=0)

    @property
    def digest(self) -> str:
        """The digest of the run, empty if it is not complete."""
        file = self.folder / "summary.json"
        return str(json.loads(file.read_text())["digest"]) if file.exists() else ""

    def trained(self, rounds: int = LEAST) -> Self:
        """Wait until some rounds are done."""

        def look() -> bool:
            assert self.is_alive, self.log
            said = re.findall(r"^round (\d+)/", self.log, re.MULTILINE)
            return max(map(int, said), default=0) >= rounds

        wait_for(look, 120, f"round {rounds} of job {self.id}", lambda: self.log)
        return self


def alone(cluster: Cluster, rounds: int) -> str:
    """Return the digest of the run without a disturbance, in one process."""
    file = cluster.jobs / "runs" / f"sleepy-alone-{rounds}" / "summary.json"
    if not file.exists():
        words = ["-q", "--rounds", str(rounds), "--algorithm.nap", "0", "--output.id", f"alone-{rounds}"]
        command = [sys.executable, "-m", "mpifl", "run", "sleepy.yaml", *words]
        subprocess.run(command, cwd=cluster.jobs, env=cluster.environment, check=True)
    return str(json.loads(file.read_text())["digest"])
