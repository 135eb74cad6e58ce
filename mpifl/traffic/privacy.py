"""Differential privacy of clients: what an upload goes through before it leaves the client.

A client's update, its upload minus the rows that it downloaded, is clipped to a length and, under local
privacy, noise is added. What the server does with clipped updates is in `runtime/private_step.py`, what it
is worth in `accountant.py`.

The unit of privacy is a client with all its data. Draws are addressed, so results depend on no rank; the
generator is NumPy's, in float64: a simulation, no hardened implementation (Mironov, "On Significance of the
Least Significant Bits for Differential Privacy", CCS 2012).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose, sqrt
from typing import Literal

import numpy as np
import torch

from mpifl.core.errors import MethodError, require
from mpifl.core.rng import Key
from mpifl.core.types import Message, Report

CLIPPED = "within_clip"  # note of adaptive clipping: 1 where the update was not longer than the clip


@dataclass(frozen=True)
class Privacy:
    """Nothing is clipped, no noise is added."""

    @property
    def clips(self) -> bool:
        """Whether uploads are clipped."""
        return False


@dataclass(frozen=True)
class _Gaussian(Privacy):
    clip: float | None = None
    noise_multiplier: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        clip, z, delta = self.clip, self.noise_multiplier, self.delta
        require(clip is None or clip > 0, "clip", clip, "take a length over 0, or null for no clipping")
        require(z >= 0, "noise_multiplier", z, "take 0 (no noise, no privacy) or more")
        require(0 < delta < 1, "delta", delta, "take a probability over 0, well below 1 / clients")
        remedy = "noise is noise_multiplier times clip: give a length, or noise_multiplier 0"
        require(clip is not None or z == 0, "clip", None, remedy)

    @property
    def clips(self) -> bool:
        """Whether uploads are clipped."""
        return self.clip is not None


@dataclass(frozen=True)
class CentralPrivacy(_Gaussian):
    """The server, which is trusted, adds noise to sums of clipped updates. McMahan et al., ICLR 2018.

    Each row becomes itself plus (sum of the clipped updates that enter it + noise) / D. All updates count the
    same, whatever the method's weights. D is a number that no client's data decide: the expected number of
    uploads of a round, divided among the rows of the table (the fixed denominator); or their count with noise
    (`count_noise`).

    Attributes:
        clip: C, the largest L2 length of a client's update over all that it uploads; null does not clip.
        noise_multiplier: z; noise of standard deviation z C on each sum. With `count_noise` or `quantile` the
            updates get a little more, so that all that is released together is worth z.
        delta: of (epsilon, delta).
        sampling: `fixed`, m of N clients without replacement (one client replaced by another: the
            sensitivity is 2 C), or `poisson`, each client with probability m / N, so that cohorts differ in
            size (a client added or removed: C).
        count_noise: standard deviation, in clients, of the noise on the number of uploads of each row of a
            table of several; their mean is divided by that. null divides by m / K.
        quantile: the clip follows this quantile of the lengths of updates from round to round, from `clip` on
            (Andrew et al., NeurIPS 2021); null keeps it.
        clip_lr: rate at which it follows.
        quantile_noise: standard deviation, in clients, of the noise on the count of updates within the clip;
            null takes m / 20.
    """

    sampling: Literal["fixed", "poisson"] = "fixed"
    count_noise: float | None = None
    quantile: float | None = None
    clip_lr: float = 0.2
    quantile_noise: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        count, quantile, noise = self.count_noise, self.quantile, self.quantile_noise
        require(self.sampling in ("fixed", "poisson"), "sampling", self.sampling, "take fixed or poisson")
        require(count is None or count >= 0, "count_noise", count, "take 0 or more clients, or null")
        remedy = "an exact count is not private; take more than 0, or noise_multiplier 0"
        require(count != 0 or self.noise_multiplier == 0, "count_noise", count, remedy)
        require(quantile is None or 0 <= quantile <= 1, "quantile", quantile, "take a share in [0, 1]")
        require(self.clip_lr > 0, "clip_lr", self.clip_lr, "take a rate over 0")
        require(noise is None or noise > 0, "quantile_noise", noise, "take more than 0 clients, or null")
        if quantile is None:
            given = noise is not None or self.clip_lr != 0.2
            require(not given, "quantile_noise, clip_lr", noise, "have no effect without quantile")
        require(quantile is None or self.clips, "quantile", quantile, "give clip, where it begins")

    def noise_of_quantile(self, num_sampled: int) -> float:
        """Return the standard deviation, in clients, of the noise on the count of updates within the clip."""
        return num_sampled / 20 if self.quantile_noise is None else self.quantile_noise

    def noise_of_updates(self, num_sampled: int, counts: bool) -> float:
        """Return z of the updates, so that they and what else is released are together worth z.

        The queries are one: (updates / z_u, counts / count_noise, bits / quantile_noise), in which one
        client's part has the length 1 / z. The bits are 1/2 or -1/2 (Andrew et al., theorem 1).

        Args:
            num_sampled: m.
            counts: whether counts are released.

        Raises:
            UserError: the others alone are worth less privacy than z.
        """
        z = self.noise_multiplier
        if z == 0:
            return 0.0
        left = z**-2
        if counts and self.count_noise is not None:
            left -= self.count_noise**-2
        if self.quantile is not None:
            left -= (2 * self.noise_of_quantile(num_sampled)) ** -2
        remedy = "leaves nothing for the updates; take more count_noise or quantile_noise, or less of it"
        require(left > 1e-9 * z**-2, "privacy.noise_multiplier", z, remedy)
        return z if isclose(left, z**-2, rel_tol=0) else left**-0.5


@dataclass(frozen=True)
class LocalPrivacy(_Gaussian):
    """Each client clips its update and adds Gaussian noise before it sends: the server need not be trusted.

    Attributes:
        clip: C, the largest L2 length of a client's update over all that it uploads; null does not clip.
        noise_multiplier: z; noise of standard deviation z C on each number. Any two updates are at most 2 C
            apart.
        delta: of (epsilon, delta).
    """


PRIVACIES: Mapping[str, type[Privacy]] = {
    "none": Privacy,
    "central": CentralPrivacy,
    "local": LocalPrivacy,
}


# -- at the client -------------------------------------------------------------------------------------------


def protect(
    report: Report, message: Message, privacy: Privacy, trained: str | None, clip: float | None, key: Key
) -> Report:
    """Return a report whose update is clipped, with noise under local privacy.

    Args:
        report: what the client would send.
        message: what it downloaded.
        privacy: the run's.
        trained: the note that names the row which was trained (`RowUpdates.trained`).
        clip: C of this visit; None: that of `privacy`.
        key: of the visit.

    Raises:
        MethodError: the upload is no update of rows that were downloaded, or more than uploads is sent.
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
    """Return the downloaded row [d] of which each upload is the update, zeros for a change.

    What else an upload says it is based on is not taken: it may be the client's own model.

    Args:
        report: what the client would send.
        message: what it downloaded.
        trained: the note that names the row of a table of which several were downloaded.

    Raises:
        MethodError: there is none, an upload is based on something else, or notes tell more than that row.
    """
    out = {}
    more = sorted(set(report.notes) - {trained})
    if more:
        raise MethodError("privacy", f"clients also send {', '.join(more)}", "no noise covers that")
    for name, x in report.vectors.items():
        rows = message.vectors.get(name)
        if rows is None or x.shape != rows.shape[-1:]:
            raise MethodError("privacy", f"upload {name!r} is no update of a row", "upload a trained row")
        base = rows[0 if len(rows) == 1 else int(report.notes[str(trained)])]
        if name in report.based_on:
            said = report.based_on[name]
            if said is not None and not torch.equal(said.to(base.device), base):
                what = f"upload {name!r} is based on what the client did not download"
                raise MethodError("privacy", what, "its distance from there is no bound for an update")
            base = torch.zeros_like(base) if said is None else base
        out[name] = base.to(x.device)
    return out


