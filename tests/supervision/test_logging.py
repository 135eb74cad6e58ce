"""A rank's complaints are in its file; the terminal is rank 0's."""

from __future__ import annotations

import logging
import warnings

import pytest

from mpifl.core.errors import UserError
from mpifl.supervision.logging import rank_log


def complain() -> None:
    """Warn twice, in the ways of libraries, and fail."""
    warnings.warn("a step is skipped", stacklevel=1)
    logging.getLogger("library").warning("disk is slow")
    logging.getLogger("library").info("all is well")
    raise ZeroDivisionError("client 3")


@pytest.mark.parametrize("terminal", [True, False])
def test_warnings_and_the_last_exception_are_in_the_file(terminal, tmp_path):
    log = tmp_path / "logs" / "host-1.log"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with pytest.raises(ZeroDivisionError), rank_log(log, terminal):
            complain()
        assert [str(w.message) for w in heard] == ["a step is skipped"] * terminal
    text = log.read_text()
    for part in ("UserWarning: a step is skipped", "WARNING library: disk is slow", "in complain"):
        assert part in text
    assert "ZeroDivisionError: client 3" in text
    assert "all is well" not in text


def test_without_complaints_there_is_no_file_and_afterwards_all_is_as_before(tmp_path):
    before, shown = list(logging.getLogger().handlers), warnings.showwarning
    with pytest.raises(UserError), rank_log(tmp_path / "logs" / "host-0.log", terminal=True):
        raise UserError("rounds", 0, "use at least one round")
    assert not (tmp_path / "logs").exists()
    assert logging.getLogger().handlers == before
    assert warnings.showwarning is shown
