"""The cases of a sweep: every combination of the values that `vary` names, and the parts of them.

`vary` maps keys of the configuration to values: a list, or a mapping of labels to values. Three of its keys
are no keys of the configuration. The values of `vary.configuration` are names of whole configurations, which
the sweep's own keys override. The values of `vary.rows` and `vary.columns` are parts of a configuration that
override it; the part of a group of columns may have a key `rows` with changes for single rows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from mpifl.core.beginning import PHASES, STEPS, with_steps
from mpifl.core.case_names import (
    folder_name,
    label_among,
    labels_of,
    place_of,
    rows_left_out,
    slug_of,
    title_of,
)
from mpifl.core.errors import UserError, nearest, require
from mpifl.core.textfiles import MAX_NAME_BYTES, is_file, json_file, yaml_file
from mpifl.experiment import loader
from mpifl.experiment.schema import REFUSE, Config, OutputConfig
from mpifl.experiment.section_checks import check_sections
from mpifl.experiment.table_layout import COLUMNS, OF_SWEEPS, ROWS, SEED, TableConfig
from mpifl.simulation.availability import Availability
from mpifl.simulation.client_devices import Alike
from mpifl.simulation.delays import Constant
from mpifl.simulation.network import Links
from mpifl.training.per_client import names_devices

MAX_CASES = 10_000
SWEEP_FILE = "sweep.yaml"  # in the sweep's folder: the configuration that it was started with
CONFIGURATIONS_FILE = "configurations.json"  # beside it: the configurations that it varies, at that time
MEASURED = ("wall_seconds", "seconds", "arrivals_per_second", "mpi_")  # beginnings of figures' names
LEAN = {"output": {"model": False}}  # cases keep no models, unless output.model is set to true
CONFIGURATIONS = "vary.configuration"  # key of a started sweep's tree that holds these configurations


@dataclass(frozen=True)
class Case:
    """One combination of values; its configuration is made and checked when it is first asked for.

    Attributes:
        labels: varied key -> label of its value.
        tree: the configuration, as nested mappings.
        own: the varied keys whose labels the user chose, in a mapping of labels to values.
    """

    labels: Mapping[str, str]
    tree: Mapping[str, Any]
    own: tuple[str, ...] = ()

    @cached_property
    def config(self) -> Config:
        """The configuration.

        Raises:
            UserError: it is invalid, or needs files that are not there; with the title of the case.
        """
        try:
            config: Config = loader.from_tree(Config, self.tree)
            check_sections(config)
        except UserError as error:
            raise error.in_case(self.title) from None
        return config

    @cached_property
    def can_run(self) -> bool:
        """Whether the configuration is valid."""
        try:
            return bool(self.config)
        except UserError:  # raised again where the case is to run
            return False

    @property
    def name(self) -> str:
        """The name in the configuration, which need not be valid."""
        return str(self.tree.get("name", Config.name))

    @property
    def output(self) -> OutputConfig:
        """The section `output`; the rest of the configuration need not be valid."""
        section: OutputConfig = loader.from_tree(OutputConfig, self.tree["output"], "output")
        return section

    @property
    def slug(self) -> str:
        """The labels as one word; the id of the run folder."""
        return slug_of(self.labels.values())

    @property
    def title(self) -> str:
        """The labels, each after its key."""
        return title_of(self.labels)

    @cached_property
    def training(self) -> str:
        """The settings that decide the training of a synchronous run, as text.

        They are equal for cases that differ only in times, so that one training gives all these cases. Times
        depend on network, delay, availability and devices (except if clients train in another way by the name
        of their device, or metrics are averaged by it). Empty if times decide what is trained, if callbacks
        must be called for each case, or if the run folder lacks the visits or samples from which times are
        computed, see `retime.check`.
        """
        evaluation, output = self.config.evaluation, self.config.output
        changes = self.config.data.scenario.changes or self.config.drift.kind is not None
        some = evaluation.clients is not None or changes
        unknown = self.config.devices.needs_samples and some
        timed = not self.config.policy.fixed_visits or bool(self.config.decided_by_time)
        if timed or output.clients != "all" or unknown or output.callbacks:
            return ""
        plain = replace(self.config, network=Links(), delay=Constant(), availability=Availability())
        if not names_devices(plain.per_client) and "device" not in evaluation.by:
            plain = replace(plain, devices=Alike())
        written = OutputConfig(model=output.model, updates=output.updates, client_models=output.client_models)
        return json.dumps(loader.to_tree(replace(plain, output=written)))

    @cached_property
    def beginning(self) -> Mapping[str, str]:
        """The first phases that it can share, each with a digest of what decides it; see `beginnings`."""
        from mpifl.experiment.shared_beginning import shared_phases  # needs torch

        return shared_phases(self.config)

    @cached_property
    def steps_alike(self) -> str:
        """What cases have in common that differ in `drift` alone; see `steps_before_change`."""
        from mpifl.experiment.shared_beginning import steps_alike  # needs torch

        return steps_alike(self.config)

    def folder(self, parent: Path) -> Path:
        """Return the run folder.

        Args:
            parent: the sweep's folder.
        """
        return parent / folder_name(self.name, self.slug)

    def placed(self, parent: Path) -> Config:
        """Return the configuration with the folder and the label of its run.

        Args:
            parent: the sweep's folder.
        """
        output = self.config.output
        own = [label for key, label in self.labels.items() if key in self.own and not is_seed(key)]
        label = ", ".join([*([output.label] if output.label else []), *own]) or None
        return replace(
            self.config,
            output=replace(output, folder=str(parent), id=self.slug, existing=REFUSE, label=label),
        )


# -- the cases -----------------------------------------------------------------------------------------------


def combinations(tree: Mapping[str, Any]) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Return the labels and the values of all cases, each as varied key -> label or value.

    Args:
        tree: the configuration, as nested mappings.

    Raises:
        UserError: `vary` is invalid, or there are more than `MAX_CASES`.
    """
    vary = tree.get("vary") or {}
    remedy = "name at least one key and its values, as in algorithm.alpha: [0.3, 0.6]"
    require(isinstance(vary, dict) and bool(vary), "vary", vary, remedy)
    odd = [key for key in vary if not isinstance(key, str)]
    require(not odd, "vary", odd[:1], "is not a key of a configuration")
    axes = [_labelled(key, values) for key, values in vary.items()]
    count = num_cases(vary)
    require(count <= MAX_CASES, "vary", count, f"are more than {MAX_CASES} cases; use fewer values")
    out, without = [], rows_left_out(vary)
    for combination in product(*axes):
        labels, values = zip(*combination, strict=True)
        if place_of(named := dict(zip(vary, labels, strict=True))) not in without:
            out.append((named, dict(zip(vary, values, strict=True))))
    require(bool(out), "vary", [*vary], "every group of columns leaves out every row")
    return out


