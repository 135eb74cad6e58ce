"""Which cases of a sweep have the same beginning, and the files that they share (`system.share_beginnings`).

A file holds what one call of a hook returned: the statistics of a client, its first training, its look, the
server's set-up. Its name is a digest of everything that decides the result: the arguments of the call and,
in `about`, the data, the settings, the versions of programs and the machine. A call whose file is there is
not made; everything that follows it, from filters to the ledger, is done in every case.

Cases that run at the same time compute a result once: who computes it holds a lock, and others wait until the
file is there, or the lock is free because its holder gave up or was killed.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from mpifl.comm.transport import on_server
from mpifl.core.beginning import OWN, PHASES, STEPS, no_room, phases
from mpifl.core.capabilities import LOOKS, TRAINING
from mpifl.core.devices import CPU
from mpifl.core.files import try_lock_byte, write_atomically
from mpifl.core.packed import Damaged, NotPackable, digest, packed, unpacked
from mpifl.core.progress import doing
from mpifl.core.types import Message, Report, Server
from mpifl.results.identity import deciding
from mpifl.runtime.exchange import Found
from mpifl.runtime.step_config import Origins
from mpifl.simulation.clock import VirtualTime
from mpifl.supervision.logging import warn_once

from . import loader
from .context import RunContext
from .schema import Config

LATER = (  # sections that decide who takes part, when, and what becomes of results, but no result of a client
    *("algorithm", "rounds", "stop", "participation", "cohort_size", "newcomers", "leavers"),
    *("on_client_error",),
    *("policy", "clock", "network", "delay", "availability", "robust"),
)


def shared_phases(config: Config) -> dict[str, str]:
    """Return the phases that a case can share, each with a digest of all settings that decide it.

    Cases with equal digests compute the same, except that they may have other data under the same name.
    """
    if config.system.share_beginnings is False:
        return {}
    found = {phase: _about(config, phase, fields) for phase, fields in phases(config.algorithm).items()}
    if config.local.keep_optimizer or not config.policy.synchronous:
        # the states of optimisers are not kept; and what asynchronous clients read depends on who was first
        found = {phase: about for phase, about in found.items() if phase not in (TRAINING, LOOKS)}
    return {phase: _short_digest(about) for phase, about in found.items()}


def steps_alike(config: Config) -> str:
    """Return a digest of all settings that decide the steps of a run before its data change; empty for none.

    Not shared are steps of runs that real time or the times of changes decide, that tell callbacks or a trace
    of each step, and of methods that know the true groups of later steps.
    """
    in_virtual_time = config.policy.synchronous or isinstance(config.clock, VirtualTime)
    timed = config.stop.wall_seconds is not None or bool(config.drift.at_s) or not in_virtual_time
    told = config.output.trace or config.output.callbacks or config.algorithm.needs.groups
    if config.system.share_beginnings is False or timed or told:
        return ""
    output = config.output
    written = [output.clients, output.updates]
    settings = {name: part for name, part in deciding(loader.to_tree(config)).items() if name != "drift"}
    return _short_digest([settings, written])


def _short_digest(about: Any) -> str:
    return digest(json.dumps(about, default=str))[:16]


def first_change(config: Config) -> int:
    """Return the step from which on data change by `drift`; the number after the last step without it."""
    return config.drift.at[0] if config.drift.at else config.rounds + 1


def _about(config: Config, phase: str, fields: Mapping[str, Any]) -> list[Any]:
    cls = type(config.algorithm)
    return [phase, cls.__module__, cls.__qualname__, fields, settings_before(config)]


def settings_before(config: Config) -> dict[str, Any]:
    """Return the settings, other than the method's own, that decide results of the first phases."""
    whole = deciding(loader.to_tree(config))
    found = {name: part for name, part in whole.items() if name not in LATER}
    return found | {"evaluation": config.evaluation.metrics}


def shared_beginning(context: RunContext, folders: Mapping[str, Path]) -> BeginningFiles | None:
    """Return the shared results of a case; None if it shares nothing; every rank calls.

    Args:
        context: context of the run.
        folders: phase -> folder of its files.
    """
    folders = {phase: of for phase, of in folders.items() if phase != STEPS}  # no results of calls
    if not folders:
        return None
    config = context.config
    cls, fields = type(config.algorithm), phases(config.algorithm)

    def about() -> str:
        start = context.problem.init(0)
        what = [settings_before(config), loader.sums_of(config), context.identity, context.federation.content]
        return digest(json.dumps(what, default=str, sort_keys=True), start)

    return BeginningFiles(
        folders,
        on_server(context.transport, about),
        {phase: (cls.__module__, cls.__qualname__, of) for phase, of in fields.items()},
        f"{config.name}-{config.output.id}",
        context.learner.device,
    )


# -- the files -----------------------------------------------------------------------------------------------

LOOK_BYTES = 1 << 26  # written between two looks at the size of all files
LOCK = ".lock"  # file of a phase; each result has a byte in it
PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5  # between two looks at a lock that another case holds
CLASSES = (Report, Server, Found)  # of results


