"""Follows a run, or a folder of runs, from outside: it only reads run folders and keeps no other state.

`look` returns the state of a run from its folder. `watch` shows it in a terminal until the run ends.
`watch_page` serves it to a browser.
"""

from __future__ import annotations

import csv
import io
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpifl.core.case_names import LOCKS, folder_name, labels_of, slug_of, title_of
from mpifl.core.errors import UserError, first_of
from mpifl.core.textfiles import json_mapping, yaml_file
from mpifl.core.units import in_bytes
from mpifl.supervision.progress import FILE, in_words

WAITING, RUNNING, SILENT, ENDED = "waiting", "running", "silent", "ended"
STOPPED, FAILED, COMPLETE = "stopped", "failed", "complete"
OVER = (ENDED, STOPPED, FAILED, COMPLETE)  # states in which nothing changes unless the run is resumed
QUIET_SECONDS = 30.0  # without a new progress.json, written every 2 s, until a run counts as silent
LOG_LINES, LAST_EVALUATIONS, MOST_RANKS, MOST_CASES = 3, 8, 16, 40
LEAST_S, MOST_PHASES = 0.05, 6  # seconds of all ranks from which on a phase has a column; columns of phases
BARS = "▁▂▃▄▅▆▇█"
UNBROKEN = 100_000  # width of output to a file or a pipe, so that lines are not wrapped
COLUMNS = {  # column of metrics.csv -> name of its curve here
    "round": "round",
    "seconds": "seconds",
    "virtual_seconds": "virtual_seconds",
    "loss": "loss",
    "train_loss": "train_loss",
    "num_clusters": "clusters",
    "ari": "ari",
    "churn": "churn",
    "federation_bytes_up": "bytes_up",
    "federation_bytes_down": "bytes_down",
}
FACTS = ("algorithm", "data.scenario", "data.source", "model", "policy")  # sections whose names are shown


