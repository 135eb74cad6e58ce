"""Client-level differential privacy: clipping and noise at the client.

A client's update, its upload minus the rows that it downloaded, is clipped to a maximum L2 norm. Local
privacy also adds noise to it. `protection/private_step.py` has the server's part, `accountant.py` computes
epsilon.

The unit of privacy is a client with all its data. Draws depend on random keys, not on ranks. They come from
NumPy's generator in float64: this is a simulation, not a hardened implementation (Mironov, "On Significance
of the Least Significant Bits for Differential Privacy", CCS 2012).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose, sqrt
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Interval

from mpifl.aggregation.update_filter import UpdateFilter
from mpifl.core.errors import MethodError, require
from mpifl.core.options import NonNegativeFloat, Options, PositiveFloat, UnitInterval
from mpifl.core.parameters import VectorParts
from mpifl.core.registry import Registry
from mpifl.core.rng import Key
from mpifl.core.types import Message, Report

CLIPPED = "within_clip"  # note of adaptive clipping: 1 if the norm of the update was at most the clip


@dataclass(frozen=True)
class Privacy(Options):
    """No clipping and no noise; the base of mechanisms of your own."""

    def filter(self, parts: VectorParts, key: Key) -> UpdateFilter | None:
        """Return the filter of a mechanism that has no accountant. Default: none.

        Args:
            parts: what the method's vectors hold.
            key: address of the server's random draws.
        """
        return None

    @property
    def clips(self) -> bool:
        """Whether uploads are clipped."""
        return False


@dataclass(frozen=True)
class _Gaussian(Privacy):
    clip: PositiveFloat | None = None
    noise_multiplier: NonNegativeFloat = 1.0
    delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "noise is noise_multiplier times clip: give a length, or noise_multiplier 0"
        require(self.clip is not None or self.noise_multiplier == 0, "clip", None, remedy)

    @property
    def clips(self) -> bool:
        """Whether uploads are clipped."""
        return self.clip is not None


@dataclass(frozen=True)
class CentralPrivacy(_Gaussian):
    """The trusted server adds noise to sums of clipped updates. McMahan et al., ICLR 2018.

    Each row is increased by (sum of the clipped updates that enter it + noise) / D. All updates have the same
    weight, whatever the method's weights. No client's data determine D: it is the expected number of uploads
    of a round divided by the number of rows of the table (the fixed denominator), or the number of uploads
    with noise (`count_noise`).

    Attributes:
        clip: C, the maximum L2 norm of a client's update, over everything that it uploads; null does not
            clip.
        noise_multiplier: z; each sum gets noise of standard deviation z C. With `count_noise` or `quantile`
            the updates get a little more noise, so that everything released has the privacy of z.
        delta: delta of (epsilon, delta).
        sampling: `fixed` draws m of N clients without replacement (neighbours differ in one client replaced
            by another; the sensitivity is 2 C). `poisson` draws each client with probability m / N, so cohort
            sizes vary (neighbours differ in one client added or removed; the sensitivity is C).
        count_noise: standard deviation, in clients, of the noise on the number of uploads of each row, for
            tables of several rows; each sum is divided by its noisy number. null divides by m / K.
        quantile: quantile of the norms of the updates that the clip follows from round to round, starting at
            `clip` (Andrew et al., NeurIPS 2021); null keeps the clip constant.
        clip_lr: learning rate of the clip.
        quantile_noise: standard deviation, in clients, of the noise on the number of updates within the clip;
            null takes m / 20.
    """

    paper = "mcmahan2018learning"

    sampling: Literal["fixed", "poisson"] = "fixed"
    count_noise: NonNegativeFloat | None = None
    quantile: UnitInterval | None = None
    clip_lr: PositiveFloat = 0.2
    quantile_noise: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        count, quantile, noise = self.count_noise, self.quantile, self.quantile_noise
        remedy = "an exact count is not private; use more than 0, or noise_multiplier 0"
        require(count != 0 or self.noise_multiplier == 0, "count_noise", count, remedy)
        if quantile is None:
            given = noise is not None or self.clip_lr != 0.2
            require(not given, "quantile_noise, clip_lr", noise, "have no effect without quantile")
        require(quantile is None or self.clips, "quantile", quantile, "give clip, where it begins")

    def papers(self) -> tuple[str, ...]:
        """Return the papers on the mechanism, and on clips that follow a quantile."""
        return (self.paper, *(["andrew2021differentially"] if self.quantile is not None else []))

    def noise_of_quantile(self, num_sampled: int) -> float:
        """Return the standard deviation, in clients, of the noise on the count of updates within the clip."""
        return num_sampled / 20 if self.quantile_noise is None else self.quantile_noise

    def noise_of_updates(self, num_sampled: int, counts: bool) -> float:
        """Return z_u, the noise multiplier of the updates that gives everything released the privacy of z.

        All queries are treated as one: (updates / z_u, counts / count_noise, bits / quantile_noise). In it
        one client's contribution has the norm 1 / z. The bits are 1/2 or -1/2 (Andrew et al., theorem 1).

        Args:
            num_sampled: m, number of clients sampled in a round.
            counts: whether counts are released.

        Raises:
            UserError: the other queries alone give less privacy than z.
        """
        z = self.noise_multiplier
        if z == 0:
            return 0.0
        left = z**-2
        if counts and self.count_noise is not None:
            left -= self.count_noise**-2
        if self.quantile is not None:
            left -= (2 * self.noise_of_quantile(num_sampled)) ** -2
        remedy = "leaves nothing for the updates; use more count_noise or quantile_noise, or less of it"
        require(left > 1e-9 * z**-2, "privacy.noise_multiplier", z, remedy)
        return z if isclose(left, z**-2, rel_tol=0) else left**-0.5


@dataclass(frozen=True)
class LocalPrivacy(_Gaussian):
    """Each client clips its update and adds Gaussian noise before sending; the server need not be trusted.

    Attributes:
        clip: C, the maximum L2 norm of a client's update, over everything that it uploads; null does not
            clip.
        noise_multiplier: z; each number gets noise of standard deviation z C. Any two updates are at most 2 C
            apart.
        delta: delta of (epsilon, delta).
    """


PRIVACIES: Registry[type[Privacy]] = Registry(
    "protections", Privacy, {"none": Privacy, "central": CentralPrivacy, "local": LocalPrivacy}
)


# -- at the client -------------------------------------------------------------------------------------------


def protect(
    report: Report, message: Message, privacy: Privacy, trained: str | None, clip: float | None, key: Key
) -> Report:
    """Return a report with a clipped update and, under local privacy, noise.

    Args:
        report: report of the client before clipping.
        message: the client's download.
        privacy: privacy mechanism of the run.
        trained: the note that names the row that was trained (`RowUpdates.trained`).
        clip: C of this visit; None: that of `privacy`.
        key: random key of the visit.

    Raises:
        MethodError: the upload is not an update of downloaded rows, or the client sends other notes as well.
    """
    if not isinstance(privacy, _Gaussian):
        return report
    bases = rows_updated(report, message, trained)
    most = privacy.clip if clip is None else clip
    notes = dict(report.notes)
    if isinstance(privacy, CentralPrivacy) and privacy.quantile is not None:
        assert most is not None, "quantile needs a clip"
        notes[CLIPPED] = float(_length(report.vectors, bases) <= most)
    vectors = dict(report.vectors) if most is None else clipped(report.vectors, bases, most)
    if isinstance(privacy, LocalPrivacy) and privacy.noise_multiplier:
        assert most is not None, "noise needs a clip"
        scale = privacy.noise_multiplier * most
        vectors = {name: with_noise(x, scale, key.of("privacy", name)) for name, x in vectors.items()}
    return replace(report, vectors=vectors, notes=notes)


def rows_updated(report: Report, message: Message, trained: str | None) -> dict[str, torch.Tensor]:
    """Return, for each upload, the downloaded row [d] that it updates; zeros if it is a change already.

    Any other base of an upload (`based_on`) is refused, because it may be the client's own model.

    Args:
        report: report of the client before clipping.
        message: the client's download.
        trained: the note that names the row, for tables of which several rows were downloaded.

    Raises:
        MethodError: there is no such row, an upload is based on something else, or there are other notes.
    """
    out = {}
    more = sorted(set(report.notes) - {trained})
    if more:
        raise MethodError("privacy", f"clients also send {', '.join(more)}", "no noise covers that")
    for name, x in report.vectors.items():
        rows = message.vectors.get(name)
        if rows is None or x.shape != rows.shape[-1:]:
            raise MethodError("privacy", f"upload {name!r} is not an update of a row", "upload a trained row")
        base = rows[0 if len(rows) == 1 else int(report.notes[str(trained)])]
        if name in report.based_on:
            said = report.based_on[name]
            if said is not None and not torch.equal(said.to(base.device), base):
                what = f"upload {name!r} is based on what the client did not download"
                raise MethodError("privacy", what, "its distance from there does not bound an update")
            base = torch.zeros_like(base) if said is None else base
        out[name] = base.to(x.device)
    return out


def _length(vectors: Mapping[str, torch.Tensor], bases: Mapping[str, torch.Tensor]) -> float:
    """Return the L2 norm of the differences of all vectors from their bases."""
    return sqrt(sum(float((x.double() - bases[name].double()).square().sum()) for name, x in vectors.items()))


def clipped(
    vectors: Mapping[str, torch.Tensor], bases: Mapping[str, torch.Tensor], most: float
) -> dict[str, torch.Tensor]:
    """Return vectors clipped to a maximum joint difference from their bases, also after rounding to float32.

    Vectors within the maximum are returned unchanged, bit for bit.

    Args:
        vectors: name -> float32 vector.
        bases: name -> float32 vector of the same shape.
        most: the maximum L2 norm.
    """
    out, factor = dict(vectors), 1.0
    while (length := _length(out, bases)) > most:
        factor *= most / length * (1 - 1e-9)  # once more if rounding made the norm larger
        out = {
            name: (bases[name].double() + factor * (x.double() - bases[name].double())).float()
            for name, x in vectors.items()
        }
    return out


def with_noise(x: torch.Tensor, scale: float, key: Key) -> torch.Tensor:
    """Return a vector plus Gaussian noise of standard deviation `scale`, added in float64."""
    noise = scale * key.numpy().standard_normal(tuple(x.shape))
    return (x.double().cpu() + torch.from_numpy(np.asarray(noise))).float().to(x.device)