def case_of(tree: Mapping[str, Any], labels: Mapping[str, str], values: Mapping[str, Any]) -> Case:
    """Return the case of one combination.

    Args:
        tree: the configuration, as nested mappings.
        labels: varied key -> label of its value.
        values: varied key -> value.

    Raises:
        UserError: the parts of its configuration do not fit together.
    """
    own = tuple(key for key, values in tree["vary"].items() if isinstance(values, dict))
    try:
        return Case(labels, _configuration(tree, labels, values), own)
    except UserError as error:
        raise error.in_case(title_of(labels)) from None


def cases(tree: Mapping[str, Any], part: Part | None = None) -> list[Case]:
    """Return all cases of a configuration with `vary`, after checking those that are to run.

    Args:
        tree: the configuration, as nested mappings.
        part: the cases that are to run; None for all. The others may be invalid.

    Raises:
        UserError: as `unchecked_cases`; or `part` names what the sweep does not have, one of its cases is
            invalid, or two of them are the same run.
    """
    out = unchecked_cases(tree)
    if part is not None:
        part.check(tree["vary"])
    _check_different(out if part is None else part.chosen(out), tree)
    return out


def unchecked_cases(tree: Mapping[str, Any]) -> list[Case]:
    """Return all cases of a configuration with `vary`; none is checked.

    Args:
        tree: the configuration, as nested mappings.

    Raises:
        UserError: `vary` or `table` is invalid, two cases have the same name, a name is too long, or there
            are more than `MAX_CASES`.
    """
    out = [case_of(tree, labels, values) for labels, values in combinations(tree)]
    slugs = [case.slug for case in out]
    twice = next((slug for slug in slugs if slugs.count(slug) > 1), None)
    require(twice is None, "vary", twice, "two cases have the same name; label the values")
    long = next((slug for slug in slugs if len(slug.encode()) > MAX_NAME_BYTES), None)
    require(long is None, "vary", long, "is too long a name for a folder; label the values, in few letters")
    if tree.get("table") is not None:
        table_of(tree).check(tree["vary"])
    return out


