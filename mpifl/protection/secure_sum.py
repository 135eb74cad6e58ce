"""Secure aggregation: masked integers that hide each upload but have the sum of the uploads, bit for bit.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, against an
honest but curious server. Exact sums are already sums of integers (`exact_sum.py`). Modulo 2^bits, each
client adds a mask of its own and, for each neighbour, a pair mask that both of them know; one of the two adds
it and the other subtracts it, so pair masks cancel in the sum. Clients share their secrets among their
neighbours (Shamir). From the shares of the remaining clients, the server reconstructs the own masks of the
clients whose uploads arrived, and the keys of those whose uploads did not, which give the pair masks that did
not cancel. It never learns both secrets of one client.

With `neighbours` = k, each client has k neighbours on a ring in random order, instead of all clients, so
costs grow with m k instead of m^2 (Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead", CCS 2020).

The simulation differs from a real deployment as follows. Secrets are draws with fixed addresses, so that a
run can be repeated. Masks come from NumPy's Philox, which is not a cipher. Keys are agreed on by a
Diffie-Hellman exchange modulo 2^255 - 19, whose messages have the size of X25519's but which is not a secure
group. Encryption of the shares is counted but not done. All arithmetic on masks, keys and shares is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from math import ceil
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Interval, MultipleOf

from mpifl.aggregation import exact_sum
from mpifl.aggregation.update_filter import PlannedStep, UpdateFilter
from mpifl.core import devices
from mpifl.core.errors import MethodError, UserError
from mpifl.core.options import Options, PositiveShare, ShareBelowOne
from mpifl.core.plan import Mixing, Plan, with_statistics_apart
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.types import Report

GROUP, GENERATOR = 2**255 - 19, 2  # modulus and generator of the key exchange
PRIME = 2**256 - 189  # modulus of the shares: the largest prime below 2^256
KEY_BYTES = SHARE_BYTES = 32
CIPHER_BYTES = 2 * SHARE_BYTES + 28  # shares of two secrets, with nonce and tag of an authenticated cipher
BOUND_BYTES, GRID_BYTES = 4, 16  # largest absolute value, float32; weight and spacing, float64
EXACT_BITS = 52  # enough for every sum of `exact_sum`: below 2^51, with sign
KEY, SEED = "key", "seed"  # the two secrets of a client
Seeds = Sequence[tuple[int, int]]  # (seed of a mask, its sign)
STAGES = ("secure_keys", "secure_grid", "secure_shares", "secure_unmasking")


# -- secrets -------------------------------------------------------------------------------------------------


def secret(key: Key) -> int:
    """Return the 256-bit secret at an address, modulo `PRIME`."""
    return int.from_bytes(blake2b(repr(key.path).encode(), digest_size=32).digest(), "little") % PRIME


def polynomial(coefficients: Sequence[int], x: int) -> int:
    """Return c_0 + c_1 x + c_2 x^2 + ... modulo `PRIME`: for x > 0, a share of the secret c_0."""
    value = 0
    for c in reversed(coefficients):
        value = (value * x + c) % PRIME
    return value


def reconstructed(shares: Mapping[int, int]) -> int:
    """Return the secret from exactly as many shares as needed, x -> share (Lagrange interpolation at 0)."""
    total = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += share * above * pow(below, -1, PRIME)
    return total % PRIME


def public_key(private: int) -> int:
    """Return the public key of a private key."""
    return pow(GENERATOR, private, GROUP)


def agreed_seed(private: int, public: int) -> int:
    """Return the common seed of two clients, from one's private key and the other's public key."""
    common = pow(public, private, GROUP)
    return int.from_bytes(blake2b(common.to_bytes(32, "little"), digest_size=32).digest(), "little")


def stream(seed: int, first: int, size: int) -> np.ndarray:
    """Return the mask of a block of numbers, uniform uint64 [size].

    Args:
        seed: seed of the mask.
        first: index of the block's first column.
        size: number of columns of the block.
    """
    about = seed.to_bytes(32, "little") + first.to_bytes(8, "little")
    key = int.from_bytes(blake2b(about, digest_size=16).digest(), "little")
    return np.random.Philox(key=key).random_raw(size)


# -- who hides with whom -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecureGroup:
    """A group of clients whose uploads are summed.

    Attributes:
        key: address of their secrets.
        ring: the clients in ring order, which decides who are neighbours.
        threshold: share of a client's neighbours that must remain to reveal one of its secrets.
        degree: number of neighbours of each client; n - 1 for all others.
        public: client -> public key.
    """

    key: Key
    ring: tuple[int, ...]
    threshold: float
    degree: int
    public: Mapping[int, int]

    @staticmethod
    def of(key: Key, members: Sequence[int], threshold: float, degree: int | None) -> SecureGroup:
        """Return a group of the given clients.

        Args:
            key: address of the group's secrets.
            members: the clients.
            threshold: see `SecureGroup`.
            degree: number of neighbours of each client, even; None, or more than there are, for all others.
        """
        n = len(members)
        ring = tuple(members[i] for i in key.of("ring").numpy().permutation(n))
        public = {k: public_key(secret(key.of(KEY, k))) for k in members}
        return SecureGroup(key, ring, threshold, n - 1 if degree is None else min(degree, n - 1), public)

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Return the clients with whom a client shares masks, ascending."""
        n = len(self.ring)
        if self.degree == n - 1:
            return tuple(sorted(k for k in self.ring if k != client))
        at, reach = self.ring.index(client), self.degree // 2
        return tuple(sorted(self.ring[(at + s) % n] for s in range(-reach, reach + 1) if s))

    @property
    def needed(self) -> int:
        """How many shares reveal a secret."""
        return max(1, ceil(self.threshold * self.degree - 1e-9))  # 0.55 * 100 is above 55 in floating point

    def shares(self, which: str, owner: int, holders: Sequence[int]) -> dict[int, int]:
        """Return the shares of the owner's secret (`KEY` or `SEED`) held by some of its neighbours."""
        key, places = self.key.of(which, owner), self.neighbours(owner)
        coefficients = [secret(key), *(secret(key.of("coefficient", c)) for c in range(1, self.needed))]
        return {1 + (x := places.index(k)): polynomial(coefficients, 1 + x) for k in holders}

    def revealed(self, which: str, owner: int, left: Collection[int]) -> int:
        """Return a secret of the owner, from as many shares of remaining neighbours as needed."""
        holders = [k for k in self.neighbours(owner) if k in left][: self.needed]
        assert len(holders) == self.needed, "the group would have been given up"
        return reconstructed(self.shares(which, owner, holders))

    def holds(self, left: Collection[int]) -> bool:
        """Return whether the sum over the remaining clients can be revealed, and has at least two terms."""
        there = set(left)
        enough = (len(there.intersection(self.neighbours(k))) >= self.needed for k in self.ring)
        return len(there) > 1 and all(enough)

    def seeds(self, client: int) -> Seeds:
        """Return the seeds and signs of a client's masks, from its own secrets and others' public keys."""
        private = secret(self.key.of(KEY, client))
        pairs = [
            (agreed_seed(private, self.public[k]), 1 if client < k else -1) for k in self.neighbours(client)
        ]
        return [(secret(self.key.of(SEED, client)), 1), *pairs]

    def left_over(self, left: Collection[int]) -> Seeds:
        """Return the seeds and signs of the masks that do not cancel in the remaining clients' sum."""
        there = set(left)
        own = [(self.revealed(SEED, k, there), 1) for k in sorted(there)]
        pairs = []
        for gone in sorted(set(self.ring) - there):
            private = self.revealed(KEY, gone, there)
            pairs += [
                (agreed_seed(private, self.public[k]), 1 if k < gone else -1)
                for k in self.neighbours(gone)
                if k in there
            ]
        return own + pairs


