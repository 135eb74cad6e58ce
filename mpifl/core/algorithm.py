"""The one abstraction behind every method: what a client computes, how the server's rows are mixed.

A method never sends. Its hooks are pure functions: the client's hooks run where the client's data are, the
server's hooks run on rank 0, and `comm/` moves what they name. Hyperparameters are the fields of a frozen
dataclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from .client import Client, Peer
from .errors import require
from .federation import Split
from .mixing import Plan
from .rng import Key
from .types import Message, Notes, ProblemInfo, Reads, Report, Server, State, Vector


@dataclass(frozen=True)
class Needs:
    """What a method asks of the engine beyond a plain round; declared, never probed.

    Attributes:
        groups: the true groups (Oracle).
        fingerprint: one-shot statistics of the initial_clients before training.
        fingerprint_gram: name of a fingerprint vector whose pairwise products `setup` reads as `gram` [n, n].
        fingerprint_distance: name of a fingerprint vector whose distances to the rows of the table of that
            name `assign_new_clients` reads as `row_distance` [m, K].
        newcomers: those who are no initial_clients give their statistics when they first take part
            (`assign_new_clients`).
        gram: name of an upload whose pairwise products `aggregate` reads as `gram` [m, m].
        memory: name of an upload that the server remembers for clients that do not take part in a step.
        probe: the pairwise second look after local training.
        validation: every client must hold validation data.
        state: clients keep something between visits.
        polish: `server_update` changes rows.
        inspect: uploads are evaluated where they are, on data the server owns (`inspect`, `appraise`).
        row_distance: name of an upload whose distances to all rows of the table of that name `aggregate`
            reads as `row_distance` [m, K].
        rounds: what a client does depends on the number of the round.
        one_by_one: a step takes a single upload; only policies that step at every arrival will do.
        several: a step compares uploads, or shares rows out among them; policies that step at every arrival
            will not do.
        together: uploads answer what the server sent in this very step; policies with stale uploads will not
            do.
        asynchronous: its own rule weighs single and stale uploads; no policy damps its steps.
        plain_sgd: local training must be SGD without momentum.
    """

    groups: bool = False
    fingerprint: bool = False
    fingerprint_gram: str | None = None
    fingerprint_distance: str | None = None
    newcomers: bool = False
    gram: str | None = None
    memory: str | None = None
    probe: bool = False
    validation: bool = False
    state: bool = False
    polish: bool = False
    inspect: bool = False
    row_distance: str | None = None
    rounds: bool = False
    one_by_one: bool = False
    several: bool = False
    together: bool = False
    asynchronous: bool = False
    plain_sgd: bool = False


@dataclass(frozen=True)
class Look:
    """What a probe found.

    Attributes:
        notes: small numbers the client sends to the server.
        findings: what the server computes from what was exchanged; no traffic of its own.
    """

    notes: Mapping[str, Any] = field(default_factory=dict)
    findings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRun:
    """A run of rounds before it begins, for methods that forecast their traffic (`Algorithm.extra_bytes`).

    Attributes:
        problem: as `setup` meets it.
        num_rounds: T.
        num_sampled: m, clients of a round.
        cohort: round, from 1 -> its clients, int64 [m] ascending.
        sizes: samples for training, validation and test of each client, int64 [N, 3].
        message_bytes: (numbers, messages=1, note=False) -> bytes of messages that hold so many numbers.
        client: a client that takes no step when it trains.
    """

    problem: ProblemInfo
    num_rounds: int
    num_sampled: int
    cohort: Callable[[int], np.ndarray]
    sizes: np.ndarray
    message_bytes: Callable[..., int]
    client: Client

    def cohorts(self) -> Iterator[np.ndarray]:
        """Yield the clients of each round."""
        return map(self.cohort, range(1, self.num_rounds + 1))


class Algorithm(ABC):
    """A federated method. Subclasses are frozen dataclasses, abstract or final, never overridden again.

    Attributes:
        paper: where it comes from, a key of `algorithms/papers.bib` or a BibTeX entry; empty: nowhere.
        needs: what it asks of the engine.
        traffic_depends_on: what decides its traffic and only training can tell; empty where the traffic is
            known before.
        fingerprints_vary: whether the size of one-shot statistics depends on the client's data.
    """

    paper: ClassVar[str] = ""
    needs: ClassVar[Needs] = Needs()
    traffic_depends_on: ClassVar[str] = ""
    fingerprints_vary: ClassVar[bool] = False

    def check(self, problem: ProblemInfo) -> None:
        """Raise `UserError` when this method cannot run in this problem. Default: when K is larger than N."""
        for name in ("num_clusters", "num_components", "num_groups"):
            remedy = f"there are only {problem.num_clients} clients; take fewer"
            require(getattr(self, name, 0) <= problem.num_clients, name, getattr(self, name, 0), remedy)

    def auxiliary(self) -> Mapping[str, Any] | None:
        """Return name and options of the network beside the model (`Client.auxiliary`). Default: none."""
        return None

    def shows(self, problem: ProblemInfo, key: Key) -> Mapping[str, torch.Tensor]:
        """Return the rows [r, width] all download for one-shot statistics. Default: theta0 as `init`."""
        return {"init": problem.init(0)[None]}

    def initial_clients(self, problem: ProblemInfo, present: np.ndarray, key: Key) -> np.ndarray:
        """Return who of the clients `present` gives one-shot statistics before training. Default: all."""
        return present

    def fingerprint(self, client: Client, shown: Mapping[str, Vector], key: Key) -> Report | None:
        """Return the one-shot statistics of a client, which downloaded `shown` (only if declared)."""
        return None

    def setup(self, problem: ProblemInfo, fingerprints: Notes | None, key: Key) -> Server:
        """Return the first server; runs once, on rank 0. Default: one model, used by all."""
        return Server({"model": problem.init(0)[None]}, np.zeros(problem.num_clients, np.int64))

    def initial_plan(self, server: Server, fingerprints: Notes) -> Plan:
        """Mix what the initial_clients sent as one-shot statistics into the first rows. Default: nothing."""
        return Plan([])

    def new_clients(self, server: Server, cohort: np.ndarray) -> np.ndarray:
        """Return who of a cohort gives one-shot statistics before training (only if `newcomers` is declared).

        Default: those who are not in `algorithm_state["known"]`, bool [N].
        """
        return np.asarray(cohort[~server.algorithm_state["known"][cohort]])

    def assign_new_clients(self, server: Server, fingerprints: Notes) -> Plan:
        """Take in new_clients by their one-shot statistics (only if `newcomers` is declared)."""
        return Plan([])

    def reads(self, server: Server, k: int) -> Reads:
        """Return the rows client `k` downloads to train. Default: its assigned model."""
        return {"model": (int(server.assign[k]),)}

    def serves(self, server: Server, k: int) -> Reads:
        """Return the rows that client `k` is evaluated with. Default: what it downloads."""
        return self.reads(server, k)

    def serves_unseen(self, server: Server, k: int) -> Reads:
        """Return the rows that client `k` is evaluated with before its first visit. Default: those of
        `serves`.

        A method whose clients choose their row at a visit serves all rows here; `model_of` then chooses.
        """
        return self.serves(server, k)

    def local_update(self, message: Message, state: State, client: Client, key: Key) -> tuple[Report, State]:
        """Train at the client: from what it downloaded and its own state to a report and its next state.

        Default: train the one model that was downloaded, keep nothing.
        """
        w = client.sgd(message["model"][0], key)
        return client.report(model=w.vector, metrics={"train_loss": w.loss}), {}

    def compares(self, server: Server) -> bool:
        """Return whether `aggregate` reads `gram` after this step (only if declared). Default: always."""
        return True

    def probes(self, server: Server, step: int) -> bool:
        """Return whether the pairwise second look happens in this step (only if declared)."""
        return self.needs.probe

    def probe(self, client: Client, own: Mapping[str, Vector], peers: Sequence[Peer], key: Key) -> Look:
        """Look, with the uploads of a client, at the data of its peers (only if declared)."""
        return Look()

    def inspect(self, vectors: Mapping[str, Vector], public: Sequence[Client]) -> Mapping[str, Any]:
        """Return what the server finds when it judges an upload on its own data (only if declared)."""
        return {}

    def appraise(self, old: Server | None, new: Server, public: Sequence[Client]) -> Server:
        """Return `new` with what the server must know of its own rows (only if `inspect` is declared)."""
        return new

    @abstractmethod
    def aggregate(self, server: Server, notes: Notes) -> Plan:
        """Decide, on rank 0 and from notes only, how the rows are mixed."""

    def server_update(self, old: Server, new: Server) -> Server:
        """Polish the rows after mixing (momentum, Adam). Default: nothing."""
        return new

    def model_of(self, message: Message, state: State, client: Client) -> Vector:
        """Return the vector [d] by which a client is evaluated. Default: the first row of `model` it is
        served.
        """
        return message["model"][0]

    def evaluate(self, message: Message, state: State, client: Client, split: Split) -> dict[str, float]:
        """Return what a client scores on `split`. Default: accuracy and loss of `model_of`."""
        return client.evaluate(self.model_of(message, state, client), split)

    def labels(self, server: Server) -> np.ndarray:
        """Return the estimated cluster [N] of each client. Default: its row."""
        return server.assign

    def placed(self, server: Server, visited: np.ndarray) -> np.ndarray:
        """Return whose cluster is known, bool [N]; the others stand wherever they began.

        Default: those in `visited` and, where the method has newcomers, in `algorithm_state["known"]`.
        """
        return visited | server.algorithm_state["known"].astype(bool) if self.needs.newcomers else visited

    def extra_bytes(self, run: PlannedRun) -> tuple[int, int]:
        """Return what a run sends beside the reads and reports of equal rounds: bytes (down, up), by unicast.

        The forecast multiplies round 1 by the number of rounds. A method whose rounds differ, or that has a
        second look, adds here what is missing; what is sent less is negative. Default: nothing.
        """
        return 0, 0

    def mixtures(self, server: Server) -> np.ndarray | None:
        """Return the estimated share [N, K] of each group in each client's data (none by default)."""
        return None


def apply_plan(server: Server, plan: Plan, tables: Mapping[str, torch.Tensor]) -> Server:
    """Return the server after `plan`, given its new tables."""
    return Server(
        tables=tables,
        assign=server.assign if plan.assign is None else plan.assign,
        algorithm_state=server.algorithm_state if plan.algorithm_state is None else plan.algorithm_state,
        version=server.version + 1,
    )
