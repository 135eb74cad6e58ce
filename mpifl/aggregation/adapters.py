"""Filters for adapters: clients with smaller ranks, and means of the products B A instead of the factors.

A client of rank s has the first s rows of A and columns of B; the others are 0. Their gradients are 0 as
well, since each has the other as a factor, so that no optimiser moves them; what else may move them, such as
noise or an attack, is taken back before the upload. Ranks that differ, averaged as factors with zeros in the
place of missing numbers: Cho et al., EMNLP 2024 (HetLoRA, without its pruning and its weights by sparsity).

Means of products: Bai et al., NeurIPS 2024 (FlexLoRA). Differs: the sum of w_i B_i A_i is decomposed through
its factors, so that no matrix of the size of a layer is formed; directions without a singular value continue
those of the old row; and old rows that a plan keeps in part enter as one more adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import torch

from mpifl.core.devices import to_main_memory
from mpifl.core.errors import MethodError
from mpifl.core.parameters import Part, take, width
from mpifl.core.plan import Mixing, Plan
from mpifl.core.types import Message, Report

from .low_rank import AdapterColumns, nearest
from .mixer import Mixer, column_blocks, gather_order, parts_of, stacked
from .update_filter import FilteredVisit, PlannedStep, UpdateFilter


class ClientRanks(UpdateFilter):
    """Gives each client the adapters of its rank, and books no more numbers than these.

    Args:
        columns: where vectors hold adapters.
        ranks: rank of each client [N].
        number_bytes: bytes of a number in a vector.
    """

    at_clients = True
    narrows = True

    def __init__(self, columns: AdapterColumns, ranks: Sequence[int], number_bytes: int) -> None:
        self.columns, self.ranks, self.number_bytes = columns, tuple(ranks), number_bytes

    def held(self, name: str, x: torch.Tensor, client: int) -> torch.Tensor:
        """Return vectors [..., d] as a client has them: 0 beyond its rank."""
        lacks = self.columns.beyond(name, x.shape[-1], self.ranks[client])
        return x if lacks is None else x.masked_fill(lacks.to(x.device), 0.0)

    def download(self, message: Message, client: int) -> Message:
        """Return a message whose adapters have the client's rank."""
        vectors = message.vectors.items()
        return replace(message, vectors={name: self.held(name, x, client) for name, x in vectors})

    def client(self, report: Report, visit: FilteredVisit) -> Report:
        """Return a report whose adapters have the client's rank."""
        vectors = report.vectors.items()
        return replace(report, vectors={name: self.held(name, x, report.client) for name, x in vectors})

    def width(self, name: str, width: int, client: int) -> int:
        """Return how many numbers of a vector [width] the client has."""
        lacks = self.columns.beyond(name, width, self.ranks[client])
        return width if lacks is None else width - int(lacks.sum())

    def kind(self, client: int) -> tuple[tuple[str, int], ...]:
        """Return the client's rank."""
        return (("rank", self.ranks[client]),)

    def sizes(self, sizes: Mapping[str, int], report: Report, message: Message) -> Mapping[str, int]:
        """Return the bytes of the vectors of a report, without the numbers that the client lacks."""
        out = dict(sizes)
        for name in sizes:
            x = report.vectors[name]
            lacks = x.shape[-1] - self.width(name, x.shape[-1], report.client)
            out[name] -= lacks * (x.numel() // max(x.shape[-1], 1)) * self.number_bytes
        return out


@dataclass(frozen=True)
class GatherPlan:
    """What every rank knows about the adapters of one mixing.

    Attributes:
        of: name of the uploads.
        part: slices of an upload that are mixed; None for all.
        columns: where these hold adapters.
        counts: number of uploads on each rank.
    """

    of: str
    part: Part | None
    columns: Part
    counts: tuple[int, ...]


class ProductMeans(UpdateFilter):
    """Replaces means of the factors A and B by the best adapters for the means of the products B A.

    Args:
        columns: where vectors hold adapters.
        changes: names of uploads that are changes of rows.
    """

    at_server = True

    def __init__(self, columns: AdapterColumns, changes: Sequence[str] = ()) -> None:
        self.columns, self.changes = columns, tuple(changes)
        self._mixers: list[ProductMixer] = []  # over ranks, and on rank 0 in asynchronous runs

    def plan(self, plan: Plan | None, step: PlannedStep) -> Plan | None:
        """Return the plan.

        Raises:
            MethodError: rows with adapters are mixed of anything but models, or read as mixtures.
        """
        reads = step.reads(step.notes.client)
        for m in () if plan is None else plan.mixings:
            size = step.server.tables[m.into].shape[1]
            if not self.columns.factors(m.into, size):
                continue
            if any(isinstance(tables.get(m.into), np.ndarray) for tables in reads.values()):
                what = f"clients read mixtures of rows of {m.into!r}, which product does not make"
                raise MethodError(step.hook, what, "use model.lora.average factors")
            held, of = self.columns.parts.held, m.of or m.into
            models = of not in self.changes
            models &= not m.of or m.part is not None or held(m.of, step.widths[m.of]) == held(m.into, size)
            if not models or (m.weights < 0).any() or not np.allclose(m.row_sums(), 1.0):
                what = f"mixing {of!r} into {m.into!r}: product mixes models with weights that sum to 1"
                raise MethodError(step.hook, what, "use model.lora.average factors")
        return plan

    def mixer(self, mixer: Mixer) -> ProductMixer:
        """Return what carries out the mixings of steps with products."""
        self._mixers.append(ProductMixer(mixer, self.columns))
        return self._mixers[-1]

    def figures(self) -> Mapping[str, float]:
        """Return what the ranks of the rows lost of the mean products in the last step.

        It is the Frobenius norm of what they lack relative to that of the mean products, over all layers and
        rows.
        """
        lost, total = (sum(getattr(m, name) for m in self._mixers) for name in ("lost", "total"))
        return {"lora_lost": sqrt(lost / total) if total else 0.0}


class ProductMixer:
    """Carries out mixings in which the products of adapters are averaged, on rank 0.

    Rank 0 gathers the adapters of all uploads. Everything else in the rows is mixed as always.

    Args:
        mixer: carries out the ordinary mixings; its tables are the ones that are mixed into.
        columns: where vectors hold adapters.

    Attributes:
        lost: square of the Frobenius norm of what the last call of `mix` has lost; on rank 0.
        total: square of the Frobenius norm of the mean products; on rank 0.
    """

    def __init__(self, mixer: Mixer, columns: AdapterColumns) -> None:
        self.mixer, self.columns = mixer, columns
        self.lost = self.total = 0.0

    def mix(
        self,
        mixings: Sequence[Mixing] | None,
        upload_info: Callable[[str], tuple[np.ndarray, np.ndarray]] | None,
        uploads: Mapping[str, Sequence[torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """Apply mixings in order; return the new tables by name on rank 0. Collective.

        Args:
            mixings: the mixings, on rank 0; None elsewhere.
            upload_info: returns, for a name, the largest absolute value and the rank of each upload [m]; on
                rank 0.
            uploads: this rank's uploads [w] by name, in ascending order of their number.
        """
        transport, changed = self.mixer.transport, dict[str, torch.Tensor]()
        self.lost = self.total = 0.0
        for i in range(transport.bcast(None if mixings is None else len(mixings), "plan")):
            mixing = None if mixings is None else mixings[i]
            owners = np.zeros(0, np.int64)
            if mixing is not None and mixing.of and upload_info is not None:
                owners = upload_info(mixing.of)[1]
            plan = transport.bcast(None if mixing is None else self._plan(mixing, changed, owners), "plan")
            sent = torch.zeros(0) if plan is None else self._gathered(plan, uploads, owners)
            new = self.mixer.mix(None if mixing is None else [mixing], upload_info, uploads, changed)
            if mixing is not None and plan is not None:
                self._put_products(
                    mixing, plan, sent, self.mixer.table_before(mixing.into, changed), new[mixing.into]
                )
            changed |= new
        return changed

    def _plan(
        self, mixing: Mixing, changed: Mapping[str, torch.Tensor], owners: np.ndarray
    ) -> GatherPlan | None:
        """Return the plan of a mixing; None if it makes no new adapters."""
        if mixing.into not in self.mixer.tables.central and mixing.into not in changed:
            return None
        factors = self.columns.factors(mixing.into, self.mixer.table_before(mixing.into, changed).shape[1])
        if not factors or not len(_mixed_rows(mixing)):
            return None
        columns = tuple(s for f in factors for s in (f.a, f.b))
        counts = np.bincount(owners, minlength=self.mixer.transport.size).tolist()
        return GatherPlan(mixing.of, mixing.part, columns, tuple(counts))

    def _gathered(
        self, plan: GatherPlan, uploads: Mapping[str, Sequence[torch.Tensor]], owners: np.ndarray
    ) -> torch.Tensor:
        """Return the adapters of all uploads [m, columns], on rank 0 in the order of the reports."""
        transport, size = self.mixer.transport, width(plan.columns)
        mine = [to_main_memory(take(u, plan.columns)) for u in parts_of(uploads.get(plan.of, []), plan.part)]
        out = torch.empty(len(owners), size, dtype=torch.float32)
        order = torch.from_numpy(np.argsort(gather_order(owners)))
        transport.barrier()
        for columns in column_blocks(size, sum(plan.counts)) if sum(plan.counts) else ():
            block = stacked([u[columns] for u in mine], columns.stop - columns.start)
            found = transport.Gatherv(block, plan.counts, "mix:adapters")
            if found is not None:
                out[:, columns] = found[order]
        return out

    def _put_products(
        self, mixing: Mixing, plan: GatherPlan, sent: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Write the adapters of the mixed rows into a new table [K, w].

        Args:
            mixing: the mixing.
            plan: its adapters.
            sent: adapters of the uploads [m, columns].
            old: the table before the mixing [K0, w].
            new: the table after the mixing of the factors.
        """
        everyone = torch.cat([sent, take(old, plan.columns)])  # uploads, then old rows
        weights = np.concatenate([mixing.weights, _kept(mixing, len(old))], axis=1)
        start = 0
        for f in self.columns.factors(mixing.into, old.shape[1]):
            middle, stop = start + f.a.stop - f.a.start, start + width((f.a, f.b))
            here = replace(f, a=slice(start, middle), b=slice(middle, stop))
            for k in _mixed_rows(mixing):
                who = np.flatnonzero(weights[k])
                some = everyone[torch.from_numpy(who)].double()
                a, b = here.take(some)
                b = b * torch.from_numpy(weights[k, who])[:, None, None]
                left, right = b.permute(1, 0, 2).flatten(1), a.flatten(0, 1)
                earlier = f.take(old[min(k, len(old) - 1)][None])[0][0]
                found = nearest(left, right, f.rank, earlier)
                new[k, f.a], new[k, f.b] = found.a.flatten().float(), found.b.flatten().float()
                self.lost, self.total = self.lost + found.lost, self.total + found.total
            start = stop


def _kept(mixing: Mixing, rows: int) -> np.ndarray:
    """Return the weights of old rows in each new row, [K, K0]."""
    if mixing.keep is None:
        return np.zeros((mixing.num_rows, rows))
    return mixing.keep if mixing.keep.ndim == 2 else np.eye(mixing.num_rows, rows) * mixing.keep[:, None]


def _mixed_rows(mixing: Mixing) -> list[int]:
    """Return the rows that are not copies of one old row."""
    keep = np.zeros(mixing.num_rows) if mixing.keep is None else mixing.keep
    largest = keep if keep.ndim == 1 else keep.max(1)
    copied = ~mixing.weights.any(1) & (largest == 1) & np.isclose(mixing.row_sums(), 1.0)
    return np.flatnonzero(~copied).tolist()
