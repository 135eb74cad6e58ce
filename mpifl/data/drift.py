"""Drift: the data of some clients change at given server steps, under any scenario that fixes who holds what.

A client holds one data set after the other. Every change is drawn before the run from the data seed: data
sets and true groups at a step are the same for any policy, and on any number of ranks. The number of a
client's samples never changes. Where the time of a change is given in seconds, its step is known when the
run's clock gets there: each moment at which a client changes has a step of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from mpifl.core.errors import UserError, require
from mpifl.core.federation import CLASSES, IMAGES, SPLITS
from mpifl.core.options import (
    FiniteNonNegative,
    FinitePositive,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveShare,
)
from mpifl.core.rng import Key
from mpifl.data.partition.dirichlet import dirichlet, take_by_mixture

from .pool import Pool
from .scenario import FixedPartition, Partition, SampleIndex
from .scenarios.relations import Relations
from .transforms import MirrorAndTurn, Op

SHARE, ALPHA, RECOVERED = 0.2, 0.3, 0.95
SHOWN = 5  # steps in a line
FIRST = 2  # the first step at which data may change: before the first, they are the scenario's


@dataclass(frozen=True)
class Drift(Options):
    """Data that change during the run: at a step, some clients hold other data from then on.

    A change concerns all splits of a client: from its step on, visits train and evaluations test on the new
    data. True groups change with it, and `ari`, `nmi` and `purity` compare clusters with those of the step.

    Attributes:
        kind: what changes; null: nothing. `swap`: pairs of clients of different groups change places, each
            then holds samples of the other's group. `input`: inputs change (images are mirrored, columns of
            features and tokens permuted). `concept`: labels are permuted, so that the same input means
            another class. `label`: the mixture of classes changes; the clients' samples are drawn anew from
            those of their group. `arrival`: a new group appears, to which clients of all groups change.
            `split`: half of the largest group permutes its labels. `merge`: all clients of the smallest group
            change to another, so that theirs vanishes.
        at: the server steps (under `rounds`: rounds) from which on changes hold, ascending.
        at_s: seconds of the run's clock instead of `at`, ascending: a change holds from the first server step
            on that begins at this time or later. The numbers of such a run depend on its times.
        share: fraction of the clients that a step in `at` concerns; `split` and `merge` concern a group.
        gradual: number of steps over which clients change one by one: each from a step of its own on, drawn
            uniformly from s..s + gradual for a step s in `at`.
        gradual_s: the same in seconds, with `at_s`: each client changes at a time of its own, drawn uniformly
            from t to t + gradual_s for a time t in `at_s`.
        recurring: whether every second step in `at` takes the change of the one before back, for the same
            clients; otherwise each step in `at` is another change, of other clients.
        alpha: concentration of the class mixtures of `label`, Dir(alpha 1_L).
        recovered: a score counts as recovered from a change once it has this share of the score before it
            (`recovery_steps` in `metrics.csv`).
    """

    kind: Literal["swap", "input", "concept", "label", "arrival", "split", "merge"] | None = None
    at: tuple[int, ...] = ()
    at_s: tuple[FinitePositive, ...] = ()
    share: PositiveShare = SHARE
    gradual: NonNegativeInt = 0
    gradual_s: FiniteNonNegative = 0.0
    recurring: bool = False
    alpha: PositiveFloat = ALPHA
    recovered: PositiveShare = RECOVERED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is None:
            remedy = "has no effect without drift.kind; name one, or leave it out"
            for name in ("at", "at_s", "share", "gradual", "gradual_s", "recurring", "alpha", "recovered"):
                value = getattr(self, name)
                require(value == getattr(Drift, name), name, value, remedy)
            return
        remedy = "data change at steps or at times; leave at or at_s out"
        require(not (self.at and self.at_s), "at_s", list(self.at_s), remedy)
        remedy = f"give the steps at which data change, ascending, from {FIRST} on, or times in at_s"
        good = bool(self.at_s) or (bool(self.at) and self.at[0] >= FIRST)
        require(good, "at", list(self.at), remedy)
        remedy = "give seconds of the run's clock, ascending"
        if self.gradual_s:
            remedy += f", each more than gradual_s = {self.gradual_s:g} after the one before"
        rising = all(b - a > self.gradual_s for a, b in pairwise(self.at_s))
        require(rising, "at_s", list(self.at_s), remedy)
        remedy = "counts server steps, and at_s seconds; use gradual_s"
        require(not (self.at_s and self.gradual), "gradual", self.gradual, remedy)
        remedy = "counts seconds, and at server steps; use gradual"
        require(not (self.at and self.gradual_s), "gradual_s", self.gradual_s, remedy)
        remedy = f"each step lies more than gradual = {self.gradual} steps after the one before"
        apart = all(b - a > self.gradual for a, b in pairwise(self.at))
        require(apart, "at", list(self.at), remedy)
        remedy = f"has no effect under kind {self.kind}, which concerns a group; leave it out"
        require(self.kind not in ("split", "merge") or self.share == SHARE, "share", self.share, remedy)
        remedy = "has no effect but under kind label; leave it out"
        require(self.kind == "label" or self.alpha == ALPHA, "alpha", self.alpha, remedy)
        remedy = "takes changes back: give a second step in at, or leave it out"
        require(not self.recurring or len(self.when) > 1, "recurring", True, remedy)

    @property
    def when(self) -> tuple[float, ...]:
        """When data change: server steps, or seconds of the run's clock."""
        return self.at or self.at_s


