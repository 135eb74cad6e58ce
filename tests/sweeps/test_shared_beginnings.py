"""Cases of a sweep that share their beginnings: the same results as alone, each phase computed once."""

from __future__ import annotations

import csv
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields

import pytest
from support import toy
from support.each import for_each
from support.runs import CONFIG
from support.sweeps import records, results, swept

from mpifl.algorithms.ccfl import CCFL
from mpifl.algorithms.csafl import CSAFL
from mpifl.algorithms.emdcfl import EMDCFL
from mpifl.algorithms.fedclust import FedClust
from mpifl.algorithms.fedcuau import FedCUAU
from mpifl.algorithms.fedsoft_async import FedSoftAsync
from mpifl.algorithms.flexcfl import FlexCFL
from mpifl.algorithms.flt import FLT
from mpifl.algorithms.local import Local
from mpifl.algorithms.pacfl import PACFL
from mpifl.algorithms.pca_km_hc import PCAKMHC
from mpifl.algorithms.registry import CATALOGUE
from mpifl.algorithms.ucfl import UCFL
from mpifl.comm.single import Single
from mpifl.core import beginning
from mpifl.core.beginning import deciding_fields, phases
from mpifl.core.capabilities import LOOKS, SETUP, SHOWN, STATISTICS, TRAINING
from mpifl.core.errors import Stopped, UserError
from mpifl.experiment import loader, shared_beginning
from mpifl.runtime import step_config
from mpifl.supervision.logging import warn_once
from mpifl.sweeps import sweep as sweeping
from mpifl.sweeps.cases import beginnings, cases, read, table_if_any
from mpifl.sweeps.sweep import listed

EMD = ["--algorithm", "{name: emdcfl, against: train, sample_cap: 24}", "--data.scenario.clients", "4"]
GRID = ["--vary", "{algorithm.epsilon: [0.001, 0.1], algorithm.projection: [0.9, 0.5]}"]
DRIFT = ["--policy", "client_decides", "--rounds", "4", "--data.scenario"]
DRIFT += ["{name: ccfl, clusters: 2, clients: 4, smallest: 40, largest: 60, test_images: 20, public: 60}"]
NETWORK = ["--data.source", "{name: digits, normalise: unit}", "--algorithm"]
SWEEPS = {
    "emdcfl": [*EMD, *GRID],
    "emdcfl, a rounded exchange": [*EMD, *GRID, "--payload.dtype", "bfloat16"],
    "emdcfl, attackers": [*EMD, *GRID, "--attack", "{name: sign_flip, share: 0.25}"],
    "emdcfl, compressed": [*EMD, *GRID, "--payload.compression", "{name: top_k, share: 0.5}"],
    "emdcfl, half": [*EMD, *GRID, "--participation", "0.5"],
    "emdcfl, stacked": [*EMD, *GRID, "--system.stack", "4"],
    "ucfl": ["--algorithm", "ucfl", "--vary", "{algorithm.streams: [0, 2]}"],
    "ucfl, private": [
        *("--algorithm", "ucfl", "--vary", "{algorithm.streams: [0, 2]}"),
        *("--payload.dtype", "float16"),
    ],
    "ccfl": ["--algorithm", "ccfl", *DRIFT, "--vary", "{algorithm.alpha0: [0.1, 0.2]}"],
    "flt": [
        *(*NETWORK, "{name: flt, centroids: 2, pretrain_epochs: 1, finetune_epochs: 1}"),
        *("--vary", "{algorithm.gamma: [0.2, 0.5]}"),
    ],
}
USUAL = ("emdcfl", "ucfl", "ccfl")  # the others are nightly


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.nightly]) for name in SWEEPS]
)
def test_shared_beginnings_give_the_results_of_cases_alone(which, tmp_path):
    alone, shared = (swept(tmp_path, SWEEPS[which], share) for share in ("false", "true"))
    assert results(shared) == results(alone)
    assert not any(records(alone).values())
    first, *others = records(shared).values()
    for phase in first:
        assert any(set(record[phase]) - {""} for record in others), f"{phase} is shared"