def started_with(folder: Path, key: str = "RUN") -> dict[str, Any]:
    """Return the configuration that a sweep was started with.

    Args:
        folder: the sweep's folder.
        key: key or option that names the folder, for messages.

    Raises:
        UserError: there is no such file, or it holds no mapping.
    """
    require((folder / SWEEP_FILE).is_file(), key, str(folder), f"is not a sweep: it has no {SWEEP_FILE}")
    tree = yaml_file(folder / SWEEP_FILE, key)
    require(isinstance(tree, dict), key, str(folder), f"has a {SWEEP_FILE} that holds no mapping")
    file = folder / CONFIGURATIONS_FILE
    known = json_file(file, key) if file.is_file() else None
    require(known is None or isinstance(known, dict), key, str(file), "holds no mapping")
    return dict(tree) | ({} if known is None else {CONFIGURATIONS: known})


def configurations_of(name: str, options: Sequence[str] = ()) -> list[Config]:
    """Return the configurations of a file, a run folder or a sweep's folder; those of all cases of a sweep.

    Args:
        name: name or path of a configuration, or the folder.
        options: words of `--key.path value` options.

    Raises:
        UserError: a file or a value is invalid.
    """
    if is_file(Path(name) / SWEEP_FILE, "CONFIG"):
        tree = changed(started_with(Path(name), "CONFIG"), loader.overrides(options))
    else:
        run = Path(name) / "config.yaml"
        tree = read(str(run) if is_file(run, "CONFIG") else name, options)
    trees = [case.tree for case in unchecked_cases(tree)] if tree.get("vary") else [tree]
    return [loader.from_tree(Config, one) for one in trees]