@dataclass(frozen=True)
class DataSet:
    """What a client holds from a step on.

    Attributes:
        change: number of the change with which it begins, by place in `at`; -1 for the first data set.
        wait: steps, or seconds, from this change until the client takes part in it.
        group: the true group that it then belongs to.
        source: base group from whose clients' samples its own are drawn; None: it keeps those of the
            scenario.
        regime: what is done to its samples beside the scenario's operations; 0: nothing.
        event: the change whose draws made it, which a recurring one shares; None for the first.
        mixed: whether its classes follow a mixture of their own.
    """

    change: int
    wait: float
    group: int
    source: int | None = None
    regime: int = 0
    event: int | None = None
    mixed: bool = False


@dataclass
class _Draft:
    """The data sets of all clients, as far as they are drawn.

    Attributes:
        options: the section `drift`.
        key: address of the draws.
        base: group of each client in the scenario, int64 [N]; zeros where it has none.
        sets: for each client, its data sets in order of time.
        groups: (base group of the samples, regime) -> true group, for those that drift has made.
    """

    options: Drift
    key: Key
    base: np.ndarray
    sets: list[list[DataSet]]
    groups: dict[tuple[int, int], int] = field(default_factory=dict)

    def group(self, base: int, regime: int) -> int:
        """Return the true group of samples of a base group under a regime."""
        if not regime:
            return base
        return self.groups.setdefault((base, regime), int(self.base.max()) + 1 + len(self.groups))

    def now(self) -> np.ndarray:
        """Return the true group of each client after all changes so far, int64 [N]."""
        return np.array([held[-1].group for held in self.sets])

    def source(self, k: int) -> int:
        """Return the base group from which client `k` has its samples."""
        source = self.sets[k][-1].source
        return int(self.base[k]) if source is None else source

    def drawn(self, event: int) -> np.ndarray:
        """Return the clients that a change concerns: a share, of those that have not changed if possible."""
        count = max(1, round(self.options.share * len(self.sets)))
        still = np.array([len(held) == 1 for held in self.sets])
        order = self.key.of("clients", event).numpy().permutation(len(self.sets))
        return np.sort(np.concatenate([order[still[order]], order[~still[order]]])[:count])

    def wait(self, event: int, k: int) -> float:
        """Return how long client `k` waits for a change: steps, or seconds."""
        rng = self.key.of("wait", event, k)
        if self.options.gradual_s:
            return float(rng.numpy().uniform(0.0, self.options.gradual_s))
        return rng.below(self.options.gradual + 1)

    def change(self, k: int, at: tuple[int, float], event: int, to: tuple[int | None, int, bool]) -> None:
        """Add a data set of client `k`: change and wait, the change whose draws made it, what it becomes."""
        source, regime, mixed = to
        group = self.group(int(self.base[k]) if source is None else source, regime)
        self.sets[k].append(DataSet(*at, group, source, regime, event, mixed))


