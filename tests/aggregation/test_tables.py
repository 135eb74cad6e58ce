"""Where rows are, and which of them must be sent again."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.testing import assert_close

from mpifl.aggregation.tables import ShardedTable, Tables, read_rows, row_distances, rows_of
from mpifl.comm.single import Single
from mpifl.comm.transport import Mismatch
from mpifl.core.errors import UserError
from mpifl.core.parameters import Layout


class Three(Single):
    """Rank 0 of three whose verbs go nowhere; `sent` are the blocks it shared."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.nodes, self.sent = 3, (0, 0, 0), []

    def Bcast(self, block, purpose, dtype=torch.float32):
        self.sent.append(block.clone())


@pytest.fixture
def tables() -> Tables:
    """Rank 0's tables, with one of three rows of width 2."""
    out = Tables(Three())
    out.publish({"model": torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])})
    return out


def test_rows_travel_once_until_their_bits_change(tables):
    assert tables.missing({"model": {0, 2}}) == {"model": ([0, 2], 2)}
    tables.bcast_rows(tables.missing({"model": {0, 2}}))
    assert_array_equal(torch.stack(tables.transport.sent), [[0, 0], [2, 2]])
    assert tables.missing({"model": {0, 2}}) == {}
    assert tables.missing({"model": {0, 1}}) == {"model": ([1], 2)}
    new = tables.central["model"].clone()
    new[2, 0] = 9.0
    tables.publish({"model": new})
    assert tables.missing({"model": {0, 2}}) == {"model": ([2], 2)}


def test_the_same_table_published_again_is_not_sent_again(tables):
    tables.bcast_rows(tables.missing({"model": {0, 1, 2}}))
    tables.publish({"model": tables.central["model"]})
    assert tables.missing({"model": {0, 1, 2}}) == {}


def test_a_table_that_shrinks_or_grows_keeps_what_is_current(tables):
    tables.bcast_rows(tables.missing({"model": {0, 1, 2}}))
    tables.publish({"model": tables.central["model"][:1].clone()})
    assert tables.missing({"model": {0}}) == {}
    tables.publish({"model": torch.tensor([[0.0, 0.0], [1.0, 1.0]])})
    assert tables.missing({"model": {0, 1}}) == {"model": ([1], 2)}, "row 1 was gone in between"


def test_alone_nothing_is_sent_and_rows_are_read_in_place():
    tables = Tables(Single())
    tables.publish({"model": torch.tensor([[1.0], [2.0], [3.0]])})
    tables.bcast_rows(tables.missing({"model": {0}}))
    assert_array_equal(tables.rows("model", (2, 0)), [[3.0], [1.0]])
    assert tables.width("model") == 1
    assert tables.whole("model") is tables.central["model"]
    assert tables.whole("nothing") is None


def test_a_spread_table_is_written_beside_the_committed_one(tmp_path):
    tables = Tables(Single())
    tables.publish({"model": torch.tensor([[1.0], [2.0]])})
    tables.shard("model", np.zeros(2, np.int64), (2, 1), tmp_path)
    table = tables.sharded["model"]
    assert "model" not in tables.central
    table.write(np.array([0]), slice(0, 1), torch.tensor([[9.0]]))
    assert_array_equal(tables.rows("model", (0, 1)), [[1.0], [2.0]])
    table.commit(np.array([0]))
    assert_array_equal(tables.rows("model", (1, 0)), [[2.0], [9.0]])
    table.write(np.array([1, 0]), slice(0, 1), torch.tensor([[8.0], [7.0]]))
    assert_array_equal(tables.rows("model", (1, 0)), [[2.0], [9.0]])
    table.commit(np.array([0, 1]))
    assert_array_equal(tables.whole("model"), [[7.0], [8.0]])
    assert tables.width("model") == 1


