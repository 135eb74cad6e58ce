"""The steps of a sweep's cases until the data of one of them change (`system.share_beginnings`).

Cases that differ in `drift` alone take the same steps until the first of them changes. The first case with
drift that gets there leaves a copy of its checkpoint in the sweep's folder; cases that begin later go on from
it. Their results are those of cases alone, to the bit, but for measured times. A case without drift leaves no
copy: its tables lack columns of the others.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpifl.core.beginning import OWN, STEPS, bytes_in, no_room, num_steps
from mpifl.core.computation import SERVER
from mpifl.core.files import write_json
from mpifl.core.textfiles import json_mapping
from mpifl.results import checkpoint_files
from mpifl.results.checkpoint_files import Content
from mpifl.results.recovery import recovery_figures
from mpifl.supervision.logging import warn_once

CHECKPOINTS, RUN = "checkpoints", "run.json"  # in a run folder, and in that of the copy
COPYING = ".shared-steps"  # in a run folder: the copy, until it is complete
OF_CONFIG = ("config", "layout")  # entries of a checkpoint's `about` that differ with `drift`
CHURN, WITHOUT_CAUSE, COSTS = "churn", "churn_without_cause", "clustering_bytes"
OF_RECOVERY = tuple(recovery_figures([], timed=True))


@dataclass(frozen=True)
class SharedSteps:
    """The copy of a checkpoint after the steps that a case shares with others; on rank 0.

    Attributes:
        folder: its folder, there once a case has left it.
        name: name of the run.
        drifts: whether the data of clients change during the run.
        regroups: whether true groups change.
        tells_costs: whether `metrics.csv` has the costs of clustering.
    """

    folder: Path
    name: str
    drifts: bool
    regroups: bool
    tells_costs: bool

    @property
    def step(self) -> int:
        """The last step that is shared; the folder's name ends with it."""
        return num_steps(self.folder.name)

    @property
    def own(self) -> dict[int, str]:
        """The origin of the steps of a case that takes them itself, see `ServerStep.beginning`."""
        return {SERVER: OWN}

    def wants(self, step: int) -> bool:
        """Return whether to leave the state after a step to other cases."""
        return step == self.step and self.drifts and not self.folder.exists()

    def leave(self, run_folder: Path, checkpoint: Path) -> None:
        """Leave a checkpoint, which has just been written, to other cases.

        Args:
            run_folder: the run folder.
            checkpoint: the folder of the checkpoint in it.
        """
        partial, clients = run_folder / COPYING, checkpoint.with_name("clients")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed here
        try:
            self.folder.parent.mkdir(exist_ok=True)
            if why := no_room(self.folder.parent, bytes_in(checkpoint) + bytes_in(clients)):
                warn_once(f"{why}: this case leaves its steps to no other")
                return
            partial.mkdir()
            shutil.copytree(checkpoint, partial / CHECKPOINTS / checkpoint.name)
            if clients.exists():
                shutil.copytree(clients, partial / CHECKPOINTS / clients.name)
            _copy_tables(run_folder, partial)
            about = {"id": json_mapping(run_folder / RUN)["id"], "name": self.name}
            write_json(partial / RUN, about)
            partial.rename(self.folder)
        except OSError as error:
            if not self.folder.exists():  # another case has left them meanwhile
                warn_once(f"{self.folder} cannot be written ({error.strerror}): cases share no steps")
        shutil.rmtree(partial, ignore_errors=True)

    def find(self, about: Mapping[str, Any]) -> Content | None:
        """Return the checkpoint as this case would have written it; None if there is none that fits.

        Args:
            about: what the numbers of the case depend on, see `resumption.about`.
        """
        origin = json_mapping(self.folder / RUN)
        if not origin:
            return None
        try:
            content = checkpoint_files.latest(self.folder / CHECKPOINTS, origin["id"], warn_once)
        except (checkpoint_files.Damaged, checkpoint_files.OtherForm) as error:
            warn_once(f"{self.folder} is not used ({error}): this case takes all steps itself")
            return None
        if content is None or _deciding(content.about) != _deciding(about):
            return None
        engine = {**content.values["engine"], "beginning": {STEPS: [(SERVER, origin["name"])]}}
        recorder = {**content.values["recorder"]}
        recorder["last"] = self._fitted(recorder["last"])
        return replace(
            content,
            values={"engine": engine, "recorder": recorder},
            metrics=self._fitted_table(content.metrics),
            about={**about, "layout": content.about["layout"]},
        )

    def copy_files(self, run_folder: Path, clients: Path) -> None:
        """Copy the tables that grow, and the files of client state, to a run folder.

        Args:
            run_folder: the run folder.
            clients: the folder of client state in it.
        """
        _copy_tables(self.folder, run_folder)
        if (kept := self.folder / CHECKPOINTS / "clients").exists():
            shutil.copytree(kept, clients, dirs_exist_ok=True)

    def _fitted_table(self, metrics: bytes) -> bytes:
        """Return the content of `metrics.csv` with the columns that this case writes."""
        rows = [self._fitted(row) for row in csv.DictReader(io.StringIO(metrics.decode(), newline=""))]
        if not rows:
            return metrics
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().encode()

    def _fitted(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of an evaluation that this case writes; before data change, none has moved."""
        left_out = {WITHOUT_CAUSE, *(() if self.drifts else OF_RECOVERY)}
        left_out |= set() if self.tells_costs else {COSTS}
        out: dict[str, Any] = {}
        for name, value in row.items():
            out |= {} if name in left_out else {name: value}
            out |= {WITHOUT_CAUSE: value} if name == CHURN and self.regroups else {}
        return out


def _copy_tables(source: Path, target: Path) -> None:
    """Copy the tables of a run folder that grow, but `metrics.csv`, which checkpoints hold."""
    for table in source.glob("*.csv"):
        if table.name != "metrics.csv":
            shutil.copyfile(table, target / table.name)


def _deciding(about: Mapping[str, Any]) -> Any:
    """Return what decides the shared steps beside settings, which `steps_alike` compares."""
    return json.loads(json.dumps({name: of for name, of in about.items() if name not in OF_CONFIG}))