def test_a_grid_trains_once_and_looks_once_for_each_projection(tmp_path, monkeypatch, capsys):
    """Four cases of 4 clients: 4 trainings instead of 16, 2 * 4 questions, 2 * 4 * 3 answers, then no more.

    Each case also calls `local_update` once without taking a step, to learn the size of an upload.
    """
    calls = Counter()

    def counting(hook):
        made = getattr(EMDCFL, hook)

        def counted(self, *given):
            calls[hook, self.epsilon, self.projection] += 1
            return made(self, *given)

        return counted

    for hook in ("local_update", "ask", "answer", "compare"):
        monkeypatch.setattr(EMDCFL, hook, counting(hook))
    options = [*EMD, *GRID, "--rounds", "1"]
    folder = swept(tmp_path, options, None)
    assert calls == {
        ("local_update", 0.001, 0.9): 4 + 1,
        **{("local_update", *case): 1 for case in ((0.001, 0.5), (0.1, 0.9), (0.1, 0.5))},
        **{("ask", 0.001, p): 4 for p in (0.9, 0.5)},
        **{(hook, 0.001, p): 4 * 3 for hook in ("answer", "compare") for p in (0.9, 0.5)},
    }
    first = {"tiny-0.001-0.9": 4}
    assert records(folder) == {
        "tiny-0.001-0.9": {TRAINING: {"": 4}, LOOKS: {"": 1}},
        "tiny-0.001-0.5": {TRAINING: first, LOOKS: {"": 1}},
        "tiny-0.1-0.9": {TRAINING: first, LOOKS: {"tiny-0.001-0.9": 1}},
        "tiny-0.1-0.5": {TRAINING: first, LOOKS: {"tiny-0.001-0.5": 1}},
    }
    with (folder / "beginnings.csv").open() as lines:
        rows = [tuple(row.values()) for row in csv.DictReader(lines)]
    assert ("0.1", "0.5", LOOKS, "0", "1", "tiny-0.001-0.5") in rows
    assert len(rows) == 8
    text = (folder / "sweep.md").read_text()
    assert "first training by 1 of 4" in text
    assert "look of the first round by 2 of 4" in text
    assert not (folder / sweeping.BEGINNINGS).exists(), "all cases are complete"
    told = listed(read(str(CONFIG), options))
    assert "first training: computed 1 times for 4 cases" in told
    assert "look of the first round: computed 2 times for 4 cases" in told


@pytest.mark.nightly
@pytest.mark.parametrize("which", [*USUAL, "flt"])
def test_results_on_two_ranks_are_those_of_cases_alone(which, mpirun, tmp_path):
    alone = swept(tmp_path, SWEEPS[which], "false")
    options = [*SWEEPS[which], "--output.folder", tmp_path, "--output.id", "two", "-q"]
    end = mpirun(2, "-m", "mpifl", "sweep", CONFIG, *options, timeout=900)
    assert end.returncode == 0, end.stderr
    assert results(tmp_path / "tiny-two") == results(alone)
    _, *others = records(tmp_path / "tiny-two").values()
    assert all("" not in origins for origins in others[-1].values()), "the last case computed nothing of it"


# -- cases at the same time ----------------------------------------------------------------------------------


def other_case(files, work) -> int:
    """Let a child process do something alone with a result; return its number when it has begun."""
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        with files.alone(TRAINING, ADDRESS):
            os.write(here, b"x")
            work()
        os._exit(0)
    os.close(here)
    assert os.read(there, 1) == b"x"
    os.close(there)
    return child


ADDRESS = "0123456789ab" * 2


@pytest.fixture
def files(tmp_path):
    return shared_beginning.BeginningFiles({TRAINING: tmp_path / "a", LOOKS: tmp_path / "b"}, "", {}, "mine")


def test_a_result_that_another_case_computes_is_waited_for_and_taken(files):
    def work():
        time.sleep(0.3)
        files.keep(TRAINING, 3, ADDRESS, (1, 2))

    child, start = other_case(files, work), time.monotonic()
    made = step_config.shared_result(Addressed(files), TRAINING, 3, tuple, lambda: pytest.fail("made twice"))
    assert made == (1, 2)
    assert time.monotonic() > start + 0.2
    os.waitpid(child, 0)


def test_a_killed_case_blocks_no_other(files):
    child = other_case(files, lambda: time.sleep(60))
    killer = threading.Timer(0.3, os.kill, (child, signal.SIGKILL))
    killer.start()
    start = time.monotonic()
    made = step_config.shared_result(Addressed(files), TRAINING, 3, tuple, lambda: (7,))
    assert made == (7,)
    assert 0.2 < time.monotonic() - start < 20
    os.waitpid(child, 0)
    killer.join()


def test_other_results_are_not_waited_for(files):
    child = other_case(files, lambda: time.sleep(60))
    with files.alone(TRAINING, "f" + ADDRESS[1:]), files.alone(LOOKS, ADDRESS), files.alone(TRAINING, ""):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


