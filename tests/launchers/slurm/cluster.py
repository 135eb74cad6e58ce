"""A small real Slurm on this machine: munged, slurmctld and a slurmd for each node, on 127.0.0.1.

Each node has its own host name, processes, /tmp and /dev/shm (namespaces), so that it can die like a machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..jobs import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare", "setpriv")
ALIVE = ("", "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")
NODE = """set -e
hostname "$1"
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
mount --bind "$2/tmp-$1" /tmp
mount --bind "$2/hosts" /etc/hosts
for each in $3; do
    umount "/sys/fs/cgroup/$each"
    mount -t cgroup -o "$each" cgroup "/sys/fs/cgroup/$each"
done
slurmd -D -N "$1" -f "$2/slurm.conf" -L "$2/$1.log" & pid=$!
trap 'kill $pid || true' TERM
while kill -0 $pid 2> /dev/null; do wait $pid || true; done
"""
CONF = """ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
{limits}{accounting}MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=30
KillWait=12
MinJobAge=3600
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs={cores} Sockets=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""

PLAIN = """ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectTypeParameters=CR_Core
"""
ACCOUNTING = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={folder}/munge/socket
"""
DBD_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacct", "sacctmgr")
DBD_CONF = """AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=slurm
"""
SQL = """CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
"""
CONTROLLERS = ("memory", "freezer", "cpuset")
CGROUPS = """ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectTypeParameters=CR_Core_Memory
"""
CGROUP_CONF = """CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainCores=yes
"""
# control groups of a node's own: NAME CONTROLLER... -- COMMAND starts in them, and sees them as the root
JOIN = """set -e
name=$1; shift
while [[ $1 != -- ]]; do
    own=/sys/fs/cgroup/$1/$name
    mkdir -p "$own"
    if [[ $1 == cpuset ]]; then
        for what in cpus mems; do cat "/sys/fs/cgroup/cpuset/cpuset.$what" > "$own/cpuset.$what"; done
    fi
    echo $$ > "$own/cgroup.procs"
    shift
