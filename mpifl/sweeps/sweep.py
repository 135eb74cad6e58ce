"""Runs a sweep: one configuration for every combination of the values that its `vary` names.

The sweep's folder holds one run folder per case, a table over all cases (`sweep.csv`; `sweep.md` with means
and standard deviations over `vary.seed`), a figure (`sweep.png`), and `table.md` if the sweep has a `table`.
Cases run one after the other, each on all ranks, or several at a time on groups of the ranks (`jobs`).
Several processes may share the cases and the folder (`Part`), and cases may be added to a sweep later.
"""

from __future__ import annotations

import gc
import hashlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from mpifl.comm.mpi_startup import is_tolerant
from mpifl.comm.transport import Transport, divided, on_server
from mpifl.core.beginning import PHASES
from mpifl.core.case_names import LOCKS, labels_of
from mpifl.core.errors import CodeFailed, Stopped, StoppedEarly, UserError, one_line, require
from mpifl.core.files import try_lock
from mpifl.core.progress import doing
from mpifl.core.textfiles import json_mapping
from mpifl.driver.checkpoints import locked
from mpifl.driver.existing import check_content, content_of, delete
from mpifl.driver.run import run
from mpifl.driver.run_callbacks import end_late
from mpifl.experiment.placement import threads_by_mask
from mpifl.experiment.schema import REPLACE, Config
from mpifl.results import run_folder as folders
from mpifl.results.reader import load
from mpifl.supervision.progress import Progress
from mpifl.supervision.signals import Signals

from .cases import (
    ALL,
    SWEEP_FILE,
    Case,
    Part,
    cases,
    in_order,
    shared_lines,
    started_with,
    table_if_any,
    trainings,
    unchecked_cases,
    with_configurations,
)
from .results import Found, check_case, is_complete, is_sweep, keep, never_ran, require_same, settings_of
from .retime import check as check_retime
from .retime import write_retimed

JOIN_SECONDS = 10.0  # longest wait for another process that has just begun the same sweep
BEGINNINGS = ".beginnings"  # folder of the results of first phases that several cases share
JOBS = ".jobs-"  # prefix of the folders through which the groups of a job communicate
ASK_SECONDS = 0.5  # time between two checks whether another group requests a stop


def sweep(
    tree: Callable[[], Mapping[str, Any]],
    transport: Transport,
    quiet: bool = False,
    part: Part = ALL,
    jobs: int = 1,
    keep_going: bool = False,
) -> Path | None:
    """Run all cases of a configuration.

    If a sweep with the same `output.id` exists, the cases are added to it: its complete cases stay as they
    are, and missing ones are run.

    Args:
        tree: returns the configuration; called on rank 0.
        transport: connects the ranks; every rank calls.
        quiet: whether to print nothing.
        part: the cases that this process runs.
        jobs: number of cases that run at the same time, each on a group of the ranks.
        keep_going: whether the other cases run although one has failed.

    Returns:
        The sweep's folder on rank 0, None on the others.

    Raises:
        UserError: the configuration or one of its cases is invalid, an existing sweep of that name has other
            settings, or there are too few ranks; nothing was run. Or a case cannot run because of the data or
            the method's own code.
        CasesFailed: cases failed, under `keep_going`; all others are complete.
        Stopped: a signal ended the sweep; `mpifl resume` continues it.
    """

    def begin() -> tuple[dict[str, Any], Path]:
        own = with_configurations(tree())
        every = cases(own, part)
        mine = _mine(part, every)
        check_jobs(jobs, transport, mine)
        check_keep_going(keep_going, transport)
        return own, _folder(own, every, mine)

    own, folder = on_server(transport, begin)
    chosen, silent = part.chosen(unchecked_cases(own)), quiet or not transport.is_server
    return _Work(folder, chosen, silent, part, keep_going).run(transport, jobs)


