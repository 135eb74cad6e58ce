"""How a second look travels between ranks: in which blocks, by which collective, and how many bytes.

Clients ask each other in pairs. A question goes to the ranks that host the peers, once for each rank; an
answer goes to the rank that compares it. The ranks take this in waves, with one asking client of each rank at
a time, and a wave in blocks of pairs, so that no rank holds more than a few blocks of `BLOCK` numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mpifl.core.options import Options

BLOCK = 1 << 22  # numbers of one kind that a rank holds at a time: 16 MiB
ALLGATHER, ALLTOALL = "Allgatherv", "Alltoallv"
SERVER = 0  # the rank of the server


@dataclass(frozen=True)
class OverMpi(Options):
    """Questions go to the ranks that host the peers and answers to the ranks that compare, by collectives.

    Attributes:
        distances: who compares: `workers`, each for its own clients, or `server`, rank 0 for all clients.
    """

    distances: Literal["workers", "server"] = "workers"


@dataclass(frozen=True)
class Local(Options):
    """The rank of the client that looks computes everything, because each rank can read all clients' data."""


def asking_waves(owners: np.ndarray, asking: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield the places of clients that ask at the same time: at most one of each rank.

    Args:
        owners: rank of each client of the step [m].
        asking: places of those that ask, ascending.
        width: largest size of a question; the questions of a wave have at most `BLOCK` numbers, or are one.
    """
    most, turns = max(1, BLOCK // max(width, 1)), np.zeros(len(asking), np.int64)
    for rank in np.unique(owners[asking]):
        mine = owners[asking] == rank
        turns[mine] = np.arange(mine.sum())
    for turn in range(int(turns.max(initial=-1)) + 1):
        wave = asking[turns == turn]
        yield from np.split(wave, range(most, len(wave), most))


def pair_blocks(
    wave: np.ndarray, owners: np.ndarray, shown: int, at_server: bool, num_workers: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the blocks of a wave: places of clients that ask, and places of clients that answer.

    In a block each rank makes and receives at most `BLOCK` numbers, or the answers of one pair, if answers
    are not larger than what is shown.

    Args:
        wave: places of the clients that ask.
        owners: rank of each client of the step [m]; their order spreads the answers of a block over ranks.
        shown: largest size of what a client of the wave shows.
        at_server: whether rank 0 compares.
        num_workers: number of ranks that host clients.
    """
    room = max(1, BLOCK // max(shown, 1))  # pairs whose answers fill a block
    turns = np.zeros(len(owners), np.int64)
    for rank in np.unique(owners):
        turns[owners == rank] = np.arange((owners == rank).sum())
    peers = np.lexsort((owners, turns))
    for some in np.split(wave, range(room, len(wave), room)):
        each = max(1, room // max(len(some), 1))
        most = each if at_server else max(1, min(each * num_workers, room))
        for those in np.split(peers, range(most, len(peers), most)):
            yield some, np.sort(those)


def needed_copies(wave: Sequence[int], pairs: np.ndarray, owners: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return which rank needs a copy of which question, bool [num_ranks, len(wave)].

    Args:
        wave: places of the clients that ask.
        pairs: whether a client (row) looks at another, bool [m, m], without the diagonal.
        owners: rank of each client [m].
        num_ranks: P, number of ranks.
    """
    needed = np.zeros((num_ranks, len(wave)), bool)
    for n, i in enumerate(wave):
        needed[owners[pairs[i]], n] = True
        needed[owners[i], n] = False
    return needed


def choose_question(sources: np.ndarray, needed: np.ndarray) -> str:
    """Return the collective with the fewest bytes, `ALLGATHER` of equal ones: if each worker needs all.

    Args:
        sources: the rank that sends each question of a wave [n].
        needed: which rank needs it, bool [P, n].
    """
    others = np.arange(len(needed))[1:, None] != sources[None, :]
    return ALLGATHER if (needed[1:] | ~others).all() else ALLTOALL


@dataclass(frozen=True)
class ExchangeBytes:
    """What one second look sends, in a federation and between ranks, and why the two differ.

    In the federation, a question goes up and down once for each pair, and both tensors of a comparison go up
    once for each pair. Between ranks, a question is copied once to each other rank that hosts a peer, and a
    tensor is copied only if another rank compares it.

    Attributes:
        pairs: number of pairs.
        copies: numbers in the copies of questions that ranks send each other.
        moved: numbers in the tensors that ranks send each other to be compared.
        asked: numbers in the questions, each counted once for each pair.
        compared: numbers in the tensors that are compared, each counted once for each pair.
        busiest: numbers that the busiest rank sends or receives, whichever are more.
        vectors: number of collectives that move questions or what is compared, one after the other.
        told: number of exchanges of small values among all ranks, through rank 0, one after the other.
        calls: the collectives of the questions.
    """

    pairs: int = 0
    copies: int = 0
    moved: int = 0
    asked: int = 0
    compared: int = 0
    busiest: int = 0
    vectors: int = 0
    told: int = 0
    calls: tuple[str, ...] = ()

    def __add__(self, other: ExchangeBytes) -> ExchangeBytes:
        """Return the sums over two looks."""
        numbers = ("pairs", "copies", "moved", "asked", "compared", "busiest", "vectors", "told")
        sums = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        return ExchangeBytes(**sums, calls=tuple(sorted({*self.calls, *other.calls})))


def exchange_bytes(
    pairs: np.ndarray,
    owners: np.ndarray,
    question: int,
    shown: np.ndarray,
    answers: np.ndarray,
    width: int,
    num_ranks: int,
    at_server: bool = False,
) -> ExchangeBytes:
    """Return what one second look sends.

    Args:
        pairs: whether a client (row) looks at another, bool [m, m].
        owners: rank of each client [m].
        question: size of a question.
        shown: size of what each client shows for a comparison [m].
        answers: size of what each client answers [m].
        width: largest size that a question may have: numbers of a model.
        num_ranks: P, number of ranks.
        at_server: whether rank 0 compares.
    """
    asks = np.flatnonzero(pairs.any(1))
    pairs = pairs & ~np.eye(len(pairs), dtype=bool)
    count, compared = int(pairs.sum()), int(pairs.sum(1) @ shown + pairs.sum(0) @ answers)
    found = ExchangeBytes(pairs=count, asked=question * count, compared=compared)
    if num_ranks == 1:
        return found
    sent, copies, vectors, told, calls = np.zeros((num_ranks, num_ranks), np.int64), 0, 0, 1, set[str]()
    for wave in asking_waves(owners, asks, width):
        told += 1  # sizes
        needed = needed_copies(wave.tolist(), pairs, owners, num_ranks)
        if needed.any():
            calls.add(choose_question(owners[wave], needed))
            copies += question * int(needed.sum())
            vectors += -(-question // max(1, BLOCK // len(wave)))
            np.add.at(sent, owners[wave], question * needed.T)
        largest = int(shown[wave].max(initial=0))
        for some, those in pair_blocks(wave, owners, largest, at_server, num_ranks - 1):
            told += 1
            here = pairs[np.ix_(some, those)]
            vectors += bool((here & (at_server | (owners[some][:, None] != owners[those]))).any())
    apart = pairs & (owners[:, None] != owners[None, :])
    moved = apart.sum(0) @ answers
    if at_server:
        away = owners != SERVER
        parts = pairs.sum(0) * answers * away + pairs.sum(1) * shown * away
        moved = parts.sum()
        np.add.at(sent[:, SERVER], owners, parts)
    else:
        asking, answering = np.nonzero(apart)
        np.add.at(sent, (owners[answering], owners[asking]), answers[answering])
    return replace(
        found,
        copies=copies,
        moved=int(moved),
        busiest=int(max(sent.sum(0).max(), sent.sum(1).max())),
        vectors=vectors,
        told=told,
        calls=tuple(sorted(calls)),
    )


def most_held(
    question: int, answer: int, num_clients: int, num_ranks: int, at_server: bool
) -> tuple[int, int]:
    """Return the most numbers that rank 0 and a worker hold of a second look that travels.

    A worker holds the questions of a wave, the answers that it makes in a block, their copy that is sent, and
    the answers that arrive; rank 0 what arrives, if it compares.

    Args:
        question: size of a question.
        answer: largest size of an answer, and of what a client shows.
        num_clients: m, number of clients of a step.
        num_ranks: P, number of ranks, at least 2.
        at_server: whether rank 0 compares.
    """
    workers = num_ranks - 1
    questions = max(question, min(BLOCK, workers * question))
    answers = max(answer, min(BLOCK, -(-num_clients // workers) * workers * answer))
    return 2 * answers * at_server, questions + 3 * answers