@dataclass(frozen=True)
class Seen:
    """The state of a run, as read from its folder.

    Attributes:
        folder: the run folder.
        state: waiting, running, silent, ended (most likely killed), stopped, failed or complete.
        text: the state in words.
        facts: description of the run, as name -> text.
        rounds: total number of server steps; 0 if it is not known.
        step: server steps so far.
        doing: the current activity of rank 0, in words; empty if it is not known.
        left_s: estimated seconds until the end; None if there is no estimate.
        started: start time in seconds since 1970; None if it is not known.
        written: time of the last change in the folder, in seconds since 1970; None if there was none.
        curves: name -> value at each evaluation; `accuracy` and `worst` are those of the run's metric.
        metric: the metric of the run; accuracy for classification.
        clusters: current clusters as (cluster, number of clients), largest first.
        sample: if only some clients have rows, how many of how many, such as `1000 of 3000`; else empty.
        ranks: for each rank: host, device, visits, seconds of each phase between the last two evaluations.
        logs: name of a rank's log -> its last lines.
        checkpoint: step of the last checkpoint; None if there is none.
    """

    folder: str
    state: str = WAITING
    text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 0
    step: int = 0
    doing: str = ""
    left_s: float | None = None
    started: float | None = None
    written: float | None = None
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    metric: str = "accuracy"
    clusters: Sequence[tuple[int, int]] = ()
    sample: str = ""
    ranks: Sequence[Mapping[str, Any]] = ()
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    checkpoint: int | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended, so that no change is expected."""
        return self.state in OVER

    def last(self, name: str) -> float | None:
        """Return the last value of a curve; None if there is none."""
        return (self.curves.get(name) or [None])[-1]


@dataclass(frozen=True)
class SeenCases:
    """The state of the runs in a folder, which may be that of a sweep.

    Attributes:
        folder: the folder.
        is_sweep: whether it is the folder of a sweep.
        cases: title of each run -> its state.
        quiet: whether no process of this machine has a case, and nothing was written for `QUIET_SECONDS`.
        sweeps: folders of sweeps in the folder, whose runs are not among `cases`.
    """

    folder: str
    is_sweep: bool
    cases: Mapping[str, Seen]
    quiet: bool = False
    sweeps: Sequence[str] = ()

    @property
    def over(self) -> bool:
        """Whether no change is expected: all runs have ended, or some have and no process runs the rest."""
        over = [case.over for case in self.cases.values()]
        return bool(over) and (all(over) or self._left)

    @property
    def _left(self) -> bool:
        """Whether runs ended early, and no process works on these or others."""
        states = {case.state for case in self.cases.values()}
        return self.quiet and bool(states & {ENDED, STOPPED, FAILED}) and not states & {RUNNING, SILENT}

    @property
    def text(self) -> str:
        """The number of runs in each state, what is not shown, and how to resume a sweep that ended early."""
        counts = Counter(case.state for case in self.cases.values())
        text = ", ".join(f"{n} {state}" for state, n in counts.items()) or "no run yet"
        if self.sweeps:
            text += f"; sweeps are not shown here, name one of them: {first_of(self.sweeps)}"
        return f"{text}; mpifl resume {self.folder} goes on" if self.is_sweep and self._left else text


# -- reading -------------------------------------------------------------------------------------------------


def look(
    folder: Path,
    now: float | None = None,
    held: Callable[[Path], bool] | None = None,
    sweep: Path | None = None,
) -> Seen:
    """Return the state of a run from its folder; files that are missing or partly written are ignored.

    Args:
        folder: the run folder; it need not exist.
        now: the time in seconds since 1970; None takes the present time.
        held: returns whether a process of this machine has a lock on a file; None takes `is_held`.
        sweep: folder of the sweep to which the run belongs; None for none.
    """
    now = time.time() if now is None else now
    config, about = _yaml(folder / "config.yaml"), json_mapping(folder / "run.json")
    if not about or not config:
        text = "there is no such folder yet" if not folder.is_dir() else "the run has not begun to write"
        return Seen(str(folder), WAITING, f"{text}{_others(folder)}")
    beat = json_mapping(folder / FILE)
    metric, curves = _curves(folder / "metrics.csv")
    steps = [int(s) for s in curves.get("round", ()) if s is not None]
    checkpoints = [p.name.partition("-")[2] for p in folder.glob("checkpoints/step-*")]
    clusters = _clusters(folder / "assignments.csv")
    seen = Seen(
        folder=str(folder),
        facts=_facts(config),
        rounds=_int(beat.get("rounds")) or _int(config.get("rounds")),
        step=max([_int(beat.get("step")), *steps[-1:]]),
        doing=str(beat.get("doing") or "") if not beat.get("end") else "",
        started=_moment(about.get("started")) or _moment(beat.get("start")),
        written=_written(folder),
        curves=curves,
        metric=metric,
        clusters=clusters,
        sample=_sample(config, sum(clients for _, clients in clusters)),
        ranks=_told_of_ranks(beat.get("ranks")),
        logs={p.name: _tail(p) for p in sorted(folder.glob("logs/*.log"))},
        checkpoint=max((int(name) for name in checkpoints if name.isdigit()), default=None),
    )
    has_lock = (is_held if held is None else held)(folder / "run.json")
    state, text = _state(folder, seen, beat, now, has_lock, sweep)
    left = _left(beat, now) if state == RUNNING else None
    if state == COMPLETE:
        last = steps[-1] if steps else seen.rounds  # a rule of `stop` may have ended it
        seen = replace(seen, step=last, rounds=last, doing="")
    return replace(seen, state=state, text=text, left_s=left)


def _state(
    folder: Path, seen: Seen, beat: Mapping[str, Any], now: float, held: bool, sweep: Path | None
) -> tuple[str, str]:
    """Return the state of a run that has begun, and its description in words."""
    if (folder / "summary.json").is_file():
        told = json_mapping(folder / "summary.json").get("ended") if seen.step < seen.rounds else None
        why = f" ({told.get('reason')})" if isinstance(told, Mapping) else ""
        return COMPLETE, f"complete{why}: mpifl report {folder}"
    where = f" on {beat['host']}" if beat.get("host") not in (None, socket.gethostname()) else ""
    resume = f"mpifl resume {sweep or folder}"
    resume += "" if seen.checkpoint is not None or sweep else " --from-start"
    going_on = f"; {resume} goes on" + ("" if seen.checkpoint is None else f" after step {seen.checkpoint}")
    if beat.get("end") in (STOPPED, FAILED):
        if held:
            return RUNNING, "running: it is being resumed"
        reason = f": {beat['reason']}" if beat.get("reason") else ""
        return str(beat["end"]), f"{beat['end']} after step {seen.step}{reason}{going_on}"
    last = seen.written or now
    age = max(now - last, 0.0)
    quiet = f"nothing was written since {_clock(last, now)}, {in_words(age)} ago"
    if age <= QUIET_SECONDS:
        return RUNNING, f"running{where}"
    if held:
        return SILENT, f"{quiet}, though a process has it open: it hangs, is stopped, or works without output"
    elsewhere = f", unless it goes on{where}" if where else ""
    return ENDED, f"{quiet}: it was killed{elsewhere}{going_on}"


def _left(beat: Mapping[str, Any], now: float) -> float | None:
    """Return an estimate of the seconds left; None if there is none."""
    told = _float(beat.get("left_s"))
    return None if told is None else max(0.0, told - (now - (_float(beat.get("time")) or now)))


def is_held(path: Path) -> bool:
    """Return whether a process of this machine has a lock on a file, without touching the lock.

    `driver.checkpoints` locks `run.json` during a run. The result is False if the system does not list
    locks.
    """
    try:
        inode = str(path.stat().st_ino)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any("FLOCK" in line and f":{inode} " in line for line in locks)


def look_at_cases(
    folder: Path,
    titles: Mapping[str, str],
    known: dict[str, Seen],
    now: float | None = None,
    held: Callable[[Path], bool] | None = None,
) -> SeenCases:
    """Return the state of the runs in a folder.

    Args:
        folder: the folder.
        titles: name of a run folder -> its title, for all cases of a sweep, including those not begun.
        known: states of complete runs, which are not read again; this call adds to it.
        now: the time in seconds since 1970; None takes the present time.
        held: see `look`.
    """
    cases, held = dict[str, Seen](), is_held if held is None else held
    sweep = folder if (folder / "sweep.yaml").is_file() else None
    for name in dict.fromkeys([*titles, *(path.name for path in _runs(folder))]):
        seen = known.get(name) or look(folder / name, now, held, sweep)
        if seen.state == COMPLETE:
            known[name] = seen
        cases[titles.get(name, name)] = replace(seen, text="") if seen.state == WAITING else seen
    last = max((case.written or 0.0 for case in cases.values()), default=0.0)
    quiet = (time.time() if now is None else now) > last + QUIET_SECONDS
    quiet = quiet and not any(map(held, (folder / LOCKS).glob("*")))
    inside = [] if sweep else [str(path) for path in _sweeps(folder)]
    return SeenCases(str(folder), sweep is not None, cases, quiet, inside)


def _runs(folder: Path) -> list[Path]:
    """Return the run folders in a folder, oldest first."""
    files = sorted(folder.glob("*/run.json"), key=lambda file: (file.stat().st_mtime, file.parent.name))
    return [file.parent for file in files]


def _sweeps(folder: Path) -> list[Path]:
    """Return the folders of sweeps in a folder."""
    return sorted(file.parent for file in folder.glob("*/sweep.yaml"))


def newest(folder: Path) -> Path | None:
    """Return the run or sweep in a folder that began last; None if there is none."""
    files = [file for name in ("run.json", "sweep.yaml") for file in folder.glob(f"*/{name}")]
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


def holds_runs(folder: Path) -> bool:
    """Return whether a folder is that of a sweep, or holds run folders and is not a run folder itself."""
    if (folder / "sweep.yaml").is_file():
        return True
    return not (folder / "run.json").is_file() and bool(_runs(folder))


def _others(folder: Path) -> str:
    """Return a hint naming the newest run beside a missing folder, in case its name was mistyped."""
    there = newest(folder.parent)
    return "" if there is None or there == folder else f"; the newest beside it is {there}"


def _written(folder: Path) -> float | None:
    """Return when a file of a run folder was last written, in seconds since 1970."""
    times = []
    for path in (*folder.glob("*"), *folder.glob("logs/*"), *folder.glob("checkpoints/*")):
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # removed in the meantime
            continue
    return max(times, default=None)


def _at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _facts(config: Mapping[str, Any]) -> dict[str, str]:
    facts = {}
    for path in FACTS:
        found = _at(config, path)
        found = found.get("name") or found.get("path") if isinstance(found, Mapping) else found
        if found:
            facts[path.rpartition(".")[2]] = str(found)
    return facts


def _curves(path: Path) -> tuple[str, dict[str, list[float | None]]]:
    """Return the metric and the curves of a `metrics.csv` whose last row may be incomplete.

    The first column named `METRIC_mean` determines the metric.
    """
    try:
        whole = path.read_text().rpartition("\n")[0]
    except (OSError, ValueError):
        return "accuracy", {}
    header, *rows = [*csv.reader(io.StringIO(whole))] or [[]]
    rows = [row for row in rows if len(row) == len(header)]
    metric = next((name.removesuffix("_mean") for name in header if name.endswith("_mean")), "accuracy")
    columns = {f"{metric}_mean": "accuracy", f"{metric}_worst": "worst", **COLUMNS}
    places = {ours: header.index(theirs) for theirs, ours in columns.items() if theirs in header}
    found = {name: [_float(row[place]) for row in rows] for name, place in places.items()}
    return metric, {name: values for name, values in found.items() if any(v is not None for v in values)}


def _clusters(path: Path) -> list[tuple[int, int]]:
    """Return the number of clients of each cluster at the last evaluation, largest cluster first."""
    try:
        rows = [line.split(",") for line in path.read_text().rpartition("\n")[0].splitlines()[1:]]
        labels = {int(client): int(cluster) for _, client, cluster in rows}
    except (OSError, ValueError):
        return []
    return sorted(Counter(labels.values()).items(), key=lambda item: (-item[1], item[0]))


def _sample(config: Mapping[str, Any], count: int) -> str:
    """Return `count` and the number of all clients as text if only a sample is written; otherwise empty."""
    if not count or _at(config, "output.clients") != "sample":
        return ""
    every = _int(_at(config, "data.scenario.clients"))
    if not every:
        return f"a sample of {count}"
    return f"{count} of {every}" if count < every else ""


def _told_of_ranks(found: Any) -> list[dict[str, Any]]:
    """Return the entries of `progress.json` on each rank, without malformed ones."""
    ranks = [dict(rank) for rank in (found if isinstance(found, list) else ()) if isinstance(rank, dict)]
    for rank in ranks:
        spent = rank.pop("seconds", None)
        if isinstance(spent, dict):
            rank["seconds"] = {phase: s for phase, v in spent.items() if (s := _float(v)) is not None}
    return ranks


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def _yaml(path: Path, typed: bool = True) -> dict[str, Any]:
    try:
        found = yaml_file(path, "RUN", typed)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _float(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if abs(found) < 1e300 else None  # neither NaN nor infinity, which JSON does not know


def _int(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _moment(found: Any) -> float | None:
    """Return a time, given in ISO format or in seconds since 1970, in seconds since 1970; None if invalid."""
    try:
        moment = datetime.fromisoformat if isinstance(found, str) else datetime.fromtimestamp
        return moment(found).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _clock(moment: float, now: float) -> str:
    """Return a time of day, with the date if it is not today's."""
    then, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(now)
    return then.strftime("%H:%M:%S" if then.date() == today.date() else "%Y-%m-%d %H:%M:%S")


