"""What rank 0 makes of the headers of a step."""

from __future__ import annotations

import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.testing import assert_array_equal

from mpifl.core.types import Notes
from mpifl.runtime.protocol import (
    ClientTask,
    GatheredReports,
    ReportHeader,
    TaskTable,
    gathered_reports,
    joined_tables,
    mean_metrics,
    report_tables,
)
from mpifl.runtime.worker import VisitResults, unpacked


def test_largest_values_and_ranks_of_components_go_together():
    """Upload 0, on rank 1, has components with max_abs 1 and 2; upload 1, on rank 2, with 3 and 4."""
    two, ones = np.zeros(2, np.int64), np.ones(2, bool)
    notes = Notes(np.arange(2), two, two, ones)
    reports = GatheredReports((), np.array([1, 2]), notes, {"model": np.array([[1.0, 2.0], [3.0, 4.0]])})
    max_abs, owners = reports.upload_info("model")
    assert_array_equal(max_abs, [1, 2, 3, 4])
    assert_array_equal(owners, [1, 1, 2, 2])


def header(number: int, client: int, **fields) -> ReportHeader:
    values = {"fresh": True, "notes": {}, "findings": {}, "metrics": {}, "max_abs": {}, "sizes": {}}
    return ReportHeader(number=number, client=client, num_samples=10 * client, **{**values, **fields})


def test_reports_of_several_forms_and_ranks_stand_in_the_order_of_their_numbers():
    """Client 2, on rank 1 with client 4, notes nothing; client 3, on rank 2, brings a remembered upload."""
    noted = {"notes": {"tau": 1}, "metrics": {"loss": 1.0}}
    first = report_tables([header(0, 2, metrics={"loss": 4.0}), header(2, 4, **noted)])
    second = report_tables([header(1, 3, fresh=False)])
    owners = [np.array([rank]) for rank in (2, 1, 1)]
    reports = gathered_reports([*second, *first], owners, np.zeros(3, np.int64), "M.local_update")
    assert_array_equal(reports.notes.client, [2, 3, 4])
    assert_array_equal(reports.notes.fresh, [True, False, True])
    assert_array_equal(reports.notes["tau"], [np.nan, np.nan, 1])
    assert_array_equal(reports.owners, [1, 2, 1])
    assert mean_metrics(reports.tables) == {"loss": (20 * 4.0 + 40 * 1.0) / 60}


def test_a_step_whose_clients_have_no_samples_has_no_mean():
    """The data of a client may drift away; `num_samples` of client 0 is 0 here."""
    tables = report_tables([header(0, 0, metrics={"loss": 0.0})])
    assert np.isnan(mean_metrics(tables)["loss"])


def test_what_clients_exchanged_is_added_over_the_reports_of_a_table():
    place = ("embedding", "up", 1)
    (table,) = report_tables([header(i, i, exchanges={place: (5, 1)}) for i in range(2)])
    assert table.exchanges == {place: (10, 2)}


def test_tasks_of_each_rank_hold_the_reads_that_it_needs():
    """Client 5, on rank 2, brings back a remembered upload; nobody is on rank 0."""
    client = np.array([3, 4, 5, 6])
    columns = np.stack((np.arange(4), client, client + 10, np.array([1, 0, -1, 1])), axis=1)
    reads = [{"model": (0,)}, {"model": (1,)}]
    works = {6: Fraction(1, 2)}
    for work in ({}, works):
        tasks = TaskTable(columns, reads, {}, work)
        nobody, one, two = parted(tasks, np.array([1, 2, 2, 1]), 3)
        assert len(nobody) == 0
        half = work.get(6)
        assert [*one, *two] == [
            ClientTask(0, 3, 13, reads[1]),
            ClientTask(3, 6, 16, reads[1], work=half),
            ClientTask(1, 4, 14, reads[0]),
            ClientTask(2, 5, 15, {}, fresh=False),
        ]