def total_mask(seeds: Seeds, first: int, size: int) -> np.ndarray:
    """Return the signed sum of masks, modulo 2^64: uint64 [size]."""
    total = np.zeros(size, np.uint64)
    for seed, sign in seeds:
        (np.add if sign > 0 else np.subtract)(total, stream(seed, first, size), out=total)
    return total


# -- what travels --------------------------------------------------------------------------------------------


def masked_upload(
    upload: torch.Tensor, weight: float, spacing: float, seeds: Seeds, first: int, bits: int
) -> np.ndarray:
    """Return a block of a masked upload: multiples of the spacing plus masks, modulo 2^bits; uint64 [b].

    Args:
        upload: block of the upload, float32 [b].
        weight: weight of the upload in its row.
        spacing: grid spacing of the row.
        seeds: seeds and signs of the client's masks.
        first: index of the block's first column.
        bits: bits per number.
    """
    size = upload.shape[0]
    terms = exact_sum.exact_sum([upload], np.array([[weight]]), np.array([spacing]), size)
    sent = devices.to_main_memory(terms)[0].numpy().view(np.uint64) + total_mask(seeds, first, size)
    return np.asarray(sent & np.uint64(2**bits - 1))


def unmasked_sum(sums: np.ndarray, seeds: Seeds, first: int, bits: int) -> np.ndarray:
    """Return the sum of uploads, int64 [b], from the sum of masked uploads, uint64 [b].

    Args:
        sums: sum of masked uploads, modulo 2^64.
        seeds: seeds and signs of the masks that did not cancel.
        first: index of the block's first column.
        bits: bits per number.
    """
    spare = np.uint64(64 - bits)
    plain = (sums - total_mask(seeds, first, len(sums))) << spare  # drops the bits above the lowest `bits`
    return np.asarray(plain.view(np.int64) >> np.int64(64 - bits))  # and extends the sign