READ_WHOLE = {"configuration", "rows", "columns", "name"}  # keys of `vary` that may name folders


def plain_titles(folder: Path) -> dict[str, str] | None:
    """Return run folder name -> title for the cases of a sweep, without resolving their configurations.

    Args:
        folder: the folder of the sweep.

    Returns:
        The titles; None if names depend on more than the varied values. In that case
        `sweeps.results.titles` returns them.
    """
    tree = _yaml(folder / "sweep.yaml", typed=False)
    name, vary = tree.get("name"), tree.get("vary")
    if not isinstance(name, str) or not isinstance(vary, dict) or not vary or READ_WHOLE & vary.keys():
        return None
    if not all(isinstance(key, str) and isinstance(values, (list, dict)) for key, values in vary.items()):
        return None
    found = {}
    for labels in product(*map(labels_of, vary.values())):
        found[folder_name(name, slug_of(labels))] = title_of(dict(zip(vary, labels, strict=True)))
    return found


class Watched:
    """The folder being watched: a run, a sweep or another folder of runs, which may not exist yet.

    Args:
        name: name of the folder; empty takes the newest run or sweep in `home`.
        titles: returns, for the folder of a sweep, name of the run folder -> title of each case.
        home: folder that holds run folders, for an empty name.

    Raises:
        UserError: the name is empty and there is no run, or the folder holds sweeps but no run.
    """

    def __init__(
        self, name: str, titles: Callable[[Path], Mapping[str, str]], home: Path = Path("runs")
    ) -> None:
        found = Path(name) if name else newest(home)
        if found is None:
            raise UserError("RUN", str(home), "holds no run; name the folder of one")
        if not (found / "run.json").is_file() and not holds_runs(found) and (inside := _sweeps(found)):
            names = first_of([*map(str, inside)])
            remedy = f"holds sweeps, which are followed one at a time: name one of {names}"
            raise UserError("RUN", str(found), remedy)
        self.folder, self.titles = found, titles
        self._known: dict[str, Seen] = {}
        self._sweep: tuple[float, Mapping[str, str]] = 0.0, {}  # modification time of its file, titles

    def see(self, case: str = "") -> Seen | SeenCases | None:
        """Return the present state of the folder.

        Args:
            case: title of one of several runs; empty for all.

        Returns:
            The state; None if there is no such case.
        """
        if not holds_runs(self.folder):
            return None if case else look(self.folder)
        file = self.folder / "sweep.yaml"
        written = file.stat().st_mtime if file.is_file() else 0.0
        if written != self._sweep[0]:  # the sweep may have got more cases
            self._sweep = written, self.titles(self.folder)
        found = look_at_cases(self.folder, self._sweep[1], self._known)
        return found.cases.get(case) if case else found


