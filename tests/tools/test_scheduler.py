"""What a job has got, from what Slurm 22.05 printed of real jobs (shortened)."""

from __future__ import annotations

import pytest

from mpifl.tools.scheduler import given, of_slurm

OWN = (
    "JobId=6 JobName=mpifl JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:01:09 "
    "TimeLimit=00:10:00 NumNodes=2 NumCPUs=8 NumTasks=4 CPUs/Task=2 MinCPUsNode=2 MinMemoryNode=700M"
)
SHARED = (
    "JobId=1 JobName=wrap JobState=RUNNING Requeue=0 TimeLimit=UNLIMITED NumNodes=1 NumCPUs=1 NumTasks=9 "
    "CPUs/Task=1 MinCPUsNode=1 MinMemoryNode=0"
)
SCRIPT = "#!/bin/bash\n#SBATCH --time=01:00:00\n#SBATCH --signal=B:USR1@120\n"


def test_tasks_cores_memory_and_the_end_are_named():
    found = of_slurm(OWN, SCRIPT, {"SLURM_JOB_ID": "6", "PMIX_NAMESPACE": "slurm.pmix.6.0"})
    parts = (
        "4 tasks on 2 nodes",
        "8 cores (2 for a task)",
        "700M",
        "00:10:00",
        "B:USR1@120",
        "queued again if",
    )
    assert [part for part in parts if part not in found.found] == []
    assert found.problem == ""
    assert "srun" in found.found


def test_a_job_that_shares_one_core_is_told_how_to_get_more():
    found = of_slurm(SHARED, "", {"SLURM_JOB_ID": "1"})
    assert "--exclusive" in found.problem
    assert "without a limit" in found.found


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        (
            {"JOB_ID": "17", "SGE_ROOT": "/sge", "NSLOTS": "4", "NHOSTS": "2"},
            "Grid Engine 17: 4 slots on 2 hosts",
        ),
        ({"LSB_JOBID": "17", "LSB_DJOB_NUMPROC": "4"}, "LSF 17: 4"),
        ({"PBS_JOBID": "9.server", "PBS_NODEFILE": "nodes"}, "PBS 9.server: 3 processes on 2 nodes"),
    ],
)
def test_other_schedulers_are_known_by_their_variables(variables, name, tmp_path, monkeypatch):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    monkeypatch.chdir(tmp_path)
    found = given(variables)
    assert (found is None) == (name is None)
    assert found is None or found.found.startswith(name)
