"""Callbacks that write to experiment trackers, on their own libraries: TensorBoard, Weights & Biases, MLflow.

All three get the configuration, the figures of each evaluation against rounds and against virtual seconds,
and the final figures of `summary.json`.
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
from importlib.util import find_spec
from pathlib import Path
from time import sleep, time
from typing import TYPE_CHECKING, Any, ClassVar

from mpifl.core.errors import require
from mpifl.core.files import try_lock, write_atomically

from .reader import read_rows
from .seed_groups import flat

if TYPE_CHECKING:
    from .reader import Run
    from .run_events import Evaluation, RunInfo

VIRTUAL, OVER_VIRTUAL = "virtual_seconds", "over_virtual_seconds"
PARAM_LENGTH, BATCH = 500, 100  # characters of a parameter, and entries of a request, that MLflow takes
RUN_ID = "mpifl.id"  # tag of a run of MLflow
CONTINUES = "mpifl.continues"  # tag of a run that stands for one whose last steps were lost: the id of that
STOPPED = "mpifl.stopped"  # tag of a run that did not reach its end
FORBIDDEN = re.compile(r"[^\w\-. /]")  # in names of parameters and metrics, by MLflow
TRIES = 40  # to read the runs of MLflow while others are written
NOTE = re.compile(r"(-?\d+)(?: (\d+))?")  # last step and, since there may be several, number of the run
MODES = ("offline", "online", "disabled")


class Logged:
    """The last evaluation that a tracker has logged, in a file of the run folder.

    A run that is killed and resumed repeats the steps since its checkpoint, with equal figures: they are not
    logged a second time. Where the clock is real they are other steps: a tracker that has logged some of them
    begins a new run.

    Args:
        info: of the run; one that is new has logged nothing.
        name: of the tracker.

    Attributes:
        step: the last that is logged; -1 for none.
        real: whether the clock is real.
        id: of the tracker's run: that of the run, with a number from the second on.
        before: id of the tracker's run that a new one continues; empty where none does.
    """

    def __init__(self, info: RunInfo, name: str) -> None:
        self.path = info.folder / f".{name}.logged"
        self.real = info.config["clock"]["name"] == "wall"
        text = self.path.read_text() if info.resumed and self.path.is_file() else ""
        found = NOTE.fullmatch(text)
        self.step = int(found[1]) if found else -1
        self._number = int(found[2] or 0) if found else 0
        self.id, self.before = self._id(info), ""
        if self.real and self.step > info.kept:
            self._number += 1
            self.id, self.before = self._id(info), self.id
            self.note(self.step)  # killed while it is filled, it is left, too

    def is_new(self, step: int) -> bool:
        """Return whether an evaluation was not logged before."""
        return step > self.step

    def note(self, step: int) -> None:
        """Note that an evaluation is logged."""
        self.step = step
        write_atomically(self.path, f"{step} {self._number}")

    def _id(self, info: RunInfo) -> str:
        return f"{info.id}-{self._number}" if self._number else info.id


class Tracker:
    """A callback on a library that is an extra of mpifl.

    Attributes:
        name: of the tracker and of the extra.
        package: what is imported.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    @classmethod
    def require_package(cls) -> None:
        """Raise `UserError` unless the library is installed."""
        there = find_spec(cls.package) is not None
        remedy = f'needs the package {cls.package}: pip install "mpifl[{cls.name}]"'
        require(there, "output.callbacks", cls.name, remedy)