def resume_sweep(
    folder: Path,
    transport: Transport,
    quiet: bool = False,
    part: Part = ALL,
    jobs: int = 1,
    keep_going: bool = False,
) -> Path | None:
    """Run the cases of a sweep that are not complete; a case with a checkpoint continues from it.

    Args:
        folder: the sweep's folder.
        transport: connects the ranks; every rank calls.
        quiet: whether to print nothing.
        part: the cases that this process runs.
        jobs: number of cases that run at the same time, each on a group of the ranks.
        keep_going: whether the other cases run although one has failed.

    Returns:
        The sweep's folder on rank 0, None on the others.

    Raises:
        UserError: the sweep has no such case, or there are too few ranks. Otherwise as in `sweep`.
        Stopped: a signal ended the sweep.
    """

    def begin() -> dict[str, Any]:
        tree = started_with(folder)
        every = cases(tree, part)
        mine = _mine(part, every)
        check_jobs(jobs, transport, mine)
        check_keep_going(keep_going, transport)
        check_cases(_checkable(every, mine), folder)
        return tree

    tree = on_server(transport, begin)
    mine, silent = part.chosen(unchecked_cases(tree)), quiet or not transport.is_server
    return _Work(folder, mine, silent, part, keep_going).run(transport, jobs)


def _mine(part: Part, every: Sequence[Case]) -> list[Case]:
    """Return the cases of a part; raise `UserError` if it has none."""
    mine = part.chosen(every)
    require(bool(mine), "--case", "/".join(map(str, part.share)), "has no case left")
    return mine


def listed(tree: Mapping[str, Any], part: Part = ALL) -> str:
    """Return one line for each case of a part of a sweep, then a line with their number.

    Args:
        tree: the configuration.
        part: the part.

    Raises:
        UserError: the configuration or one of these cases is invalid.
    """
    every = cases(tree, part)
    mine = part.chosen(every)
    some, count = len(trainings(mine)), f"{len(mine)} of {len(every)} cases"
    count += f", {some} trainings: the others differ in times only" if some < len(mine) else ""
    lines = shared_lines(mine, table_if_any(tree))
    return "\n".join([*(case.title for case in mine), count, *lines])


@contextmanager
def _named(case: Case) -> Iterator[None]:
    """Add the title of a case to a `UserError` that leaves the block."""
    try:
        yield
    except UserError as error:
        named = error.in_case(case.title)
        if named is error:
            raise
        raise named from error


def check_jobs(jobs: int, transport: Transport, some_cases: Sequence[Case]) -> None:
    """Raise `UserError` if `jobs` cases cannot run at the same time on the ranks of this job."""
    require(jobs >= 1, "--jobs", jobs, "use the number of cases that run at a time, 1 or more")
    if jobs == 1:
        return
    have = "one process runs" if transport.size == 1 else f"{transport.size} ranks run"
    at_most = "one case at a time" if transport.size == 1 else f"{transport.size} cases at a time at most"
    remedy = f"{have} {at_most}; mpirun -n {2 * jobs} mpifl sweep CONFIG --jobs {jobs} gives each case two"
    require(transport.size >= jobs, "--jobs", jobs, remedy)
    remedy = (
        "under mpirun --with-ft ulfm one run outlives its workers, a group of several does not; leave one out"
    )
    require(not is_tolerant(), "--jobs", jobs, remedy)
    sizes = {len(ranks) for ranks in divided(transport.nodes, jobs)}
    for wanted in {case.config.system.ranks for case in some_cases} - {None}:
        have = " or ".join(map(str, sorted(sizes)))
        remedy = f"each group has {have} of this job's {transport.size} ranks; "
        remedy += f"use mpirun -n {jobs * (wanted or 1)}, or leave the key out"
        require(sizes == {wanted}, "system.ranks", wanted, remedy)


def check_keep_going(keep_going: bool, transport: Transport) -> None:
    """Raise `UserError` if a case of this job cannot fail without ending the job."""
    remedy = "under mpirun --with-ft ulfm a run outlives its workers, but not an error; leave one out"
    possible = transport.size == 1 or not is_tolerant()
    require(possible or not keep_going, "--keep-going", True, remedy)


# -- the folder ----------------------------------------------------------------------------------------------


def _checkable(every: Sequence[Case], mine: Sequence[Case]) -> list[Case]:
    """Return the cases whose runs can be compared with their configurations: those to run, and valid ones."""
    slugs = {case.slug for case in mine}
    return [case for case in every if case.slug in slugs or case.can_run]