@dataclass(frozen=True)
class RankMasks:
    """The masks of one mixing as one rank sees it.

    Attributes:
        uploads: client and group of each of this rank's uploads; None if the upload does not arrive, or its
            row is given up.
        rows: group of each active row, and the clients whose uploads arrive; on rank 0 only.
        bits: bits per number.
    """

    uploads: Sequence[tuple[int, SecureGroup] | None]
    rows: Sequence[tuple[SecureGroup, Collection[int]]]
    bits: int

    @cached_property
    def _seeds(self) -> list[Seeds]:
        """Seeds of each upload's masks, computed on the client's rank."""
        return [[] if of is None else of[1].seeds(of[0]) for of in self.uploads]

    @cached_property
    def _left_over(self) -> list[Seeds]:
        """Seeds of each active row's remaining masks, computed at the server from shares."""
        return [group.left_over(left) for group, left in self.rows]

    def sums(
        self, block: Sequence[torch.Tensor], weights: np.ndarray, spacing: np.ndarray, columns: slice
    ) -> torch.Tensor:
        """Return the sums of this rank's masked uploads for the active rows, modulo 2^64, int64 [Ka, b].

        Args:
            block: the given columns of this rank's uploads, each [b].
            weights: float64 [Ka, uploads].
            spacing: g of each active row [Ka].
            columns: the columns of the block.
        """
        out = np.zeros((len(spacing), columns.stop - columns.start), np.uint64)
        for j, (upload, seeds) in enumerate(zip(block, self._seeds, strict=True)):
            for k in np.flatnonzero(weights[:, j]).tolist():
                out[k] += masked_upload(upload, weights[k, j], spacing[k], seeds, columns.start, self.bits)
        return torch.from_numpy(out.view(np.int64))

    def unmasked(self, sums: torch.Tensor, columns: slice) -> torch.Tensor:
        """Return the sums of the uploads of all ranks, int64 [Ka, b]; on rank 0."""
        rows = [
            unmasked_sum(row, seeds, columns.start, self.bits)
            for row, seeds in zip(sums.numpy().view(np.uint64), self._left_over, strict=True)
        ]
        return torch.from_numpy(np.stack(rows)) if rows else sums


