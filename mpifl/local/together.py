"""Several clients at once: each visit is stopped where it asks to train, until all ask, then one stacked
training answers them all.

Every visit runs in a thread of its own, but only one thread runs at a time, in a fixed order: a method is
written, and behaves, as if its client were alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Visit(threading.Thread, Generic[T]):
    """One visit; runs only between `advance` and the next question."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: T | None = None
        self.error: BaseException | None = None
        self.question: Any = None
        self.answer: Any = None
        self.over = False
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        """Do the work once it is this visit's turn."""
        self._mine.acquire()
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self.over = True
        self._theirs.release()

    def advance(self) -> None:
        """Let the visit run until it asks or ends."""
        self._mine.release()
        self._theirs.acquire()

    def ask(self, question: Any) -> Any:
        """Hand in a question and stand still until it is answered; called in the visit's own thread."""
        self.question = question
        self._theirs.release()
        self._mine.acquire()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Together:
    """Runs visits side by side and answers their questions all at once.

    Args:
        serve: from the questions of all visits that still run, in their order, to the answers.
    """

    def __init__(self, serve: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self.serve = serve
        self._current: _Visit[Any] | None = None

    @property
    def listening(self) -> bool:
        """Return whether the caller is a visit."""
        return self._current is not None and threading.current_thread() is self._current

    def ask(self, question: Any) -> Any:
        """Return the answer to the current visit's question."""
        assert self._current is not None
        return self._current.ask(question)

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Return what each work returns. An exception of one is raised, naming its place as `.place`."""
        visits = [_Visit(work) for work in works]
        for visit in visits:
            visit.start()
        left = list(enumerate(visits))
        while left:
            for place, visit in left:
                self._current = visit
                visit.advance()
                self._current = None
                if visit.error is not None:
                    self._dismiss(visits)
                    visit.error.place = place  # type: ignore[attr-defined]
                    raise visit.error
            left = [(place, visit) for place, visit in left if not visit.over]
            answers = self.serve([visit.question for _, visit in left]) if left else []
            for (_, visit), answer in zip(left, answers, strict=True):
                visit.answer = answer
        return [visit.result for visit in visits]  # type: ignore[misc]  # all are over

    def _dismiss(self, visits: Sequence[_Visit[Any]]) -> None:
        """End the visits that still wait, so that no thread is left behind."""
        for visit in visits:
            self._current = visit
            while not visit.over:
                visit.answer = Dismissed()
                visit.advance()
        self._current = None


class Dismissed(RuntimeError):
    """Another visit of the same stack failed."""
