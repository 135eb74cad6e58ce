"""What all tests share: one thread, a data root where there is one, `mpirun` with this interpreter's MPI."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# before anything imports torch, numpy or mpi4py
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # no use on one machine, and its start sleeps a second

import hypothesis
import pytest
from support import nightly, processes
from support.fork_server import ForkServers, read_at_the_start

# an example takes as long as the machine is busy: that is no failure
hypothesis.settings.register_profile("mpifl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("mpifl")

LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "MPIR_")  # what an outer launcher leaves behind
ONE_MACHINE = {  # for Open MPI (MPICH needs none of it): as root, more ranks than cores, waiting ranks yield
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
NOT_STARTED = "The PMIx server's listener thread failed to start"  # says an mpirun that finds no port
TRIES = 3  # of such an mpirun
SLOWEST = ("test_digests.py", "test_deaths.py", "test_async.py", "test_catalogue.py", "test_mpi_bodies.py")

AT_THE_START = dict(os.environ)  # of this process, before tests change it
SESSION = os.getpid()  # of the process that collects, from which those of `pytest -n 4` are forked

ENDS, ENDED = pytest.StashKey[list[int]](), "mpifl would have ended this process with exit code {}"

LEFT = "variables of the environment are not as they were before this test"

Run = Callable[..., subprocess.CompletedProcess[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --data-root, -n and what chooses nightly tests."""
    parser.addoption("--data-root", help="folder of real data sets (default: MPIFL_DATA)")
    nightly.options(parser)
    processes.options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Note when the session began."""
    config.stash[nightly.BEGIN] = time.time()


@pytest.hookimpl(trylast=True)  # after -m has left out what it leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose among tests; put the files that start MPI first, the slowest at their head.

    The first process takes files from the head, the others from the tail: nightly tests near a change alone,
    which come after those of the day, stand between them.
    """
    nightly.select(config, items)
    nightly.take_turns(config, items)
    mpi = {item.path for item in items if "mpirun" in getattr(item, "fixturenames", ())}
    slow = {name: place for place, name in enumerate(SLOWEST)}
    of_the_day = nightly.order(items)

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        first = item.path in mpi
        later = of_the_day.get(item.path, len(of_the_day))
        return not first, later if first else -later, slow.get(item.path.name, len(slow))

    items.sort(key=place)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Share the tests among the processes of `pytest -n 4`."""
    return processes.run(session)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a nightly test for which no time is left."""
    nightly.skip_when_late(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests have their turn on another day, or were left out for want of time."""
    if left := terminalreporter.config.stash.get(nightly.OTHER_DAYS, 0):
        terminalreporter.write_line(
            f"{left} tests have their turn on another day: launch/test --all runs them"
        )
    if line := nightly.told(terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line, yellow=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test fail in whose process mpifl would end it (`os._exit`), which ended pytest before its report.

    Processes that a test forks or starts still end.
    """
    own, end = os.getpid(), os._exit
    item.stash[ENDS] = codes = []

    def refused(code: int) -> None:
        if os.getpid() != own or not sys._getframe(1).f_globals["__name__"].startswith("mpifl"):
            end(code)
        codes.append(code)
        pytest.fail(ENDED.format(code))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "_exit", refused)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Put back what a test has left to those after it.

    Lightning wraps `torch.compile` when it is imported. A test fails that leaves variables which Python or a
    library reads at its start: later tests start processes that would have them.
    """
    torch = sys.modules.get("torch")
    wrapped = getattr(getattr(torch, "compile", None), "__wrapped__", None)
    if torch is not None and wrapped is not None:
        torch.compile = wrapped  # type: ignore[attr-defined]
    result = yield
    before, after = read_at_the_start(AT_THE_START), read_at_the_start(os.environ)
    if before != after:
        for name in after:
            del os.environ[name]
        os.environ.update(before)
        pytest.fail(f"{LEFT}: {sorted(dict(before.items() ^ after.items()))}")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let a test fail, too, where that was in another thread or its failure was caught."""
    result = yield
    if item.stash[ENDS]:
        pytest.fail(ENDED.format(item.stash[ENDS][0]))
    return result


