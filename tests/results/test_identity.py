"""What decides the last bits of a run: beside the digest, at the start of a run, and compared."""

from __future__ import annotations

import json
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from support.runs import CONFIG

import mpifl
from mpifl import cli
from mpifl.driver import checkpoints
from mpifl.kernels import bindings
from mpifl.results import identity as identities
from mpifl.results.identity import (
    Origin,
    describe_differences,
    describe_origins,
    differences,
    identity,
    machine,
)
from mpifl.runtime.run_state import STOP
from mpifl.supervision.logging import warn_once

ONE = {"processor": "fast", "kernels": "1a2b", "torch": "2"}


def test_the_code_is_that_of_the_package_and_not_of_its_pages(tmp_path, monkeypatch):
    """A checkout has links to docs/, a wheel holds the examples."""
    monkeypatch.setattr(identities, "__file__", str(tmp_path / "results" / "identity.py"))
    for name in ("results", "docs/examples"):
        (tmp_path / name).mkdir(parents=True)
    found = []
    for name in ("results/identity.py", "docs/examples/one.py", "api.py"):
        (tmp_path / name).touch()
        found.append(identities.code.__wrapped__())
    assert found[0] == found[1] != found[2]


def test_every_field_is_in_the_hash():
    options = {"compiled": True, "threads": 1}
    found = identity(options, [ONE])
    assert found == identity(dict(reversed(options.items())), [ONE, ONE]), "neither order nor number of ranks"
    others = [identity(options | {"threads": 2}, [ONE])]
    others += [identity(options, [ONE | {name: "other"}]) for name in ONE]
    assert len({found["hash"], *(other["hash"] for other in others)}) == 5
    assert [differences(found, other) for other in others] == [["threads"], *([name] for name in ONE)]


def test_workers_of_several_kinds_are_all_named():
    found = identity({}, [ONE, ONE | {"processor": "old"}, ONE])
    assert found["processor"] == "fast | old"
    assert found["torch"] == "2"


def test_runs_that_are_unlike_are_named_with_their_values():
    runs = {"a": {"hash": "x", "torch": "2", "stack": 1}, "b": {"hash": "y", "torch": "3", "stack": 1}}
    assert describe_differences(runs) == ["torch: 2 (a); 3 (b)"]
    assert describe_differences({"a": runs["a"], "c": dict(runs["a"])}) == []


