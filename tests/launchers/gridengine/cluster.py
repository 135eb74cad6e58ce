"""A small real Grid Engine on this machine: a qmaster, and an execd for each node.

Each node has its own host name, processes, /tmp, /dev/shm and network (namespaces), since Grid Engine knows a
node by its address. The network has no way out.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from ..jobs import wait_for

PLACE = Path("/usr/lib/gridengine")  # where Debian has the programs
SHARE = Path("/usr/share/gridengine")
PACKAGES = "gridengine-master gridengine-exec gridengine-client"
NODE = """set -e
hostname "$1"
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
mount --bind "$2/tmp-$1" /tmp
mount --bind "$2/hosts" /etc/hosts
ip link set lo up
if [ "$1" = node1 ]; then
    ip link add name eth0 type bridge
    export LD_LIBRARY_PATH=/usr/lib/gridengine
fi
until ip link show eth0; do sleep 0.05; done > /dev/null 2>&1
ip address add "$3/24" dev eth0
ip link set eth0 up
if [ "$1" = node1 ]; then
    sge_qmaster &
    until qconf -sh > /dev/null 2>&1; do sleep 0.1; done
fi
sge_execd & pid=$!
touch "$2/up-$1"
while kill -0 $pid 2> /dev/null; do wait $pid || true; done
"""
BOOTSTRAP = """admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {folder}/root/default/common;{folder}/qmaster
binary_path {place}
qmaster_spool_dir {folder}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
CONFIGURATION = {
    "execd_spool_dir": "{folder}/execd",
    "mailer": "/bin/true",
    "min_uid": "0",
    "min_gid": "0",
    "load_report_time": "00:00:05",
    "max_unheard": "00:00:20",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 joblog=false sharelog=00:00:00",
}
SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
# parallel environments: over all nodes, on one node
ENVIRONMENTS = {"mpi": "$round_robin", "smp": "$pe_slots"}
PARALLEL = """pe_name {name}
slots 99
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary TRUE
qsort_args NONE
"""
NOTICE = 20  # seconds between a signal to a job of -notify and SIGKILL
QUEUE = {
    "qname": "main",
    "hostlist": "{nodes}",
    "seq_no": "0",
    "nsuspend": "1",
    "suspend_interval": "00:05:00",
    "priority": "0",
    "min_cpu_interval": "00:05:00",
    "processors": "UNDEFINED",
    "qtype": "BATCH INTERACTIVE",
    "pe_list": " ".join(ENVIRONMENTS),
    "rerun": "FALSE",
    "slots": "{slots}",
    "tmpdir": "/tmp",
    "shell": "/bin/sh",
    "shell_start_mode": "posix_compliant",
    "notify": f"00:00:{NOTICE}",
    "initial_state": "default",
}
NONE = """load_thresholds suspend_thresholds ckpt_list prolog epilog starter_method suspend_method
resume_method terminate_method owner_list user_lists xuser_lists subordinate_list complex_values projects
xprojects calendar"""
LIMITED = ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")
LIMITS = [f"{kind}_{what}" for what in LIMITED for kind in "sh"]