def test_many_reads_go_only_to_the_ranks_whose_clients_have_them():
    columns = np.stack([np.arange(40)] * 4, axis=1)
    reads = [{"model": (i,)} for i in range(40)]
    one, two = parted(TaskTable(columns, reads), np.arange(40) % 2, 2)
    assert [len(one.reads), len(two.reads)] == [20, 20]
    assert [task.reads for task in two] == reads[1::2]


def parted(tasks: TaskTable, owners: np.ndarray, num_ranks: int) -> list[TaskTable]:
    """Return the tasks of each rank as they arrive there."""
    tables, columns, counts = tasks.split_by_rank(owners, num_ranks)
    own = np.split(columns, np.cumsum(counts)[:-1])
    return [replace(table, columns=mine) for table, mine in zip(tables, own, strict=True)]


def test_reports_of_all_ranks_become_one_table_for_each_form_in_the_order_of_their_numbers():
    """Rank 1 has reports 0 and 3, rank 3 has 1, and 2 of another form; rank 2 has none."""

    sent = {"max_abs": {"model": [1.0]}, "sizes": {"model": 2}}

    def noted(number: int) -> ReportHeader:
        notes = {"tau": number, "w": np.array([number, 1.5], np.float32)}
        return header(number, 10 + number, notes=notes, metrics={"loss": number / 3}, **sent)

    ranks = [[], [noted(0), noted(3)], [], [noted(1), header(2, 12, notes={"why": 7}, **sent)]]
    packed = [VisitResults(headers, {}, [], 0.5).packed() for headers in ranks]
    heads = [value[0] for value, _ in packed]
    heads[2] = heads[0]  # equal, so that they arrive as one object
    seconds, _, rows = zip(*(unpacked(memoryview(data)) for _, data in packed), strict=True)
    assert seconds == (0.5,) * 4
    tables, owners = joined_tables(heads, rows)
    assert sorted(table.number.tolist() for table in tables) == [[0, 3], [1], [2]]
    reports = gathered_reports(tables, owners, np.zeros(4, np.int64), "M.local_update")
    assert_array_equal(reports.notes.client, [10, 11, 12, 13])
    assert_array_equal(reports.owners, [1, 3, 3, 1])
    assert_array_equal(reports.notes["tau"], [0, 1, np.nan, 3])


def test_ranks_with_reports_of_one_form_share_a_table():
    ranks = [[], [header(1, 11), header(2, 12)], [header(0, 10), header(3, 13)]]
    packed = [VisitResults(headers, {}, [], 0.5).packed() for headers in ranks]
    assert pickle.dumps(packed[1][0]) == pickle.dumps(packed[2][0])
    heads = [packed[0][0][0], packed[1][0][0], packed[1][0][0]]
    rows = [unpacked(memoryview(data)).rows for _, data in packed]
    (table,), (owners,) = joined_tables(heads, rows)
    assert_array_equal(table.client, [10, 11, 12, 13])
    assert_array_equal(owners, [2, 1, 1, 2])


def test_a_table_comes_back_as_it_was():
    notes = {"tau": 3, "w": np.array([1.0, np.nan], np.float32)}
    fields = {"metrics": {"loss": 1 / 3}, "max_abs": {"model": [1.0, 2.0]}, "sizes": {"model": 2}}
    (table,) = report_tables([header(i, 7 - i, notes=notes, findings={"f": i}, **fields) for i in range(3)])
    head, rows = table.packed()
    assert len(head) == 0
    found, owners = pickle.loads(pickle.dumps(head)).unpacked([rows])
    assert_array_equal(owners, [0, 0, 0])
    for name, there in vars(table).items():
        again = vars(found)[name]
        if isinstance(there, dict) and there and isinstance(next(iter(there.values())), np.ndarray):
            assert {n: v.dtype for n, v in there.items()} == {n: v.dtype for n, v in again.items()}
            for n, values in there.items():
                assert_array_equal(again[n], values)
        else:
            assert_array_equal(again, there)


def test_a_column_of_objects_travels_whole():
    (table,) = report_tables([header(0, 1, findings={"who": {"a": 1}})])
    head, rows = table.packed()
    found, owners = head.unpacked([rows])
    assert found.findings["who"].tolist() == [{"a": 1}]
    assert_array_equal(owners, [0])
