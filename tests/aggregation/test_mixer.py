"""Mixing on one rank has the bits of a mixing over a transport."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch.testing import assert_close

from mpifl.aggregation.local_mixing import LOCAL_BLOCK, mix_exact, mix_float32
from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.single import Single
from mpifl.comm.transport import Mismatch
from mpifl.core.plan import Mixing
from mpifl.protection.robust_mixer import RobustMixer
from mpifl.protection.robust_rules import Median


@pytest.mark.parametrize("keep", [None, "diagonal", "full", "more"])
@pytest.mark.parametrize(
    ("rows", "m", "width"),
    [(1, 1, 7), (1, 1, 2 * LOCAL_BLOCK + 5), (3, 4, LOCAL_BLOCK // 3), (2, 9, LOCAL_BLOCK // 2 + 1)],
)
def test_mixing_on_one_rank_has_the_bits_of_a_mixing_over_a_transport(keep, rows, m, width):
    rng = np.random.default_rng(0)
    old = torch.from_numpy(rng.normal(size=(rows, width)).astype(np.float32))
    uploads = [
        torch.from_numpy((10.0 ** rng.integers(-3, 4) * rng.normal(size=width)).astype(np.float32))
        for _ in range(m)
    ]
    new_rows = rows + 2 if keep == "more" else rows
    weights = rng.normal(size=(new_rows, m))
    weights[-1] = 0
    kept = {
        "diagonal": rng.random(rows),
        "full": rng.random((rows, rows)),
        "more": rng.random((new_rows, rows)),
    }
    if keep in ("full", "more"):
        kept[keep][0, 0] = 0
    mixing = Mixing(weights, keep=kept.get(keep))
    max_abs = np.array([float(u.abs().max()) for u in uploads])
    tables = Tables(Single())
    tables.central = {"model": old}
    expected = Mixer(Single(), tables).mix(
        [mixing], lambda name: (max_abs, np.zeros(m, np.int64)), {"model": uploads}
    )
    assert_array_equal(mix_exact(mixing, old, uploads, max_abs).numpy(), expected["model"].numpy())


def test_a_part_of_an_upload_is_mixed_into_a_narrower_table():
    upload, old = torch.arange(10.0), torch.zeros(1, 4)
    mixing = Mixing(np.array([[0.5]]), keep=np.array([0.5]), part=(slice(1, 3), slice(7, 9)))
    new = mix_exact(mixing, old, [upload], np.array([9.0]))
    assert_array_equal(new.numpy(), [[0.5, 1.0, 3.5, 4.0]])


@pytest.mark.parametrize("keep", [None, "diagonal", "full"])
def test_float32_sums_agree_with_exact_ones(keep):
    rng = np.random.default_rng(1)
    old, uploads = torch.randn(3, 50), [torch.randn(50) for _ in range(2)]
    kept = {"diagonal": rng.random(3), "full": rng.random((3, 3)), None: None}[keep]
    weights = rng.normal(size=(3, 2))
    weights[1] = 0
    mixing = Mixing(weights, keep=kept)
    max_abs = np.array([float(u.abs().max()) for u in uploads])
    assert_close(
        mix_float32(mixing, old, uploads), mix_exact(mixing, old, uploads, max_abs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("upload", [torch.zeros(9), torch.zeros(11), torch.zeros(10, dtype=torch.float64)])
@pytest.mark.parametrize("mix", ["exact", "float32", "robust", "mixer"])
def test_an_upload_of_another_type_or_length_enters_no_sum(upload, mix):
    mixing, old, of = Mixing(np.ones((1, 2)) / 2), torch.zeros(1, 10), [torch.zeros(10), upload]
    tables = Tables(Single())
    tables.publish({"model": old})
    info = np.zeros(2), np.zeros(2, np.int64)
    mixer = Mixer(Single(), tables)
    calls = {
        "exact": lambda: mix_exact(mixing, old, of, info[0]),
        "float32": lambda: mix_float32(mixing, old, of),
        "robust": lambda: RobustMixer(Single(), mixer, Median()).mix(
            [mixing], lambda name: info, {"model": of}
        ),
        "mixer": lambda: mixer.mix([mixing], lambda name: info, {"model": of}),
    }
    with pytest.raises(Mismatch, match="an upload on rank 0"):
        calls[mix]()


def test_the_number_of_uploads_is_the_planned_one():
    mixing, tables = Mixing(np.ones((1, 2)) / 2), Tables(Single())
    tables.publish({"model": torch.zeros(1, 10)})
    info = np.zeros(2), np.zeros(2, np.int64)
    mixer = Mixer(Single(), tables)
    for count in (1, 3):
        of = [torch.zeros(10)] * count
        with pytest.raises(Mismatch, match=f"{count} for 'model'"):
            mixer.mix([mixing], lambda name: info, {"model": of})
        with pytest.raises(Mismatch, match=f"{count} uploads"):
            mixer.gram(of, (2,), info[1], 10)