def missing() -> str:
    """Return why there can be no Grid Engine here, empty if there can."""
    if os.geteuid():
        return "a Grid Engine of the tests is started by root"
    lacking = [name for name in ("sge_qmaster", "sge_execd", "qsub") if not (PLACE / name).exists()]
    lacking += [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install {PACKAGES} iproute2"
    links = "ip link add name eth0 type bridge && ip link add name v type veth"
    program = f"mount -t tmpfs tmpfs /dev/shm && {links}"
    namespaces = ["unshare", *SPACES, "sh", "-c", program]
    return "" if subprocess.run(namespaces, capture_output=True).returncode == 0 else "no namespaces here"


SPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class GridEngine:
    """A running cluster; `close` ends it.

    Args:
        folder: holds its files.
        nodes: number of nodes, node1, node2, ...; qmaster is on the first.
        slots: slots of each node.
        environment: what the submitting shell has.
    """

    def __init__(self, folder: Path, nodes: int, slots: int, environment: Mapping[str, str]) -> None:
        self.folder, self.names = folder, [f"node{i}" for i in range(1, nodes + 1)]
        root = folder / "root"
        self.environment = {
            **environment,
            "PATH": f"{PLACE}:{environment['PATH']}",
            "SGE_ROOT": str(root),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": "6444",
            "SGE_EXECD_PORT": "6445",
        }
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("qmaster", "execd", "jobs", "root/default/common", *(f"tmp-{n}" for n in self.names)):
            (folder / name).mkdir(parents=True)
        for node in self.names:
            (folder / f"tmp-{node}").chmod(0o1777)
        for name in ("bin", "lib", "utilbin"):
            (root / name).mkdir()
            (root / name / "lx-amd64").symlink_to(PLACE)
        (root / "util").symlink_to(SHARE / "util")
        hosts = "".join(f"{self._address(node)} {node}\n" for node in self.names)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        common = root / "default" / "common"
        (common / "bootstrap").write_text(BOOTSTRAP.format(folder=folder, place=PLACE))
        (common / "act_qmaster").write_text("node1\n")
        self._spool()
        for node in self.names:
            self.start_node(node)
        self._configure(slots)

    def _address(self, node: str) -> str:
        return f"10.77.0.{self.names.index(node) + 1}"

    def _spool(self) -> None:
        """Write what qmaster begins with."""
        lines = (SHARE / "default-configuration").read_text().splitlines()
        text = ""
        for key, *value in (line.split(maxsplit=1) for line in lines if line.strip("# ")):
            text += f"{key} {CONFIGURATION.get(key, ' '.join(value)).format(folder=self.folder)}\n"
        (self.folder / "configuration").write_text(text)
        common, resources = self.folder / "root/default/common", SHARE / "util/resources"
        environment = self.environment | {"LD_LIBRARY_PATH": str(PLACE)}
        for command in (
            ["spoolinit", "classic", "libspoolc", f"{common};{self.folder}/qmaster", "init"],
            ["spooldefaults", "configuration", f"{self.folder}/configuration"],
            ["spooldefaults", "complexes", str(resources / "centry")],
            ["spooldefaults", "usersets", str(resources / "usersets")],
            ["spooldefaults", "managers", "root"],
        ):
            subprocess.run([str(PLACE / command[0]), *command[1:]], env=environment, check=True)

    def _configure(self, slots: int) -> None:
        """Make the parallel environments and the queue."""
        for node in self.names:
            self.run("qconf", "-as", node)
        for name, rule in ENVIRONMENTS.items():
            self._add("-Ap", PARALLEL.format(name=name, rule=rule))
        queue = dict.fromkeys(NONE.split(), "NONE") | dict.fromkeys(LIMITS, "INFINITY") | QUEUE
        text = "".join(f"{key} {value}\n" for key, value in queue.items())
        self._add("-Aq", text.format(nodes=" ".join(self.names), slots=slots))
        lines = (line.split(maxsplit=1) for line in self.run("qconf", "-ssconf").stdout.splitlines())
        self._add("-Msconf", "".join(f"{key} {SCHEDULER.get(key, value)}\n" for key, value in lines))

    def _add(self, option: str, text: str) -> None:
        file = self.folder / f"qconf{option}"
        file.write_text(text)
        done = self.run("qconf", option, str(file))
        assert done.returncode == 0, done.stdout + done.stderr

    def _first(self, node: str) -> str:
        """Return the process id of the first process in a node."""
        show = ["pgrep", "-P", str(self._nodes[node].pid)]
        found: list[str] = []

        def look() -> bool:
            found[:] = subprocess.run(show, capture_output=True, text=True).stdout.split()
            return bool(found)

        wait_for(look, 10, f"the first process of {node}")
        return found[0]

    def start_node(self, node: str) -> None:
        """Start a node and join it to the first one; return when its execd runs."""
        (self.folder / f"up-{node}").unlink(missing_ok=True)
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, "bash", "-c", NODE, "node", node]
        with (self.folder / f"{node}.log").open("ab") as log:
            self._nodes[node] = subprocess.Popen(
                [*command, str(self.folder), self._address(node)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment | {"SGE_ND": "1"},
                start_new_session=True,
            )
        if node != "node1":
            port, there, here = f"to-{node}", self._first("node1"), self._first(node)
            add = ["ip", "link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", port]
            subprocess.run([*add, "netns", there], check=True)
            join = ["ip", "link", "set", port, "master", "eth0", "up"]
            subprocess.run(["nsenter", "-t", there, "--net", *join], check=True)
            wait_for((self.folder / "up-node1").exists, 20, "qmaster")
            self.run("qconf", "-ah", node)
        wait_for((self.folder / f"up-{node}").exists, 30, f"{node}", (self.folder / f"{node}.log").read_text)

    def kill_node(self, node: str) -> None:
        """End all processes of a node at once, as if it had lost its power."""
        os.kill(int(self._first(node)), signal.SIGKILL)
        self._nodes.pop(node).wait(20)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node, in the folder of the jobs."""
        spaces = ["nsenter", "-t", self._first("node1"), "--net", "--uts", "--ipc", "--mount", "--pid"]
        env = self.environment | environment
        words = [*spaces, "env", "-C", str(self.jobs), *command]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)

    @property
    def jobs(self) -> Path:
        """The folder that jobs are submitted from."""
        return self.folder / "jobs"

    def look(self, job: str) -> dict[str, str]:
        """Return what `qstat` shows as states of the tasks of a job that have not ended, by number."""
        tree = ElementTree.fromstring(self.run("qstat", "-xml", "-g", "d").stdout)
        listed = [each for each in tree.iter("job_list") if each.findtext("JB_job_number") == job]
        return {each.findtext("tasks", "1"): each.findtext("state", "") for each in listed}

    def ended(self, job: str, seconds: float = 120) -> list[dict[str, str]]:
        """Wait for the end of a job, and return what `qacct` says of each of its starts."""
        wait_for(lambda: not self.look(job), seconds, f"the end of job {job}", lambda: self.log(job))
        wait_for(lambda: self.starts(job), 20, f"the account of job {job}")
        time.sleep(1.5)  # it is written once a second
        return self.starts(job)

    def starts(self, job: str) -> list[dict[str, str]]:
        """Return what `qacct` says of the starts of a job that have ended."""
        found: list[dict[str, str]] = []
        for line in self.run("qacct", "-j", job).stdout.splitlines():
            if line.startswith("===="):
                found.append({})
            elif found and line.strip():
                key, value, *_ = [*line.split(maxsplit=1), ""]
                found[-1][key] = value.strip()
        return found

    def log(self, job: str) -> str:
        """Return what a job of `launch/gridengine` has printed."""
        return "".join(file.read_text() for file in sorted(self.jobs.glob(f"mpifl.o{job}*")))

    def close(self) -> None:
        """End all jobs and daemons."""
        with suppress(subprocess.TimeoutExpired):
            self.run("qdel", "-f", "-u", "root")
        for node in reversed([*self._nodes]):
            self.kill_node(node)