@dataclass(frozen=True)
class GroupMasks:
    """The masks of one mixing, on rank 0.

    Attributes:
        groups: row -> the group of clients whose uploads enter it.
        clients: client of each upload [m].
        arrives: whether each upload arrives, bool [m].
        grid_weights: weights that the clients were told [K, m], before it was known who drops out.
        scale: factor of the sum over the remaining clients, for each row [K].
        bits: bits per number.
    """

    groups: Mapping[int, SecureGroup]
    clients: tuple[int, ...]
    arrives: np.ndarray
    grid_weights: np.ndarray
    scale: np.ndarray
    bits: int

    @property
    def grid_factor(self) -> float:
        """Grid spacing relative to that of exact sums: larger if sums must fit in fewer bits."""
        return float(2 ** max(EXACT_BITS - self.bits, 0))

    def of_rank(self, rows: np.ndarray, uploads: np.ndarray, is_server: bool) -> RankMasks:
        """Return the masks that one rank needs.

        Args:
            rows: indices of the active rows.
            uploads: indices of the rank's uploads.
            is_server: whether the rank removes the masks that do not cancel.
        """
        own: list[tuple[int, SecureGroup] | None] = []
        for j in uploads.tolist():
            of = [g for k, g in self.groups.items() if self.grid_weights[k, j]] if self.arrives[j] else []
            own.append((self.clients[j], of[0]) if of else None)
        there = []
        for k in rows.tolist() if is_server else ():
            left = [
                c for c, a, w in zip(self.clients, self.arrives, self.grid_weights[k], strict=True) if a and w
            ]
            there.append((self.groups[k], left))
        return RankMasks(own, there, self.bits)


# -- a round -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecureConfig(Options):
    """No secure aggregation: the server sees single uploads."""


@dataclass(frozen=True)
class MaskedSums(SecureConfig):
    """The server learns only sums of uploads (Bonawitz et al., CCS 2017); see `docs/privacy.md`.

    Attributes:
        threshold: share of a client's neighbours, in (0, 1], that must remain at the end of a round to reveal
            the sum of a row; if fewer remain, see `on_failure`.
        neighbours: number of other clients with whom each client shares masks, even; null for all others.
        bits: bits per number of a masked upload, 16 to 64. With 52 or more, sums equal those of a run without
            masks, bit for bit; with fewer, the grid is coarser.
        dropout: probability, in [0, 1), that a client is lost after it has shared its secrets, so that its
            upload does not arrive.
        on_failure: what happens if too few clients remain to reveal the sum of a row: `skip` leaves the row
            unchanged, `abort` ends the run.
    """

    paper = "bonawitz2017practical"

    threshold: PositiveShare = 2 / 3
    neighbours: Annotated[int, Ge(2), MultipleOf(2)] | None = None
    bits: Annotated[int, Interval(ge=16, le=64)] = 64
    dropout: ShareBelowOne = 0.0
    on_failure: Literal["skip", "abort"] = "skip"

    def vector_bytes(self, numbers: int) -> int:
        """Return the bytes of a masked upload with this many numbers."""
        return ceil(self.bits * numbers / 8)


SECURE: Registry[type[SecureConfig]] = Registry("", SecureConfig, {"none": SecureConfig, "masks": MaskedSums})


class Booking(NamedTuple):
    """A ledger entry: what one client sends or receives in one stage of the protocol.

    Attributes:
        client: the client.
        direction: `up` or `down`.
        name: name of the stage, or of the upload.
        numbers: how many numbers are sent.
        size: bytes.
    """

    client: int
    direction: str
    name: str
    numbers: int
    size: int