def test_a_machine_says_what_it_computes_with(monkeypatch):
    here = machine()
    assert here["device"] == "cpu"
    assert here["kernels"] == (bindings.BUILD["sources"] if bindings.TRAINING_AVAILABLE else "none")
    computing = (
        "mpifl",
        "torch",
        "numpy",
        "scipy",
        "scikit-learn",
        "POT",
        "umap-learn",
        "numba",
        "pynndescent",
    )
    assert "none" not in (here["processor"], *(here[name] for name in computing))
    monkeypatch.setattr(bindings, "TRAINING_AVAILABLE", False)
    assert (machine("H200")["device"], machine()["kernels"], machine()["compiler"]) == (
        "H200",
        "none",
        "none",
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder for runs and their data."""
    return tmp_path_factory.mktemp("identity")


def run(place: Path, run_id: str, *more: str) -> dict:
    """Run the tiny configuration; return its summary."""
    where = ["--output.folder", str(place), "--output.id", run_id, "--data.cache", str(place / "cache")]
    assert cli.main(["run", str(CONFIG), *where, *more]) == 0
    return json.loads((place / f"tiny-{run_id}" / "summary.json").read_text())


def test_the_version_of_mpifl_is_known_where_it_is_not_installed(monkeypatch):
    """On a path to a checkout it was `None`, and a run another one than where it is installed."""

    def none(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", none)
    identities.version_of.cache_clear()
    assert identities.version_of("mpifl") == mpifl.__version__
    assert identities.version_of("torch") is None
    identities.version_of.cache_clear()


@pytest.mark.skipif(not bindings.TRAINING_AVAILABLE, reason=bindings.PROBLEM or "kernels")
def test_the_identity_stands_beside_the_digest_and_at_the_start(place, capsys):
    one, two = run(place, "one"), run(place, "two")
    said = capsys.readouterr().out.splitlines()
    assert one["identity"] == two["identity"]
    assert one["digest"] == two["digest"]
    (line, _) = (line for line in said if line.startswith("numbers "))
    for word in (one["identity"]["hash"], bindings.BUILD["sources"], bindings.BUILD["compiler"], "threads 1"):
        assert word in line
    changed = {
        "compiled": run(place, "torch", "--system.kernels", "false", "--quiet"),
        "stack": run(place, "stack", "--system.stack", "2", "--quiet"),
        "sums": run(place, "sums", "--system.sums", "fast", "--quiet"),
    }
    for name, other in changed.items():
        assert name in differences(one["identity"], other["identity"])
    assert changed["compiled"]["digest"] != one["digest"]


@pytest.mark.skipif(not bindings.TRAINING_AVAILABLE, reason=bindings.PROBLEM or "kernels")
def test_a_run_without_the_kernels_says_so_and_has_another_identity(place, capsys, monkeypatch):
    with_them = run(place, "with", "--quiet")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(bindings, "TRAINING_AVAILABLE", False)
    monkeypatch.setattr(bindings, "PROBLEM", "the C kernels were not built: install")
    warn_once.cache_clear()
    without = run(place, "without", "--quiet")
    run(place, "twice", "--quiet")
    (line,) = capsys.readouterr().err.splitlines()
    assert "not built" in line
    assert "digest" in line
    assert without["digest"] != with_them["digest"]
    assert differences(with_them["identity"], without["identity"]) == ["kernels", "compiler"]
    run(place, "asked", "--quiet", "--system.kernels", "false")
    assert capsys.readouterr().err == "", "who asks for PyTorch gets what was asked for"
    monkeypatch.undo()
    capsys.readouterr()
    assert cli.main(["compare", str(place / "tiny-with"), str(place / "tiny-without")]) == 0
    said = capsys.readouterr().err
    assert "kernels: " in said
    assert "none (tiny-without)" in said
    assert cli.main(["compare", str(place / "tiny-with"), str(place / "tiny-with")]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_elsewhere_names_what_differs(place, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "due", lambda self, now: STOP if now == 1 else "")
        where = ["--output.folder", str(place), "--output.id", "moved", "--data.cache", str(place / "cache")]
        assert cli.main(["run", str(CONFIG), "--quiet", "--rounds", "2", *where]) == 75
    capsys.readouterr()
    monkeypatch.setattr(identities, "processor", lambda: "another one")
    assert cli.main(["resume", str(place / "tiny-moved"), "--quiet", "--system.stack", "2"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "last bits" in line]
    assert ["stack was 1 and is 2" in said[0], "is another one" in said[1]] == [True, True]
    assert len(said) == 2


def test_the_code_is_in_the_identity_and_a_run_that_goes_on_with_another_says_so(place, capsys, monkeypatch):
    """Numbers may have been mended under the same version."""
    own_class = "from mpifl.algorithms.fedavg import FedAvg\n\nclass Own(FedAvg):\n    pass\n"
    (place / "own.py").write_text(own_class)
    own = ["--algorithm", f"{{name: {place}/own.py:Own}}"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "due", lambda self, now: STOP if now == 1 else "")
        where = ["--output.folder", str(place), "--output.id", "mended", "--data.cache", str(place / "cache")]
        assert cli.main(["run", str(CONFIG), "--rounds", "2", *where, *own]) == 75
    assert f"code {identities.code()}, own code " in capsys.readouterr().out
    monkeypatch.setattr(identities, "code", lambda: "another")
    (place / "own.py").write_text(f"{own_class}    # mended\n")
    assert cli.main(["resume", str(place / "tiny-mended"), "--quiet"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "not only their last bits" in line]
    assert {line.split()[1] for line in said} == {"code", "own_code"}


def stopped(place: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Begin a run of four rounds, or go on with it, up to a step."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "due", lambda self, now: STOP if now == step else "")
        where = ["--output.folder", str(place), "--output.id", name, "--data.cache", str(place / "cache")]
        begun = (place / f"tiny-{name}").exists()
        first = ["resume", str(place / f"tiny-{name}")] if begun else ["run", str(CONFIG), "--rounds", "4"]
        assert cli.main([*first, "--quiet", *(() if begun else where), *words]) == 75


def test_a_run_that_goes_on_elsewhere_has_an_identity_of_its_own(place, capsys, monkeypatch):
    """Its digest is not that of a run which was there from the start, and `earlier` says why."""
    whole = run(place, "whole", "--rounds", "4", "--quiet", "--system.sums", "fast")
    stopped(place, "parts", 1, monkeypatch)
    stopped(place, "parts", 2, monkeypatch, "--system.stack", "2")
    stopped(place, "parts", 3, monkeypatch)
    folder = place / "tiny-parts"
    assert cli.main(["resume", str(folder), "--quiet", "--system.sums", "fast", "--system.stack", "1"]) == 0
    parts = json.loads((folder / "summary.json").read_text())
    assert parts["digest"] != whole["digest"]
    assert parts["identity"]["hash"] != whole["identity"]["hash"]
    assert differences(parts["identity"], whole["identity"]) == ["earlier"]
    changes = ["stack 1 until step 1", "sums exact, stack 2, ranks none, collective none until step 3"]
    assert parts["identity"]["earlier"].split("; ") == changes
    capsys.readouterr()
    assert cli.main(["compare", str(place / "tiny-whole"), str(folder), "--csv", str(place / "t.csv")]) == 0
    assert "earlier: " in capsys.readouterr().err


def test_a_run_that_goes_on_where_it_was_has_the_identity_of_one_undisturbed(place, monkeypatch):
    stopped(place, "same", 2, monkeypatch)
    assert cli.main(["resume", str(place / "tiny-same"), "--quiet"]) == 0
    same = json.loads((place / "tiny-same" / "summary.json").read_text())
    assert same["identity"] == run(place, "undisturbed", "--rounds", "4", "--quiet")["identity"]


def test_of_many_runs_three_are_named():
    runs = {f"run {i}": {"torch": "2" if i else "1"} for i in range(6)}
    assert describe_differences(runs) == ["torch: 1 (run 0); 2 (run 1, run 2, run 3 and 2 more)"]


def test_comparisons_do_not_name_code_of_ones_own():
    runs = {"a": {"own_code": "1", "code": "x"}, "b": {"code": "y"}}
    assert describe_differences(runs) == ["code: x (a); y (b)"]


def origins(*rows) -> dict[str, Origin]:
    """Return origins of runs a, b, ...: configuration, data, data seed, own code, digests of the data."""
    return {
        name: Origin(configuration, data, seed, {"own_code": own} if own else {}, content)
        for name, (configuration, data, seed, own, content) in zip("abcd", rows, strict=False)
    }


def test_runs_that_differ_in_nothing_but_seeds_have_one_code_of_their_users():
    one, other = ("x", "d", "0", "1", {}), ("x", "d", "1", "2", {})
    assert describe_origins(origins(one, other)) == ["own_code (in one configuration): 1 (a); 2 (b)"]
    assert describe_origins(origins(one, ("y", "d", "0", "2", {}), ("x", "d", "1", "", {}))) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("d", "0", {"samples": "p"}), ("d", "1", {"samples": "q"})], ["samples"]),
        ([("d", "0", {"samples": "p"}), ("e", "0", {"samples": "q"})], []),
        ([("d", "0", {"files": "p"}), ("d", "1", {"files": "q"})], ["files"]),
        ([("d", "0", {"split": "p"}), ("d", "1", {"split": "q"})], []),  # a seed draws a split
        ([("d", "0", {"split": "p"}), ("d", "0", {"split": "q"})], ["split"]),
        ([("d", "0", {"split": "p"}), ("d", "0", {})], []),  # without a split
        ([("d", "0", {"split": "p"}), ("d", "0", {"split": "p"})], []),
    ],
)
def test_runs_with_the_same_settings_of_data_have_the_same_data(rows, said):
    """Also runs of different methods, which are compared."""
    found = describe_origins(origins(*((str(i), *row[:2], "", row[2]) for i, row in enumerate(rows))))
    assert [line.split()[0] for line in found] == said
    assert all(line.endswith(": p (a); q (b)") for line in found)


@pytest.mark.parametrize("name", ["settings", "identity", "data"])
def test_an_identity_that_is_no_mapping_is_refused(name, place, capsys):
    assert cli.main(["run", str(CONFIG), "--output.folder", str(place), "--output.id", name, "-q"]) == 0
    file = place / f"tiny-{name}" / "summary.json"
    summary = json.loads(file.read_text())
    says = f"has no mapping {name} in summary.json; run it again"
    for value in (3, [[]], "x"):
        file.write_text(json.dumps(summary | {name: value}))
        capsys.readouterr()
        assert cli.main(["compare", str(file.parent)]) == 2, value
        assert capsys.readouterr().err == f"mpifl: RUN = {str(file.parent)!r}: {says}\n"
