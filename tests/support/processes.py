"""Several processes for the tests of a session: `pytest -n 4` collects them once and forks.

Each process takes whole files: the first from the head of the list, the others from its tail. A test whose
process ends fails, and a new process goes on with the next one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from typing import Any

import pytest

FORK = multiprocessing.get_context("fork")
LOOK_S = 2.0  # after so many seconds in which nobody tells anything: is anybody dead?
PATIENCE_S = 20.0  # for a process that is to end and has children of its own

Told = tuple[str, Any]  # what a process tells: `ran`, `warned` or `more`, and about what


def options(parser: pytest.Parser) -> None:
    """Add -n."""
    parser.getgroup("general")._addoption(  # the public method has no letters for plug-ins
        "-n", type=int, default=0, metavar="PROCESSES", help="share the tests among so many processes"
    )


def run(session: pytest.Session) -> bool | None:
    """Run the tests of a session in several processes; return None where pytest itself is to run them."""
    option, count = session.config.option, session.config.getoption("-n")
    if count < 2 or option.collectonly or option.usepdb or session.testsfailed:
        return None
    files: dict[Any, list[int]] = {}
    for number, item in enumerate(session.items):
        files.setdefault(item.path, []).append(number)
    Processes(session, deque(files.values())).run(min(count, len(files)))
    return True


class Process:
    """A process, and the tests that it has.

    Args:
        number: 0 for the first, which takes files from the head.
    """

    def __init__(self, number: int, session: pytest.Session, stopped: Event) -> None:
        self.number, self.left = number, deque[int]()
        self.connection, there = FORK.Pipe()
        self.process = FORK.Process(target=work, args=(session, there, stopped))
        self.process.start()
        there.close()

    def heard(self) -> Told | None:
        """Return the next message; None where there is none now, or no more will come."""
        with suppress(EOFError, ConnectionError):
            told: Told | None = self.connection.recv() if self.connection.poll() else None
            return told
        self.process.join()  # it has closed its end
        return None


class Processes:
    """The processes of a session, and the files that none has taken yet.

    Args:
        files: numbers of the tests of each.
    """

    def __init__(self, session: pytest.Session, files: deque[list[int]]) -> None:
        self.session, self.files, self.hook = session, files, session.config.hook
        self.stopped, self.processes = FORK.Event(), dict[Connection, Process]()

    def run(self, count: int) -> None:
        """Run all tests; report each in this process."""
        config = self.session.config
        config._tmp_path_factory.getbasetemp()  # one for all: whoever makes a folder in it takes a free name
        if terminal := config.pluginmanager.get_plugin("terminalreporter"):
            terminal.showfspath = False  # tests of several files follow each other
        gc.collect()
        gc.freeze()  # no process needs to look through what all have in common
        try:
            for number in range(count):
                self.start(number)
            while self.processes:
                for connection in wait([*self.processes], LOOK_S) or [*self.processes]:
                    self.hear(self.processes[connection])
        finally:
            self.end()
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def start(self, number: int) -> None:
        """Fork a process."""
        process = Process(number, self.session, self.stopped)
        self.processes[process.connection] = process

    def hear(self, process: Process) -> None:
        """Take one message of a process, if it has any; see to it if it has ended."""
        alive = process.process.is_alive()  # before the last message
        if (told := process.heard()) is not None:
            getattr(self, told[0])(process, told[1])
        elif not alive or not process.process.is_alive():
            del self.processes[process.connection]
            process.connection.close()
            if process.left and not self.stopped.is_set():
                self.died(process)

    def more(self, process: Process, _: None) -> None:
        """Give a process a file; none where there is none, or no more is to run."""
        part: list[int] = []
        if self.files and not self.stopped.is_set():
            part = self.files.pop() if process.number else self.files.popleft()
        process.left.extend(part)
        with suppress(ConnectionError):  # it has died since
            process.connection.send(part)

    def ran(self, process: Process, reports: Sequence[dict[str, Any]]) -> None:
        """Report a test."""
        item, config = self.session.items[process.left.popleft()], self.session.config
        self.report(
            item, [config.hook.pytest_report_from_serializable(config=config, data=r) for r in reports]
        )

    def report(self, item: pytest.Item, reports: Sequence[pytest.TestReport]) -> None:
        """Let pytest's other parts know what became of a test."""
        self.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            self.hook.pytest_runtest_logreport(report=report)
        self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self.session.shouldfail or self.session.shouldstop:
            self.stopped.set()

    def warned(self, process: Process, about: tuple[str, str, str, int, dict[str, Any]]) -> None:
        """Count a warning, of a class of the same name."""
        name, text, file, line, others = about
        kind = type(name, (Warning,), {})
        message = warnings.WarningMessage(kind(text), kind, file, line)
        self.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **others})

    def died(self, process: Process) -> None:
        """Let the test fail that ran when its process ended; another process takes the tests after it."""
        item = self.session.items[process.left.popleft()]
        said = f"the process of this test ended with exit code {process.process.exitcode}"
        self.report(item, [pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")])
        if process.left:
            self.files.insert(0 if process.number == 0 else len(self.files), [*process.left])
        self.start(process.number)

    def end(self) -> None:
        """Let the processes end that are still there, after the tests that they are at."""
        self.stopped.set()
        for process in self.processes.values():
            process.connection.close()
            process.process.join(PATIENCE_S)
            if process.process.is_alive():
                process.process.terminate()
                process.process.join()


# -- a process -----------------------------------------------------------------------------------------------


class Telling:
    """A plug-in that tells what pytest says in a process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection
        self.reports: list[dict[str, Any]] = []
        self.begun = False  # a plug-in is told what was recorded before it was there

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report, in a form that can be sent."""
        to_send = self.config.hook.pytest_report_to_serializable
        self.reports.append(to_send(config=self.config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """Tell of a warning by its name and text: not everything in it can be sent."""
        if not self.begun:
            return
        others = {"when": when, "nodeid": nodeid, "location": location}
        kind, text = warning_message.category.__name__, str(warning_message.message)
        where = warning_message.filename, warning_message.lineno
        self.connection.send(("warned", (kind, text, *where, others)))

    def ran(self) -> None:
        """Tell of the test that has just ended."""
        reports, self.reports = self.reports, []
        self.connection.send(("ran", reports))

    def more(self) -> list[int]:
        """Ask for the tests of another file."""
        self.connection.send(("more", None))
        numbers: list[int] = self.connection.recv()
        return numbers


def work(session: pytest.Session, connection: Connection, stopped: Event) -> None:
    """Run tests as long as there are some; the last test of a file knows which one follows it.

    So fixtures of the session stay.
    """
    plugins, threads = session.config.pluginmanager, threading.enumerate()
    assert len(threads) == 1, f"a fork has lost the threads {threads}"
    captured, terminal = plugins.get_plugin("capturemanager"), plugins.get_plugin("terminalreporter")
    captured.stop_global_capturing()  # its files are those of all processes
    captured.start_global_capturing()
    captured.suspend_global_capture(in_=True)
    if terminal:  # the first process reports
        terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115 (to the end of this process)
    telling = Telling(session.config, connection)
    plugins.register(telling)
    with suppress(ConnectionError, EOFError, KeyboardInterrupt):  # nobody listens any more
        telling.begun = True
        numbers = telling.more()
        while numbers and not (stopped.is_set() or session.shouldfail or session.shouldstop):
            number, *numbers = numbers
            numbers = numbers or telling.more()
            item, after = session.items[number], session.items[numbers[0]] if numbers else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            telling.ran()
    session._setupstate.teardown_exact(None)  # what a test has left that was not to be the last