class Addressed:
    """Shared results of which all calls have one address."""

    def __init__(self, files):
        self.files = files

    def __contains__(self, phase):
        return True

    def __getattr__(self, name):
        return getattr(self.files, name)

    def address(self, *given):
        return ADDRESS


@pytest.mark.nightly
@pytest.mark.parametrize("together", ["jobs", "processes"])
def test_cases_at_the_same_time_compute_their_beginning_once(together, mpirun, tmp_path):
    """Four cases with one training of four clients, and two looks."""
    alone = swept(tmp_path, SWEEPS["emdcfl"], "false")
    options = [*map(str, ("-m", "mpifl", "sweep", CONFIG, *SWEEPS["emdcfl"]))]
    options += ["--output.folder", str(tmp_path), "--output.id", "two", "-q"]
    if together == "jobs":
        end = mpirun(4, *options, "--jobs", "2", timeout=600)
        assert end.returncode == 0, end.stderr
    else:
        environment = {**os.environ, **toy.PYTHONPATH}
        parts = [
            subprocess.Popen([sys.executable, *options, "--case", f"{i}/4"], env=environment)
            for i in (1, 2, 3, 4)
        ]
        assert [part.wait(600) for part in parts] == [0] * 4
    assert results(tmp_path / "tiny-two") == results(alone)
    computed = Counter()
    for record in records(tmp_path / "tiny-two").values():
        for phase, origins in record.items():
            computed[phase] += origins.get("", 0)
    assert computed == {TRAINING: 4, LOOKS: 2}


def broken(damage):
    """Return a sweep's `run` that damages all files of shared results before each case."""
    run = sweeping.run

    def damaged(config, *given, beginning, **more):
        for folder in beginning.values():
            for file in folder.glob("*"):
                damage(file)
        return run(config, *given, beginning=beginning, **more)

    return damaged


@pytest.mark.parametrize("damage", [lambda f: os.truncate(f, 100), lambda f: f.write_bytes(b"")])
def test_damaged_results_are_computed_again_with_a_line(damage, tmp_path, monkeypatch, capsys):
    alone = results(swept(tmp_path, SWEEPS["ucfl"], "false"))
    monkeypatch.setattr(sweeping, "run", broken(damage))
    warn_once.cache_clear()
    folder = swept(tmp_path, SWEEPS["ucfl"], None)
    assert results(folder) == alone
    assert [record[STATISTICS] for record in records(folder).values()] == [{"": 8}, {"": 8}]
    assert "one-shot statistics is computed again" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["disk", "size", "free"])
def test_a_full_disk_ends_the_sharing_and_no_case(limit, tmp_path, monkeypatch, capsys):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    if limit == "disk":
        monkeypatch.setattr(shared_beginning, "write_atomically", full)
    elif limit == "size":
        monkeypatch.setattr(beginning, "MOST_BYTES", 1000)
    else:
        monkeypatch.setattr(beginning, "LEAST_FREE", 1.0)
    warn_once.cache_clear()
    folder = swept(tmp_path, SWEEPS["ucfl"], None)
    assert [record[STATISTICS] for record in records(folder).values()] == [{"": 8}, {"": 8}]
    assert "leaves no more of it to other cases" in capsys.readouterr().err


def of_each(vary: str, options: list[str] | None = None) -> list[set[str]]:
    """Return the phases that each case of a sweep shares."""
    tree = read(str(CONFIG), ["--vary", vary, *(options or [])])
    return [set(found) for found in beginnings(cases(tree), table_if_any(tree)).values()]