@pytest.fixture(scope="session")
def data_root(pytestconfig: pytest.Config) -> Path:
    """Return the folder of real data sets; without one, tests that ask for it are skipped."""
    root = pytestconfig.getoption("--data-root") or os.environ.get("MPIFL_DATA")
    if not root:
        pytest.skip("no data root: set MPIFL_DATA or give --data-root")
    if not Path(root).is_dir():
        pytest.fail(f"data root {root}: no such folder")
    return Path(root)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> list[int]:
    """Return the exit codes with which mpifl would have ended this process; a test fails if any is left."""
    return request.node.stash[ENDS]


@pytest.fixture
def flat_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FLT take two coordinates for UMAP, which compiles for ten seconds in every process."""
    from support import toy

    monkeypatch.setattr("mpifl.algorithms.flt.umap_plane", toy.plane)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports have no figures, which take seconds to draw."""
    monkeypatch.setattr("mpifl.analysis.report._files", lambda *arguments, **options: {})


@pytest.fixture(scope="module")
def virtual_hosts() -> Iterator[None]:
    """Skip where launch/virtual-cluster makes no hosts; let no two test processes have some at a time."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("virtual hosts need root, iproute2 and util-linux")
    if not (Path(sys.executable).parent / "prterun").exists():
        pytest.skip("virtual hosts need Open MPI 5 beside the interpreter")
    with (Path(tempfile.gettempdir()) / "mpifl-virtual-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(["ip", "netns", "add", "mpifl-probe"], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        subprocess.run(["ip", "netns", "delete", "mpifl-probe"], check=True)
        yield


def mpi_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without an outer launcher's variables, ready for `mpirun` on one machine."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return clean | ONE_MACHINE | dict(extra or {})


def children(pid: int) -> list[int]:
    """Return the processes that one has started, by any of its threads."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            found += [int(child) for child in thread.read_text().split()]
    return found


def finish(command: Sequence[str], timeout: float, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; past the time limit, end it with its children and fail the test."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **(pipes | options)) as process:  # type: ignore[call-overload]
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # mpirun ends its ranks; they would outlive it after SIGKILL
            try:
                out, err = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            pytest.fail(f"no end after {timeout} s: {' '.join(command)}\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="session")
def fork_servers() -> ForkServers:
    """Return the servers that fork ranks; the processes of `pytest -n 4` share them."""
    folder = Path(tempfile.gettempdir()) / f"mpifl-fork-{os.getuid()}-{SESSION}"
    return ForkServers(str(folder), SESSION, AT_THE_START)


@pytest.fixture(scope="session")
def mpirun(fork_servers: ForkServers) -> Run:
    """Return `run(ranks, *python_arguments)`: Python on so many ranks; with `ranks=None`, without mpirun.

    `run(3, "-m", "mpifl", "run", config)` or `run(2, "-c", program)`. Keywords: `timeout` in seconds, `env`
    (added), `cwd`, `launcher` (options of mpirun), `python` (an interpreter; the mpirun beside it is taken),
    `fresh` (whether ranks start Python themselves, instead of a fork that has imported PyTorch: for tests
    about processes, their memory or imports).
    An mpirun that ends before it has started a rank, because it finds no port to listen on, is tried again.
    """

    def run(
        ranks: int | None,
        *arguments: str | Path,
        timeout: float = 300,  # for a machine on which much else runs
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        launcher: Sequence[str] = (),
        python: str = sys.executable,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        words, environment = [*map(str, arguments)], mpi_environment(env)
        forked = not fresh and fork_servers.can_run(python, words, environment)
        command = fork_servers.command(ranks or 1, words) if forked else [python, *words]
        if ranks is not None:
            path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", "")))
            executable = shutil.which("mpirun", path=path)
            if executable is None:
                pytest.skip("no mpirun beside the interpreter or on the PATH")
            command = [executable, "-n", str(ranks), *launcher, *command]
        for left in reversed(range(TRIES)):
            end = finish(command, timeout, env=environment, cwd=cwd)
            if NOT_STARTED not in end.stderr or not left:
                break
            said = f"{end.stdout}\n{end.stderr}"
            warnings.warn(f"mpirun could not start, and is tried again: {said}", stacklevel=2)
            time.sleep(1)
        return end

    return run
