"""Callbacks that write to experiment trackers: TensorBoard, Weights & Biases and MLflow.

All three use the tracker's own library. They log the configuration, the figures of each evaluation against
rounds and against virtual seconds, and the final figures of `summary.json`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import sleep, time
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mpifl.core.files import try_lock, write_atomically
from mpifl.core.optional_packages import need_package
from mpifl.core.options import Options
from mpifl.core.registry import Registry
from mpifl.core.textfiles import flat

from .reader import read_rows

if TYPE_CHECKING:
    from .reader import Run
    from .run_events import Evaluation, RunInfo

VIRTUAL, OVER_VIRTUAL = "virtual_seconds", "over_virtual_seconds"
PARAM_LENGTH, BATCH = 500, 100  # limits of MLflow: characters of a parameter, entries of a request
RUN_ID = "mpifl.id"  # tag of an MLflow run
CONTINUES = "mpifl.continues"  # tag of a run that replaces one whose last steps were lost: the id of that run
STOPPED = "mpifl.stopped"  # tag of a run that did not reach its end
FORBIDDEN = re.compile(r"[^\w\-. /]")  # by MLflow in names of parameters and metrics
TRIES = 40  # to read MLflow's runs while other processes write theirs
NOTE = re.compile(r"(-?\d+) (\d+)")  # last step; number of the run


class Logged:
    """The last evaluation that a tracker has logged, kept in a file of the run folder.

    A run that is killed and resumed repeats the steps since its checkpoint. With a virtual clock, their
    figures are equal and are not logged again. With the wall clock they differ, so a tracker that has logged
    any of them starts a new run.

    Args:
        info: the run; if it is not resumed, nothing has been logged yet.
        name: name of the tracker.

    Attributes:
        step: step of the last logged evaluation; -1 for none.
        real: whether the run uses the wall clock.
        id: identifier of the tracker's run: that of the mpifl run, with a number from the second one on.
        before: identifier of the tracker's run that a new one continues; empty if there is none.
    """

    def __init__(self, info: RunInfo, name: str) -> None:
        self.path = info.folder / f".{name}.logged"
        self.real = info.config["clock"]["name"] == "wall"
        text = self.path.read_text() if info.resumed and self.path.is_file() else ""
        found = NOTE.fullmatch(text)
        self.step = int(found[1]) if found else -1
        self._number = int(found[2]) if found else 0
        self.id, self.before = self._id(info), ""
        if self.real and self.step > info.kept:
            self._number += 1
            self.id, self.before = self._id(info), self.id
            self.note(self.step)  # if killed while it is being filled, it is replaced as well

    def is_new(self, step: int) -> bool:
        """Return whether an evaluation has not been logged yet."""
        return step > self.step

    def note(self, step: int) -> None:
        """Record that an evaluation is logged."""
        self.step = step
        write_atomically(self.path, f"{step} {self._number}")

    def _id(self, info: RunInfo) -> str:
        return f"{info.id}-{self._number}" if self._number else info.id


class Tracker(Options):
    """A callback whose library is an optional dependency of mpifl.

    Attributes:
        name: name of the tracker, and of the extra that installs its library.
        package: name of the package to import.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    @classmethod
    def require_package(cls) -> None:
        """Raise `UserError` unless the library is installed."""
        need_package(cls.package, cls.name, "output.callbacks", cls.name)


@dataclass
class TensorBoard(Tracker):
    """Event files for TensorBoard.

    Scalars are logged against rounds. `over_virtual_seconds/NAME` holds the same values with virtual seconds
    as their wall time, so that the axis "relative" shows them against virtual seconds.

    Attributes:
        folder: folder with one subfolder of event files per run, named like the run folder; null takes
            `tensorboard` in the run folder.
    """

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"

    folder: str | None = None
    _writer: Any = field(default=None, init=False, repr=False)
    _config: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)

    def on_start(self, info: RunInfo) -> None:
        """Open the files, and write the configuration as text."""
        from torch.utils.tensorboard import SummaryWriter

        self._config = info.config
        purged = info.kept + 1 if info.resumed else None  # drops steps written after the checkpoint
        own = info.folder / self.name if self.folder is None else Path(self.folder) / info.folder.name
        self._writer = SummaryWriter(str(own), purge_step=purged)
        if not info.resumed:
            text = (info.folder / "config.yaml").read_text()
            self._writer.add_text("config", f"```yaml\n{text}\n```")

    def on_evaluation(self, found: Evaluation) -> None:
        """Write the figures of an evaluation."""
        for name, value in numbers(found.metrics):
            self._writer.add_scalar(name, value, found.step)
            if found.virtual_seconds is not None and name != VIRTUAL:
                over = f"{OVER_VIRTUAL}/{name}"
                self._writer.add_scalar(over, value, found.step, walltime=found.virtual_seconds)
        self._writer.flush()

    def on_end(self, run: Run) -> None:
        """Write the final figures, also for the hyper-parameter page."""
        from torch.utils.tensorboard.summary import hparams

        final = final_figures(run, "summary")
        given = {k: v for k, v in flat(self._config) if isinstance(v, (bool, int, float, str))}
        for event in hparams(given, final):
            self._writer.file_writer.add_summary(event)
        for name, value in final.items():
            self._writer.add_scalar(name, value, int(run.summary["rounds"]))
        self._writer.add_text("summary", f"```json\n{json.dumps(run.summary, indent=2, default=str)}\n```")
        self.on_stop("")

    def on_stop(self, reason: str) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass
class WandB(Tracker):
    """A run of Weights & Biases.

    Charts are drawn against rounds; `virtual_seconds` is also logged and can be chosen as their axis.

    Logged values are passed to wandb's own process, which loses the last of them if a run is killed. A
    resumed run therefore logs all evaluations up to its checkpoint again, except those that the server
    already has.

    Attributes:
        project: project in which the run appears.
        mode: `offline` writes to a folder, which `wandb sync` uploads later; `online` uploads at once, with
            the login of wandb; `disabled` does nothing.
        entity: user or team; null takes that of the login.
        group: group of the run; null takes the name of the configuration.
        folder: folder that wandb writes to; null takes the run folder.
    """

    name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    project: str = "mpifl"
    mode: Literal["offline", "online", "disabled"] = "offline"
    entity: str | None = None
    group: str | None = None
    folder: str | None = None
    _run: Any = field(default=None, init=False, repr=False)
    _logged: Any = field(default=None, init=False, repr=False)

    def on_start(self, info: RunInfo) -> None:
        """Start a wandb run under the run's own id, or continue it."""
        import wandb

        self._logged = Logged(info, self.name)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group or info.name,
            name=info.folder.name,
            id=self._logged.id,
            notes=f"continues {self._logged.before} from step {info.step}" if self._logged.before else None,
            resume="allow",
            mode=self.mode,
            dir=self.folder or str(info.folder),
            config=thawed(info.config),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")
        for row in recorded(info):
            self._log(int(row["round"]), row)
        if self._logged.before:
            self._logged.note(info.kept)

    def on_evaluation(self, found: Evaluation) -> None:
        """Log the figures of an evaluation."""
        if self._logged.real:
            self._logged.note(found.step)
        self._log(found.step, dict(numbers(found.metrics)))

    def on_end(self, run: Run) -> None:
        """Write the final figures and close the wandb run."""
        self._run.summary.update({**final_figures(run), "digest": run.summary["digest"]})
        self._run.finish()
        self._run = None

    def on_stop(self, reason: str) -> None:
        """Close the wandb run as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None

    def _log(self, step: int, values: dict[str, float]) -> None:
        if step >= self._run.step:  # the server has the earlier ones
            self._run.log(values, step=step)


@dataclass
class MLflow(Tracker):
    """A run of MLflow.

    Metrics are logged against rounds. `over_virtual_seconds/NAME` holds the same values with virtual seconds
    as their time.

    Attributes:
        tracking_uri: URI of a tracking server or folder; null takes the environment variable
            MLFLOW_TRACKING_URI, or else the folder `mlruns` beside the run folder.
        experiment: experiment in which the run appears; null takes the name of the configuration.
    """

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    tracking_uri: str | None = None
    experiment: str | None = None
    _client: Any = field(default=None, init=False, repr=False)
    _id: str = field(default="", init=False, repr=False)
    _logged: Any = field(default=None, init=False, repr=False)

    def on_start(self, info: RunInfo) -> None:
        """Create an MLflow run and write the configuration, or continue the one with the run's own id."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._logged = Logged(info, self.name)
        beside = (info.folder.parent / "mlruns").resolve().as_uri()
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or beside
        if "://" not in uri or uri.startswith("file:"):  # since 3.17 file stores need this permission
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        with in_turn(info.folder.parent / ".mlflow.lock"):  # cases of a sweep may start at the same time
            self._client = MlflowClient(tracking_uri=uri)
            where = self._experiment(self.experiment or info.name)
        if info.resumed and (found := self._runs(where, self._logged.id)):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            if STOPPED in found[0].data.tags:
                self._client.delete_tag(self._id, STOPPED)
            return
        before, tags = self._logged.before, {RUN_ID: self._logged.id}
        tags |= {CONTINUES: before} if before else {}
        self._id = self._client.create_run(where, run_name=info.folder.name, tags=tags).info.run_id
        params = [Param(allowed(name), str(value)[:PARAM_LENGTH]) for name, value in flat(info.config)]
        for i in range(0, len(params), BATCH):
            self._client.log_batch(self._id, params=params[i : i + BATCH])
        if before:
            rows = list(recorded(info))
            began = time() - rows[-1]["seconds"] if rows else 0.0
            for row in rows:
                self._log_row(int(row["round"]), row, began + row["seconds"], row.get(VIRTUAL))
            for left in self._runs(where, before):
                text = f"goes on from step {info.step} as {self._logged.id}"
                self._client.set_tag(left.info.run_id, STOPPED, text)
                self._client.set_terminated(left.info.run_id, "KILLED")
            self._logged.note(info.kept)

    def on_evaluation(self, found: Evaluation) -> None:
        """Log the figures of an evaluation."""
        if not self._logged.is_new(found.step):
            return
        if self._logged.real:
            self._logged.note(found.step)  # must be recorded even if it is logged only in part
        self._log_row(found.step, dict(numbers(found.metrics)), time(), found.virtual_seconds)
        self._logged.note(found.step)

    def on_end(self, run: Run) -> None:
        """Write the final figures and close the MLflow run."""
        self._log(final_figures(run), time(), int(run.summary["rounds"]))
        self._client.set_tag(self._id, "mpifl.digest", run.summary["digest"])
        self._close("FINISHED")

    def on_stop(self, reason: str) -> None:
        """Close the MLflow run as failed."""
        if self._client is not None and self._id:
            self._client.set_tag(self._id, STOPPED, reason[:PARAM_LENGTH])
            self._close("FAILED")

    def _experiment(self, title: str) -> str:
        """Return the id of an experiment, which is created if it does not exist."""
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(title)
        if known is None:
            try:
                return str(self._client.create_experiment(title))
            except MlflowException:
                known = self._client.get_experiment_by_name(title)
                if known is None:  # no other process has created it
                    raise
        return str(known.experiment_id)

    def _runs(self, where: str, name: str) -> list[Any]:
        """Return the MLflow runs that carry an id of mpifl."""
        search = partial(self._client.search_runs, [where], f"tags.`{RUN_ID}` = '{name}'")
        for _ in range(TRIES):
            with suppress(ValueError):  # from a file store in which another run is writing
                return list(search())
            sleep(0.05)
        return list(search())

    def _log_row(self, step: int, row: Mapping[str, float], seconds: float, virtual: float | None) -> None:
        """Log the figures of an evaluation at a real time, and at the virtual time if there is one."""
        self._log(row, seconds, step)
        if virtual is not None:
            over = {f"{OVER_VIRTUAL}/{name}": value for name, value in row.items() if name != VIRTUAL}
            self._log(over, virtual, step)

    def _log(self, values: Mapping[str, float], seconds: float, step: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(allowed(name), value, int(1000 * seconds), step) for name, value in values.items()]
        for i in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[i : i + BATCH])

    def _close(self, status: str) -> None:
        self._client.set_terminated(self._id, status)
        self._client, self._id = None, ""