def test_cases_share_only_what_nothing_decides_that_differs():
    emd = "algorithm: {a: {name: emdcfl}, b: {name: emdcfl, %s}}"
    assert of_each(f"{{{emd % 'epsilon: 1'}}}") == [{TRAINING, LOOKS}] * 2
    assert of_each(f"{{{emd % 'projection: 0.5'}}}") == [{TRAINING}] * 2
    assert of_each(f"{{{emd % 'epsilon: 1'}, local.lr: [0.1, 0.2]}}") == [{TRAINING, LOOKS}] * 4
    for other in ("local.lr: [0.1, 0.2]", "seed: [0, 1]", "model.hidden: [[3], [4]]"):
        assert of_each(f"{{{other}}}", EMD) == [set()] * 2
    assert of_each("{rounds: [1, 2]}", EMD) == [{TRAINING, LOOKS}] * 2
    ucfl = "algorithm: {a: {name: ucfl}, b: {name: ucfl, %s}}"
    assert of_each(f"{{{ucfl % 'streams: 2'}}}") == [{STATISTICS}] * 2
    assert of_each(f"{{{ucfl % 'noise_batch: 7'}}}") == [set()] * 2
    flt = "algorithm: {a: {name: flt}, b: {name: flt, %s}}"
    assert of_each(f"{{{flt % 'gamma: 2'}}}") == [{SHOWN, STATISTICS}] * 2
    assert of_each(f"{{{flt % 'centroids: 2'}}}") == [{SHOWN}] * 2
    assert of_each(f"{{{flt % 'code: 16'}}}") == [set()] * 2
    ccfl = "algorithm: {a: {name: ccfl}, b: {name: ccfl, %s}}"
    assert of_each(f"{{{ccfl % 'rho: 1'}}}", ["--policy", "client_decides"]) == [{SETUP}] * 2
    assert of_each(f"{{{ccfl % 'pretrain_epochs: 1'}}}", ["--policy", "client_decides"]) == [set()] * 2
    assert of_each("{algorithm: [fedavg, fedprox]}") == [set()] * 2
    kept = ["--local", "{keep_optimizer: true, momentum: 0.9}"]
    assert of_each("{algorithm.epsilon: [1, 2]}", [*EMD, *kept]) == [set()] * 2


def test_cases_that_are_retimed_need_no_beginning(tmp_path):
    assert of_each("{network: [wired, wireless-slow]}", EMD) == [set(), set()]
    vary = "{algorithm.epsilon: [0.001, 0.1], network: [wired, wireless-slow]}"
    folder = swept(tmp_path, [*EMD, "--vary", vary, "--rounds", "1"], None)
    assert len(results(folder)) == 4
    assert "first training by 1 of 2" in (folder / "sweep.md").read_text()


def test_rows_that_show_measured_times_share_nothing_unless_they_ask():
    table = "{title: T, figures: {time: {of: %s}}}"
    vary, rows = "{rows: {a: {algorithm: emdcfl}, b: {algorithm: {name: emdcfl, epsilon: 1}}}}", ["--table"]
    assert of_each(vary, [*rows, table % "wall_seconds"]) == []
    assert of_each(vary, [*rows, table % "virtual_seconds"]) == [{TRAINING, LOOKS}] * 2
    asked = [*rows, table % "wall_seconds", "--system.share_beginnings", "true"]
    assert of_each(vary, asked) == [{TRAINING, LOOKS}] * 2
    assert of_each(vary, ["--system.share_beginnings", "false"]) == [set()] * 2


def test_a_run_by_itself_says_that_it_shares_nothing(tmp_path, capsys):
    warn_once.cache_clear()
    options = ["--system.share_beginnings", "true", "--output.folder", str(tmp_path), "--rounds", "1"]
    sweeping.run(loader.load(str(CONFIG), options), Single(), quiet=True)
    assert "system.share_beginnings: without effect" in capsys.readouterr().err


def test_results_are_removed_when_no_case_is_left_that_needs_them(tmp_path, monkeypatch):
    run, seen = sweeping.run, []

    def noted(config, *given, beginning, **more):
        found = run(config, *given, beginning=beginning, **more)
        kept = [path.name.split("-")[0] for path in (tmp_path / "tiny-x" / sweeping.BEGINNINGS).iterdir()]
        seen.append(Counter(kept))
        return found

    monkeypatch.setattr(sweeping, "run", noted)
    vary = "{algorithm.projection: [0.9, 0.5], algorithm.epsilon: [0.001, 0.1]}"
    swept(tmp_path, [*EMD, "--vary", vary, "--rounds", "1"], None, "x")
    one, two = {TRAINING: 1, LOOKS: 1}, {TRAINING: 1, LOOKS: 1}
    assert seen == [one, one, two, two], "looks of the first projection went before the second"


def test_a_case_that_is_resumed_still_says_what_it_took(tmp_path):
    """It stops after round 1, whose training and look it has from another case; round 2 shares nothing."""
    folders = {phase: tmp_path / "shared" / phase for phase in (TRAINING, LOOKS)}
    options = [*EMD, "--output.folder", str(tmp_path), "--checkpoint.every", "1"]
    other = loader.load(str(CONFIG), [*options, "--output.id", "other"])
    sweeping.run(other, Single(), quiet=True, beginning=folders)
    config = loader.load(str(CONFIG), [*options, "--output.id", "x", "--algorithm.epsilon", "0.1"])
    asked = itertools.count()
    with pytest.raises(Stopped) as end:
        sweeping.run(config, Single(), True, beginning=folders, asked_to_stop=lambda: next(asked) > 0)
    assert end.value.step == 1
    folder = tmp_path / "tiny-x"
    sweeping.run(config, Single(), quiet=True, resumed=folder, beginning=folders)
    assert json.loads((folder / "summary.json").read_text())["beginning"] == {
        TRAINING: {"tiny-other": 4},
        LOOKS: {"tiny-other": 1},
    }