done
shift
exec "$@"
"""


def missing() -> str:
    """Return why there can be no Slurm here, empty if there can."""
    if os.geteuid():
        return "a Slurm of the tests is started by root"
    if lacking := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(lacking)}: apt-get install slurm-wlm slurmctld slurmd munge"
    namespaces = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    return "" if subprocess.run(namespaces, capture_output=True).returncode == 0 else "no namespaces here"


def no_cgroups() -> str:
    """Return why Slurm cannot limit the memory of jobs here, empty if it can."""
    lacking = [each for each in CONTROLLERS if not Path(f"/sys/fs/cgroup/{each}/cgroup.procs").exists()]
    if lacking:
        return f"no control groups of version 1 here: {', '.join(lacking)}"
    return "" if os.access("/sys/fs/cgroup/memory", os.W_OK) else "control groups are read-only here"


def no_accounting() -> str:
    """Return why Slurm cannot keep accounts here, empty if it can."""
    lacking = [name for name in DBD_PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(lacking)}: apt-get install slurmdbd mariadb-server" if lacking else ""


class Slurm:
    """A running cluster; `close` ends it.

    Args:
        folder: holds its files; short, because a socket lies in it.
        nodes: number of nodes, node1, node2, ...
        cores: cores that each node has in the configuration.
        environment: what the submitting shell has.
        cgroups: limit the memory and cores of jobs; a node then has at most this machine's cores.
        accounting: keep accounts with slurmdbd and a MariaDB of its own.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        cores: int,
        environment: Mapping[str, str],
        cgroups: bool = False,
        accounting: bool = False,
    ) -> None:
        self.folder, self.names = folder, [f"node{i}" for i in range(1, nodes + 1)]
        self.environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "munge", *(f"tmp-{node}" for node in self.names)):
            (folder / name).mkdir()
        for node in self.names:
            (folder / f"tmp-{node}").chmod(0o1777)
        port, text = self._free_ports(nodes + 3), ""
        sql_port, dbd_port = port + nodes + 1, port + nodes + 2
        for i, node in enumerate(self.names):
            text += f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port + 1 + i}\n"
        self._cgroups = cgroups
        limits = CGROUPS if cgroups else PLAIN
        if cgroups:
            (folder / "cgroup.conf").write_text(CGROUP_CONF)
        accounts = ACCOUNTING.format(folder=folder, dbd_port=dbd_port) if accounting else ""
        conf = CONF.format(
            folder=folder, port=port, cores=cores, nodes=text, limits=limits, accounting=accounts
        )
        (folder / "slurm.conf").write_text(conf)
        hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {node}\n" for node in self.names)
        (folder / "hosts").write_text(hosts)
        self._start_munge()
        if accounting:
            self._start_accounting(sql_port, dbd_port)
        self._daemons.append(self._start(["slurmctld", "-D", "-f", f"{folder}/slurm.conf"]))
        for node in self.names:
            self.start_node(node)

    @staticmethod
    def _free_ports(count: int) -> int:
        """Return the first of `count` ports in a row that nobody listens to."""
        for first in range(21000 + os.getpid() % 7000, 32000, count):
            with suppress(OSError):
                for port in range(first, first + count):
                    with socket.socket() as one:
                        one.bind(("127.0.0.1", port))
                return first
        raise AssertionError("no free ports")

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a daemon that ends with this process."""
        command = ["setpriv", "--pdeathsig", "KILL", *command]
        log = (self.folder / "daemons.log").open("ab")
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.environment,
            start_new_session=True,
        )

    def _start_munge(self) -> None:
        place = self.folder / "munge"
        (place / "key").write_bytes(os.urandom(128))
        (place / "key").chmod(0o400)
        for each in (place, place / "key"):
            shutil.chown(each, "munge", "munge")
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "--pdeathsig", "KILL"]
        files = [
            f"--{what}={place}/{what.split('-')[0]}"
            for what in ("key-file", "pid-file", "log-file", "seed-file")
        ]
        self._daemons.append(
            self._start([*user, "munged", "--foreground", f"--socket={place}/socket", *files])
        )
        wait_for((place / "socket").exists, 10, "munged")

    def _start_accounting(self, sql_port: int, dbd_port: int) -> None:
        place = self.folder / "sql"
        place.mkdir()
        (place / "start.sql").write_text(SQL)
        data = ["--no-defaults", "--user=root", f"--datadir={place}/data"]
        install = ["mariadb-install-db", *data, "--skip-test-db", "--auth-root-authentication-method=normal"]
        subprocess.run(install, check=True, capture_output=True)
        small = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M"]
        files = [f"--socket={place}/socket", f"--pid-file={place}/pid", f"--init-file={place}/start.sql"]
        listen = ["--bind-address=127.0.0.1", f"--port={sql_port}"]
        self._daemons.append(self._start(["mariadbd", *data, *small, *files, *listen]))
        wait_for((place / "socket").exists, 60, "mariadbd")
        conf = self.folder / "slurmdbd.conf"
        conf.touch(0o600)
        conf.write_text(DBD_CONF.format(folder=self.folder, sql_port=sql_port, dbd_port=dbd_port))
        self._daemons.append(self._start(["slurmdbd", "-D"]))
        add = ("sacctmgr", "-i", "add", "cluster", "tests")
        wait_for(lambda: self.run(*add).returncode == 0, 10, "slurmdbd", lambda: str(self.run(*add)))

    def start_node(self, node: str) -> None:
        """Start a node; return when a node that has died is known to have died, and is idle again."""
        if (self.folder / f"{node}.log").exists():
            show = ("sinfo", "-h", "-n", node, "-p", "main", "-o", "%T")
            wait_for(lambda: self.run(*show).stdout.startswith("down"), 90, f"{node} is down")
        spaces = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*spaces, "bash", "-c", NODE, "node", node, str(self.folder)]
        if self._cgroups:
            join = ["bash", "-c", JOIN, "join", self._group(node), *CONTROLLERS, "--"]
            command = [*join, "unshare", "--cgroup", *command, " ".join(CONTROLLERS)]
        self._nodes[node] = self._start(command)
        if len(self._nodes) == len(self.names):
            self.wait_until_idle()

    def _group(self, node: str) -> str:
        """Return the name of a node's control groups."""
        return f"{self.folder.name}-{node}"

    def kill_node(self, node: str) -> None:
        """End all processes of a node at once, as if it had lost its power."""
        unshare = self._nodes.pop(node)
        first = subprocess.run(
            ["pgrep", "-P", str(unshare.pid)], capture_output=True, text=True
        ).stdout.split()
        for pid in first:
            os.kill(int(pid), signal.SIGKILL)
        unshare.wait(20)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm in the folder of the jobs."""
        env = self.environment | environment
        return subprocess.run(command, cwd=self.jobs, env=env, capture_output=True, text=True, timeout=60)

    @property
    def jobs(self) -> Path:
        """The folder that jobs are submitted from."""
        place = self.folder / "jobs"
        place.mkdir(exist_ok=True)
        return place

    def wait_until_idle(self) -> None:
        """Wait until no job holds a node."""
        show = ("sinfo", "-h", "-N", "-p", "main", "-o", "%T")
        wait_for(lambda: self.run(*show).stdout.split() == ["idle"] * len(self.names), 60, "idle nodes")

    def about(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        words = self.run("scontrol", "show", "job", "-o", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def submit_urgent(self) -> None:
        """Submit a short job that takes all nodes from others."""
        options = ("-p", "urgent", "--nodes=2", "--ntasks-per-node=4", "--output=/dev/null")
        self.run("sbatch", *options, "--wrap", "sleep 1")

    def look(self, job: str) -> str:
        """Return the state of a job; one that is queued again begins at once, not two minutes later."""
        about = self.about(job)
        if about.get("JobState") == "PENDING" and about.get("Reason") == "BeginTime":
            self.wait_until_idle()
            time.sleep(3.0)  # a credential is refused within its first seconds
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return about.get("JobState", "")

    def has_ended(self, job: str) -> bool:
        """Return whether a job has ended for good."""
        return self.about(job).get("JobState", "") not in ALIVE

    def wait_until_ended(self, job: str, seconds: float = 90) -> str:
        """Wait for the end of a job, and return its state."""
        wait_for(lambda: self.look(job) not in ALIVE, seconds, f"the end of job {job}", lambda: self.log(job))
        return self.look(job)

    def log(self, job: str) -> str:
        """Return what a job of `launch/slurm` has printed."""
        file = self.jobs / f"mpifl-{job}.log"
        return file.read_text() if file.exists() else ""

    def close(self) -> None:
        """End all jobs and daemons."""
        self.run("scancel", "--full", "-s", "KILL", "-u", "root")
        self.run("scancel", "-u", "root")
        time.sleep(0.5)
        for node in [*self._nodes]:
            self.kill_node(node)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for node in self.names if self._cgroups else ():
            for each in CONTROLLERS:
                tops = Path("/sys/fs/cgroup", each, self._group(node))
                for folder in sorted((path for path in tops.rglob("*") if path.is_dir()), reverse=True):
                    folder.rmdir()
                tops.rmdir()