def with_configurations(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a sweep with the contents of the configurations that `vary.configuration` names.

    The cases then stay the same if one of these files changes later.

    Args:
        tree: the configuration, as nested mappings.
    """
    vary = tree.get("vary")
    values = vary.get("configuration") if isinstance(vary, dict) else None
    if not isinstance(values, (dict, list)):
        return dict(tree)
    names = values.values() if isinstance(values, dict) else values
    return {**tree, CONFIGURATIONS: {str(name): loader.read(str(name)) for name in names}}


def read(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the tree of a sweep: a configuration, overridden by command-line options.

    Args:
        name: the configuration: a file, or the name of one that comes with mpifl.
        options: command-line options.
    """
    return loader.resolved(name, loader.overrides(options), changed)


def changed(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration overridden by a user's changes.

    In a sweep the changes apply to every case: they also override parts of `vary.rows` or `vary.columns` that
    contain a changed section or key.

    Args:
        tree: the configuration, as nested mappings.
        changes: keys and values; may include `vary` and `table`.

    Raises:
        UserError: a changed key is varied, so that no case would take its value.
    """
    out = loader.merged(tree, changes)
    vary = out.get("vary")
    own = {name: value for name, value in changes.items() if name not in OF_SWEEPS}
    if not own or not isinstance(vary, dict):
        return out
    for key, value in _leaves(own):
        varied = next((varied for varied in map(str, vary) if _decides(varied, key)), None)
        remedy = f"vary.{varied} gives each case its own; use --only {varied}=LABEL, or change vary.{varied}"
        require(varied is None, key, value, remedy)

    def also(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        mine = {name: value for name, value in own.items() if any(_decides(key, name) for key in part)}
        part = loader.merged(part, mine)
        return {**part, ROWS: _each(part[ROWS], also)} if ROWS in part else part

    axes = {key: _each(vary[key], also) for key in (ROWS, COLUMNS) if key in vary}
    return {**out, "vary": {**vary, **axes}}


def _decides(key: str, other: str) -> bool:
    """Return whether a key determines another one: the key itself, one below it, or one that it excludes."""
    return f"{other}.".startswith(f"{key}.") or {key, other} <= {*loader.EXCLUSIVE}


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a tree, without sections, and their values."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _each(values: Any, change: Callable[[Any], Any]) -> Any:
    """Return the values of a varied key after applying `change` to each."""
    if isinstance(values, dict):
        return {label: change(value) for label, value in values.items()}
    return [*map(change, values)] if isinstance(values, list) else values


def _configuration(
    tree: Mapping[str, Any], labels: Mapping[str, str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration of one combination of values, as nested mappings."""
    one = {name: value for name, value in tree.items() if name not in (*OF_SWEEPS, CONFIGURATIONS)}
    special: Mapping[str, Any] = {}
    for key, value in values.items():
        if key in (ROWS, COLUMNS):
            require(isinstance(value, dict), f"vary.{key}", value, "use parts of a configuration")
            part = dict(value)
            if key == COLUMNS:
                special = _special(part.pop(ROWS, {}), tree, labels)
            one = loader.merged(one, part)
        elif key == "configuration":
            known = tree.get(CONFIGURATIONS, {}).get(str(value))
            file = loader.read(str(value)) if known is None else known  # saved as JSON
            _check_algorithm(tree, file, str(value))
            one = loader.merged(file, one)
        else:
            one = loader.merged(one, loader.nested(key.split("."), value))
    return loader.merged(LEAN, loader.merged(one, special))


def _special(rows: Any, tree: Mapping[str, Any], labels: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the changes of a group of columns in this case's row: `vary.columns.LABEL.rows.LABEL`."""
    path = f"vary.columns.{labels[COLUMNS]}.rows"
    require(isinstance(rows, dict), path, rows, "use a mapping of rows to parts of a configuration")
    known = labels_of(tree["vary"].get(ROWS, []))
    for label in rows:
        if label_among(label, known) is None:
            raise UserError(path, label, f"no such row; {nearest(str(label), known)}")
    mine = labels.get(ROWS, "")
    part: Any = next((part for label, part in rows.items() if label_among(label, (mine,))), {})
    require(isinstance(part, dict), f"{path}.{labels.get(ROWS)}", part, "use a part of a configuration")
    return dict(part)


def table_of(tree: Mapping[str, Any]) -> TableConfig:
    """Return the section `table` of a sweep that has one."""
    return loader.from_tree(TableConfig, tree["table"], "table")


def table_if_any(tree: Mapping[str, Any]) -> TableConfig | None:
    """Return the section `table` of a sweep; None without one."""
    return None if tree.get("table") is None else table_of(tree)


def is_seed(key: str) -> bool:
    """Return whether a varied key is a seed; runs that differ only in seeds form one group."""
    return key.partition(".")[0] == SEED


def num_cases(vary: Mapping[str, Any]) -> int:
    """Return the number of combinations, without checking them."""
    return prod(len(values) if isinstance(values, (list, dict)) else 1 for values in vary.values())


def _labelled(key: str, values: Any) -> list[tuple[str, Any]]:
    """Return the labels and values of one key."""
    fits = isinstance(values, (list, dict)) and len(values) > 0
    require(fits, f"vary.{key}", values, "use a list of values, or a mapping of labels to values")
    every = values.values() if isinstance(values, dict) else values
    return [*zip(labels_of(values), every, strict=True)]


def _check_algorithm(own: Mapping[str, Any], file: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` if the sweep's own algorithm overrides that of a varied configuration.

    Otherwise a row would be labelled with an algorithm that was never run.
    """
    mine, theirs = (_algorithm(tree.get("algorithm")) for tree in (own, file))
    remedy = (
        f"vary.configuration {name} says {theirs}, which would never run; leave algorithm out of the sweep"
    )
    require(mine in (None, theirs), "algorithm", mine, remedy)


def _algorithm(section: Any) -> str | None:
    """Return the name in an `algorithm` section."""
    name = section.get("name") if isinstance(section, dict) else section
    return None if name is None else str(name)


def _check_different(some_cases: Sequence[Case], tree: Mapping[str, Any]) -> None:
    """Raise `UserError` if a case is invalid, or two cases are the same run.

    Rows under `tuned`, whose options were chosen for them, may have become the same as others.
    """
    seen: dict[str, Case] = {}
    tuned = tree.get("tuned", ())
    for case in some_cases:
        resolved = {k: v for k, v in loader.to_tree(case.config).items() if k not in ("name", "output")}
        if case.labels.get(ROWS) in tuned:
            continue
        known = seen.setdefault(json.dumps(resolved), case)
        if known is not case:
            keys = [key for key, label in case.labels.items() if known.labels[key] != label]
            own = [key for key in tree if key not in ("vary", "name", "output", "system", CONFIGURATIONS)]
            why = f" below the sweep's own {', '.join(own)}" if "configuration" in keys and own else ""
            remedy = f"the same run as {known.slug}{why}; use other values of {', '.join(keys)}"
            raise UserError("vary", case.slug, remedy)


# -- parts of a sweep ----------------------------------------------------------------------------------------


def trainings(some_cases: Sequence[Case]) -> list[list[Case]]:
    """Return cases grouped by their training, in the order of the first case of each group."""
    found: dict[str, list[Case]] = {}
    for case in some_cases:
        found.setdefault(case.training or case.slug, []).append(case)
    return [*found.values()]


def beginnings(every: Sequence[Case], table: TableConfig | None) -> dict[str, dict[str, str]]:
    """Return the first phases that each case of a sweep computes together with other cases.

    Cases that are retimed share nothing: they are not trained. If the table shows measured times, only cases
    that ask for it (`system.share_beginnings: true`) share.

    Args:
        every: the cases; invalid ones are left out.
        table: the section `table`, if there is one.

    Returns:
        Name of a case -> phase -> digest of what decides the phase.
    """
    measured = table is not None and any(map(is_measured, (f.of for f in table.figures.values())))
    valid = [case for case in every if case.can_run]
    sharing = {
        case.slug: case.beginning for case in valid if case.config.system.share_beginnings or not measured
    }
    firsts = [unit[0] for unit in trainings(valid) if unit[0].slug in sharing]
    counts = Counter(place for case in firsts for place in sharing[case.slug].items())
    steps = steps_before_change(firsts)
    return {
        slug: {phase: about for phase, about in of.items() if counts[phase, about] > 1} | steps.get(slug, {})
        for slug, of in sharing.items()
    }


def steps_before_change(some_cases: Sequence[Case]) -> dict[str, dict[str, str]]:
    """Return the steps that cases share until data change: of cases that differ in `drift` alone.

    The number of steps is that by which the most are saved; cases whose data change before take no part.

    Returns:
        Name of a case -> `STEPS` -> what identifies the steps: a digest, a dot and their number.
    """
    from mpifl.experiment.shared_beginning import first_change  # needs torch

    alike, out = dict[str, list[Case]](), dict[str, dict[str, str]]()
    for case in some_cases:
        alike.setdefault(case.steps_alike or case.slug, []).append(case)
    for about, members in alike.items():
        ends = {case.slug: first_change(case.config) - 1 for case in members}
        last = max(case.config.rounds for case in members)
        saved = {end: end * (sum(other >= end for other in ends.values()) - 1) for end in ends.values()}
        step = max((end for end in saved if 0 < end < last), key=lambda end: (saved[end], -end), default=0)
        if step and saved[step]:
            out |= {slug: {STEPS: with_steps(about, step)} for slug, end in ends.items() if end >= step}
    return out


def in_order(some_cases: Sequence[Case], shared: Mapping[str, Mapping[str, str]]) -> list[int]:
    """Return the places of cases in the order in which they run: that of the sweep, with one exception.

    Cases without drift leave their steps to no other case (`driver.shared_steps`); they run after those that
    do.

    Args:
        some_cases: the cases, in the order of the sweep.
        shared: what each case shares, see `beginnings`.
    """
    steps = [shared.get(case.slug, {}).get(STEPS) for case in some_cases]
    waits = [bool(steps[i]) and case.config.drift.kind is None for i, case in enumerate(some_cases)]
    last = {about: i for i, about in enumerate(steps) if not waits[i]}

    def place(i: int) -> tuple[int, bool]:
        return max(i, last.get(steps[i], i)) if waits[i] else i, waits[i]

    return sorted(range(len(steps)), key=place)


def shared_lines(every: Sequence[Case], table: TableConfig | None) -> list[str]:
    """Return a line for each first phase that cases share: how often it is computed, for how many of them."""
    shared, lines = beginnings(every, table), list[str]()
    for phase, title in PHASES.items():
        which = [of[phase] for of in shared.values() if phase in of]
        lines += [f"{title}: computed {len(set(which))} times for {len(which)} cases"] if which else []
    return lines


def is_measured(figure: str) -> bool:
    """Return whether a figure of a run is measured time or traffic of this machine, not of the federation."""
    return figure.startswith(MEASURED)


@dataclass(frozen=True)
class Part:
    """The cases of a sweep that one process runs; all by default.

    Attributes:
        only: varied key -> labels, or texts with several labels separated by commas.
        share: i and N; of the cases in `only`, the i-th of N parts (i from 1). Cases with the same training
            stay together.
    """

    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    share: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, only: Sequence[str] = (), share: str | None = None) -> Part:
        """Return the part that command-line options describe.

        Args:
            only: texts `KEY=LABEL,LABEL`.
            share: text `i/N`.

        Raises:
            UserError: an option has another form.
        """
        chosen: dict[str, list[str]] = {}
        for text in only:
            key, equals, names = text.partition("=")
            require(bool(equals and names), "--only", text, "use KEY=LABEL, as in rows=FedAvg,Local")
            chosen.setdefault(key, []).append(names)
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", share or "1/1")
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        require(1 <= number <= count, "--case", share, "use i/N with i from 1 to N, as in 2/8")
        return cls(chosen, (number, count))

    @property
    def options(self) -> str:
        """The command-line options that describe this part; empty for a whole sweep."""
        texts = [f"--only {quote(f'{key}={text}')}" for key, names in self.only.items() for text in names]
        number, count = self.share
        return " ".join([*texts, *([f"--case {number}/{count}"] if count > 1 else [])])

    def check(self, vary: Mapping[str, Any]) -> None:
        """Raise `UserError` if `only` names a key or label that the sweep does not have."""
        for key, names in self.only.items():
            if key not in vary:
                raise UserError("--only", key, f"is not varied; {nearest(key, [*vary])}")
            known = labels_of(vary[key])
            for name in _labels(names, known):
                if name not in known:
                    raise UserError("--only", f"{key}={name}", f"no such label; {nearest(name, known)}")

    def chosen(self, all_cases: Sequence[Case]) -> list[Case]:
        """Return the cases of this part, in order."""
        number, count = self.share
        only = {key: _labels(names, {c.labels[key] for c in all_cases}) for key, names in self.only.items()}
        named = [c for c in all_cases if all(c.labels[key] in names for key, names in only.items())]
        if count == 1:
            return named
        mine = {id(case) for twins in trainings(named)[number - 1 :: count] for case in twins}
        return [case for case in named if id(case) in mine]


def _labels(texts: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the labels in texts that list them; a label may itself contain commas.

    Args:
        texts: labels separated by commas.
        known: all labels.
    """
    out = []
    for text in texts:
        parts = text.split(",")
        while parts:
            names = [",".join(parts[:n]).strip() for n in range(len(parts), 0, -1)]
            found = [label_among(name, known) for name in names]
            at = next((i for i, label in enumerate(found) if label is not None), len(names) - 1)
            out.append(found[at] or names[at])
            parts = parts[len(names) - at :]
    return out


ALL = Part()


def note_on(config: Config) -> str:
    """Return a note that a page ignores the values in `vary`; empty for a configuration without `vary`."""
    keys = ", ".join(map(str, config.vary or ()))
    return f"\n\nvary: `mpifl sweep` gives other values to {keys}; this is without them" if keys else ""


def note_on_beginnings(tree: Mapping[str, Any]) -> str:
    """Return the lines of `shared_lines` for a configuration with `vary`; empty without it."""
    if not tree.get("vary"):
        return ""
    own = with_configurations(dict(tree))
    lines = shared_lines(unchecked_cases(own), table_if_any(own))
    return "".join(f"\n  {line}" for line in lines)