# -- what methods declare ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Derived(EMDCFL):
    """A method of a user that may read more."""

    more: int = 0


def test_a_declaration_does_not_count_for_a_class_below():
    assert set(phases(EMDCFL())) == {TRAINING, LOOKS}
    assert phases(EMDCFL())[TRAINING] == {}
    assert "epsilon" not in phases(EMDCFL())[LOOKS]
    assert set(phases(Derived())) == {LOOKS}
    assert phases(Derived())[LOOKS].keys() == {f.name for f in fields(Derived)}


DECLARATIONS = ("shown_from", "statistics_from", "setup_from", "trained_from", "looked_from")


@for_each("cls", CATALOGUE.values())
def test_declared_fields_are_fields(cls):
    names = {name for declaration in DECLARATIONS for name in vars(cls).get(declaration) or ()}
    assert names <= {f.name for f in fields(cls)}


FIRST = {
    EMDCFL: ("local_update", "ask", "show", "answer", "compare"),
    UCFL: ("fingerprint",),
    FedClust: ("fingerprint",),
    PACFL: ("fingerprint",),
    PCAKMHC: ("fingerprint",),
    FlexCFL: ("fingerprint",),
    FedCUAU: ("fingerprint",),
    FLT: ("shows", "fingerprint"),
    CSAFL: ("fingerprint",),
    CCFL: ("setup",),
    FedSoftAsync: ("setup",),
    Local: ("setup",),
}
PHASE_OF = {"local_update": TRAINING, "fingerprint": STATISTICS, "setup": SETUP, "shows": SHOWN}


def guarded(cls, hook, used):
    """Return a hook of a class that fails when it reads a field that its phase does not declare."""
    made = getattr(cls, hook)

    def guard(self, *given):
        known = phases(self)[PHASE_OF.get(hook, LOOKS)]
        other = {f.name for f in fields(self)} - known.keys()

        class Guarded(cls):
            def __getattribute__(self, name):
                if name in other:
                    raise AssertionError(f"{cls.__name__}.{hook} reads {name}, which is not declared")
                return super().__getattribute__(name)

        watched = object.__new__(Guarded)
        watched.__dict__.update(self.__dict__)
        used.add(hook)
        return made(watched, *given)

    return guard


OPTIONS = {
    EMDCFL: ["--algorithm", "{name: emdcfl, sample_cap: 24, noise: 0.1, tau: full}", "--rounds", "1"],
    FedCUAU: ["--algorithm", "fedcuau", "--model", "{name: mlp, hidden: [12, 8]}"],
    FLT: [*NETWORK, "{name: flt, centroids: 2, pretrain_epochs: 1, finetune_epochs: 1}"],
    CCFL: ["--algorithm", "ccfl", *DRIFT],
    FedSoftAsync: ["--algorithm", "fedsoft_async", *DRIFT],
    Local: ["--algorithm", "{name: local, pretrain_epochs: 1}", *DRIFT],
}


@pytest.mark.parametrize(
    "cls", [pytest.param(cls, marks=[pytest.mark.nightly] if cls is FLT else []) for cls in FIRST]
)
def test_hooks_of_shared_phases_read_no_other_field(cls, tmp_path, monkeypatch):
    name = next(name for name, known in CATALOGUE.items() if known is cls)
    used: set[str] = set()
    for hook in FIRST[cls]:
        monkeypatch.setattr(cls, hook, guarded(cls, hook, used))
    options = [*OPTIONS.get(cls, ["--algorithm", name]), "--output.folder", str(tmp_path)]
    sweeping.run(loader.load(str(CONFIG), options), Single(), quiet=True)
    assert used == set(FIRST[cls])


def test_every_declaration_is_tried():
    declaring = {cls for cls in CATALOGUE.values() if any(vars(cls).get(d) is not None for d in DECLARATIONS)}
    assert declaring == set(FIRST)
    assert deciding_fields(UCFL(), "statistics_from") == ("noise_batch",)


def test_an_option_of_another_type_is_refused():
    with pytest.raises(UserError, match=r"system\.share_beginnings"):
        loader.load(str(CONFIG), ["--system.share_beginnings", "sometimes"])