Change = tuple[int, int | None, int, bool]  # client, source and regime of its samples, whether mixed anew


def _swap(draft: _Draft, event: int) -> list[Change]:
    """Pair clients of different groups, who take each other's group."""
    groups, count = draft.now(), max(1, round(draft.options.share * len(draft.sets) / 2))
    waiting = draft.key.of("clients", event).numpy().permutation(len(groups)).tolist()
    pairs: list[tuple[int, int]] = []
    while waiting and len(pairs) < count:
        one = waiting.pop(0)
        other = next((k for k in waiting if groups[k] != groups[one]), None)
        if other is not None:
            waiting.remove(other)
            pairs.append((one, other))
    remedy = "needs clients of different groups, and this scenario has none; use another kind"
    require(bool(pairs), "kind", "swap", remedy)
    return [
        (k, draft.source(to), draft.sets[to][-1].regime, False)
        for a, b in pairs
        for k, to in ((a, b), (b, a))
    ]


def _regime(draft: _Draft, event: int) -> list[Change]:
    """Let clients' inputs, or their labels, be changed by the next regime."""
    return [(k, draft.sets[k][-1].source, event + 1, False) for k in draft.drawn(event).tolist()]


def _label(draft: _Draft, event: int) -> list[Change]:
    """Draw the classes of clients anew."""
    return [(k, draft.source(k), draft.sets[k][-1].regime, True) for k in draft.drawn(event).tolist()]


def _arrival(draft: _Draft, event: int) -> list[Change]:
    """Let clients of all groups change to one new group: samples of the largest one, with other labels."""
    source = int(np.bincount(draft.base).argmax())
    return [(k, source, event + 1, False) for k in draft.drawn(event).tolist()]


