"""The processor time of rank 0 in a round, without waiting: `mpifl bench server`.

Each of three methods has one job on a few ranks, with as many clients as the largest round. Workers answer
with the model that they received. The processor time of rank 0 is counted, except for polling for messages.
Its time within MPI's collectives is also given separately, because rank 0 waits there for the workers, too
(the rows are small). A turn consists of several rounds. A round of two clients gives the fixed cost of a
round; the additional time of larger rounds is the cost of their clients.

The job is started under mpirun as `python -m mpifl.benchmarks.server SOCKET CONFIG [--key.path value ...]`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mpifl.comm import mpi
from mpifl.comm.mpi_startup import mpirun
from mpifl.core.client import Trained
from mpifl.core.federation import Split
from mpifl.core.progress import each
from mpifl.core.rng import Key
from mpifl.core.types import Vector
from mpifl.data import prepare
from mpifl.experiment import loader
from mpifl.runtime.synchronous import SynchronousEngine
from mpifl.simulation.sampling import Sampler
from mpifl.training.client import LocalClient

from . import job
from .compare import check_rounds
from .turns import Job, scratch_folder

CONFIG = "bench/million"
METHODS = {
    "fedavg": ["--algorithm.name", "fedavg"],
    "ifca": ["--algorithm.name", "ifca", "--algorithm.num_clusters", "4"],
    "ucfl": ["--algorithm.name", "ucfl", "--algorithm.streams", "4", "--algorithm.noise_batch", "10"],
}
FEW = 2  # clients of the almost empty round; UCFL needs two
SIZES = (100, 1000, 5000)
TURNS = 9
AT_ONCE = 20, 2000  # most rounds of a turn, and about how many clients in all of them


def measure_server(
    ranks: int, num_turns: int | None, options: Sequence[str], sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Measure rank 0 with three methods, print the figures and return them.

    Args:
        ranks: number of ranks, server included.
        num_turns: turns of each size, whose median is taken; None for 9.
        options: command-line options that override the configuration.
        sizes: clients of a round, ascending.
    """
    config = loader.load(CONFIG, list(options))
    check_rounds(config, options, ("rounds", "algorithm", "cohort_size", "participation"))
    prepare(config.data, config.seed.data, download=False)
    out: dict[str, Any] = {"ranks": ranks, "sizes": [*sizes], "methods": {}}
    with scratch_folder() as place:
        for method, chosen in METHODS.items():
            asked = [*chosen, "--data.scenario.clients", str(sizes[-1]), "--model.hidden", "[8]"]
            asked += ["--local.epochs", "1", "--cohort_size", str(FEW), "--system.scratch", place, *options]
            command = [*mpirun(ranks), "mpifl.benchmarks.server", "SOCKET", CONFIG, *asked]
            one = Job(method, command, {}, Path(place))
            try:
                turns: dict[int, list[dict[str, Any]]] = {}
                for m in each((FEW, *sizes), f"rounds with {method}", "numbers of clients"):
                    one.turn(m)  # the first of its size
                    turns[m] = [one.turn(m) for _ in range(num_turns or TURNS)]
            finally:
                one.end()
            taken = {m: [turn["server_cpu"] for turn in some] for m, some in turns.items()}
            out["methods"][method] = figures(taken, [turn["collectives"] for turn in turns[FEW]])
    print("\n".join(lines(out)), flush=True)
    return out


def figures(taken: dict[int, list[float]], inside: Sequence[float]) -> dict[str, Any]:
    """Return the fixed cost of a round, and the cost of each client.

    Args:
        taken: clients of a round -> seconds of rank 0 in a round, turn after turn.
        inside: seconds of rank 0 in MPI's collectives in the smallest rounds, turn after turn.

    Returns:
        `round_s`: median of the smallest rounds; `collectives_s`: the part of it in MPI's collectives;
        `client_s`: clients of a round -> seconds per client, beyond those of the smallest rounds; `rounds`:
        clients of a round -> median.
    """
    medians = {m: statistics.median(seconds) for m, seconds in taken.items()}
    few = min(medians)
    each = {str(m): (s - medians[few]) / (m - few) for m, s in medians.items() if m != few}
    return {
        "round_s": medians[few],
        "collectives_s": statistics.median(inside),
        "client_s": each,
        "rounds": {str(m): s for m, s in taken.items()},
    }