class Left(Single):
    """Rank 1 of three, once rank 2 is lost; the server has told it `said`."""

    def __init__(self, said: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.rank, self.size, self.nodes, self.said = 1, 2, (0, 0), said

    def bcast(self, value, purpose):
        return self.said


def test_after_a_loss_rows_have_new_owners_and_all_ranks_read_what_the_server_has_committed(tmp_path):
    """A rank that was interrupted before it committed a step takes the server's word for which rows are."""
    tables = Tables(Single())
    tables.publish({"model": torch.tensor([[1.0], [2.0], [3.0]])})
    tables.shard("model", np.array([0, 0, 0]), (3, 1), tmp_path)
    table = tables.sharded["model"]
    table.owner = np.array([1, 2, 2])
    table.write(np.array([1, 2]), slice(None), torch.tensor([[20.0], [30.0]]))
    tables.transport = Left({"model": table.committed ^ np.array([0, 1, 0], np.uint8)})
    tables.regroup([0, 1], (0, 0, 0))
    assert_array_equal(table.owner, [1, 1, 1])
    assert_array_equal(tables.rows("model", (0, 1, 2)), [[1.0], [20.0], [3.0]])


def test_without_room_for_sharded_rows_no_file_is_left_and_the_folder_is_named(tmp_path, monkeypatch):
    def no_room(descriptor, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    tables = Tables(Single())
    tables.publish({"model": torch.zeros(3, 2)})
    with pytest.raises(UserError, match=r"system.scratch.*No space left"):
        tables.shard("model", np.zeros(3, np.int64), (3, 2), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_the_rows_of_a_node_take_room(tmp_path):
    table = ShardedTable(tmp_path / "table", (100, 1 << 16), np.arange(100) % 2)
    assert table.make(np.array([3, 4, 5, 90])) is None
    for name in "ab":
        about = (tmp_path / f"table-{name}").stat()
        assert about.st_size > 100 << 18
        assert 4 << 18 <= 512 * about.st_blocks <= 6 << 18
    table.open()
    table.write(np.array([90]), slice(None), torch.ones(1, 1 << 16))
    table.commit(np.array([90]))
    assert_array_equal(table.read([90, 3])[:, 5], [1.0, 0.0])


TABLE = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])


def test_a_mixture_of_rows_is_one_vector():
    """0.25 of row 0 and 0.75 of row 2: (75.25, 150.5); row 1 is not asked for."""
    asked = []

    def rows(name: str, numbers: list[int]) -> torch.Tensor:
        asked.append((name, numbers))
        return TABLE[numbers]

    which = np.array([0.25, 0.0, 0.75])
    assert_close(read_rows(rows, "model", which), torch.tensor([[75.25, 150.5]]))
    assert_close(read_rows(rows, "model", (2, 0)), TABLE[[2, 0]])
    assert asked == [("model", [0, 2]), ("model", [2, 0])]
    assert rows_of(which) == [0, 2]
    assert rows_of((2, 0)) == [2, 0]


def test_distances_to_rows_are_over_parameters_only():
    """The last number is a running mean: from (4, 6, 99) to (1, 2, 0) it is 5.

    What is not as long as a model counts in full: from (4, 6) to (1, 2) 5, from (4, 6, 0, 12) to 0 14.
    """
    layout = Layout(("w", "mean"), ((2,), (1,)), 2)
    rows = torch.tensor([[1.0, 2.0, 0.0], [4.0, 6.0, 7.0]])
    assert_allclose(row_distances(torch.tensor([4.0, 6.0, 99.0]), rows, layout), [5, 0])
    assert_allclose(row_distances(torch.tensor([4.0, 6.0]), rows[:, :2], layout), [5, 0])
    assert_allclose(row_distances(torch.tensor([4.0, 6.0, 0.0, 12.0]), torch.zeros(1, 4), layout), [14])


def test_distances_to_rows_do_not_depend_on_how_many_are_measured_at_once(monkeypatch):
    layout = Layout(("w",), ((7,),), 7)
    upload, rows = torch.arange(7.0), torch.arange(35.0).reshape(5, 7) / 3
    at_once = row_distances(upload, rows, layout)
    monkeypatch.setattr("mpifl.aggregation.tables.DIFFERENCES", 14)
    assert_array_equal(row_distances(upload, rows, layout), at_once)
    alone = [float((upload - row).double().norm()) for row in rows]
    assert_array_equal(at_once, alone)


def test_a_table_is_float32():
    with pytest.raises(Mismatch, match="float64"):
        Tables(Single()).publish({"model": torch.zeros(1, 2, dtype=torch.float64)})
