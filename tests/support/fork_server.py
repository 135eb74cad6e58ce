"""Python processes that begin with PyTorch, NumPy and SciPy imported: a server imports them once, and forks.

`python -I -S fork_server.py ask FOLDER/ ARGUMENTS...` is `python ARGUMENTS...` in a child of a server: with
the environment, working directory, standard streams, signals and exit code of the process that asks. mpifl
itself is imported anew in each child, and NumPy's global generator seeded anew.

Ranks are spread over `SERVERS` servers. Their sets of texts have different orders, as those of processes
that have nothing in common: what ranks compute may not depend on it.
"""

from __future__ import annotations

import array
import fcntl
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType

SERVERS = 3
MODULES = ("torch", "numpy", "scipy.optimize", "safetensors.torch", "yaml")
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
READ_AT_THE_START = (  # beginnings of variables that Python or a library above reads only then
    *("ATEN_", "DNNL_", "LD_", "MKL_", "NPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "TORCH_"),
    *("MPIFL_INSTRUCTIONS", "COVERAGE_PROCESS"),
)
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGABRT")
READY = "ready\n"
Request = tuple[list[str], dict[str, str], str]  # arguments of Python, environment, working directory


def read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a server and what it is to run must have in common."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_THE_START) and name != "PYTHONPATH"
    }


# -- the tests -----------------------------------------------------------------------------------------------


class ForkServers:
    """The servers of a test session, each started when first needed; processes of `pytest -n 4` share them.

    Args:
        folder: for their sockets, with a short name.
        owner: number of the process with which they end.
        environment: theirs.
    """

    def __init__(self, folder: str, owner: int, environment: Mapping[str, str]) -> None:
        self.folder, self.owner, self.started = folder, owner, 0
        self.environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
        self.processes: list[subprocess.Popen[str]] = []

    def can_run(self, python: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether a child would be as Python started anew with these arguments.

        The measurement of coverage begins with the start of Python.
        """
        return (
            hasattr(os, "pidfd_open")
            and python == sys.executable
            and (arguments[0] in ("-c", "-m") or not arguments[0].startswith("-"))
            and read_at_the_start(environment) == read_at_the_start(self.environment)
            and not any(name.startswith("COVERAGE_PROCESS") for name in environment)
        )

    def command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        """Return the command that stands for `python ARGUMENTS...` on so many ranks."""
        wanted = min(ranks, SERVERS)
        if self.started < wanted:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            with open(f"{self.folder}/lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._start(wanted)
        return [sys.executable, "-I", "-S", __file__, "ask", f"{self.folder}/", *arguments]

    def _start(self, wanted: int) -> None:
        paths = [f"{self.folder}/{number}" for number in range(wanted)]
        new = [
            subprocess.Popen(
                [sys.executable, __file__, "serve", path, str(self.owner)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # Ctrl-C reaches those who ask; they pass it on
            )
            for path in paths
            if not os.path.exists(path)
        ]
        for server in new:
            assert server.stdout is not None
            said = server.stdout.readline()
            assert said == READY, said + server.stdout.read()
        self.processes += new
        self.started = wanted


# -- the process that asks -----------------------------------------------------------------------------------


def ask(folder: str, arguments: Sequence[str]) -> int:
    """Let the server of this rank run Python with these arguments; return the exit code.

    Args:
        folder: of the servers' sockets, with a slash.
        arguments: those of Python.
    """
    if "PMI_FD" in os.environ:  # MPICH gives its ranks a file descriptor, which no child of a server has
        os.execv(sys.executable, [sys.executable, *arguments])
    rank = next((int(os.environ[name]) for name in RANK if name in os.environ), 0)
    request = marshal.dumps((list(arguments), dict(os.environ), os.getcwd()))
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}{rank % SERVERS}")
        server.sendmsg([len(request).to_bytes(8, "big")], streams)
        server.sendall(request)
        with server.makefile("r") as answers:
            child = int(answers.readline())
            woken, wakes = socket.socketpair()  # a signal just before a call that waits would wait, too
            wakes.setblocking(False)
            signal.set_wakeup_fd(wakes.fileno())
            for name in FORWARDED:
                signal.signal(getattr(signal, name), lambda number, frame: pass_on(child, number))
            while server not in select.select([server, woken], [], [])[0]:
                woken.recv(64)
            code = os.waitstatus_to_exitcode(int(answers.readline()))
    if code < 0:  # end in the same way
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def pass_on(child: int, number: int) -> None:
    """Send a signal to a child; one that has just ended is left alone."""
    with suppress(ProcessLookupError):
        os.kill(child, number)


# -- the server ----------------------------------------------------------------------------------------------


def serve(path: str, owner: int) -> Request | None:
    """Serve until the owner has ended; in a child, return what it has to do.

    Args:
        path: of the socket.
        owner: number of the process that owns this server.
    """
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # children need not look through what they have in common, least of all at their end
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for a child
    ends = os.pidfd_open(owner)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print(READY, end="", flush=True)
        while ends not in (ready := select.select([listener, ends], [], [])[0]):
            assert ready
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.close(ends)
                return begin(connection)
            connection.close()
    for name in (path, f"{os.path.dirname(path)}/lock"):
        if os.path.exists(name):
            os.unlink(name)
    if not os.listdir(os.path.dirname(path)):
        os.rmdir(os.path.dirname(path))
    return None


def begin(connection: socket.socket) -> Request:
    """Fork the child that was asked for, and return in it; this process ends after the child."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12), socket.MSG_WAITALL)
    streams = array.array("i", ancillary[0][2])
    size, request = int.from_bytes(head, "big"), b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    child = os.fork()
    if child == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        asked: Request = marshal.loads(request)
        return asked
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    ended = os.pidfd_open(child)
    with suppress(OSError):  # of a process that asks and has been killed
        connection.sendall(b"%d\n" % child)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    with suppress(OSError):
        connection.sendall(b"%d\n" % os.waitpid(child, 0)[1])
    os._exit(0)


def become(request: Request, path: Sequence[str]) -> None:
    """Run Python's arguments in this process, as the interpreter would.

    Args:
        request: what to run, and where.
        path: the interpreter's own, without the folder of a program and `PYTHONPATH`.
    """
    import runpy

    (kind, *words), environment, folder = request
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["numpy"].random.seed()
    first = {"-c": "", "-m": folder}.get(kind, os.path.dirname(os.path.realpath(kind)))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    if kind == "-m":
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *words[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = [kind, *words]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    role, place, *others = sys.argv[1:]
    if role == "ask":
        sys.exit(ask(place, others))
    own_path = sys.path[1:]
    asked = serve(place, int(others[0]))
    if asked is not None:
        become(asked, own_path)
