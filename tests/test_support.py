"""Helpers that other tests rely on to fail."""

from __future__ import annotations

import os

import pytest
from conftest import pytest_runtest_teardown
from support.each import check_each, for_each


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


def test_cases_of_one_test_have_the_arguments_and_names_of_parameters():
    tried = []

    @for_each(("number", "word"), [(1, "a"), (2, "b"), (3, "c")], ids=["one", "two", "three"])
    def test_it(word: str, number: int) -> None:
        tried.append((number, word))
        assert number != 2

    with pytest.raises(ExceptionGroup, match="1 of 3 cases fail") as error:
        test_it()
    assert tried == [(1, "a"), (2, "b"), (3, "c")]
    assert error.value.exceptions[0].__notes__ == ["in the case two"]
    assert test_it.__name__ == "test_it"


def test_a_test_that_leaves_variables_to_later_processes_fails_and_they_are_taken_back():
    before = dict(os.environ)
    end = pytest_runtest_teardown()
    next(end)
    os.environ["NPY_LEFT"] = "1"
    del os.environ["OMP_NUM_THREADS"]
    with pytest.raises(pytest.fail.Exception, match=r"\['NPY_LEFT', 'OMP_NUM_THREADS'\]"):
        end.send(None)
    assert dict(os.environ) == before