def _folder(tree: dict[str, Any], every: Sequence[Case], mine: Sequence[Case]) -> Path:
    """Return the folder of the sweep, new or an existing one, which then holds the cases of both.

    Args:
        tree: the configuration of the sweep.
        every: its cases.
        mine: those that are to run.
    """
    first = every[0]  # whichever part is to run: processes that share a sweep meet in one folder
    there = Path(first.output.folder) / f"{first.name}-{first.output.id}"
    if first.output.existing == REPLACE:
        remedy = "would delete cases that are not to run; run all of them, or leave it out"
        require(len(mine) == len(every), "output.existing", REPLACE, remedy)
        _delete(there)
    try:
        if first.output.id is None or not there.is_dir():
            folder = folders.create(first.output.folder, first.name, first.output.id)
            keep(tree, folder)
            return folder
    except UserError:
        if first.output.id is None or not there.is_dir():  # otherwise another process has just created it
            raise
    file, until = there / SWEEP_FILE, time.monotonic() + JOIN_SECONDS
    while not file.exists() and time.monotonic() < until and not (there / "config.yaml").exists():
        time.sleep(0.1)  # another process has just created the folder
    remedy = f"a run of that name is there already and is never overwritten; give another ({there})"
    require(file.exists(), "output.id", first.output.id, remedy)
    began = started_with(there, "output.id")
    known, mended = {case.slug: case for case in unchecked_cases(began)}, False
    others = _is_worked_on(there)
    for case in _checkable(every, mine):
        if (was := known.get(case.slug)) is None:
            continue
        if not others and never_ran(case.folder(there)):
            mended |= not was.can_run or settings_of(was.config) != settings_of(case.config)
        elif was.can_run:
            require_same(was.config, case.config, f"the sweep in {there}", "give another output.id")
    whole = joined(began, tree, there, mended)
    check_cases(_checkable(unchecked_cases(whole), mine), there)
    if whole != began:
        keep(whole, there)
    return there


def _is_worked_on(folder: Path) -> bool:
    """Return whether another process is running a case of a sweep, whose settings must then stay."""
    for path in (folder / LOCKS).glob("*"):
        with suppress(FileNotFoundError), path.open() as file:
            if not try_lock(file):
                return True
    return False


