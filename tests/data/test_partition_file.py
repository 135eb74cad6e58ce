"""Partitions that travel: what is exported is imported as it was; files of other simulators are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.nightly import covering
from support.refusal import refusal_of
from support.runs import CONFIG

import mpifl
from mpifl import cli
from mpifl.api import tree_of
from mpifl.core.errors import UserError
from mpifl.data import SCENARIOS, SOURCES, DataConfig, export_partition, open_federation
from mpifl.experiment.build import open_data
from mpifl.experiment.loader import from_tree
from mpifl.experiment.schema import Config

BACKDOOR = {"clients": 6, "validation": 0.1}
CASES = [
    ("digits", "dirichlet", {"alpha": 0.3, "validation": 0.1}),
    ("digits", "rotated", {"angles": (0.0, 90.0), "clients": 4}),
    ("digits", "composed", {"angles": (0.0, 30.0), "permutations": 2, "clients": 8}),
    ("digits", "iid", {"test": "all", "clients": 3}),
    ("digits", "rotated", {"test_share": 0.0, "clients": 4}),  # nobody is tested
    ("mnist", "emdcfl_backdoor_mnist", BACKDOOR),
    ("sklearn", "relations", {"clients": 4}),
    ("text", "alphabets", {"clients": 4, "groups": 2}),
]


def opened(source: str, scenario, root: Path, cache: Path):
    """Return a federation with data seed 3."""
    return open_federation(DataConfig(str(root), str(cache), SOURCES[source](), scenario), 3)


def same(a, b) -> None:
    """Compare every sample of two federations."""
    np.testing.assert_array_equal(a.sizes, b.sizes)
    assert a.extra == b.extra
    assert a.names == b.names
    np.testing.assert_array_equal(a.targets, b.targets) if a.targets is not None else None
    for groups in (a.groups, b.groups):
        np.testing.assert_array_equal(groups, a.groups) if a.groups is not None else None
    for k in range(a.num_clients):
        for part in ("train", "val", "test", *a.extra):
            for mine, theirs in zip(a.samples(k, part), b.samples(k, part), strict=True):
                np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(a.client(k).train.x, b.client(k).train.x)


def named(value: object) -> str:
    """Return the name of a case, or an ending."""
    return value if isinstance(value, str) else " ".join(map(str, value))


@pytest.mark.parametrize(("case", "ending"), covering(CASES, [".csv", ".parquet"], ids=named))
def test_an_exported_partition_is_imported_as_it_was(small_root, cache, tmp_path, case, ending):
    source, name, options = case
    scenario, file = SCENARIOS[name](**options), tmp_path / f"split{ending}"
    config = DataConfig(str(small_root), str(cache), SOURCES[source](), scenario)
    rows = export_partition(config, 3, file, "--export")
    before = opened(source, scenario, small_root, cache)
    after = opened(source, SCENARIOS["partition"](path=str(file)), small_root, cache)
    assert rows == before.sizes.sum() + sum(len(before.labels(k, e)) for k in range(6) for e in before.extra)
    same(before, after)


def test_a_run_on_an_imported_partition_has_the_digest_of_the_run_it_was_exported_from(tmp_path, capsys):
    file = tmp_path / "split.csv"
    cli.main(["data", str(CONFIG), "--export", str(file), "--sheet", str(tmp_path / "sheet.png")])
    assert f"partition: {file}, " in capsys.readouterr().out
    output = {"folder": str(tmp_path)}
    one = mpifl.run(CONFIG, output={**output, "id": "1"})
    two = mpifl.run(
        CONFIG, output={**output, "id": "2"}, data={"scenario": {"name": "partition", "path": str(file)}}
    )
    assert one.summary["digest"] == two.summary["digest"]
    other = mpifl.run(CONFIG, output={**output, "id": "3"}, seed={"data": 1})
    assert one.summary["digest"] != other.summary["digest"]


def test_a_split_without_test_samples_is_said_to_be_one(tmp_path, capsys):
    words = ["data", str(CONFIG), "--export", str(tmp_path / "split.csv"), "--sheet", str(tmp_path / "s.png")]
    cli.main([*words, "--data.scenario", "{name: emdcfl_mnist}"])
    said = capsys.readouterr().out
    assert "test data              none: a run is refused, unless it has evaluation.train" in said
    assert "partition: " in said
    unseen = {
        "rounds": 1,
        "data": {"scenario": {"name": "emdcfl_mnist"}},
        "output": {"folder": str(tmp_path)},
    }
    with pytest.raises(UserError, match=r"data\.scenario\.clients = 40: no client has test data"):
        mpifl.run(CONFIG, **unseen)
    assert mpifl.run(CONFIG, **unseen, evaluation={"train": True}).summary["rounds"] == 1


def test_an_exported_table_says_who_holds_what(small_root, cache, tmp_path):
    scenario, file = SCENARIOS["rotated"](clients=4, angles=(0.0, 90.0)), tmp_path / "split.csv"
    config = DataConfig(str(small_root), str(cache), SOURCES["mnist"](), scenario)
    export_partition(config, 3, file, "--export")
    table = pd.read_csv(file, comment="#")
    assert [*table] == ["client", "part", "sample", "group", "label"]
    federation = open_federation(config, 3)
    for k in range(4):
        for part, count in zip(("train", "val", "test"), federation.sizes[k], strict=True):
            rows = table[(table.client == k) & (table.part == part)]
            assert len(rows) == count
            np.testing.assert_array_equal(rows.label, federation.labels(k, part))
            assert (rows.group == k // 2).all()
            assert ((rows["sample"] >= 1369) == (part == "test")).all()


def test_an_altered_file_is_another_partition(small_root, cache, tmp_path):
    file = tmp_path / "split.csv"
    file.write_text("client,sample\n0,0\n1,1\n")
    scenario = SCENARIOS["partition"](path=str(file), test="all")
    assert opened("digits", scenario, small_root, cache).partition.of(1, "train", 0).index.tolist() == [1]
    file.write_text("client,sample\n0,0\n1,12\n")
    assert opened("digits", scenario, small_root, cache).partition.of(1, "train", 0).index.tolist() == [12]


def labels_of(source: str, root: Path) -> np.ndarray:
    """Return the labels of a source, training part first."""
    return SOURCES[source]().load(root, root).labels


@pytest.mark.parametrize("client", [-1, 3])
def test_a_client_that_an_exported_partition_does_not_have_is_refused(cache, tmp_path, client):
    file = tmp_path / "split.csv"
    config = DataConfig(
        str(tmp_path), str(cache), SOURCES["digits"](), SCENARIOS["dirichlet"](clients=3, validation=0.1)
    )
    export_partition(config, 3, file, "--export")
    rows = file.read_text().splitlines()
    file.write_text("\n".join([*rows[:2], ",".join([str(client), *rows[2].split(",")[1:]]), *rows[3:]]))
    with pytest.raises(UserError, match="was altered"):
        opened("digits", SCENARIOS["partition"](path=str(file)), tmp_path, cache)


def test_the_csv_of_the_federated_vision_data_sets_is_read(small_root, cache, tmp_path):
    """Hsu, Qi and Brown, ECCV 2020: user_id, image_id, class; sorted by user here, as theirs are."""
    labels = labels_of("cifar10", small_root)
    file = tmp_path / "federated_train_alpha_0.50.csv"
    users = {7: [3, 900, 14], 12: [1, 2], 31: [999, 5, 6, 8]}
    lines = [f"{user},{image},{labels[image]}" for user, images in users.items() for image in images]
    file.write_text("\n".join(["user_id,image_id,class", *lines]) + "\n")
    federation = opened("cifar10", SCENARIOS["partition"](path=str(file)), small_root, cache)
    assert federation.sizes[:, 0].tolist() == [3, 2, 4]
    assert federation.facts["clients"] == ["7", "12", "31"]
    for k, images in enumerate(users.values()):
        np.testing.assert_array_equal(federation.labels(k), labels[images])
    assert set(federation.labels(1, "test")) <= set(federation.labels(1))  # test: like
    lines[4] = f"12,2,{(labels[2] + 1) % 10}"
    file.write_text("\n".join(["user_id,image_id,class", *lines]) + "\n")
    with pytest.raises(UserError, match=r"1 labels differ; sample 2 has .*labels: ignore"):
        opened("cifar10", SCENARIOS["partition"](path=str(file)), small_root, cache)
    opened("cifar10", SCENARIOS["partition"](path=str(file), labels="ignore"), small_root, cache)


FROM_0 = " test samples are of the source's training part"
SHARED = " samples are held by several clients"
OVERLAPS = [  # the digits' test part begins at 1438
    ("0,train,1\n0,train,2\n1,train,3\n0,test,1500\n1,test,1501", []),
    (
        "0,train,1\n0,train,2\n1,train,1\n0,test,1500\n1,test,1500",
        [f"1 of 2 training{SHARED} (sample 1 by 0 and 1)", f"1 of 1 test{SHARED} (sample 1500 by 0 and 1)"],
    ),
    ("0,train,1\n0,train,2\n1,train,3\n0,test,5\n1,test,6", [f"all 2{FROM_0}"]),
    ("0,train,1\n1,train,3\n0,test,5\n1,test,1438", []),  # one of them is of the test part
    (
        "0,train,1\n0,train,2\n1,train,3\n0,test,2\n1,test,6",
        ["1 of 2 test samples also train or validate", f"all 2{FROM_0}"],
    ),
    ("0,train,1\n1,train,1500\n0,test,1500\n1,test,1", ["2 of 2 test samples also train or validate"]),
    (
        "0,train,1\n1,train,3\n1,val,4\n0,test,4",
        ["1 of 1 test samples also train or validate", f"all 1{FROM_0}"],
    ),
    ("0,train,1\n0,train,2\n0,val,2\n0,test,1500", ["1 of 1 validation samples also train their client"]),
    (  # no client chooses by what it trains on
        "0,train,1\n0,val,2\n1,train,2\n0,test,1500",
        [f"1 of 2 training{SHARED} (sample 2 by 0 and 1)"],
    ),
    (
        "0,train,5\n0,train,5\n0,train,5\n1,train,5\n0,test,1500",
        ["2 rows repeat a sample of their client", f"1 of 1 training{SHARED} (sample 5 by 0 and 1)"],
    ),
]


@pytest.mark.parametrize(("rows", "says"), OVERLAPS)
def test_samples_that_train_and_test_are_said_once_at_every_start(small_root, cache, tmp_path, rows, says):
    file = tmp_path / "split.csv"
    file.write_text(f"client,part,sample\n{rows}\n")
    config = DataConfig(
        str(small_root), str(cache), SOURCES["digits"](), SCENARIOS["partition"](path=str(file))
    )
    for _ in range(2):  # prepared, and found
        lines: list[str] = []
        open_federation(config, 3, lines.append)
        found = [line for line in lines if str(file) in line]
        assert len(found) == bool(says)
        told = "".join(found).removeprefix(f"data.scenario.path = {str(file)!r}: ")
        told = told.removesuffix(" (its test part begins at 1438: add that where the file numbers it from 0)")
        assert told == "; ".join(says)


def test_json_lists_of_samples_are_read(small_root, cache, tmp_path):
    """A mapping from clients to indices, as dictionaries of FedLab and of NIID-Bench are."""
    file = tmp_path / "split.json"
    file.write_text(json.dumps({"1": [4, 2], "0": [9, 8, 7, 6]}))
    options = {"path": str(file), "test": "own", "test_share": 0.5, "validation": 0.4}
    federation = opened("digits", SCENARIOS["partition"](**options), small_root, cache)
    assert federation.sizes.tolist() == [[1, 1, 2], [1, 0, 1]]
    parts = {"0": {"train": [1], "valid": [2, 3], "test": [1500]}, "1": {"training": [4], "test": [1501]}}
    file.write_text(json.dumps(parts))
    federation = opened("digits", SCENARIOS["partition"](path=str(file)), small_root, cache)
    assert federation.sizes.tolist() == [[1, 2, 1], [1, 0, 1]]
    assert federation.partition.of(0, "val", 0).index.tolist() == [2, 3]


def test_a_client_whose_name_is_no_text_is_refused_in_a_line(cache, tmp_path):
    file = tmp_path / "split.json"
    file.write_text(json.dumps({"\ud800": [4, 2], "b": [9, 8]}))
    with refusal_of("data.scenario.path", r"cannot be read as a partition \(UnicodeEncodeError"):
        opened("digits", SCENARIOS["partition"](path=str(file), test="own"), tmp_path, cache)


CLIENTS = [
    (["site#0", "site#1", "site#2"], ["site#0", "site#1", "site#2"]),
    (["1", "01", "2"], ["01", "1", "2"]),  # not one client, as their numbers would be
    (["02", "01", "11"], ["1", "2", "11"]),
    (["10", "9", "8"], ["8", "9", "10"]),  # numbers in their order, not in that of texts
    (["10.0", "9.0", "8.0"], ["8", "9", "10"]),
    (["NA", "EU", "null"], ["EU", "NA", "null"]),
    (["inf", "1", "2"], ["1", "2", "inf"]),
    (["#a", "b", "#c"], ["#a", "#c", "b"]),
    (["9007199254740993", "9007199254740992", "1"], ["1", "9007199254740992", "9007199254740993"]),
]


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
@pytest.mark.parametrize(("clients", "names"), CLIENTS)
def test_clients_with_different_names_are_different_clients(cache, tmp_path, clients, names, ending):
    file = tmp_path / f"split.{ending}"
    rows = [(clients[i % 3], i) for i in range(30)]
    if ending == "csv":
        file.write_text("client,sample\n" + "".join(f"{k},{i}\n" for k, i in rows))
    elif ending == "json":
        file.write_text(json.dumps({client: [i for k, i in rows if k == client] for client in clients}))
    else:
        pytest.importorskip("pyarrow")
        pd.DataFrame(rows, columns=["client", "sample"]).to_parquet(file)
    federation = opened("digits", SCENARIOS["partition"](path=str(file), test="own"), tmp_path, cache)
    assert federation.facts["clients"] == names
    assert federation.sizes.sum(1).tolist() == [10, 10, 10]
    numbers = [names.index(k) if k in names else names.index(str(int(float(k)))) for k in clients]
    held = [federation.partition.of(k, part, 0).index for k in numbers for part in ("train", "val", "test")]
    for i, k in enumerate(clients):
        mine = np.concatenate([h for h in held[3 * i : 3 * i + 3] if h is not None])
        assert sorted(mine.tolist()) == [sample for client, sample in rows if client == k]


REFUSED = [
    ("client,sample\n", r"holds no row"),
    ("client,x\n0,1\n", r"no column for the sample: call it sample or sample_id"),
    ("client,sample\n0,-1\n", r"sample '-1' of row 1 is not a number from zero"),
    ("client,sample\n0,one\n", r"sample 'one' of row 1 is not a number"),
    ("client,sample\n0,5000\n", r"names sample 5000, and the source has 1797"),
    ("client,part,sample\n0,prove,1\n", r"names part 'prove': known are train, val, test"),
    ("client,part,sample\n0,train,1\n1,test,1\n", r"client 1 has no training samples"),
    ("client,sample,group\n0,1,0\n0,2,1\n", r"client 0 is in several groups"),
    ("client,sample,group\n0,1,a\n", r"group 'a' of row 1"),
    ("client,sample\n0,1\n,2\n", r"no client in row 2: name one"),
    ("client,part,sample\n0,train,1\n1, ,1\n", r"no part in row 2: name one"),
    ('"client,sample\n0,1', r"cannot be read as a partition"),
    ("# mpifl partition {\n", r"cannot be read as a partition"),
    ("# mpifl partition {}x\nclient,sample\n0,1\n", r"cannot be read as a partition"),
    ('# mpifl partition {"version": 1}\nclient,sample\n0,1\n', r"its first line was altered"),
    ('# mpifl partition {"version": 9}\nclient,sample\n0,1\n', r"is of version 9: update mpifl"),
]


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_what_is_no_partition_is_refused_in_a_line(cache, tmp_path, text, says):
    file = tmp_path / "split.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        opened("digits", SCENARIOS["partition"](path=str(file)), tmp_path, cache)
    assert error.value.key == "data.scenario.path"
    assert "\n" not in str(error.value)


def test_keys_that_the_file_decides_are_refused(cache, tmp_path):
    file = tmp_path / "split.csv"
    file.write_text("client,part,sample\n0,train,1\n0,val,2\n0,test,3\n")
    for key, value in (("test", "own"), ("validation", 0.5)):
        with pytest.raises(UserError, match=f"{key} = .*the file says which samples"):
            opened("digits", SCENARIOS["partition"](path=str(file), **{key: value}), tmp_path, cache)
    for name, says in (("split.txt", "ends in .csv, .parquet, .json"), ("none.csv", "there is no such file")):
        with pytest.raises(UserError, match=says):
            opened("digits", SCENARIOS["partition"](path=str(tmp_path / name)), tmp_path, cache)


@pytest.mark.parametrize("test", [None, "like", "all"])
def test_clients_are_not_tested_on_samples_that_others_train_on(cache, tmp_path, test):
    """The test part of digits begins at 1438; a split of all digits deals it out for training, too."""
    file = tmp_path / "split.json"
    rows = {"0": {"train": [0, 1438, 1439], "val": [1]}, "1": {"train": [2, 1439], "val": [1500]}}
    file.write_text(json.dumps(rows))
    says = r"data.scenario.test = '(like|all)': 3 samples .* of the source's test part.* use own, or leave"
    with pytest.raises(UserError, match=says):
        opened("digits", SCENARIOS["partition"](path=str(file), test=test), tmp_path, cache)
    federation = opened("digits", SCENARIOS["partition"](path=str(file), test="own"), tmp_path, cache)
    assert federation.sizes.tolist() == [[2, 1, 1], [1, 1, 1]]
    rows = {"0": {"train": [0, 1437], "val": [1]}, "1": {"train": [2]}}
    file.write_text(json.dumps(rows))
    opened("digits", SCENARIOS["partition"](path=str(file), test=test), tmp_path, cache)


def test_a_partition_is_refused_for_another_source(small_root, cache, tmp_path):
    file = tmp_path / "split.csv"
    scenario = SCENARIOS["iid"](clients=3)
    export_partition(DataConfig(cache=str(cache), scenario=scenario), 0, file, "--export")
    with pytest.raises(UserError, match="was made for digits with 1797 samples"):
        opened("mnist", SCENARIOS["partition"](path=str(file)), small_root, cache)


def test_clients_that_change_cannot_be_exported(cache, tmp_path):
    config = DataConfig(cache=str(cache), scenario=SCENARIOS["population"](clients=5))
    with pytest.raises(UserError, match="there is no partition to export"):
        export_partition(config, 0, tmp_path / "split.csv", "--export")
    with pytest.raises(UserError, match=r"--export = .*ends in .csv, .parquet"):
        export_partition(replace(config, scenario=SCENARIOS["iid"]()), 0, tmp_path / "a.json", "--export")
    with pytest.raises(UserError, match=r"--export = .*cannot be written"):
        export_partition(replace(config, scenario=SCENARIOS["iid"]()), 0, tmp_path / "no/a.csv", "--export")


def test_a_clients_data_are_those_that_it_trains_on_in_a_run():
    """An attacker's labels are wrong; who awaits a drift skips data sets, here one half of them or more."""
    true, flipped = (
        mpifl.client_data(CONFIG, 3, **attack)["train"][1]
        for attack in ({}, {"attack": {"name": "label_flip", "clients": [3]}})
    )
    assert (true != flipped).all()
    drift = {"name": "ccfl", "clients": 8, "smallest": 20, "largest": 40, "public": 100, "test_images": 50}
    policy = {"name": "client_decides", "uploads": {"name": "drift", "threshold": 0.3}}
    options = {"data": {"scenario": drift}, "algorithm": "ccfl", "policy": policy}
    federation = open_data(from_tree(Config, tree_of(CONFIG, options)), True)
    cycles = [federation.cycle(0, visit) for visit in range(4)]
    assert cycles != [0, 1, 2, 3]
    for visit in range(4):
        x = mpifl.client_data(CONFIG, 0, visit=visit, **options)["train"][0]
        np.testing.assert_array_equal(x, federation.client(0, visit).train.x)


def test_a_clients_data_are_arrays(tmp_path):
    parts = mpifl.client_data(CONFIG, 3)
    assert [*parts] == ["train", "val", "test"]
    x, y = parts["train"]
    assert (x.dtype, x.shape[1:], y.dtype) == (np.float32, (1, 8, 8), np.int64)
    stored, labels = mpifl.client_data(CONFIG, 3, stored=True)["train"]
    assert stored.dtype == np.uint8
    np.testing.assert_allclose(x, (stored / 255 - 0.3053) / 0.3761, atol=1e-5)
    np.testing.assert_array_equal(y, labels)
    run = mpifl.run(CONFIG, rounds=1, output={"folder": str(tmp_path), "id": "a"})
    np.testing.assert_array_equal(mpifl.client_data(run, 3)["train"][0], x)
    with pytest.raises(UserError, match=r"client = 8: clients are numbered from 0 to 7"):
        mpifl.client_data(CONFIG, 8)