CALLBACKS: Registry[Any] = Registry(
    "callbacks", object, {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
)


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Lock a file during the block; wait until no other process has locked it."""
    with path.open("a") as file:
        while not try_lock(file):
            sleep(0.05)
        yield


def allowed(name: str) -> str:
    """Return a name with the characters that MLflow forbids replaced."""
    return FORBIDDEN.sub("_", name)


def numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of the finite numbers in a row."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield name, value


def final_figures(run: Run, prefix: str = "final") -> dict[str, float]:
    """Return the finite numbers of a run's summary, each name behind a prefix."""
    return {f"{prefix}/{name}": value for name, value in numbers(dict(flat(run.summary)))}


def recorded(info: RunInfo) -> Iterator[dict[str, float]]:
    """Yield the numbers of each evaluation up to the checkpoint from which a run continues."""
    for row in read_rows(info.folder / "metrics.csv", {}) if info.restored else ():
        found = dict[str, float]()
        for name, text in row.items():
            with suppress(ValueError):  # not a number
                found[name] = float(text)
        yield dict(numbers(found))


def thawed(tree: Any) -> Any:
    """Return a read-only tree as plain dictionaries and lists."""
    if isinstance(tree, Mapping):
        return {name: thawed(value) for name, value in tree.items()}
    return [thawed(value) for value in tree] if isinstance(tree, (list, tuple)) else tree
