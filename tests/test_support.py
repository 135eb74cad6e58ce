"""Helpers that other tests rely on to fail."""

from __future__ import annotations

import pytest
from support.each import check_each


def test_a_check_of_many_cases_tries_all_and_names_those_that_fail():
    tried = []

    def check(number: int) -> None:
        tried.append(number)
        assert number != 2
        if number == 3:
            with pytest.raises(ValueError, match="x"):
                pass

    with pytest.raises(ExceptionGroup, match="2 of 4 cases fail") as error:
        check_each(check, [(f"n{number}", (number,)) for number in (1, 2, 3, 4)])
    assert tried == [1, 2, 3, 4]
    equal, missing = error.value.exceptions
    assert equal.__notes__ == ["in the case n2"]
    assert str(missing).startswith("n3: DID NOT RAISE")


def test_a_check_of_no_case_fails():
    with pytest.raises(AssertionError, match="no case"):
        check_each(print, [])
