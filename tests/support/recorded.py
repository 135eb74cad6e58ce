"""Recorded figures of a sweep, and a page whose tables are written from them; see `tests/campaigns`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpifl.core.errors import UserError
from mpifl.core.files import write_atomically
from mpifl.core.textfiles import json_file
from mpifl.results.reader import Run, load
from mpifl.sweeps.cases import Case
from mpifl.sweeps.results import check_case

ROOT = Path(__file__).parents[2]
END = "<!-- end -->\n"


@dataclass(frozen=True)
class Recorded:
    """The file of a sweep's figures and its page.

    Attributes:
        name: name of the sweep in `configs/sweeps`, and of the page in `docs`.
        program: the program that records it, in `tests/campaigns`.
        on: name of the page, if it is that of another sweep.
    """

    name: str
    program: str
    on: str = ""

    @property
    def page(self) -> Path:
        """The page."""
        return ROOT / "docs" / f"{self.on or self.name}.md"

    @property
    def measured(self) -> Path:
        """The file of figures."""
        return ROOT / "configs" / "sweeps" / "measured" / f"{self.name}.json"

    @property
    def begin(self) -> str:
        """The line before the tables."""
        of = f" of sweeps/{self.name}" if self.on else ""
        return f"<!-- written by tests/campaigns/{self.program}{of} -->\n"

    def rows(self) -> list[dict[str, Any]]:
        """Return the recorded rows."""
        return list(json_file(self.measured, "RUN")["rows"])

    def write(
        self, rows: Iterable[Mapping[str, Any]], about: Mapping[str, Iterable[str]], **more: Any
    ) -> None:
        """Write the file of figures, a line for each row.

        Args:
            rows: the figures.
            about: dates and code of the runs, see `about`.
            more: other entries of the file.
        """
        head = {
            "sweep": f"sweeps/{self.name}",
            **{key: sorted(texts) for key, texts in about.items()},
            **more,
        }
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        write_atomically(self.measured, f'{{{json.dumps(head)[1:-1]}, "rows": [\n{lines}\n]}}\n')

    def with_tables(self, text: str, tables: str) -> str:
        """Return the page with its tables written anew.

        Args:
            text: the page.
            tables: the tables.

        Raises:
            UserError: the page has no place for them.
        """
        head, begin, rest = text.partition(self.begin)
        _, end, tail = rest.partition(END)
        if not (begin and end):
            raise UserError("page", self.page.name, f"has no lines {self.begin.strip()} and {END.strip()}")
        return f"{head}{self.begin}\n{tables}\n{END}{tail}"


def runs_of(cases: Sequence[Case], folder: Path) -> Iterator[tuple[Case, Run]]:
    """Yield complete cases of a sweep with their runs.

    Args:
        cases: the cases.
        folder: the sweep's folder.

    Raises:
        UserError: the run in the folder of a case is not the case's.
    """
    for case in cases:
        check_case(case, folder)
        yield case, load(case.folder(folder))


def about(run: Run) -> dict[str, str]:
    """Return the day on which a run ended, and the identity of the code that ran."""
    ended = datetime.fromtimestamp((run.folder / "summary.json").stat().st_mtime, UTC)
    return {"dates": f"{ended:%Y-%m-%d}", "code": str(run.summary["identity"]["code"])}


def kept(value: float) -> float:
    """Return a whole number (bytes) unchanged, and any other number with six digits."""
    return value if float(value).is_integer() else float(f"{value:.6g}")