# -- the terminal --------------------------------------------------------------------------------------------


def watch(
    see: Callable[[], Seen | SeenCases | None],
    once: bool = False,
    every: float = 2.0,
    out: TextIO | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> int:
    """Show the state of a folder until its runs end or Ctrl-C is pressed; return the exit code.

    On a terminal the display is updated in place. To a file or a pipe, a line is written for every change.

    Args:
        see: returns the state to show.
        once: show it once and return.
        every: seconds between two updates.
        out: output stream; None takes stdout.
        pause: waits for the given number of seconds.
    """

    def shown() -> Seen | SeenCases:
        found = see()
        assert found is not None
        return found

    console, seen = Console(file=out or sys.stdout, highlight=False), shown()
    if not console.is_terminal:
        console.width = UNBROKEN
    try:
        if once:
            console.print(picture(seen))
        elif console.is_terminal:
            with Live(picture(seen), console=console, auto_refresh=False) as live:
                while not seen.over:
                    pause(every)
                    seen = shown()
                    live.update(picture(seen), refresh=True)
        else:
            said = ""
            while True:
                line = one_line(seen)
                if line != said:
                    console.print(line, soft_wrap=True, markup=False)
                said = line
                if seen.over:
                    break
                pause(every)
                seen = shown()
    except KeyboardInterrupt:
        return 0
    bad = (seen,) if isinstance(seen, Seen) else seen.cases.values()
    return 1 if not once and any(case.state in (ENDED, FAILED, STOPPED) for case in bad) else 0


def one_line(seen: Seen | SeenCases) -> str:
    """Return the state of a run as a line for a log, which changes with its state and evaluations."""
    if isinstance(seen, SeenCases):
        return f"{seen.folder}: {seen.text}"
    if not seen.curves or seen.over:
        return seen.text
    return f"round {seen.last('round'):.0f}/{seen.rounds}  {'  '.join(_figures(seen))}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a curve as a line of at most `width` bars, scaled from its lowest to its highest value."""
    there = [v for v in values if v is not None]
    if not there:
        return ""
    low, step = min(there), (max(there) - min(there) or 1.0) / len(BARS)
    count = min(len(values), width)
    chosen = [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]
    return "".join(" " if v is None else BARS[min(int((v - low) / step), len(BARS) - 1)] for v in chosen)


def _figures(seen: Seen) -> Iterator[str]:
    """Yield the last figures of a run."""
    metric = seen.metric.replace("_", " ")
    texts = {"accuracy": f"{metric} {{:.4f}}", "worst": "worst {:.4f}", "ari": "ARI {:.2f}"}
    for name, text in (texts | {"clusters": "clusters {:.0f}"}).items():
        if (value := seen.last(name)) is not None:
            yield text.format(value)
    sent = [seen.last("bytes_up"), seen.last("bytes_down")]
    if None not in sent:
        yield in_bytes(sum(b for b in sent if b))


def picture(seen: Seen | SeenCases) -> RenderableType:
    """Return the display for a terminal."""
    return _picture_of_cases(seen) if isinstance(seen, SeenCases) else _picture_of_run(seen)


STYLES = {RUNNING: "green", COMPLETE: "bold green", WAITING: "cyan", SILENT: "yellow", STOPPED: "yellow"}


def _picture_of_run(seen: Seen) -> RenderableType:
    style = STYLES.get(seen.state, "bold red")
    parts: list[RenderableType] = [Text(seen.folder, style="bold"), Text(seen.text, style=style)]
    if seen.state == WAITING:
        return Group(*parts)
    if seen.facts:
        parts.append(Text(", ".join(f"{k} {v}" for k, v in seen.facts.items()), style="dim"))
    row = Table.grid(padding=(0, 2))
    times = [f"round {seen.step}/{seen.rounds or '?'}"]
    if seen.left_s is not None:
        times.append(f"about {in_words(seen.left_s)} left")
    if seen.started is not None:
        times.append(f"started {datetime.fromtimestamp(seen.started):%Y-%m-%d %H:%M:%S}")
    row.add_row(ProgressBar(seen.rounds or 1, seen.step, width=40), *times)
    parts.append(row)
    if seen.doing and not seen.over:
        parts.append(Text(f"now: {seen.doing}"))
    curves = Table.grid(padding=(0, 2))
    titles = {"accuracy": f"mean {seen.metric}", "worst": "worst client", "loss": "test loss"}
    for name, title in titles.items():
        values = [v for v in seen.curves.get(name, ()) if v is not None]
        if values:
            text = f"{values[-1]:.4f}  (from {min(values):.4f} to {max(values):.4f})"
            curves.add_row(title, sparkline(values, 48), text)
    parts += [Text(), curves] if curves.row_count else []
    parts += [Text(), _evaluations(seen)] if seen.curves else []
    if seen.clusters:
        sizes = ", ".join(f"{label}: {n}" for label, n in seen.clusters[:20])
        more = f", and {len(seen.clusters) - 20} more" if len(seen.clusters) > 20 else ""
        of = f", of {seen.sample} clients" if seen.sample else ""
        parts.append(Text(f"clients by cluster{of}: {sizes}{more}"))
    parts += [Text(), _ranks(seen)] if seen.ranks else []
    for name, lines in seen.logs.items():
        parts += [Text(f"{name}:", style="yellow"), *(Text(f"  {line}") for line in lines)]
    return Group(*parts)


def _evaluations(seen: Seen) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = {
        "round": ("round", "{:.0f}".format),
        "seconds": ("after", in_words),
        "accuracy": (seen.metric, "{:.4f}".format),
        "worst": ("worst", "{:.4f}".format),
        "ari": ("ARI", "{:.2f}".format),
        "clusters": ("clusters", "{:.0f}".format),
        "churn": ("churn", "{:.2f}".format),
        "bytes_up": ("up", in_bytes),
        "bytes_down": ("down", in_bytes),
    }
    names = [name for name in shown if name in seen.curves]
    for name in names:
        table.add_column(shown[name][0], justify="right")
    rows = [*zip(*(seen.curves[name] for name in names), strict=True)]
    for row in rows[-LAST_EVALUATIONS:]:
        cells = zip(names, row, strict=True)
        table.add_row(*("" if v is None else shown[name][1](v) for name, v in cells))
    return table


def _ranks(seen: Seen) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    total: dict[str, float] = {}
    for rank in seen.ranks:
        for phase, seconds in (rank.get("seconds") or {}).items():
            total[phase] = total.get(phase, 0.0) + seconds
    longest = sorted((phase for phase, s in total.items() if s >= LEAST_S), key=lambda p: -total[p])
    phases = [phase for phase in total if phase in longest[:MOST_PHASES]]
    for title in ("rank", "host", "device", "visits", *(f"{phase}, s" for phase in phases)):
        table.add_column(title, justify="left" if title in ("host", "device") else "right")
    for number, rank in enumerate(seen.ranks[:MOST_RANKS]):
        spent = rank.get("seconds") or {}
        cells = [rank.get("host"), rank.get("device"), rank.get("visits")]
        times = [f"{spent[p]:.1f}" if p in spent else "" for p in phases]
        table.add_row(str(number), *("" if c is None else str(c) for c in cells), *times)
    if len(seen.ranks) > MOST_RANKS:
        table.add_row("...", f"{len(seen.ranks)} ranks in all")
    return table


def _picture_of_cases(seen: SeenCases) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    metrics = {case.metric.replace("_", " ") for case in seen.cases.values() if case.curves} or {Seen.metric}
    several = len(metrics) > 1  # then each case names its own
    head = "metric" if several else metrics.pop()
    for title in ("case" if seen.is_sweep else "run", "state", "round", head, "ARI", "left", ""):
        table.add_column(title, justify="right" if title in ("round", head, "ARI", "left") else "left")
    order = sorted(seen.cases.items(), key=lambda item: item[1].state not in (RUNNING, SILENT))
    for title, case in order[:MOST_CASES]:
        value, ari, metric = case.last("accuracy"), case.last("ari"), case.metric.replace("_", " ")
        table.add_row(
            Text(title),
            Text(case.state, style=STYLES.get(case.state, "bold red")),
            f"{case.step}/{case.rounds}" if case.rounds else "",
            "" if value is None else f"{value:.4f}{f' {metric}' if several else ''}",
            "" if ari is None else f"{ari:.2f}",
            "" if case.left_s is None else in_words(case.left_s),
            Text("" if case.state in (RUNNING, COMPLETE, WAITING) else case.text, style="dim"),
        )
    parts: list[RenderableType] = [Text(seen.folder, style="bold"), Text(seen.text), table]
    if len(order) > MOST_CASES:
        parts.append(Text(f"and {len(order) - MOST_CASES} more", style="dim"))
    return Group(*parts)


def as_json(seen: Seen | SeenCases, now: float | None = None) -> str:
    """Return the state of a folder as JSON, for the page in a browser."""
    tree = {"kind": "cases" if isinstance(seen, SeenCases) else "run", "now": now or time.time()}
    if isinstance(seen, SeenCases):
        few = {"state", "text", "step", "rounds", "left_s", "folder", "metric"}
        cases = [
            {"title": title, **{k: v for k, v in asdict(case).items() if k in few}}
            | {name: case.last(name) for name in ("accuracy", "worst", "ari")}
            for title, case in seen.cases.items()
        ]
        return json.dumps({**tree, "folder": seen.folder, "text": seen.text, "cases": cases})
    return json.dumps({**tree, **asdict(seen), "over": seen.over})