def lines(out: dict[str, Any]) -> list[str]:
    """Return the figures as text lines."""
    page = [
        f"processor time of rank 0 of {out['ranks']} in a round, without waiting",
        "method  ms a round beside  in collectives  us a client of"
        + "".join(f"{m:>7d}" for m in out["sizes"]),
    ]
    for method, f in out["methods"].items():
        each = "".join(f"{1e6 * f['client_s'][str(m)]:7.1f}" for m in out["sizes"])
        beside = f"{1e3 * f['round_s']:17.2f} {1e3 * f['collectives_s']:15.2f}"
        page.append(f"{method:7s} {beside} {'':15s}{each}")
    return page


# -- the job -------------------------------------------------------------------------------------------------


class Waits:
    """Counts the processor time that a process spends polling for messages and in MPI's collectives.

    Attributes:
        polls: seconds so far.
        collectives: seconds so far, the work of the collectives included.
    """

    def __init__(self) -> None:
        self.polls = self.collectives = 0.0

    @contextmanager
    def counted(self) -> Iterator[Waits]:
        """Count within the block."""
        inner = vars(mpi)["wait_until"]

        def wait_until(ready: Callable[[], Any]) -> Any:
            begin = time.thread_time()
            answer = inner(ready)
            self.polls += time.thread_time() - begin
            return answer

        def timed(verb: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                begin = time.thread_time()
                answer = verb(*args)
                self.collectives += time.thread_time() - begin
                return answer

            return call

        with ExitStack() as stack:
            stack.enter_context(patch.object(mpi, "wait_until", wait_until))
            for name in ("Bcast", "Reduce", "Gatherv"):
                stack.enter_context(patch.object(mpi.Mpi, name, timed(getattr(mpi.Mpi, name))))
            yield self


@contextmanager
def untrained() -> Iterator[None]:
    """Make clients answer with the model that they received, and rate every model as equally good."""

    def sgd(self: LocalClient, start: Vector, key: Key, **options: Any) -> Trained:
        return Trained(start, 1, 0.5, 0.1)

    def losses(self: LocalClient, vector: Vector, split: Split | None = None) -> torch.Tensor:
        return vector[:1]

    with patch.object(LocalClient, "sgd", sgd), patch.object(LocalClient, "losses", losses):
        yield


class SizedRounds(job.TurnRunner):
    """Runs several rounds in a turn, with as many clients as the measuring process asks for."""

    def __init__(self, rounds: SynchronousEngine, waits: Waits) -> None:
        super().__init__(rounds)
        self.waits = waits

    def turn(self, asked: int) -> dict[str, Any]:
        """Run rounds; return their seconds, and rank 0's processor time per round, without polling.

        Args:
            asked: Number of clients.
        """
        sampler = self.rounds.sampler
        assert isinstance(sampler, Sampler)
        self.rounds.sampler = replace(sampler, num_sampled=asked)
        most, clients = AT_ONCE
        count = min(most, max(1, clients // asked))
        before = time.thread_time() - self.waits.polls, self.waits.collectives
        taken = super().turn(count)
        after = time.thread_time() - self.waits.polls, self.waits.collectives
        cpu, inside = ((b - a) / count for a, b in zip(before, after, strict=True))
        return {**taken, "server_cpu": cpu, "collectives": inside}


if __name__ == "__main__":
    with Waits().counted() as counted, untrained():
        sys.exit(
            job.main(sys.argv[1], sys.argv[2], sys.argv[3:], lambda rounds: SizedRounds(rounds, counted))
        )