@dataclass
class SecureRounds(UpdateFilter):
    """Hides single uploads: groups, drop-outs and messages of each round; on rank 0.

    Attributes:
        config: configuration of the run.
        key: address of all draws.
        fixed: whether sums are divided by the planned weights (central privacy); otherwise by the weights of
            the uploads that arrive.
        dropped: number of uploads that did not arrive so far.
        skipped: number of rows left unchanged so far because too few clients remained.
    """

    at_server = hides_uploads = True
    state = "secure"
    config: MaskedSums
    key: Key
    fixed: bool = False
    dropped: int = 0
    skipped: int = 0
    _now: list[int] = field(default_factory=lambda: [0, 0])

    def arrives(self, step: int, clients: np.ndarray) -> np.ndarray:
        """Return whether the upload of each client [m] arrives in a round, bool [m]."""
        lost = [self.key.of("drop", step, k).below(1 << 53) < self.config.dropout * 2**53 for k in clients]
        return ~np.array(lost, bool)

    def lost(self, step: int, clients: np.ndarray) -> np.ndarray:
        """Return those of the clients [m] whose upload does not arrive in a round."""
        return np.asarray(clients[~self.arrives(step, clients)])

    def plan(self, plan: Plan | None, step: PlannedStep) -> Plan | None:
        """Return a plan whose mixings hide single uploads, and book the protocol's traffic.

        Raises:
            MethodError: a mixing is no mean of uploads that hold running statistics; see also `begin`.
        """
        if plan is None or not len(step.notes):
            return plan
        if with_statistics_apart(plan.mixings, step.server.tables, step.parts).tables:
            what = "a mixing is no mean of the uploads, which hold running statistics that need one"
            remedy = "average uploads of whole models by row, or use a model without batch norm"
            raise MethodError(step.hook, f"under masks {what}", remedy)
        version = step.server.version + 1
        mixings, sent = self.begin(plan.mixings, step.notes.client, version, step.widths)
        for message in sent:
            step.book(*message)
        return replace(plan, mixings=mixings)

    def begin(
        self, mixings: Sequence[Mixing], clients: np.ndarray, step: int, widths: Mapping[str, int]
    ) -> tuple[list[Mixing], list[Booking]]:
        """Return the mixings of a round with masks, and what its clients send and receive.

        Args:
            mixings: mixings as planned; each upload enters one row of each.
            clients: client of each upload [m].
            step: number of the round.
            widths: upload -> how many numbers it has.

        Raises:
            UserError: too few clients remain for a row, and `on_failure` is `abort`.
            MethodError: an upload enters several rows of a mixing, or only a part of it is mixed.
        """
        arrives = self.arrives(step, clients)
        self._now = [int((~arrives).sum()), 0]
        out, bookings = [], list[Booking]()
        for mixing in mixings:
            if mixing.of:
                mixing, sent = self._masked(mixing, clients, arrives, step, widths[mixing.of])
                bookings += sent
            out.append(mixing)
        return out, bookings

    def _masked(
        self, mixing: Mixing, clients: np.ndarray, arrives: np.ndarray, step: int, width: int
    ) -> tuple[Mixing, list[Booking]]:
        told, key = mixing.weights, self.key.of(step, mixing.into)
        if ((told != 0).sum(0) > 1).any() or mixing.part is not None:
            what = f"an upload enters several rows of {mixing.into!r}, or a part of it"
            raise MethodError("secure_aggregation", what, "use a method whose uploads enter one row each")
        weights, keep = told * arrives, mixing.keep
        keep = np.zeros(len(told)) if keep is None else keep.astype(np.float64)
        scale, groups, sent = np.ones(len(told)), dict[int, SecureGroup](), list[Booking]()
        for k in np.flatnonzero(told.any(1)).tolist():
            chosen = told[k] != 0
            members, left = clients[chosen].tolist(), clients[chosen & arrives].tolist()
            group = SecureGroup.of(key.of(k), members, self.config.threshold, self.config.neighbours)
            if group.holds(left):
                groups[k], lost = group, told[k].sum() - weights[k].sum()
                if self.fixed:
                    keep[k] += lost
                elif len(left) < len(members):
                    scale[k] = told[k].sum() / weights[k].sum()
            else:
                self._give_up(mixing.into, k, len(left), len(members), step)
                weights[k], keep[k] = 0.0, 1.0
            if len(members) > 1:
                sent += messages(group, left, mixing.of, width, self.config, k in groups)
        masks = GroupMasks(groups, tuple(clients.tolist()), arrives, told, scale, self.config.bits)
        return replace(mixing, weights=weights, keep=keep if keep.any() else None, masks=masks), sent

    def _give_up(self, table: str, row: int, left: int, members: int, step: int) -> None:
        self._now[1] += 1
        key, value = "secure_aggregation.on_failure", self.config.on_failure
        where = f"round {step}, row {row} of {table!r}: {left} of {members} clients are left, too few"
        if value == "abort":
            raise UserError(key, value, f"{where}; use a lower threshold, or skip")

    def traffic(
        self, sizes: Mapping[str, int], report: Report, clients: int, header_bytes: int
    ) -> tuple[int, Mapping[str, int]]:
        """Return a client's share of a round of one group without drop-outs; see `bytes_of_round`."""
        down, sent = 0, {}
        for name in sizes:
            of_all = bytes_of_round(clients, report.vectors[name].numel(), self.config, header_bytes)
            down, sent[name] = down + of_all[0] // clients, of_all[1] // clients
        return down, sent

    def commit(self) -> None:
        """Add the round to the counts, after its step was taken."""
        self.dropped, self.skipped = self.dropped + self._now[0], self.skipped + self._now[1]
        self._now = [0, 0]

    def figures(self) -> dict[str, int]:
        """Return the columns of `metrics.csv`: uploads lost and rows left unchanged so far."""
        return {"secure_dropped": self.dropped, "secure_skipped": self.skipped}

    def state_dict(self) -> dict[str, int]:
        """Return the counts so far."""
        return self.figures()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.dropped, self.skipped = state["secure_dropped"], state["secure_skipped"]