class BeginningFiles:
    """The shared results that a run reads and writes; one object for each rank.

    Args:
        folders: phase -> folder of its files, in one common folder; other phases are not shared.
        about: digest of what decides results beside the arguments of a call.
        fields: phase -> the method and the fields that decide the phase.
        name: name of the run, which its files hold.
        device: device of results that were not in main memory.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        about: str,
        fields: Mapping[str, Any],
        name: str,
        device: torch.device = CPU,
    ) -> None:
        self.folders, self.about, self.fields = folders, about, fields
        self.name, self.device = name, device
        self._origins: dict[str, dict[int, str]] = {}
        self._writes, self._until_look = True, 0
        self._unpackable: set[str] = set()  # phases whose results cannot be written

    def __contains__(self, phase: str) -> bool:
        return phase in self.folders

    def address(self, phase: str, *arguments: Any) -> str:
        """Return the digest of a call; empty if an argument is no plain value, so that it is not shared."""
        try:
            return digest(phase, self.about, repr(self.fields.get(phase)), arguments)
        except NotPackable:
            return ""

    @contextmanager
    def alone(self, phase: str, address: str) -> Iterator[None]:
        """Keep other cases from computing a result in the block, which begins when none of them does.

        Without effect for what is not shared. A process that ends, however it ends, frees its locks.

        Args:
            phase: the phase.
            address: the return value of `address`.
        """
        shares = address and self._writes and phase not in self._unpackable
        with ExitStack() as opened:
            if shares and (locks := self._lock_file(phase)):
                self._wait(opened.enter_context(locks), phase, address)
            yield

    def _lock_file(self, phase: str) -> IO[Any] | None:
        """Open the lock file of a phase; None if it cannot be written, which `keep` says."""
        try:
            self.folders[phase].mkdir(parents=True, exist_ok=True)
            return (self.folders[phase] / LOCK).open("w")
        except OSError:
            return None

    def _wait(self, locks: IO[Any], phase: str, address: str) -> None:
        """Return when this process holds the lock of a result, or the result is there."""
        place, pause = int(address[:12], 16), PAUSE_S
        if try_lock_byte(locks, place):
            return
        with doing(f"waiting for another case: {PHASES[phase]}"):
            while not self._file(phase, address).exists() and not try_lock_byte(locks, place):
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def find(self, phase: str, client: int, address: str, known: Message | None = None) -> Any:
        """Return the result of a call that another case made, as `keep` got it; None if there is none.

        Args:
            phase: the phase.
            client: number of the client, or `SERVER`.
            address: the return value of `address`.
            known: download of the visit; its rows are not in the file.
        """
        file = self._file(phase, address)
        try:
            if not address:
                return None
            origin, value = unpacked(file.read_bytes(), self.device, _rows(known), CLASSES)
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as error:
            warn_once(f"{file} cannot be read ({error}): {PHASES[phase]} is computed again")
            return None
        self._origins.setdefault(phase, {})[client] = str(origin)
        return value

    def keep(self, phase: str, client: int, address: str, value: Any, known: Message | None = None) -> None:
        """Write the result of a call for other cases; see `find`.

        What cannot be written is said in a line, and nothing further is written.
        """
        self._origins.setdefault(phase, {})[client] = OWN
        if not address or not self._writes:
            return
        try:
            data = packed((self.name, value), _rows(known))
        except NotPackable as error:
            warn_once(f"{PHASES[phase]} is not shared: it holds a {error}")
            self._unpackable.add(phase)
            return
        file = self._file(phase, address)
        try:
            self._check_room(file.parent.parent, len(data))
            if self._writes:
                write_atomically(file, data)
        except OSError as error:
            self._stop(f"{file.parent.parent} cannot be written ({error.strerror})")

    def taken(self) -> Origins:
        """Return the origins of all results since the last call."""
        found, self._origins = self._origins, {}
        return found

    def _file(self, phase: str, address: str) -> Path:
        return self.folders[phase] / address

    def _check_room(self, folder: Path, size: int) -> None:
        """Stop writing if the files of a sweep would become too large, or its disk too full."""
        self._until_look -= size
        if self._until_look > 0:
            return
        self._until_look = LOOK_BYTES
        folder.mkdir(parents=True, exist_ok=True)
        if why := no_room(folder, size):
            self._stop(why)

    def _stop(self, why: str) -> None:
        self._writes = False
        warn_once(f"{why}: this case computes its beginning, and leaves no more of it to other cases")


def record(found: Origins) -> dict[str, dict[str, int]]:
    """Return the origins as `summary.json` has them: phase -> name of a run -> number of results."""
    return {
        phase: dict(sorted(Counter(origins.values()).items())) for phase, origins in sorted(found.items())
    }


def _rows(message: Message | None) -> list[torch.Tensor]:
    """Return the rows of a download, one by one."""
    return [] if message is None else [row for rows in message.vectors.values() for row in rows]