def _split(draft: _Draft, event: int) -> list[Change]:
    """Let half of the largest group have other labels."""
    groups = draft.now()
    members = np.flatnonzero(groups == np.bincount(groups).argmax())
    half = draft.key.of("clients", event).numpy().permutation(members)[: len(members) // 2]
    remedy = "needs a group of two clients or more; use more clients, or another kind"
    require(len(half) > 0, "kind", "split", remedy)
    return [(k, draft.sets[k][-1].source, event + 1, False) for k in np.sort(half).tolist()]


def _merge(draft: _Draft, event: int) -> list[Change]:
    """Let all clients of the smallest group change to another one, drawn."""
    known, sizes = np.unique(groups := draft.now(), return_counts=True)
    remedy = f"there is one group left at {draft.options.when[event]:g}; let groups merge fewer times"
    require(len(known) > 1, "kind", "merge", remedy)
    gone = known[sizes.argmin()]
    to = int(draft.key.of("group", event).numpy().choice(known[known != gone]))
    like = int(np.flatnonzero(groups == to)[0])
    regime = draft.sets[like][-1].regime
    return [(k, draft.source(like), regime, False) for k in np.flatnonzero(groups == gone).tolist()]


@dataclass(frozen=True)
class Kind:
    """A kind of drift.

    Attributes:
        changes: returns what changes at an event.
        in_groups: whether it needs true groups.
        permutes: what its regimes change, `inputs` or `labels`.
    """

    changes: Callable[[_Draft, int], list[Change]]
    in_groups: bool = False
    permutes: Literal["inputs", "labels"] = "labels"


KINDS: dict[str, Kind] = {
    "swap": Kind(_swap, in_groups=True),
    "input": Kind(_regime, permutes="inputs"),
    "concept": Kind(_regime),
    "label": Kind(_label),
    "arrival": Kind(_arrival, in_groups=True),
    "split": Kind(_split, in_groups=True),
    "merge": Kind(_merge, in_groups=True),
}


def _scheduled(options: Drift, groups: np.ndarray | None, num_clients: int, key: Key) -> list[list[DataSet]]:
    """Return the data sets of each client, in order of time."""
    assert options.kind is not None
    base = np.zeros(num_clients, np.int64) if groups is None else groups.astype(np.int64)
    draft = _Draft(options, key, base, [[DataSet(-1, 0, int(g))] for g in base])
    made: list[Change] = []
    for event in range(len(options.when)):
        back = options.recurring and event % 2 == 1
        if not back and (not options.recurring or event == 0):
            made = KINDS[options.kind].changes(draft, event)
        of = 0 if options.recurring else event  # the same samples again where a change comes back
        wait = {k: draft.wait(event, k) for k, *_ in made}
        for k, source, regime, mixed in made:
            if back:
                first = draft.sets[k][0]
                draft.sets[k].append(DataSet(event, wait[k], first.group))
            else:
                draft.change(k, (event, wait[k]), of, (source, regime, mixed))
    return draft.sets


class DriftingPartition(Partition):
    """A fixed partition whose clients hold one data set after the other.

    Args:
        inner: who holds what before anything changes.
        options: the section `drift`; its kind is given.
        groups: true group of each client, int64 [N], or None.
        labels: labels of the pool, [S] for classes.
        num_classes: L.
        key: address of the draws.

    Attributes:
        sets: for each client, its data sets in order of time.
        moments: under `at_s`, the times at which changes begin and at which clients take part, ascending.
        settled: the step of each of the moments, as far as it is known.

    Raises:
        UserError: the kind needs groups, or a group holds too few samples for a client that changes to it.
    """

    def __init__(
        self,
        inner: FixedPartition,
        options: Drift,
        groups: np.ndarray | None,
        labels: np.ndarray,
        num_classes: int,
        key: Key,
    ) -> None:
        remedy = (
            "needs true groups, and this scenario has none; use input, concept or label, or another scenario"
        )
        in_groups = KINDS[str(options.kind)].in_groups
        require(groups is not None or not in_groups, "kind", options.kind, remedy)
        self.inner, self.options, self.key = inner, options, key
        self.sizes, self.labels, self.num_classes = inner.sizes, labels, num_classes
        self.sets = _scheduled(options, groups, len(inner.sizes), key)
        taking = (options.at_s[h.change] + h.wait for some in self.sets for h in some[1:] if options.at_s)
        self.moments = sorted({*options.at_s, *taking})
        self.settle(())
        self._base = np.zeros(len(self.sets), np.int64) if groups is None else groups
        self._unions: dict[tuple[int, str], SampleIndex] = {}
        self._check_stock()

    def _check_stock(self) -> None:
        """Refuse a change to a group whose clients hold too few samples."""
        moves = {
            (held.source, k) for k, sets in enumerate(self.sets) for held in sets if held.source is not None
        }
        for source, k in sorted(moves):
            for split, wanted in zip(SPLITS, self.sizes[k].tolist(), strict=True):
                held = len(self._union(source, split).index)  # type: ignore[arg-type]  # an array
                remedy = f"client {k} has {wanted} samples for {split}, and the clients of group {source}"
                remedy += f" hold {held}; use clients of more equal sizes"
                require(wanted <= held, "kind", self.options.kind, remedy)

    def settle(self, steps: Sequence[int]) -> None:
        """Set the step of each of the moments, as far as it is known."""
        self.settled = tuple(steps)
        found = [[self._step_of(held) for held in sets] for sets in self.sets]
        self._since = [[step for step in some if step is not None] for some in found]
        vars(self).pop("regroups", None)

    def _step_of(self, held: DataSet) -> int | None:
        """Return the step with which a data set begins; None if it is not known."""
        if held.change < 0:
            return 0
        if self.options.at:
            return self.options.at[held.change] + int(held.wait)
        return self._step_at(self.options.at_s[held.change] + held.wait)

    def _step_at(self, moment: float) -> int | None:
        """Return the step that begins at a moment or later; None if it is not known."""
        place = bisect_left(self.moments, moment)
        return self.settled[place] if place < len(self.settled) else None

    @property
    def steps(self) -> tuple[int, ...]:
        """The step with which each change begins, as far as it is known."""
        known = map(self._step_at, self.options.at_s)
        return self.options.at or tuple(step for step in known if step is not None)

    def is_due(self, seconds: float) -> bool:
        """Return whether the time of the next of the moments has come."""
        waiting = self.moments[len(self.settled) :]
        return bool(waiting) and waiting[0] <= seconds

    @property
    def regimes(self) -> int:
        """The number of regimes beside the scenario's own."""
        return max(held.regime for sets in self.sets for held in sets)

    def number(self, k: int, step: int) -> int:
        """Return the number of client `k`'s data set at a step."""
        return bisect_right(self._since[k], step) - 1

    def groups_at(self, step: int) -> np.ndarray:
        """Return the true group of each client at a step, int64 [N]."""
        return np.array([self.sets[k][self.number(k, step)].group for k in range(len(self.sets))], np.int64)

    @cached_property
    def regroups(self) -> list[int]:
        """The steps from which on some client is in another true group, as far as known, ascending."""
        found = set()
        for since, sets in zip(self._since, self.sets, strict=True):
            for (before, after), step in zip(pairwise(sets), since[1:], strict=False):
                if before.group != after.group:
                    found.add(step)
        return sorted(found)

    def of(self, k: int, split: str, visit: int) -> SampleIndex:
        """Return the samples of client `k` in its data set number `visit`."""
        held = self.sets[k][visit]
        own = self.inner.of(k, split, 0)
        if held.source is None or held.event is None:
            return replace(own, regime=held.regime)
        stock = self._union(held.source, split)
        count, key = len(_as_array(own.index)), self.key.of("samples", held.event, k)
        rng = key.of(split).numpy()
        index = _as_array(stock.index)
        if held.mixed:
            chosen = self._by_mixture(index, count, key, rng)
        else:
            chosen = np.sort(rng.choice(len(index), count, replace=False))
        group = stock.group[chosen] if isinstance(stock.group, np.ndarray) else stock.group
        return SampleIndex(index[chosen], group, held.regime)

    def of_all(self, clients: np.ndarray, split: str, visits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of several clients in data sets of these numbers."""
        if not visits.any():
            return self.inner.of_all(clients, split, visits)
        return super().of_all(clients, split, visits)

    def changed(self, clients: np.ndarray, visits: np.ndarray) -> bool:
        """Return whether a regime changes the samples of some of these data sets."""
        pairs = zip(clients.tolist(), visits.tolist(), strict=True)
        return any(self.sets[k][visit].regime for k, visit in pairs)

    def _by_mixture(self, index: np.ndarray, count: int, key: Key, rng: np.random.Generator) -> np.ndarray:
        """Return which of some samples a client gets whose classes follow a mixture of its own."""
        classes = self.labels[index]
        stock = [np.flatnonzero(classes == c) for c in range(self.num_classes)]
        left = np.array([len(some) for some in stock])
        mixture = dirichlet(key.of("mixture").numpy(), self.options.alpha, (self.num_classes,))
        counts = take_by_mixture(mixture[None], np.array([count]), left, rng)[0]
        parts = [some[rng.choice(len(some), n, replace=False)] for some, n in zip(stock, counts, strict=True)]
        return np.sort(np.concatenate(parts))

    def _union(self, group: int, split: str) -> SampleIndex:
        """Return the samples of all clients of a base group, each once, with the group of the operations."""
        if (group, split) not in self._unions:
            found = [self.inner.of(int(k), split, 0) for k in np.flatnonzero(self._base == group)]
            index = np.concatenate([_as_array(some.index) for some in found])
            ops = np.concatenate([np.broadcast_to(s.group, len(_as_array(s.index))) for s in found])
            index, first = np.unique(index, return_index=True)
            self._unions[group, split] = SampleIndex(index, ops[first])
        return self._unions[group, split]

    def num_samples(self, k: int, visit: int) -> int:
        """Return the number of training samples of client `k`, the same in all of its data sets."""
        return int(self.sizes[k, 0])

    def sizes_of(self, split: str, clients: np.ndarray, visits: np.ndarray) -> np.ndarray:
        """Return the number of samples of several clients, the same in all of their data sets."""
        return self.inner.sizes_of(split, clients, visits)

    @property
    def test_pool(self) -> int:
        """Return the number of different test samples of all clients together, before anything changes."""
        return self.inner.test_pool


def regime_op(options: Drift, regimes: int, pool: Pool, key: Key) -> Op | None:
    """Return the operation that makes regimes 1, 2, ... differ from the scenario's data; None for no regime.

    Args:
        options: the section `drift`.
        regimes: how many there are.
        pool: the samples.
        key: address of the draws.

    Raises:
        UserError: inputs or labels of this kind cannot be permuted, or not in so many ways.
    """
    if not regimes:
        return None
    permutes = KINDS[str(options.kind)].permutes
    if permutes == "inputs" and pool.kind == IMAGES:
        return MirrorAndTurn(tuple(360.0 * r / regimes for r in range(regimes)))
    return Relations(groups=regimes + 1, permutes=permutes).operation(pool, key)


def check_pool(options: Drift, pool: Pool) -> None:
    """Raise `UserError` for a kind that means nothing for the labels of a source."""
    remedy = f"draws classes anew, and labels of this source are {pool.label_kind}; use another kind"
    require(options.kind != "label" or pool.label_kind == CLASSES, "kind", options.kind, remedy)


def _as_array(index: np.ndarray | slice) -> np.ndarray:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def drifting(
    options: Drift, partition: Partition, groups: np.ndarray | None, pool: Pool, key: Key
) -> tuple[DriftingPartition, Op | None]:
    """Return a partition under drift, and the operation of its regimes.

    Raises:
        UserError: the data change by themselves, or the kind does not fit them.
    """
    if not isinstance(partition, FixedPartition):
        remedy = "the data of this scenario are drawn anew for each visit or client; use another scenario"
        raise UserError("kind", options.kind, remedy)
    check_pool(options, pool)
    found = DriftingPartition(partition, options, groups, pool.labels, pool.num_classes, key)
    return found, regime_op(options, found.regimes, pool, key.of("regime"))


def _time_of(options: Drift, held: DataSet) -> float:
    """Return when a client takes a data set; under `gradual_s`, when the change begins."""
    return options.when[held.change] + (0.0 if options.gradual_s else held.wait)


def lines_on(options: Drift, sets: Sequence[Sequence[DataSet]]) -> list[str]:
    """Return lines for the user: how many clients change, and when."""
    times = [_time_of(options, held) for some in sets for held in some[1:]]
    found, counts = np.unique(np.array(times), return_counts=True)
    form, unit = ("at {:.15g} s", "times") if options.at_s else ("at step {}", "steps")
    if options.gradual_s:
        form = f"within {options.gradual_s:.15g} s from {{:.15g}} s on"
    pairs = zip(found.tolist(), counts.tolist(), strict=True)
    each = [f"{n} {form.format(time)}" for time, n in pairs]
    shown = each if len(each) <= SHOWN else [*each[:SHOWN], f"... at {len(each)} {unit} in all"]
    return [f"drift ({options.kind}): of {len(sets)} clients change {', '.join(shown)}"]
