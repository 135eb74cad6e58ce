"""What a fork server's child has in common with Python started anew, and what it has not."""

from __future__ import annotations

import array
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import sys

import pytest
from conftest import mpi_environment
from support.fork_server import ForkServers

SHOW = """
import json, os, sys
known = [name for name in ("torch", "mpifl") if name in sys.modules]
sys.stderr.write("on stderr")
print(json.dumps([sys.argv, os.getcwd(), os.environ["HERE"], sys.stdin.read(), __name__, sys.path[0], known]))
sys.exit(7)
"""


@pytest.fixture
def asks(fork_servers, tmp_path):
    """Return a function that starts `python ARGUMENTS...` by a fork server, in `tmp_path`."""

    def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
        environment = mpi_environment({"HERE": "é"}) | options.pop("env", {})
        assert fork_servers.can_run(sys.executable, arguments, environment)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = fork_servers.command(3, arguments)
        return subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, **pipes)

    return start


def test_a_child_has_the_arguments_place_streams_and_exit_code_of_who_asks(asks, tmp_path):
    (tmp_path / "deep").mkdir()
    for folder in (tmp_path, tmp_path / "deep"):
        (folder / "shown.py").write_text(SHOW)
    own, deep = str(tmp_path), str(tmp_path / "deep")
    for words, argv, first in (
        (("-c", SHOW, "a", "b"), ["-c", "a", "b"], ""),
        (("-m", "shown", "a"), [f"{own}/shown.py", "a"], own),
        (("deep/shown.py", "a"), ["deep/shown.py", "a"], deep),
    ):
        child = asks(*words)
        out, err = child.communicate("from stdin")
        assert json.loads(out) == [argv, own, "é", "from stdin", "__main__", first, ["torch"]]
        assert (err, child.returncode) == ("on stderr", 7)


def test_ranks_differ_in_the_order_of_sets_and_in_global_draws(asks):
    """As separate starts of Python do: what depends on either shows in a comparison of ranks."""
    program = "import numpy; print(hash('a'), numpy.random.random(), sep='\\n')"
    ranks = [asks("-c", program, env={"OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)]
    hashes, draws = zip(*(rank.communicate()[0].split() for rank in ranks), strict=True)
    assert len({*hashes[:3]}) == 3
    assert len({*draws}) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_who_asks_and_in_the_same_way(number, asks):
    """Its streams are closed: it does not live on."""
    child = asks("-c", "import time; print('begun', flush=True); time.sleep(600)")
    assert child.stdout.readline() == "begun\n"
    child.send_signal(number)
    assert child.communicate(timeout=60) == ("", "")
    assert child.returncode == -number


def test_a_child_ends_where_who_asks_has_ended_before_it_was_told_of_a_child(fork_servers, tmp_path):
    """Its standard output ends with it."""
    *_, folder = fork_servers.command(1, [])
    asked = ["-c", "import time; time.sleep(600)"], mpi_environment({}), str(tmp_path)
    request = marshal.dumps(asked)
    output, written = os.pipe()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}0")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [written] * 3))]
        server.sendmsg([len(request).to_bytes(8, "big")], rights)
        server.sendall(request)
    os.close(written)
    assert select.select([output], [], [], 60)[0], "it lives on"
    assert os.read(output, 1) == b""
    os.close(output)


def test_a_child_that_is_killed_is_told_of_as_such(asks):
    child = asks("-c", "import os; os.kill(os.getpid(), 9)")
    child.communicate()
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "python", "changed"),
    [
        (["-X", "importtime", "-m", "mpifl"], sys.executable, {}),
        (["-m", "mpifl"], "/usr/bin/python", {}),
        (["-m", "mpifl"], sys.executable, {"MPIFL_INSTRUCTIONS": "avx2"}),
        (["-m", "mpifl"], sys.executable, {"OMP_NUM_THREADS": "2"}),
        (["-m", "mpifl"], sys.executable, {"COVERAGE_PROCESS_CONFIG": "x"}),
    ],
)
def test_what_only_a_start_of_python_can_do_is_left_to_one(arguments, python, changed):
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "x"}
    servers = ForkServers("none", 1, environment)
    set_by_libraries = {"KMP_INIT_AT_FORK": "FALSE", "TORCHINDUCTOR_CACHE_DIR": "/tmp", "HF_HUB_OFFLINE": "1"}
    assert servers.can_run(sys.executable, ["-m", "mpifl"], environment | set_by_libraries)
    assert not servers.can_run(python, arguments, environment | changed)