def _length(vectors: Mapping[str, torch.Tensor], bases: Mapping[str, torch.Tensor]) -> float:
    """Return the L2 length of the differences of all vectors from their bases."""
    return sqrt(sum(float((x.double() - bases[name].double()).square().sum()) for name, x in vectors.items()))


def clipped(
    vectors: Mapping[str, torch.Tensor], bases: Mapping[str, torch.Tensor], most: float
) -> dict[str, torch.Tensor]:
    """Return vectors whose joint difference from their bases is at most so long, after rounding to float32.

    Vectors that are near enough are returned as they are, bit for bit.

    Args:
        vectors: float32 by name.
        bases: float32 by name, of the same shapes.
        most: the L2 length.
    """
    out, factor = dict(vectors), 1.0
    while (length := _length(out, bases)) > most:
        factor *= most / length * (1 - 1e-9)  # a second turn where rounding made it longer
        out = {
            name: (bases[name].double() + factor * (x.double() - bases[name].double())).float()
            for name, x in vectors.items()
        }
    return out


def with_noise(x: torch.Tensor, scale: float, key: Key) -> torch.Tensor:
    """Return a vector with Gaussian noise of a standard deviation, added in float64."""
    noise = scale * key.numpy().standard_normal(tuple(x.shape))
    return (x.double().cpu() + torch.from_numpy(np.asarray(noise))).float().to(x.device)
