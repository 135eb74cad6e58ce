"""One tree of dataclasses = one YAML tree = one tree of options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support import toy
from support.each import for_each
from torch import nn

from mpifl.algorithms.registry import CATALOGUE
from mpifl.cli import main
from mpifl.core.errors import UserError
from mpifl.core.federation import DataInfo
from mpifl.core.textfiles import flat
from mpifl.experiment import loader, schema
from mpifl.experiment.build import public_sets
from mpifl.experiment.checks import (
    warn_of_idle_options,
    warn_of_ignored,
    warn_of_ignored_options,
    warn_of_numbered_categories,
    warn_of_unused_collective,
    warn_of_unused_exchange,
    warn_of_unused_public,
)
from mpifl.experiment.loader import dump, from_tree, load, merged, overrides
from mpifl.experiment.reference import meanings
from mpifl.experiment.schema import Config, Seeds
from mpifl.experiment.section_checks import check_sections
from mpifl.models import MODELS
from mpifl.supervision.logging import warn_once
from mpifl.training.config import LocalConfig

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


def test_options_become_a_tree_of_texts():
    tokens = [
        "--rounds",
        "3",
        "--local.lr=1.0e-2",
        "--data.scenario.angles",
        "[0, 90]",
        "--model",
        "{name: mlp}",
    ]
    assert overrides(tokens) == {
        "rounds": "3",
        "local": {"lr": "1.0e-2"},
        "data": {"scenario": {"angles": ["0", "90"]}},
        "model": {"name": "mlp"},
    }
    assert overrides(["--a.b", "1", "--a.c", "x", "--a.b", "null"]) == {"a": {"b": None, "c": "x"}}
    assert overrides(["--a.b", "'null'", "--a.c", ""]) == {"a": {"b": "null", "c": ""}}
    assert overrides(["--output.id", "a=b"]) == {"output": {"id": "a=b"}}


def test_what_is_laid_over_wins_key_by_key():
    under = {"rounds": 1, "local": {"lr": 1, "epochs": 2}}
    assert merged(under, {"local": {"lr": 3}}) == {"rounds": 1, "local": {"lr": 3, "epochs": 2}}
    assert under["local"]["lr"] == 1


def test_a_section_that_changes_its_name_starts_anew():
    """Options of EMD-CFL mean nothing to FedProx; a name given alone keeps those of the same method."""
    under = {"algorithm": {"name": "emdcfl", "epsilon": 0.1}}
    assert merged(under, {"algorithm": {"name": "fedprox", "mu": 1}})["algorithm"] == {
        "name": "fedprox",
        "mu": 1,
    }
    assert merged(under, {"algorithm": {"epsilon": 0.2}})["algorithm"] == {"name": "emdcfl", "epsilon": 0.2}
    assert merged(under, {"algorithm": {"name": "emdcfl"}})["algorithm"] == {"name": "emdcfl", "epsilon": 0.1}
    assert merged({"algorithm": "ifca"}, {"algorithm": {"num_clusters": 2}})["algorithm"] == {
        "name": "ifca",
        "num_clusters": 2,
    }


def test_a_word_is_the_name_of_its_section():
    """It keeps the keys of a section of that name; another name starts anew."""
    under = {"algorithm": {"name": "fedprox", "mu": 0.5}}
    assert merged(under, {"algorithm": "fedprox"}) == under
    assert merged(under, {"algorithm": "fedavg"}) == {"algorithm": "fedavg"}


def test_options_win_over_the_file_the_file_over_its_base_the_base_over_defaults(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "rounds: 5\nlocal: {lr: 0.5, epochs: 7}\nalgorithm: fedavg\nmodel: mlp\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "top.yaml").write_text("base: ../base.yaml\nlocal: {lr: 0.25}\n")
    found = load(str(tmp_path / "sub" / "top.yaml"), ["--rounds", "2"])
    assert (found.rounds, found.local.lr, found.local.epochs, found.local.batch_size) == (2, 0.25, 7, 32)


def test_a_number_sets_all_seeds_a_section_some():
    assert load(TINY, ["--seed", "7"]).seed == Seeds(7, 7, 7, 7)
    assert load(TINY, ["--seed.model", "3"]).seed == Seeds(model=3)
    assert load(TINY, ["--seed", "7", "--seed.model", "3"]).seed == Seeds(7, 3, 7, 7)
    assert load(TINY, ["--seed.model", "3", "--seed", "7"]).seed == Seeds(7, 7, 7, 7)


def test_classes_are_chosen_by_name_and_configured_by_their_fields():
    found = load(TINY, ["--algorithm", "{name: ifca, num_clusters: 2}", "--model.hidden", "[5, 6]"])
    assert found.algorithm == CATALOGUE["ifca"](num_clusters=2)
    assert found.model == MODELS["mlp"](hidden=(5, 6))


def test_a_method_of_ones_own_is_named_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom mpifl.algorithms.fedavg import FedAvg\n"
        "@dataclasses.dataclass(frozen=True)\nclass Mine(FedAvg):\n    strength: float = 1.0\n"
    )
    name = f"{tmp_path / 'mine.py'}:Mine"
    found = load(TINY, ["--algorithm.name", name, "--algorithm.strength", "2"])
    assert found.algorithm.strength == 2.0
    assert yaml.safe_load(dump(found))["algorithm"] == {"name": name, "strength": 2.0}


@pytest.mark.parametrize(
    "options", [[], ["--algorithm", "emdcfl"], ["--data.scenario", "{name: dirichlet, alpha: 2}"]]
)
def test_what_is_written_is_read_again(options):
    found = load(TINY, options)
    assert from_tree(Config, yaml.safe_load(dump(found))) == found


def test_every_field_of_every_section_is_documented():
    sections = (Seeds, schema.EvaluationConfig, schema.SystemConfig, schema.OutputConfig, LocalConfig)
    for cls in (*sections, *CATALOGUE.values(), *MODELS.values()):
        for field in dataclasses.fields(cls):
            assert field.name in meanings(cls), f"{cls.__name__}.{field.name}"


@pytest.mark.parametrize(
    ("options", "participation", "size"),
    [
        (["--participation", "0.5"], 0.5, None),
        (["--cohort_size", "3"], 1.0, 3),
        (["--participation", "1"], 1.0, None),
        (["--participation", "0.5", "--cohort_size", "3"], 1.0, 3),
        (["--cohort_size", "3", "--participation", "0.5"], 0.5, None),
    ],
)
def test_a_cohort_is_a_fraction_or_a_number_and_what_is_given_last_counts(options, participation, size):
    found = load(TINY, options)
    assert (found.participation, found.cohort_size) == (participation, size)


def test_only_what_differs_from_the_defaults_is_in_the_identity():
    """By hand, from the file and the defaults; name, system, output and the place of data are no part."""
    options = ["--seed.model", "3", "--system.threads", "2", "--output.label", "x", "--data.root", "."]
    scenario = {"name": "rotated", "clients": 8, "angles": [0.0, 180.0]}
    assert loader.settings(load(TINY, [*options, "--network.latency_s", "2", "--local.epochs", "1"])) == {
        "algorithm": {"name": "fedavg"},
        "model": {"name": "mlp", "hidden": [12]},
        "rounds": 2,
        "seed": {"model": 3},
        "local": {"lr": 0.1},
        "data": {"scenario": scenario},
        "evaluation": {"every": 0},
        "network": {"name": "links", "latency_s": 2.0},
    }
    found = load(TINY, ["--per_client", "{weak: {epochs: 2}}", "--network.name", "wired"])
    assert loader.settings(found)["per_client"] == {"weak": {"epochs": 2}}
    assert loader.settings(found)["network"] == {"name": "wired"}


@pytest.mark.parametrize("folder", ["algorithms", "."])
def test_what_differs_from_the_defaults_is_the_whole_configuration(folder):
    files = sorted((loader.SHIPPED / folder).glob("[!_]*.yaml"))
    assert files
    for found in map(load, files):
        assert from_tree(Config, loader.non_default(found)) == found


PINNED = """
participation: 1.0
on_client_error: abort
seed: {data: 0, model: 0, training: 0, system: 0}
local: {epochs: 1, batch_size: 32, momentum: 0.0, weight_decay: 0.0, optimizer: sgd, milestones: []}
model: {weights: null, lora: {rank: 0, alpha: null, layers: ['*'], train: [head]}}
data:
  source: {normalise: null, mean: null, std: null}
  scenario: {tolerance: 0.0, copies: true, balance: true, validation: 0.2, test_parts: group, spread: true}