def _delete(folder: Path) -> None:
    """Delete the folder of a sweep, if there is one.

    Raises:
        UserError: it is none, or a process is running one of its cases.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    good = is_sweep(folder) and not folder.is_symlink()
    remedy = f"{folder} is not the folder of a sweep, and is not deleted; move it away, or give another id"
    require(good, "output.existing", REPLACE, remedy)
    with ExitStack() as held:
        for about in sorted(folder.glob("*/run.json")):
            held.enter_context(closing(locked(about.parent)))
        delete(folder)


def joined(
    began: Mapping[str, Any], tree: Mapping[str, Any], there: Path, mended: bool = False
) -> dict[str, Any]:
    """Return the configuration that covers both an existing sweep and the cases to add.

    Args:
        began: configuration with which the sweep was started.
        tree: configuration of the cases to add.
        there: the sweep's folder.
        mended: whether `tree` has other settings for cases that never ran, which replace those of `began`.

    Raises:
        UserError: they vary different keys, or each has values that the other leaves out.
    """
    old, new = began["vary"], tree["vary"]
    remedy = f"the sweep in {there} varies {', '.join(old)}; give another output.id"
    require([*old] == [*new], "vary", ", ".join(new), remedy)
    labels = {key: (labels_of(old[key]), labels_of(new[key])) for key in new}
    missing = {key: [x for x in were if x not in are] for key, (were, are) in labels.items()}
    more = any(label not in were for were, are in labels.values() for label in are)
    for key, names in missing.items():
        remedy = f"leaves out {', '.join(names)} of the sweep in {there}; name them too: "
        remedy += "complete cases stay as they are, and --only chooses some"
        require(not ((more or mended) and names), f"vary.{key}", labels[key][1], remedy)
    table = tree.get("table") or began.get("table")
    return {**(tree if more or mended else began), **({} if table is None else {"table": table})}


def check_cases(every: Sequence[Case], there: Path) -> None:
    """Raise `UserError` if a case's folder holds a run of other settings, code, files or data of the user.

    Each choice of data is opened once, with the seed of the first complete case that has it; a split is
    compared under this seed alone. Data that are not there, or cannot be opened, are not compared.
    """
    opened: dict[str, tuple[int, Mapping[str, str]]] = {}
    for case in every:
        with _named(case):
            check_case(case, there)
            then = json_mapping(case.folder(there) / "summary.json").get("data")
            if not isinstance(then, dict):
                continue
            data, seed = case.config.data, case.config.seed.data
            if repr(data) not in opened:
                opened[repr(data)] = seed, content_of(data, seed)
            of, now = opened[repr(data)]
            known = {part: now[part] for part in now if part != "split" or of == seed}
            remedy = "bring the old data back, or move the run away, and the sweep runs it again"
            check_content(then, known, data, case.folder(there), remedy)


# -- running -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """The cases that a process, or a job of several ranks, runs.

    Attributes:
        folder: the sweep's folder.
        mine: the cases to run.
        quiet: whether to print nothing.
        part: what `mine` is of the sweep.
        keep_going: whether the other cases run although one has failed.
        failed: case -> its message, of those that failed under `keep_going`; complete on rank 0 at the end.
        printed: lines that are printed for the first case that has them only.
    """

    folder: Path
    mine: Sequence[Case]
    quiet: bool
    part: Part
    keep_going: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    printed: set[str] = field(default_factory=set)

    @cached_property
    def found(self) -> Found:
        """The tables and the figure."""
        return Found(self.folder)

    @property
    def command(self) -> str:
        """The command that continues these cases."""
        return " ".join(filter(None, ("mpifl resume", str(self.folder), self.part.options)))

    @cached_property
    def twins(self) -> dict[str, list[Case]]:
        """`Case.training` -> all cases of the sweep whose numbers this training gives."""
        found: dict[str, list[Case]] = {}
        for case in self.found.every:
            if case.can_run:
                found.setdefault(case.training, []).append(case)
        return found

    def run(self, transport: Transport, jobs: int) -> Path | None:
        """Run the cases; return the folder on rank 0, None elsewhere.

        Cases that another process was running are tried once more at the end, because it may have been
        killed.
        """
        order = on_server(transport, lambda: in_order(self.mine, self.found.sharing))
        mine = [self.mine[i] for i in order]
        self._run_all(transport, jobs, mine)
        passed = on_server(transport, lambda: [c.slug for c in self.left(mine) if c.slug not in self.failed])
        if passed:
            self._run_all(transport, jobs, [case for case in mine if case.slug in passed])
        if transport.is_server:
            self._write_all()
        on_server(transport, self._check_failed)
        return self.folder if transport.is_server else None

    def _check_failed(self) -> None:
        """Raise `CasesFailed` if some cases failed."""
        if self.failed:
            failed = [case for case in self.mine if case.slug in self.failed]
            known = {case.title: self.failed[case.slug] for case in failed}
            raise CasesFailed(known, len(self.mine), self.command)

    def _write_all(self) -> None:
        """Write the tables and the figure, and say what is left."""
        self.found.write()
        self.found.draw()
        left = self.left(self.found.every)
        if not left:
            for path in (
                self.folder / LOCKS,
                self.folder / BEGINNINGS,
                *self.folder.glob(f"{JOBS}*"),
            ):  # also those of killed jobs
                shutil.rmtree(path, ignore_errors=True)
        if not self.quiet:
            print(self.found.text(), flush=True)
        if left and (not self.quiet or self.left(self.mine)):
            are, them = ("is", "it") if len(left) == 1 else ("are", "them")
            said = f"{len(left)} of {len(self.found.every)} cases {are} not complete; once no other process"
            print(f"{said} runs {them}: mpifl resume {self.folder}", flush=True)

    def _run_all(self, transport: Transport, jobs: int, mine: Sequence[Case]) -> None:
        if not any(case.config.system.ranks for case in mine):  # so that no rank stays idle
            jobs = min(jobs, on_server(transport, lambda: len(trainings(self.left(mine)))))
        if jobs > 1:
            _SideBySide(self, transport, jobs, mine).run()
        else:
            self.one_by_one(transport, mine)

    def left(self, some_cases: Sequence[Case]) -> list[Case]:
        """Return the cases that are not complete."""
        return [case for case in some_cases if not is_complete(case, self.folder)]

    def one_by_one(self, transport: Transport, mine: Sequence[Case]) -> None:
        """Run the cases one after the other, each on all ranks; write table and figure after each."""
        display, every = Progress(title=self.folder.name, quiet=self.quiet), len(mine)
        answers = transport.is_server and not self.quiet
        counted, group = doing("case", every, alike=False), self.fresh(transport)
        with (
            Signals(answers=answers, tell=transport.ask_to_stop) as signals,
            display as progress,
            counted as stage,
        ):
            for number, case in enumerate(mine, 1):
                progress.say(f"case {number}/{every}: {case.title}")
                try:
                    trained, error = self.try_case(case, group, self.quiet, is_new=self._is_new)
                except Stopped as end:
                    raise Stopped(end.step, str(self.folder), end.written, self.command) from None
                except StoppedEarly:
                    raise StoppedEarly(self.command) from None
                if error is not None:
                    group = self.fresh(transport)
                stage.done = number
                stage.first += not trained  # it tells nothing of the time that a case takes
                if transport.is_server:
                    self.found.write()
                stop = number < len(mine) and on_server(transport, lambda: signals.stop)
                if stop:  # the request came after the case's last step
                    raise Stopped(case.config.rounds, str(self.folder), command=self.command)

    def _is_new(self, text: str) -> bool:
        """Return whether a line that cases share has not been printed yet."""
        known = text in self.printed
        self.printed.add(text)
        return not known

    def fresh(self, transport: Transport) -> Transport:
        """Return a transport for cases that may fail, because a failure can leave messages behind.

        Args:
            transport: connects the ranks; every rank calls.
        """
        return transport.split(1) if self.keep_going else transport

    def try_case(
        self, case: Case, transport: Transport, quiet: bool, threads: int = 0, **options: Any
    ) -> tuple[bool, UserError | CodeFailed | None]:
        """Run a case as `run_case` does; under `keep_going`, note its error instead of raising it.

        Returns:
            Whether it was trained, and its error on every rank. After an error, the transport is spent.
        """
        if not self.keep_going:
            return self.run_case(case, transport, quiet, threads, **options), None
        try:
            trained = self.run_case(case, transport, quiet, threads, **options)
            transport.barrier()  # an error of another rank at the very end is heard here
            return trained, None
        except StoppedEarly:
            raise
        except (UserError, CodeFailed) as error:
            transport.raise_on_others(error)
            if not transport.final_barrier():
                raise
            self.failed[case.slug] = one_line(str(error))
            if transport.is_server:
                trace = getattr(error, "trace", "")
                print(f"{trace}mpifl: {case.title} failed: {error}", file=sys.stderr, flush=True)
            return False, error

    def run_case(
        self, case: Case, transport: Transport, quiet: bool, threads: int = 0, **options: Any
    ) -> bool:
        """Run a case unless it is complete; if possible, retime a complete case with the same training.

        A case is skipped if another process is running it or the same training. Returns whether it was
        trained.

        Args:
            case: a case of the sweep.
            transport: connects the ranks that run it.
            quiet: whether to print nothing.
            threads: number of threads of each rank, used if `system.threads` of the case is 0; 0 takes what
                the CPU masks allow.
            options: further arguments of `run`.
        """
        with self._alone_with(case, transport) as mine:
            if mine:
                return self._run(case, transport, quiet, threads, **options)
            if transport.is_server and not is_complete(case, self.folder):
                print(f"{case.title}: another process runs it", flush=True)
            return False

    @contextmanager
    def _alone_with(self, case: Case, transport: Transport) -> Iterator[bool]:
        """Lock a case, and all cases with the same training, against other processes that share the folder.

        Yields whether the locks were free. For processes with different machine settings, only the lock on
        the case's name works, because `Case.training` contains these settings.
        """
        with ExitStack() as held:

            def lock() -> bool:
                own = hashlib.sha256(case.training.encode()).hexdigest()[:16]
                names = [*([f"training-{own}"] if case.training else []), case.slug]
                return all(try_lock(held.enter_context(self._lock_file(name))) for name in names)

            yield on_server(transport, lock)

    def _lock_file(self, name: str) -> TextIO:
        """Open a file to lock. A process that completes the sweep may remove their folder at any time."""
        folder = self.folder / LOCKS
        while True:
            folder.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                return (folder / name).open("w")

    def _run(self, case: Case, transport: Transport, quiet: bool, threads: int, **options: Any) -> bool:
        state, twin = on_server(transport, lambda: self._state(case))
        config = case.placed(self.folder)
        config = replace(config, system=replace(config.system, threads=config.system.threads or threads))
        if twin is not None:
            with _named(case):
                on_server(transport, lambda: write_retimed(load(twin), config))
        elif state == "complete":
            with _named(case):
                on_server(transport, lambda: end_late(case.folder(self.folder)), everywhere=False)
        else:
            started = case.folder(self.folder) if state == "started" else None
            with _named(case), _cycles_collected():
                if shared := on_server(transport, lambda: self._shared(case)):
                    options = {**options, "beginning": shared}
                    if not quiet:
                        print(shared_text(shared), flush=True)
                run(config, transport, quiet, started, **options)
            on_server(transport, self._remove_beginnings)
        return twin is None and state != "complete"

    def _shared(self, case: Case) -> dict[str, Path]:
        """Return phase -> folder of its results, for the first phases that a case shares with others."""
        own = self.found.sharing.get(case.slug, {})
        return {phase: self.folder / BEGINNINGS / _name(phase, about) for phase, about in own.items()}

    @property
    def places(self) -> dict[str, set[tuple[str, str]]]:
        """Name of a case -> what identifies the first phases that it shares."""
        return {slug: {*of.items()} for slug, of in self.found.sharing.items()}

    def _remove_beginnings(self) -> None:
        """Remove the results of first phases that no case needs which is still to run."""
        left = {case.slug for case in self.left(self.found.every)}
        needed = {
            _name(*place) for slug, of in self.found.sharing.items() if slug in left for place in of.items()
        }
        for folder in (self.folder / BEGINNINGS).glob("*"):
            if folder.name not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def _state(self, case: Case) -> tuple[str, Path | None]:
        """Return whether a case is complete, started or new, and the run to retime for it, if any.

        A folder that cannot be resumed is removed.
        """
        folder = case.folder(self.folder)
        if is_complete(case, self.folder):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # left if it was killed at the very end
            return "complete", None
        like = self.twins.get(case.training, []) if case.training else []
        done = (other.folder(self.folder) for other in like if is_complete(other, self.folder))
        twin = next((other for other in done if _gives(other, case.config)), None)
        if twin is None and (folder / "run.json").is_file():
            return "started", None
        if folder.exists():  # the process ended while it created the folder
            shutil.rmtree(folder)
        return "new", twin


def shared_text(folders: Mapping[str, Path]) -> str:
    """Return a line on what a case shares with others, and whether one of them has computed it.

    Args:
        folders: phase -> folder of its results.
    """
    there = {phase: any(not f.name.startswith(".") for f in of.glob("*")) for phase, of in folders.items()}
    words = {True: "computed by an earlier case", False: "not computed yet"}
    parts = [f"{PHASES[phase]} ({words[seen]})" for phase, seen in there.items()]
    return f"shares with other cases: {', '.join(parts)}"


def _name(phase: str, about: str) -> str:
    """Return the name of the folder that holds the results of a phase."""
    return f"{phase}-{about}"


def _gives(folder: Path, config: Config) -> bool:
    """Return whether a complete run can be retimed to give that of `config`; False if it is unreadable."""
    try:
        check_retime(load(folder), config)
    except UserError:  # the tables report an unreadable one
        return False
    return True


@contextmanager
def _cycles_collected() -> Iterator[None]:
    """Collect reference cycles that were made in the block; those of a run hold its model and samples.

    Older objects are frozen; examining them takes a fraction of a second once libraries are imported.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


