"""Another scenario takes the place of one that nobody chose and that cannot serve the samples of a source."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

import mpifl
from mpifl.core.errors import UserError
from mpifl.data import DataConfig, open_federation
from mpifl.data.scenarios.relations import Relations
from mpifl.data.scenarios.rotated import Rotated
from mpifl.data.scenarios.usual import Dirichlet
from mpifl.experiment.loader import from_tree, load, merged, settings, with_scenario
from mpifl.supervision.logging import warn_once
from mpifl.sweeps.cases import cases, read


@pytest.fixture(autouse=True)
def prepared(tmp_path, monkeypatch):
    """Work in a folder of its own with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    warn_once.cache_clear()


@pytest.fixture
def table(tmp_path):
    """Return a function that writes a table of 200 rows with a column of labels, and its section."""

    def write(labels, **more) -> dict[str, object]:
        rng = np.random.default_rng(0)
        names = ["a", "b", *more, "y"]
        columns = [*rng.normal(size=(2, 200)).round(3), *more.values(), labels]
        lines = [",".join(names), *(",".join(map(str, row)) for row in zip(*columns, strict=True))]
        (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
        return {"name": "table", "path": str(tmp_path / "table.csv"), "target": ["y"]}

    return write


def _options(source) -> list[str]:
    return ["--data.source", yaml.safe_dump(source, default_flow_style=True).strip()]


FEDAVG = {"algorithm": "fedavg", "model": "mlp", "rounds": 1}
CLASSES, NUMBERS = np.arange(200) % 2, np.linspace(0, 1, 200).round(3)


def test_a_table_gets_the_scenario_that_the_refusal_proposes_and_one_line_says_so(table, capsys):
    """It is the configuration in which the user writes that scenario himself, and its data can be opened."""
    source = table(CLASSES)
    config = load("quickstart", _options(source))
    assert config.data.scenario == Relations(validation=0.3)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rotated" in line]
    assert "data.scenario" in line
    assert "relations, validation: 0.3" in line
    written = ["--data.scenario", "{name: relations, validation: 0.3}"]
    assert settings(config) == settings(load("quickstart", [*_options(source), *written]))
    assert capsys.readouterr().err == ""
    assert open_federation(config.data, 0).num_clients == 20


@pytest.mark.parametrize("source", ["digits", "{name: digits, normalise: unit}"])
def test_a_scenario_that_serves_stays(source, capsys):
    config = load("quickstart", ["--data.source", source])
    assert isinstance(config.data.scenario, Rotated)
    assert "scenario" not in capsys.readouterr().err


def test_a_scenario_that_the_user_gave_is_refused(table, tmp_path):
    """On the command line, in a file of his own, and in a file above another one of his own."""
    source = table(CLASSES)
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({**FEDAVG, "data": {"scenario": "rotated", "source": source}})
    )
    (tmp_path / "above.yaml").write_text("base: mine\nrounds: 1\n")
    options = [*_options(source), "--data.scenario", "rotated"]
    for config in (load("quickstart", options), load("mine.yaml"), load("above.yaml", _options(source))):
        assert isinstance(config.data.scenario, Rotated)
        with pytest.raises(UserError, match="it changes images, but samples of table are features"):
            open_federation(config.data, 0)


def test_a_file_of_the_users_own_on_a_named_configuration_counts_as_his_words(table, tmp_path):
    """Its source is the user's, the scenario of its base is not; nor is the default."""
    source = table(CLASSES)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"base": "quickstart", "data": {"source": source}}))
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump({**FEDAVG, "data": {"source": source}}))
    assert load("mine.yaml").data.scenario == Relations(validation=0.3)
    assert load("bare.yaml").data.scenario == Relations(validation=Rotated.validation)


def test_labels_decide_too(table, tmp_path):
    """Numbers are no classes, which `dirichlet` reads; classes of a table are."""
    base = {**FEDAVG, "data": {"scenario": {"name": "dirichlet", "clients": 10, "validation": 0.1}}}
    for labels, expected in ((NUMBERS, Relations(clients=10, validation=0.1)), (CLASSES, Dirichlet)):
        own = {"data": {"source": table(labels)}}
        tree = with_scenario(merged(base, own), own)
        (tmp_path / "made.yaml").write_text(yaml.safe_dump(tree))
        found = load("made.yaml").data.scenario
        assert found == expected or isinstance(found, expected)


def test_groups_divide_the_clients_that_the_scenario_had(table):
    """15 clients make three groups of five."""
    own = {"data": {"source": table(CLASSES, c=np.arange(200) / 7)}}
    rotated = {"name": "rotated", "clients": 15, "angles": [0, 90, 180]}
    tree = with_scenario(merged({"data": {"scenario": rotated}}, own), own)
    scenario = {"name": "relations", "clients": 15, "groups": 3, "validation": Rotated.validation}
    assert tree["data"]["scenario"] == scenario
    assert open_federation(from_tree(DataConfig, tree["data"]), 0).num_clients == 15


def test_columns_of_categories_are_not_permuted(table):
    """Groups of such a table differ in their labels, and its data can be opened."""
    source = table(CLASSES, colour=np.array(["red", "green"] * 100))
    config = load("quickstart", _options(source))
    assert config.data.scenario == Relations(permutes="labels", validation=0.3)
    assert open_federation(config.data, 0).num_clients == 20


@pytest.mark.in_turn
def test_texts_by_characters_run_and_the_run_says_its_scenario(tmp_path):
    """Also from Python; the saved configuration has the scenario, so that a resumed run keeps it."""
    (tmp_path / "text.txt").write_text("ab cd ef " * 400)
    source = {"name": "text", "path": str(tmp_path / "text.txt"), "length": 8}
    options = {"model": "lstm", "task": "next_token", "algorithm": "fedavg", "local": {"epochs": 1}}
    run = mpifl.run("quickstart", rounds=1, data={"source": source}, output={"id": "t"}, **options)
    assert run.config["data"]["scenario"] == {
        "name": "relations", "clients": 20, "groups": 2, "permutes": "inputs", "validation": 0.3,
        "test_share": 0.2,
    }  # fmt: skip


def test_cases_of_a_sweep_share_the_scenario(table):
    options = [*_options(table(CLASSES)), "--vary", "{algorithm: [fedavg, ifca]}"]
    found = cases(read("quickstart", options))
    assert [case.config.data.scenario for case in found] == 2 * [Relations(validation=0.3)]


def test_data_that_are_not_there_are_refused_where_they_are_opened(tmp_path):
    config = load("quickstart", ["--data.source", "{name: table, path: nowhere.csv, target: [y]}"])
    assert isinstance(config.data.scenario, Rotated)
    with pytest.raises(UserError, match=r"nowhere\.csv"):
        open_federation(config.data, 0)
