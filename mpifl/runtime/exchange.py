"""The second look of a step: after training, clients ask each other in pairs (`SecondLook`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from mpifl.core.capabilities import Question, SecondLook, hooks_of
from mpifl.core.client import Client
from mpifl.core.rng import Key
from mpifl.core.timing import Stopwatch
from mpifl.core.types import Vector

from .hook_errors import Dropped, VisitPlace, attempt
from .hooks import ClientHooks
from .protocol import LookPlan
from .step_config import StepConfig

T = TypeVar("T")
Uploads = Mapping[int, Mapping[str, Vector]]  # number of a report -> its vectors, for clients that ask


@dataclass
class Found:
    """What the look of one client has found.

    Attributes:
        notes: notes of its question.
        findings: name -> a number for each client of the step [m], NaN for those that it did not look at;
            `peer` has the numbers of these clients.
        exchanges: see `ReportHeader`.
    """

    notes: Mapping[str, Any]
    findings: dict[str, np.ndarray]
    exchanges: dict[tuple[str, str, int], tuple[int, int]] = field(default_factory=dict)

    def count(self, name: str, direction: str, client: int, tensor: torch.Tensor) -> None:
        """Count a tensor that a client exchanges with the server."""
        numbers, messages = self.exchanges.get((name, direction, client), (0, 0))
        self.exchanges[name, direction, client] = numbers + tensor.numel(), messages + 1

    def add(self, peer: int, compared: Mapping[str, float]) -> None:
        """Add what a comparison with a peer, given by its place in the step, has found."""
        for name, value in compared.items():
            column = self.findings.setdefault(name, np.full(len(self.findings["peer"]), np.nan))
            column[peer] = value


class _LeftOut(Exception):
    """A hook failed twice; the client that looks is left out."""

    def __init__(self, dropped: Dropped) -> None:
        self.dropped = dropped


class PairedLooks:
    """Carries out the second look of a step on this rank.

    Args:
        config: objects and settings of server steps.
        hooks: calls the hooks of the method.
        watch: counts the seconds of each phase.
    """

    def __init__(self, config: StepConfig, hooks: ClientHooks, watch: Stopwatch) -> None:
        self.config, self.hooks, self.watch = config, hooks, watch

    def run(
        self, looks: LookPlan, step: int, uploads: Uploads
    ) -> tuple[Mapping[int, Found], Mapping[int, Dropped]]:
        """Return what clients of this rank find, and which of them are left out, by report number.

        A hook that fails is called once more. If it fails again, the client that looks is left out; in a run
        that leaves nobody out, the error is raised.

        Args:
            looks: who looks at whom.
            step: number of the server step.
            uploads: the uploads of the clients of this rank that look.
        """
        found, dropped = dict[int, Found](), dict[int, Dropped]()
        clients = [self.config.clients.client(*who, step) for who in looks.clients_and_visits]
        with self.watch("cluster"):
            for number, own in uploads.items():
                try:
                    found[number] = self._look(looks, step, number, own, clients)
                except _LeftOut as left:
                    dropped[number] = left.dropped
        return found, dropped

    def _look(
        self, looks: LookPlan, step: int, i: int, own: Mapping[str, Vector], clients: Sequence[Client]
    ) -> Found:
        """Return what client `i` of the step finds."""
        names, place = hooks_of(self.config.algorithm, SecondLook), self._place(looks, step, i)
        me, key = clients[i], self.key(looks, step, i)
        question = self._attempt(lambda: self.hooks.ask(me, place.visit, own, key), place)
        found = Found(question.notes, {"peer": looks.clients})
        sent = self._rounded(question.payload, place)
        for j in looks.peers(i).tolist():
            them, visit = clients[j], int(looks.visits[j])
            shown = self._shown(question, place, them.id, key)
            work = partial(self.hooks.answer, them, visit, sent, key)
            answered = self._rounded(self._attempt(work, place), place)
            if shown is not None:
                found.count(names.answered, "up", me.id, shown)
            found.count(names.question, "up", me.id, sent)
            found.count(names.question, "down", them.id, sent)
            found.count(names.answered, "up", them.id, answered)
            compare = partial(self.hooks.compare, me.id, place.visit, shown, answered, question.notes)
            found.add(j, self._attempt(compare, place))
        return found

    def _shown(self, question: Question, place: VisitPlace, peer: int, key: Key) -> torch.Tensor | None:
        """Return what a client sends for the comparison with a peer, as it arrives; None for nothing."""
        if question.shown is None:
            return None
        work = partial(self.hooks.show, question.shown, place.client, place.visit, peer, key)
        return self._rounded(self._attempt(work, place), place)

    def key(self, looks: LookPlan, step: int, i: int) -> Key:
        """Return the key with which client `i` of a step asks, and with which it is answered."""
        return self.config.seed.of("probe", int(looks.clients[i]), step)

    def _place(self, looks: LookPlan, step: int, i: int) -> VisitPlace:
        rank = self.config.transport.rank
        return VisitPlace(rank, step, int(looks.clients[i]), int(looks.visits[i]))

    def _rounded(self, sent: torch.Tensor, place: VisitPlace) -> torch.Tensor:
        """Return a tensor as it arrives."""
        return self._attempt(partial(self.config.payload.rounded, sent), place)

    def _attempt(self, work: Callable[[], T], place: VisitPlace) -> T:
        """Return the result of a hook of the client that looks.

        Raises:
            _LeftOut: it failed twice, and clients that fail are left out.
        """
        made = attempt(work, place, self.config.drops, self.config.kept)
        if isinstance(made, Dropped):
            raise _LeftOut(made)
        return made