# -- several at a time ---------------------------------------------------------------------------------------


class _SideBySide:
    """Runs cases on groups of ranks; each group takes the next case when it has finished one.

    A group takes all cases with the same training together, and prefers cases that share no beginning with
    those under way. If a group fails or is asked to stop, the others stop after their current step and write
    their state.

    Args:
        work: the cases to run.
        transport: connects all ranks; every rank calls.
        jobs: number of groups.
        mine: the cases to run, in this order.
    """

    def __init__(self, work: _Work, transport: Transport, jobs: int, mine: Sequence[Case]) -> None:
        self.work, self.transport = work, transport
        self.units = trainings(mine)
        self.left = [*range(len(self.units))]  # units that this group has not considered yet
        self.numbers = {case.slug: number for number, case in enumerate(mine, 1)}
        limits = [case.config.system.stopped_timeout_s for case in mine]
        transport.watch_stopped(max(limits) if all(limits) else 0.0)  # while ranks wait for other groups
        groups = divided(transport.nodes, jobs)
        self.threads = threads_by_mask(transport, [ranks[0] for ranks in groups if len(ranks) > 1])
        self.group = transport.split(jobs)
        token = on_server(transport, lambda: secrets.token_hex(4))
        self.claims = Claims(work.folder / f"{JOBS}{token}")
        self.quiet = on_server(transport, lambda: work.quiet) or not self.group.is_server
        self.case: Case | None = None  # the case that runs now

    def run(self) -> None:
        """Run all cases and write the tables; raise the error or stop that ended the sweep early, if any."""
        on_server(self.transport, self.claims.create)
        end = self._until_the_end()
        if end is not None and self.group.is_server:
            self.claims.ask_to_stop()
        place = self.numbers[self.case.slug] if self.case else 0
        about = (place, end, self.work.failed) if self.group.is_server else None
        told = self.transport.gather(about, "control")
        for one in told or ():
            self.work.failed.update(one[2] if one is not None else {})
        first = self.transport.bcast(None if told is None else self._joined(told), "control")
        if self.transport.is_server:
            self.claims.remove()
            self.work.found.write()
        if isinstance(first, _Stop):
            raise SweepStopped(first, self.work.command)
        if first is not None:
            raise first

    def _joined(self, told: Sequence[tuple[int, Any, Any] | None]) -> Any:
        """Return what ends the sweep: the error of the first case that failed, else all stops together."""
        ends = [end for end in told if end is not None and end[1] is not None]
        errors = sorted((end for end in ends if not isinstance(end[1], _Stop)), key=lambda end: end[0])
        if errors:
            return errors[0][1]
        stops = [end[1] for end in ends]
        return _Stop(sum(s.cases for s in stops), sum(s.unwritten for s in stops)) if stops else None

    def _until_the_end(self) -> UserError | CodeFailed | _Stop | None:
        """Run cases until none is left; return the error or stop that ended this group early, else None."""
        out = sys.stdout
        try:
            answers = self.transport.is_server and not self.quiet
            with Signals(answers=answers, tell=self.group.ask_to_stop) as signals:
                while (unit := on_server(self.group, lambda: self._next(signals))) >= 0:
                    for case in self.units[unit]:
                        self.case = case
                        self._run(case, out)
                return None if unit == NONE_LEFT else _Stop(0, 0)
        except Stopped as end:
            return _Stop(1, int(end.written is not None))
        except (UserError, CodeFailed) as error:
            self.group.raise_on_others(error)
            if not self.group.final_barrier():
                raise
            if isinstance(error, StoppedEarly):
                return _Stop(1, 1)
            if not self.quiet and self.case is not None:
                print(f"case {self.numbers[self.case.slug]}: failed", flush=True)
            return error

    def _next(self, signals: Signals) -> int:
        """Return the number of the next unit, `NONE_LEFT`, or `STOP` if this group is asked to stop."""
        places = self.work.places
        starts = [{place for case in unit for place in places.get(case.slug, ())} for unit in self.units]
        sharing = [n for n, start in enumerate(starts) if start]
        taken = [n for n in sharing if self.claims.taken(n) and not self._is_complete(n)]
        while self.left:
            number = first_apart(self.left, starts, taken)
            self.left.remove(number)
            if self._is_complete(number):
                continue
            if signals.stop or self.claims.stop_asked():
                return STOP
            if self.claims.take(number):
                return number
            taken.append(number)
        return NONE_LEFT

    def _is_complete(self, number: int) -> bool:
        return all(is_complete(case, self.work.folder) for case in self.units[number])

    def _run(self, case: Case, out: TextIO) -> None:
        """Run a case on this group; each printed line begins with the number of the case."""
        number = self.numbers[case.slug]
        if not self.quiet:
            print(f"case {number}/{len(self.numbers)}: {case.title}", flush=True)
        with redirect_stdout(Prefixed(out, f"case {number}: ")):
            asked = self.claims.stop_asked
            options: dict[str, Any] = {"asked_to_stop": asked, "is_new": self.claims.is_new}
            _, error = self.work.try_case(case, self.group, self.quiet, self.threads, **options)
        if error is not None:
            self.group = self.work.fresh(self.group)
        if self.group.is_server:
            self.work.found.write()


