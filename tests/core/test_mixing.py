"""Builders of mixings, worked out by hand, and the affine map they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.tables import Tables
from mpifl.comm.single import Single
from mpifl.core.algorithm import apply_plan
from mpifl.core.mixing import (
    add,
    average,
    blend,
    by_cluster,
    carry,
    componentwise,
    in_turn,
    own_rows,
    rows,
    sample_weights,
)
from mpifl.core.parameters import Layout, VectorParts
from mpifl.core.plan import Mixing, Plan, mixing_of_statistics, statistics_of, with_statistics_apart
from mpifl.core.types import Notes, Server


def notes_of(*num_samples: int) -> Notes:
    """Return notes of clients 0, 1, ... with these sample counts."""
    m = len(num_samples)
    return Notes(np.arange(m), np.array(num_samples), np.zeros(m, np.int64), np.ones(m, bool))


def applied(mixing: Mixing, old: list[list[float]], uploads: list[list[float]]) -> np.ndarray:
    """Return the new rows."""
    tables = Tables(Single())
    tables.publish({mixing.into: torch.tensor(old, dtype=torch.float32)})
    vectors = [torch.tensor(u, dtype=torch.float32) for u in uploads]
    max_abs = np.array([float(v.abs().max()) for v in vectors])
    mixer = Mixer(Single(), tables)
    out = mixer.mix([mixing], lambda _: (max_abs, np.zeros(len(vectors), int)), {mixing.of: vectors})
    return out[mixing.into].numpy()


def test_average_weighs_by_samples():
    """Samples 1, 3: (1 * 2 + 3 * 6) / 4 = 5."""
    mixing = average(notes_of(1, 3))
    assert_array_equal(mixing.weights, [[0.25, 0.75]])
    assert mixing.keep is None
    assert_allclose(applied(mixing, [[9.0]], [[2.0], [6.0]]), [[5.0]])
    assert_array_equal(sample_weights(notes_of(1, 3)), [0.25, 0.75])


def test_average_takes_other_weights():
    """Weights 1, 1, 2: (4 + 8 + 2 * 2) / 4 = 4."""
    mixing = average(notes_of(5, 6, 7), np.array([1, 1, 2]), into="body", of="part")
    assert (mixing.into, mixing.of) == ("body", "part")
    assert_allclose(applied(mixing, [[0.0]], [[4.0], [8.0], [2.0]]), [[4.0]])


def test_by_cluster_averages_each_label_and_keeps_an_empty_row():
    """Labels 0, 2, 2, samples 5, 1, 3: row 0 = 10, row 1 stays 7, row 2 = (1 * 2 + 3 * 6) / 4 = 5."""
    mixing = by_cluster(np.array([0, 2, 2]), 3, np.array([5, 1, 3]))
    assert_array_equal(mixing.weights, [[1, 0, 0], [0, 0, 0], [0, 0.25, 0.75]])
    assert_array_equal(mixing.keep, [0, 1, 0])
    assert_array_equal(mixing.row_sums(), 1)
    assert_allclose(applied(mixing, [[1.0], [7.0], [1.0]], [[10.0], [2.0], [6.0]]), [[10.0], [7.0], [5.0]])


def test_rows_normalises_each_row():
    """Row (1, 3) of uploads 4, 8: (4 + 24) / 4 = 7; row (2, 0): 4."""
    mixing = rows(np.array([[1.0, 3.0], [2.0, 0.0]]))
    assert mixing.keep is None
    assert_allclose(applied(mixing, [[0.0], [0.0]], [[4.0], [8.0]]), [[7.0], [4.0]])


def test_add_leaves_the_row_and_adds_the_mixture():
    """10 + 0.5 * 2 + 0.5 * 4 = 13."""
    mixing = add(np.array([0.5, 0.5]))
    assert mixing.num_rows == 1
    assert_allclose(applied(mixing, [[10.0]], [[2.0], [4.0]]), [[13.0]])


def test_blend_moves_a_row_towards_the_uploads():
    """Rates 0.25, 0.25: 0.5 * 8 + 0.25 * 0 + 0.25 * 4 = 5; rate 0 leaves 8."""
    mixing = blend(np.array([[0.25, 0.25], [0.0, 0.0]]))
    assert_array_equal(mixing.row_sums(), 1)
    assert_allclose(applied(mixing, [[8.0], [8.0]], [[0.0], [4.0]]), [[5.0], [8.0]])


def test_uploads_in_turn_are_blended_one_after_the_other():
    """8, then half of 0: 4, then a quarter of 12: 0.75 * 4 + 3 = 6. Rate 0 passes an upload over: 0.5 * 8."""
    mixing = in_turn(np.array([[0.5, 0.25], [0.5, 0.0]]))
    assert_array_equal(mixing.row_sums(), 1)
    assert_array_equal(mixing.weights, [[0.375, 0.25], [0.5, 0.0]])
    assert_allclose(applied(mixing, [[8.0], [8.0]], [[0.0], [12.0]]), [[6.0], [4.0]])


def test_uploads_are_blended_in_the_order_that_is_given():
    """The second first: 8, then a quarter of 12: 9, then half of 0: 4.5. Each keeps its own weight."""
    mixing = in_turn(np.array([[0.5, 0.25]]), order=np.array([1, 0]))
    assert_array_equal(mixing.weights, [[0.5, 0.125]])
    assert_allclose(applied(mixing, [[8.0]], [[0.0], [12.0]]), [[4.5]])


def test_row_k_mixes_component_k_of_each_upload():
    """Two components each of uploads (1, 10) and (2, 20): row 0 = 1 * 1 + 2 * 2, row 1 = 3 * 10 + 4 * 20."""
    weights = componentwise(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert_array_equal(weights, [[1, 0, 2, 0], [0, 3, 0, 4]])
    mixed = applied(Mixing(weights), [[0.0], [0.0]], [[1.0], [10.0], [2.0], [20.0]])
    assert_allclose(mixed, [[5.0], [110.0]])


def test_rows_of_absent_clients_stay():
    """Clients 3 and 1 of 4 take part; client 3 keeps to itself, client 1 takes both alike."""
    notes = Notes(np.array([3, 1]), np.ones(2, int), np.zeros(2, int), np.ones(2, bool))
    mixing = own_rows(np.array([[1.0, 0.0], [1.0, 1.0]]), notes, 4)
    assert_array_equal(mixing.keep, [1, 0, 1, 0])
    old = [[1.0], [2.0], [3.0], [4.0]]
    assert_allclose(applied(mixing, old, [[10.0], [20.0]]), [[1.0], [15.0], [3.0], [10.0]])


def test_rows_carried_over_take_no_upload():
    mixing = carry(np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]))
    assert_array_equal(mixing.row_sums(), 1)
    tables = Tables(Single())
    tables.publish({"model": torch.tensor([[2.0], [4.0]])})
    assert_allclose(Mixer(Single(), tables).mix([mixing], lambda _: None, {})["model"], [[4.0], [3.0], [2.0]])


def test_a_split_copies_the_parents_row_into_both_children():
    """Rows 1, 5; row 1 splits: parents (0, 1, 1), updates 2, 4 join rows 1 and 2: 1, 5 + 2, 5 + 4."""
    keep = np.eye(2)[[0, 1, 1]]
    mixing = Mixing(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), keep=keep)
    assert_array_equal(mixing.row_sums(), [1, 2, 2])
    assert_allclose(applied(mixing, [[1.0], [5.0]], [[2.0], [4.0]]), [[1.0], [7.0], [9.0]])


def test_a_part_of_the_upload_enters_a_narrower_table():
    """Slices 0:1 and 2:4 of (1, 2, 3, 4) are (1, 3, 4)."""
    mixing = Mixing(np.ones((1, 1)), part=(slice(0, 1), slice(2, 4)))
    assert_allclose(applied(mixing, [[0.0, 0.0, 0.0]], [[1.0, 2.0, 3.0, 4.0]]), [[1.0, 3.0, 4.0]])


def test_mixings_of_one_table_compose_in_order():
    """Start 1; add upload 2: 3; then keep half and add half of upload 2: 1.5 + 1 = 2.5."""
    tables = Tables(Single())
    tables.publish({"model": torch.tensor([[1.0]])})
    first = Mixing(np.array([[1.0]]), keep=np.ones(1))
    second = Mixing(np.array([[0.5]]), keep=np.full(1, 0.5))
    mixer = Mixer(Single(), tables)
    upload_info = (np.array([2.0]), np.zeros(1, int))
    out = mixer.mix([first, second], lambda _: upload_info, {"model": [torch.tensor([2.0])]})
    assert_allclose(out["model"], [[2.5]])


@pytest.mark.parametrize(
    "changes", [{}, {"assign": np.array([1, 0])}, {"algorithm_state": {"a": np.ones(1)}}]
)
def test_a_plan_replaces_only_what_it_names(changes):
    server = Server({"model": torch.zeros(1, 1)}, np.array([0, 0]), {"b": np.zeros(1)}, version=4)
    new = apply_plan(server, Plan([], **changes), {"model": torch.ones(1, 1)})
    assert new.version == 5
    assert_array_equal(new.assign, changes.get("assign", server.assign))
    assert set(new.algorithm_state) == {"b"} | changes.get("algorithm_state", {}).keys()
    assert float(new.tables["model"]) == 1.0
    assert float(server.tables["model"]) == 0.0


# -- running statistics --------------------------------------------------------------------------------------

NORMED = VectorParts(Layout(("w", "var"), ((2,), (1,)), 2))  # two weights and a variance


def with_statistics(mixing: Mixing, old: list[list[float]], **uploads: list[list[float]]) -> np.ndarray:
    """Return the new rows of table `model` of two weights and a variance."""
    table = {"model": torch.tensor(old)}
    values = [name for name in uploads if statistics_of(name) in uploads]
    apart = with_statistics_apart([mixing], table, NORMED, values)
    tables, given = (
        Tables(Single()),
        {name: [torch.tensor(u) for u in some] for name, some in uploads.items()},
    )
    tables.publish({**table, **apart.tables})

    def info(name: str) -> tuple[np.ndarray, np.ndarray]:
        return np.array([float(u.abs().max()) for u in given[name]]), np.zeros(len(given[name]), np.int64)

    return apart.joined(Mixer(Single(), tables).mix(apart.mixings, info, given))["model"].numpy()


@pytest.mark.parametrize(
    "mixing",
    [
        average(notes_of(1, 3)),
        by_cluster(np.array([1, 1]), 2, np.array([1, 2])),
        blend(np.array([0.3, 0.2])),
        in_turn(np.array([0.6, 0.5])),
        Mixing(np.array([[0.0, 1.0], [0.5, 0.0]]), keep=np.array([[0.0, 0.0], [0.25, 0.25]])),
        carry(np.array([[0.0, 1.0]])),
        add(np.array([0.5, 0.5]), of="delta"),
    ],
)
def test_a_mixing_of_means_treats_statistics_as_weights(mixing):
    assert mixing_of_statistics(mixing, values=False) is mixing
    table = {"model": torch.ones(2, 3)}
    assert with_statistics_apart([mixing], table, NORMED).mixings == [mixing]


def test_steps_along_changes_average_the_statistics_that_arrived():
    """Three times the mean change (-1, 1): weights move by -3 and 3; the variances 1 and 2 have the mean 1.5.

    From a variance of 4 the changes are -3 and -2; three times their mean would lead to -3.5.
    """
    found = with_statistics(
        add(np.array([1.5, 1.5]), of="delta"),
        [[0.0, 0.0, 4.0]],
        delta=[[-1.0, 0.0, -3.0], [-1.0, 2.0, -2.0]],
        **{"delta.statistics": [[1.0], [2.0]]},
    )
    assert_allclose(found, [[-3.0, 3.0, 1.5]])


def test_without_their_values_changes_of_statistics_are_averaged():
    """4 - 2.5; a step of less than their mean is left as it is: 4 - 0.25 * 5."""
    changes = [[-1.0, 0.0, -3.0], [-1.0, 2.0, -2.0]]
    found = with_statistics(add(np.array([1.5, 1.5]), of="delta"), [[0.0, 0.0, 4.0]], delta=changes)
    assert_allclose(found, [[-3.0, 3.0, 1.5]])
    small = applied(add(np.array([0.25, 0.25]), of="delta"), [[0.0, 0.0, 4.0]], changes)
    assert_allclose(small, [[-0.5, 0.5, 2.75]])


def test_a_mixing_beyond_the_uploads_gives_their_mean_as_statistics():
    """Rates 1 and 0.5 leave -0.5 of the old row; of the statistics 2/3 and 1/3 arrive: (2 * 3 + 6) / 3."""
    found = with_statistics(
        blend(np.array([1.0, 0.5])), [[1.0, 2.0, 9.0]], model=[[1.0, 0.0, 3.0], [2.0, 4.0, 6.0]]
    )
    assert_allclose(found, [[1.5, 1.0, 4.0]])


def test_a_row_that_nobody_enters_keeps_its_statistics():
    """Row 0 gets the upload, row 1 stays; a third row begins as a copy of row 1, as when a cluster splits."""
    keep = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    found = with_statistics(
        Mixing(np.array([[1.0], [0.0], [2.0]]), keep=keep, of="delta"),
        [[0.0, 0.0, 4.0], [1.0, 1.0, 5.0]],
        delta=[[1.0, 1.0, -1.0]],
        **{"delta.statistics": [[3.0]]},
    )
    assert_allclose(found, [[1.0, 1.0, 3.0], [1.0, 1.0, 5.0], [3.0, 3.0, 3.0]])


def test_statistics_may_lie_between_weights():
    """A part of a model with a variance in its middle."""
    parts = VectorParts(Layout(("a", "b", "var"), ((1,), (1,), (1,)), 2), {"model": "all"})
    apart = with_statistics_apart([add(np.array([2.0]))], {"model": torch.ones(1, 3)}, parts)
    assert [m.into for m in apart.mixings] == ["model.weights", "model.statistics"]
    pieces = {"model.weights": torch.tensor([[1.0, 2.0]]), "model.statistics": torch.tensor([[3.0]])}
    assert apart.joined({**pieces, "other": torch.zeros(1, 1)}).keys() == {"model", "other"}
    middle = replace_columns(apart)
    assert middle.joined(pieces)["model"].tolist() == [[1.0, 3.0, 2.0]]


def replace_columns(apart):
    """Return the same mixings, with the statistics in the middle column."""
    return replace(apart, columns={"model": ((slice(0, 1), slice(2, 3)), (slice(1, 2),))})
