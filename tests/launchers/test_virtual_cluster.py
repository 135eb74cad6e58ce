"""Virtual hosts are hosts to MPI: memory is shared within, TCP between; nothing of them is left behind."""

import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("virtual_hosts")
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "virtual-cluster"
PROGRAM = """
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
rows = world.gather((MPI.Get_processor_name(), node.size))
if world.rank == 0:
    print(rows, open("/proc/net/dev").read().split("eth0:")[1].split()[8])
"""


def namespaces() -> list[str]:
    """Return the network namespaces of virtual hosts."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("mpifl-")]


def cluster(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run launch/virtual-cluster with this interpreter's MPI."""
    environment = os.environ | {"VIRTUAL_ENV": sys.prefix}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize(
    ("options", "layout"),
    [([], ["vh0", "vh0", "vh1"]), (["--map-by", "node"], ["vh0", "vh1", "vh0"])],
    ids=["by slot", "by node"],
)
def test_ranks_share_memory_by_host_and_talk_over_the_switch(options, layout):
    before = namespaces()
    done = cluster("-H", "2", "-n", "3", *options, "--", sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    rows, sent = done.stdout.rsplit(maxsplit=1)
    assert literal_eval(rows) == [(host, layout.count(host)) for host in layout]
    assert int(sent) > 0
    assert namespaces() == before


def test_exit_code_is_the_program_s():
    assert cluster("-H", "2", "-n", "2", "--", sys.executable, "-c", "raise SystemExit(3)").returncode == 3


def test_missing_command_is_told():
    done = cluster("-H", "2", "-n", "2")
    assert (done.returncode, "COMMAND... is missing" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-H", "-H: its value is missing"),
        ("up two", "up two: what is two?"),
        ("up 2 --rat 100mbit", "what is --rat?"),
        ("run -n 2 --rate 100mbit -- true", "--rate 100mbit: only where hosts are made, not with run"),
        ("down -n 2", "-n 2: has no effect with down"),
        ("exec", "exec : which host?"),
        ("cut 98", "cut 98: which host?"),
        ("heal", "heal : which host?"),
    ],
)
def test_bad_words_are_told_in_one_line(words, told):
    before = namespaces()
    done = cluster(*words.split())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert told in done.stderr
    assert namespaces() == before


PING = """
from time import perf_counter
from mpi4py import MPI
world = MPI.COMM_WORLD
for _ in range(3):
    start = perf_counter()
    if world.rank == 0:
        world.send(b"x", 1)
        world.recv(source=1)
    else:
        world.send(world.recv(source=0), 0)
if world.rank == 0:
    print(perf_counter() - start)
"""


def test_a_delay_is_added_on_the_way_there_and_on_the_way_back():
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("slow links need /dev/net/tun")
    before = namespaces()
    done = cluster("-H", "2", "-n", "2", "--delay", "30ms", "--", sys.executable, "-c", PING)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.06
    assert namespaces() == before


def test_a_delay_that_is_none_is_refused():
    before = namespaces()
    done = cluster("-H", "2", "-n", "2", "--delay", "soon", "--", "true")
    assert (done.returncode, "--delay soon" in done.stderr) == (2, True)
    assert namespaces() == before