def first_apart(left: Sequence[int], starts: Sequence[Collection[Any]], taken: Collection[int]) -> int:
    """Return the first unit of work that shares no beginning with those under way; the first if all do.

    Args:
        left: numbers of the units to choose from.
        starts: what identifies the beginnings that each unit shares with others.
        taken: numbers of the units under way.
    """
    busy = {place for n in taken for place in starts[n]}
    return next((n for n in left if busy.isdisjoint(starts[n])), left[0])


NONE_LEFT, STOP = -1, -2


@dataclass(frozen=True)
class _Stop:
    """The stop of one or several groups.

    Attributes:
        cases: number of cases that were running.
        unwritten: number of these cases that could not write their last state.
    """

    cases: int
    unwritten: int


class SweepStopped(Stopped):
    """A sweep ended early on request, after the state of its running cases was written."""

    def __init__(self, stop: _Stop, command: str) -> None:
        state = f"the state of {stop.cases} cases is written"
        if stop.unwritten:
            state += f", but for the last steps of {stop.unwritten}"
        Exception.__init__(self, f"stopped; {state}; go on with: {command}")


class CasesFailed(CodeFailed):
    """Cases of a sweep failed, and the others went on.

    Args:
        failed: title of each case that failed -> its message.
        count: number of cases that were to run.
        command: the command that tries them again.
    """

    def __init__(self, failed: Mapping[str, str], count: int, command: str) -> None:
        self.failed, self.count, self.command = dict(failed), count, command
        lines = [f"{title}: {text}" for title, text in failed.items()]
        many = f"{len(failed)} of {count} cases failed; {command} tries them again"
        super().__init__("\n".join([many, *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failed, self.count, self.command)


class Claims:
    """Messages between the groups of a job, as files in the sweep's folder, which all nodes share.

    Files are used because no rank of a group could answer a message while it trains.

    Args:
        folder: folder of this job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked, self._looked = False, 0.0

    def create(self) -> None:
        """Create the folder; on rank 0."""
        self.folder.mkdir()

    def remove(self) -> None:
        """Remove the folder; on rank 0."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_new(self, text: str) -> bool:
        """Return whether no group has printed a line that cases share."""
        return self._create(f"line-{hashlib.sha256(text.encode()).hexdigest()[:16]}")

    def take(self, number: int) -> bool:
        """Take a unit of work; return False if another group has taken it."""
        return self._create(str(number))

    def _create(self, name: str) -> bool:
        """Create a file; return False if it is there already."""
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def taken(self, number: int) -> bool:
        """Return whether a group has taken a unit of work."""
        return (self.folder / str(number)).exists()

    def ask_to_stop(self) -> None:
        """Ask all groups to stop."""
        with suppress(FileNotFoundError):  # another process has completed the sweep
            (self.folder / "stop").touch()

    def stop_asked(self) -> bool:
        """Return whether a group has asked all groups to stop; checks at most every half second."""
        now = time.monotonic()
        if not self._asked and now > self._looked + ASK_SECONDS:
            self._looked, self._asked = now, (self.folder / "stop").exists()
        return self._asked


class Prefixed(StringIO):
    """A text stream that writes whole lines to another stream, each with a prefix.

    Args:
        stream: the stream to write to.
        text: the prefix of each line.
    """

    def __init__(self, stream: TextIO, text: str) -> None:
        super().__init__()
        self.stream, self.text, self._begun = stream, text, ""

    def write(self, text: str) -> int:
        """Write complete lines, and keep the rest for the next call."""
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self.stream.write("".join(f"{self.text}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()