def messages(
    group: SecureGroup, left: Sequence[int], name: str, width: int, config: MaskedSums, ends: bool
) -> list[Booking]:
    """Return what the clients of a group send and receive, stage by stage, without headers.

    Args:
        group: group of two or more clients.
        left: clients whose masked uploads arrive.
        name: name of the upload.
        width: how many numbers it has.
        config: configuration of the run.
        ends: whether enough clients remain, so that the masks are revealed.
    """
    out = []
    g = group.degree
    for k in sorted(group.ring):
        out += [
            Booking(k, "up", STAGES[0], 2, 2 * KEY_BYTES),
            Booking(k, "down", STAGES[0], 2 * g, 2 * KEY_BYTES * g),
            Booking(k, "up", STAGES[1], 1, BOUND_BYTES),
            Booking(k, "down", STAGES[1], 2, GRID_BYTES),
            Booking(k, "up", STAGES[2], 2 * g, CIPHER_BYTES * g),
            Booking(k, "down", STAGES[2], 2 * g, CIPHER_BYTES * g),
        ]
    for k in left:
        out.append(Booking(k, "up", name, width, config.vector_bytes(width)))
        if ends:  # down: a bit for each neighbour, whether it remains; up: one share for each neighbour
            out += [
                Booking(k, "down", STAGES[3], g, ceil(g / 8)),
                Booking(k, "up", STAGES[3], g, SHARE_BYTES * g),
            ]
    return out


def bytes_of_round(clients: int, width: int, config: MaskedSums, header: int = 0) -> tuple[int, int]:
    """Return the bytes (down, up) of a round of one group without drop-outs; 0 for a single client.

    Per client with g neighbours, d numbers of b bits and headers of h bytes: up 64 + 4 + 92 g + ceil(b d / 8)
    + 32 g + 5 h, down 64 g + 16 + 92 g + ceil(g / 8) + 4 h.

    Args:
        clients: m, number of clients.
        width: d, how many numbers an upload has.
        config: configuration of the run.
        header: bytes of each message's header.
    """
    if clients < 2:
        return 0, 0
    g = clients - 1 if config.neighbours is None else min(config.neighbours, clients - 1)
    up = 2 * KEY_BYTES + BOUND_BYTES + (CIPHER_BYTES + SHARE_BYTES) * g + config.vector_bytes(width)
    down = (2 * KEY_BYTES + CIPHER_BYTES) * g + GRID_BYTES + ceil(g / 8)
    return clients * (down + 4 * header), clients * (up + 5 * header)