@dataclass
class TensorBoard(Tracker):
    """Event files for TensorBoard.

    Scalars stand against rounds. `over_virtual_seconds/NAME` are the same values with the simulated clock as
    their wall time: the axis "relative" shows them against virtual seconds.

    Attributes:
        folder: holds a folder with the event files of each run, under the name of the run folder; null takes
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
        purged = info.kept + 1 if info.resumed else None  # what an interrupted run wrote after its checkpoint
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
                self._writer.add_scalar(
                    f"{OVER_VIRTUAL}/{name}", value, found.step, walltime=found.virtual_seconds
                )
        self._writer.flush()

    def on_end(self, run: Run) -> None:
        """Write the final figures, for the page of hyper-parameters too."""
        from torch.utils.tensorboard.summary import hparams

        final = {f"summary/{name}": value for name, value in numbers(dict(flat(run.summary)))}
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

    Charts stand against rounds; `virtual_seconds` is logged beside them and can be chosen as their axis.

    What is logged is handed to wandb's own process, which loses the last of it where a run is killed. A run
    that goes on logs all evaluations up to its checkpoint again, but for those that the server has.

    Attributes:
        project: where the run appears.
        mode: `offline` writes to a folder, which `wandb sync` uploads later; `online` uploads at once, with
            the login of wandb; `disabled` does nothing.
        entity: user or team; null takes that of the login.
        group: of the run; null takes the name of the configuration.
        folder: what wandb writes to; null takes the run folder.
    """

    name: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    project: str = "mpifl"
    mode: str = "offline"
    entity: str | None = None
    group: str | None = None
    folder: str | None = None
    _run: Any = field(default=None, init=False, repr=False)
    _logged: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.mode in MODES, "wandb.mode", self.mode, f"take one of {', '.join(MODES)}")

    def on_start(self, info: RunInfo) -> None:
        """Begin a run of wandb under the run's own id, or go on with it."""
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
            mode=self.mode,  # type: ignore[arg-type]  # checked above
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
        """Write the final figures and close the run of wandb."""
        self._run.summary.update({f"final/{name}": value for name, value in numbers(dict(flat(run.summary)))})
        self._run.summary.update({"digest": run.summary["digest"]})
        self._run.finish()
        self._run = None

    def on_stop(self, reason: str) -> None:
        """Close the run of wandb as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None

    def _log(self, step: int, values: dict[str, float]) -> None:
        if step >= self._run.step:  # the server has those before
            self._run.log(values, step=step)


@dataclass
class MLflow(Tracker):
    """A run of MLflow.

    Metrics stand against rounds. `over_virtual_seconds/NAME` are the same values with the simulated clock as
    their time.

    Attributes:
        tracking_uri: of the store: a server, or a folder; null takes MLFLOW_TRACKING_URI, or the folder
            `mlruns` beside the run folder.
        experiment: where the run appears; null takes the name of the configuration.
    """

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    tracking_uri: str | None = None
    experiment: str | None = None
    _client: Any = field(default=None, init=False, repr=False)
    _id: str = field(default="", init=False, repr=False)
    _logged: Any = field(default=None, init=False, repr=False)

    def on_start(self, info: RunInfo) -> None:
        """Create a run of MLflow, or go on with that of the run's own id; write the configuration."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._logged = Logged(info, self.name)
        beside = (info.folder.parent / "mlruns").resolve().as_uri()
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or beside
        if "://" not in uri or uri.startswith("file:"):  # since 3.17 a store of files must be asked for
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        with in_turn(info.folder.parent / ".mlflow.lock"):  # cases of a sweep begin at once
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
            self._logged.note(found.step)  # what is logged in part must be known, too
        self._log_row(found.step, dict(numbers(found.metrics)), time(), found.virtual_seconds)
        self._logged.note(found.step)

    def on_end(self, run: Run) -> None:
        """Write the final figures and close the run of MLflow."""
        final = {f"final/{name}": value for name, value in numbers(dict(flat(run.summary)))}
        self._log(final, time(), int(run.summary["rounds"]))
        self._client.set_tag(self._id, "mpifl.digest", run.summary["digest"])
        self._close("FINISHED")

    def on_stop(self, reason: str) -> None:
        """Close the run of MLflow as failed."""
        if self._client is not None and self._id:
            self._client.set_tag(self._id, STOPPED, reason[:PARAM_LENGTH])
            self._close("FAILED")

    def _experiment(self, title: str) -> str:
        """Return the id of an experiment, which is created unless it is there."""
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(title)
        if known is None:
            try:
                return str(self._client.create_experiment(title))
            except MlflowException:
                known = self._client.get_experiment_by_name(title)
                if known is None:  # no other run was quicker
                    raise
        return str(known.experiment_id)

    def _runs(self, where: str, name: str) -> list[Any]:
        """Return the runs of MLflow under an id of mpifl."""
        search = partial(self._client.search_runs, [where], f"tags.`{RUN_ID}` = '{name}'")
        for _ in range(TRIES):
            with suppress(ValueError):  # of a store of files, where another run is writing a line
                return list(search())
            sleep(0.05)
        return list(search())

    def _log_row(self, step: int, row: Mapping[str, float], seconds: float, virtual: float | None) -> None:
        """Log the figures of an evaluation at a time, and at the virtual one where there is one."""
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


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold a file against other processes; wait until none of them holds it."""
    with path.open("a") as file:
        while not try_lock(file):
            sleep(0.05)
        yield


def allowed(name: str) -> str:
    """Return a name as MLflow takes it."""
    return FORBIDDEN.sub("_", name)


def numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a row."""
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            yield name, value


def recorded(info: RunInfo) -> Iterator[dict[str, float]]:
    """Yield the numbers of each evaluation up to the checkpoint from which a run goes on."""
    for row in read_rows(info.folder / "metrics.csv", {}) if info.restored else ():
        found = dict[str, float]()
        for name, text in row.items():
            with suppress(ValueError):  # no number
                found[name] = float(text)
        yield dict(numbers(found))


def thawed(tree: Any) -> Any:
    """Return a read-only tree as dictionaries and lists."""
    if isinstance(tree, Mapping):
        return {name: thawed(value) for name, value in tree.items()}
    return [thawed(value) for value in tree] if isinstance(tree, (list, tuple)) else tree