evaluation: {at_start: false, clients: null, finetune_epochs: 0, by: [], metrics: []}
newcomers: {share: 0.0, joins: 2, groups: []}
policy: {name: rounds}
delay: {name: constant, value_s: 1.0}
network: {name: links, uplink_bytes_s: null, downlink_bytes_s: null, latency_s: 0.0, cast: unicast}
payload: {dtype: float32, header_bytes: 0, compression: {name: none}, error_feedback: false}
availability: {on_s: 100.0, off_s: 0.0, profile: [], day_s: 86400.0, shift_s: 0.0, spread_s: 0.0}
privacy: {name: none}
robust: {name: none}
task: {name: classification, metrics: [accuracy]}
"""


def test_a_default_does_not_change_unseen():
    """The identity of a run leaves defaults out: who changes one raises `run_folder.FORMAT` and says so."""
    found = dict(flat(loader.to_tree(load(TINY))))
    pinned = dict(flat(yaml.safe_load(PINNED)))
    assert {key: found[key] for key in pinned} == pinned


def test_a_new_option_changes_no_identity(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom mpifl.algorithms.fedavg import FedAvg\n"
        "@dataclasses.dataclass(frozen=True)\nclass Before(FedAvg):\n    strength: float = 1.0\n"
        "@dataclasses.dataclass(frozen=True)\nclass After(Before):\n    grown: float = 0.0\n"
    )

    def settings(name: str, *options: str) -> dict:
        found = loader.settings(load(TINY, ["--algorithm.name", f"{tmp_path / 'mine.py'}:{name}", *options]))
        return {key: value for key, value in found["algorithm"].items() if key != "name"}

    changed = ("--algorithm.strength", "2")
    assert settings("Before") == settings("After") == {}
    assert settings("Before", *changed) == settings("After", *changed) == {"strength": 2.0}
    assert settings("After", "--algorithm.grown", "1") == {"grown": 1.0}


def test_numbers_are_taken_as_their_field_wants_them():
    found = load(TINY, ["--local.lr", "1", "--local.milestones", "[2, 3]", "--output.id", "7"])
    assert found.local.lr == 1.0
    assert isinstance(found.local.lr, float)
    assert found.local.milestones == (2, 3)
    assert found.output.id == "7"
    with pytest.raises(UserError, match=r"local\.milestones"):
        load(TINY, ["--local.milestones", "[2.5]"])


WRITTEN = ["7", "1.10", "1_000", "0x10", "0b11", "+7", "1.0", ".5", "1.50e+3", "-0", "010", "2024-05-01"]


@for_each("text", [*WRITTEN, "true", "on", "#3", "a #3", "a: b", "it's", '"a" or b'])
def test_options_that_are_text_stand_as_they_are_written(text):
    for given in (["--output.label", text], [f"--output.label={text}"], ["--output.label", json.dumps(text)]):
        assert load(TINY, given).output.label == text
    assert load(TINY, ["--output.label", "x", "--output.label", "null"]).output.label is None


@pytest.mark.parametrize("text", WRITTEN)
def test_files_keep_the_spelling_of_numbers_where_text_is_asked(text, tmp_path):
    """In lists and below `name`, too; where numbers are asked they are numbers."""
    source = f"{{name: table, path: x.csv, target: [{text}], client: {text}}}"
    (tmp_path / "whole.yaml").write_text(f"output: {{id: {text}}}\ndata: {{source: {source}}}\nseed: 1_0\n")
    (tmp_path / "top.yaml").write_text("base: whole.yaml\nlocal: {lr: 1.0e-2}\n")
    whole = loader.merged(loader.read(TINY), loader.read(str(tmp_path / "top.yaml")))
    by_option = overrides(
        ["--output", f"{{id: {text}}}", "--data.source", source, "--data.source.client", text]
    )
    for tree in (whole, merged(loader.read(TINY), by_option)):
        found = from_tree(Config, tree)
        assert (found.output.id, found.data.source.client, found.data.source.target) == (text, text, (text,))
        assert from_tree(Config, yaml.safe_load(dump(found))) == found
    assert {type(value) for value in dataclasses.astuple(from_tree(Config, whole).seed)} == {int}
    assert f"{from_tree(Config, whole).local.lr!r} {from_tree(Config, whole).seed.data}" == "0.01 10"


def test_a_text_that_looks_like_something_else_needs_quotes_only_where_it_is_a_list_or_null():
    assert load(TINY, ["--output", "{label: no}"]).output.label == "no"
    assert load(TINY, ["--output.label", "'[draft]'"]).output.label == "[draft]"
    assert load(TINY, ["--output.label", "'null'"]).output.label == "null"
    with pytest.raises(UserError, match=r"output.label = \['draft'\]: must be of type str; quote it"):
        load(TINY, ["--output.label", "[draft]"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--algorithm", "perfedavg", "--local.momentum", "0.9", "--local.augment", "crop_flip"],
            "local.lr, local.momentum, local.augment: without effect on how PerFedAvg trains; "
            "set algorithm.alpha and algorithm.beta",
        ),
        (
            ["--algorithm", "perfedavg", "--per_client.0-3.lr", "0.5", "--local.lr", "0.01"],
            "per_client.0-3.lr: without effect on how PerFedAvg trains; "
            "set algorithm.alpha and algorithm.beta",
        ),
        (
            ["--algorithm", "pfedme", "--local.epochs", "2", "--evaluation.finetune_epochs", "1"],
            "local.epochs: without effect on how PFedMe trains; set algorithm.local_rounds",
        ),
        (
            ["--algorithm", "ifca", "--algorithm.variant", "gradient", "--local.momentum", "0.9"],
            "local.momentum: without effect on how IFCA trains",
        ),
        (
            ["--algorithm", "cflgp", "--local.epochs", "2"],
            "local.epochs: without effect on how CFLGP trains; set algorithm.protocol gap",
        ),
        (
            ["--local.gamma", "0.5"],
            "local.gamma: without effect while there are no milestones; set local.milestones",
        ),
        (["--local.gamma", "0.5", "--local.milestones", "[1]"], ""),
        (
            ["--local.optimizer", "adam", "--local.momentum", "0.9", "--per_client.2.momentum", "0.5"],
            "local.momentum, per_client.2.momentum: without effect under local.optimizer adam; use sgd",
        ),
        (
            ["--local.optimizer", "adam", "--per_client", "{1: {momentum: 0.9}, 2: {lr: 0.1}}"],
            "per_client.1.momentum: without effect under local.optimizer adam; use sgd",
        ),
        (["--local.optimizer", "adam", "--per_client.1.momentum", "0.0"], ""),
        (["--local.momentum", "0.9", "--per_client.1.momentum", "0.5"], ""),
        (["--algorithm", "ifca", "--local.momentum", "0.9"], ""),
        (["--algorithm", "pfedme", "--local.lr", "0.01"], ""),
    ],
)
def test_what_a_method_ignores_of_local_is_said_once(options, line, capsys):
    warn_once.cache_clear()
    for _ in range(2):
        config = load(TINY, options)
        finetunes = bool(config.evaluation.finetune_epochs)
        warn_of_ignored(config.algorithm, config.local, config.per_client, finetunes)
    assert [x for x in capsys.readouterr().err.splitlines() if "effect" in x] == (
        [f"mpifl: {line}"] if line else []
    )


WITHOUT_EFFECT = {
    "{name: fesem, mu: 0.2}": "mu: without effect: only variant emdcfl has a penalty",
    "{name: fesem, mu: 0.2, variant: emdcfl}": "",
    "{name: ifca, least: 0.2}": "least: without effect: without restarts, no set of models is tried",
    "{name: ifca, least: 0.2, restarts: 2}": "",
    "{name: fedcuau, mu: 0.2}": "mu: without effect: only fedprox has a proximal term",
    "{name: fedcuau, mu: 0.2, over: fedprox}": "",
    "{name: flhc, rounds_before: 0, threshold: 2, num_clusters: 2}": (
        "threshold: without effect: num_clusters cuts the hierarchy"
    ),
    "{name: flhc, threshold: 2}": "",
    "{name: fedsoft, lam: 0.3, variant: emdcfl}": "lam: without effect: variant emdcfl has no proximal term",
    "{name: fedsoft, lam: 0.3, sigma: 0.1}": "",
    "{name: pacfl, p: 2, budget: 6}": "p: without effect: budget gives the number of singular vectors",
    "{name: pacfl, p: 2}": "",
    "{name: fedamp, self_weight: 0.3}": "self_weight: without effect: only variant heur reads it",
    "{name: fedamp, self_weight: 0.3, variant: heur}": "",
    "{name: emdcfl, reg: 0.2}": "reg: without effect: only solver sinkhorn is regularised",
    "{name: emdcfl, reg: 0.2, solver: sinkhorn}": "",
    "{name: fedsoft, variant: emdcfl}": "",  # an option at its default may not have been given
}


@pytest.mark.parametrize("method", WITHOUT_EFFECT)
def test_options_of_a_method_without_effect_are_said(method, capsys):
    warn_once.cache_clear()
    warn_of_ignored_options(load(TINY, ["--algorithm", method]).algorithm)
    line = WITHOUT_EFFECT[method]
    assert capsys.readouterr().err.splitlines() == ([f"mpifl: algorithm.{line}"] if line else [])


DRIFTING = ("--drift", "{kind: swap, at: [2]}")
LATE = ("--newcomers", "{share: 0.4, joins: 2}")
AGAIN = ("--recluster", "{every: 2}")


@pytest.mark.parametrize(
    ("method", "given", "line"),
    [
        (
            "{name: ucfl, keep_gradients: true}",
            DRIFTING,
            "keep_gradients: without effect: the run has no newcomers and no recluster",
        ),
        ("{name: ucfl, keep_gradients: true}", LATE, ""),
        ("{name: ucfl, keep_gradients: true}", AGAIN, ""),
        ("{name: flexcfl, migration: 0.1}", LATE, "migration: without effect: the run has no drift"),
        ("{name: flexcfl, migration: 0.1}", DRIFTING, ""),
        (
            "{name: fielding, theta: 0.1}",
            AGAIN,
            "theta: without effect: the run has no newcomers and no drift",
        ),
        ("{name: fielding, theta: 0.1}", LATE, ""),
        ("{name: fielding, theta: 0.1}", DRIFTING, ""),
        ("{name: fielding}", (), ""),
    ],
)
def test_options_of_a_method_that_act_on_what_does_not_happen_are_said(method, given, line, capsys):
    warn_once.cache_clear()
    warn_of_idle_options(load(TINY, ["--algorithm", method, *given]), given is DRIFTING)
    assert capsys.readouterr().err.splitlines() == ([f"mpifl: algorithm.{line}"] if line else [])


@pytest.mark.parametrize(
    ("name", "plain", "idle"),
    [
        ("ucfl", {"noise_batch": 4.0}, {"keep_gradients": True}),
        ("flexcfl", {"num_groups": 2}, {"migration": 0.0}),
        ("fielding", {"num_clusters": 2}, {"theta": 0.0}),
    ],
)
def test_options_that_act_on_what_does_not_happen_leave_all_models_as_they_are(name, plain, idle, tmp_path):
    found = []
    for i, options in enumerate((plain, plain | idle)):
        done = toy.run(CATALOGUE[name](**options), toy.Tiny(), tmp_path / str(i), steps=3, participation=0.5)
        found.append((done.server.tables["model"].tolist(), done.server.assign.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("method", [method for method, line in WITHOUT_EFFECT.items() if line])
def test_an_option_said_to_have_no_effect_has_none(method, tmp_path):
    options = yaml.safe_load(method)
    name, key = options.pop("name"), WITHOUT_EFFECT[method].partition(":")[0]
    plain = {other: value for other, value in options.items() if other != key}
    found = []
    for i, given in enumerate((options, plain)):
        done = toy.run(CATALOGUE[name](**given), toy.Tiny(), tmp_path / str(i), steps=2)
        found.append({table: rows.tolist() for table, rows in done.server.tables.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--policy", "client_decides", "--cohort_size", "2"], "cohort_size: without effect: all clients"),
        (
            ["--policy", "drawn_staleness", "--participation", "0.5"],
            "participation: without effect: policy.most + 1 visits",
        ),
        (["--policy", "client_decides"], ""),
        (["--policy", "every_arrival", "--cohort_size", "2"], ""),
    ],
)
def test_a_cohort_that_a_policy_does_not_draw_is_said(options, line, capsys):
    warn_once.cache_clear()
    assert main(["plan", TINY, "--algorithm", "fedasync", *options]) == 0
    said = [x for x in capsys.readouterr().err.splitlines() if "effect" in x]
    assert said == ([f"mpifl: {line} are under way at a time"] if line else [])


@pytest.mark.parametrize(("newcomers", "said"), [("{joins: 3}", True), ("{share: 0.4, joins: 3}", False)])
def test_a_round_in_which_nobody_joins_is_said(newcomers, said, capsys):
    warn_once.cache_clear()
    assert main(["plan", TINY, "--newcomers", newcomers]) == 0
    line = "mpifl: newcomers.joins: without effect: no client is a newcomer; give share or groups"
    assert (line in capsys.readouterr().err.splitlines()) == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data.public", "digits"], True),
        (["--data.public", "photos"], False),  # the default
        (["--algorithm", "flt", "--data.public", "digits"], False),
    ],
)
def test_images_of_the_server_that_nothing_is_trained_on_are_said(options, said, capsys):
    warn_once.cache_clear()
    config = load(TINY, options)
    warn_of_unused_public(config.algorithm, config.data)
    line = "mpifl: data.public: without effect: the method has no network that the server pre-trains"
    assert (line in capsys.readouterr().err.splitlines()) == said


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ([], ""),
        (["--system.collective", "gather"], ""),
        (["--system.cost", "measured"], ""),
        (
            ["--system.cost", "measured", "--system.collective", "gather"],
            "system.cost: without effect: system.collective names the collective; use auto",
        ),
        (
            ["--system.cost", "measured", "--policy", "every_arrival", "--algorithm", "fedasync"],
            "system.cost: without effect: under this policy the server mixes alone",
        ),
        (
            ["--system.collective", "gather", "--policy", "buffer", "--algorithm", "fedbuff"],
            "system.collective: without effect: under this policy the server mixes alone",
        ),
    ],
)
def test_a_collective_that_is_not_called_is_said(options, warning, capsys):
    warn_once.cache_clear()
    config = load(TINY, options)
    warn_of_unused_collective(config.system, config.policy)
    assert capsys.readouterr().err == (f"mpifl: {warning}\n" if warning else "")


@pytest.mark.parametrize("exchange", ["local", "{name: mpi, distances: server}"])
def test_an_exchange_of_clients_who_exchange_nothing_is_refused(exchange, capsys):
    with pytest.raises(UserError, match=r"system.exchange = '(local|mpi)'.*no client of FedAvg"):
        check_sections(load(TINY, ["--system.exchange", exchange]))
    config = load(TINY, ["--system.exchange", exchange, "--algorithm", "emdcfl"])
    check_sections(config)
    warn_once.cache_clear()
    warn_of_unused_exchange(config.system, 3)
    assert capsys.readouterr().err == ""
    warn_of_unused_exchange(config.system, 1)
    assert "one process computes everything" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class Plain:
    """A model that knows the shape of a sample alone."""

    def build(self, shape, num_classes):
        return nn.Linear(shape[0], num_classes)


@dataclasses.dataclass(frozen=True)
class Wider(MODELS["mlp"]):
    def build(self, shape, num_classes):
        return super().build(shape, num_classes)


@pytest.mark.parametrize(
    ("model", "categories", "said"),
    [(Plain(), (0, 3), True), (Wider(), (0, 3), True), (Plain(), (), False), (MODELS["mlp"](), (3,), False)],
)
def test_a_network_that_gets_the_numbers_of_categories_is_named(model, categories, said, capsys):
    warn_once.cache_clear()
    info = DataInfo((len(categories) or 2,), 2, "features", categories=categories)
    warn_of_numbered_categories(model, info)
    line = capsys.readouterr().err
    assert (type(model).__name__ in line and "1 columns of categories as numbers" in line) == said
    assert bool(line) == said


@pytest.mark.parametrize(("public", "said"), [("digits", True), ("photos", False)])
def test_images_of_the_server_beside_sets_of_its_own_are_said(public, said, capsys):
    warn_once.cache_clear()
    config = load(TINY, ["--algorithm", "flt", "--data.public", public])
    sets = (toy.draw("test", 0, 4, 0),)
    found = public_sets(config.algorithm, config.data, SimpleNamespace(public=lambda: sets), is_server=True)
    assert found is sets
    lines = [line for line in capsys.readouterr().err.splitlines() if "data.public" in line]
    line = "mpifl: data.public: without effect: the server pre-trains on its sets of data.scenario"
    assert lines == ([line] if said else [])


@pytest.mark.parametrize(
    ("alpha", "policy", "said"), [("2", "barrier", True), ("2", "rounds", False), ("4", "barrier", False)]
)
def test_statistics_of_all_clients_under_an_asynchronous_policy_are_said(alpha, policy, said, capsys):
    """Of eight clients FlexCFL would begin with alpha m."""
    warn_once.cache_clear()
    method = f"{{name: flexcfl, num_groups: 2, alpha: {alpha}}}"
    assert main(["plan", TINY, "--algorithm", method, "--policy", policy]) == 0
    line = (
        "mpifl: policy: all 8 clients give their statistics before training, FlexCFL would begin with 4 and "
        "take the others as they join; policy rounds does that"
    )
    assert (line in capsys.readouterr().err.splitlines()) == said


@pytest.mark.parametrize(("wanted", "said"), [("50", True), ("8", False), ("3", False)])
def test_more_evaluated_clients_than_there_are_are_said(wanted, said, capsys):
    warn_once.cache_clear()
    assert main(["plan", TINY, "--evaluation.clients", wanted]) == 0
    line = f"mpifl: evaluation.clients = {wanted}: there are no more than 8 clients, all are evaluated"
    assert (line in capsys.readouterr().err.splitlines()) == said
