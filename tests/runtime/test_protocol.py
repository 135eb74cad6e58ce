"""What rank 0 makes of the headers of a step."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from mpifl.core.types import Notes
from mpifl.runtime.protocol import (
    ClientTask,
    GatheredReports,
    ReportHeader,
    TaskTable,
    gathered_reports,
    mean_metrics,
    report_tables,
)


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
    reports = gathered_reports([*second, *first], [2, 1, 1], np.zeros(3, np.int64), "M.local_update")
    assert_array_equal(reports.notes.client, [2, 3, 4])
    assert_array_equal(reports.notes.fresh, [True, False, True])
    assert_array_equal(reports.notes["tau"], [np.nan, np.nan, 1])
    assert_array_equal(reports.owners, [1, 2, 1])
    assert mean_metrics(reports.tables) == {"loss": (20 * 4.0 + 40 * 1.0) / 60}


def test_what_probes_exchanged_is_added_over_the_reports_of_a_table():
    place = ("embedding", "up", 1)
    (table,) = report_tables([header(i, i, exchanges={place: (5, 1)}) for i in range(2)])
    assert table.exchanges == {place: (10, 2)}


def test_tasks_of_each_rank_hold_the_reads_that_it_needs():
    """Client 5, on rank 2, brings back a remembered upload; nobody is on rank 0."""
    number, client = np.arange(4), np.array([3, 4, 5, 6])
    reads = [{"model": (0,)}, {"model": (1,)}]
    tasks = TaskTable(number, client, client + 10, reads, np.array([1, 0, -1, 1]))
    nobody, one, two = tasks.dealt(np.array([1, 2, 2, 1]), 3)
    assert len(nobody) == 0
    assert [*one] == [ClientTask(0, 3, 13, reads[1]), ClientTask(3, 6, 16, reads[1])]
    assert one.reads == [reads[1]]
    assert [*two] == [ClientTask(1, 4, 14, reads[0]), ClientTask(2, 5, 15, {}, fresh=False)]
