"""A run folder that is there already: refused, reused, continued or replaced."""

from __future__ import annotations

import fcntl
import json

import pytest
from support.refusal import refusal_of
from support.runs import CONFIG

import mpifl
from mpifl.cli import main

METRIC = "def hits(logits, labels):\n    return float((logits.argmax(1) == labels).float().mean())\n"


def tiny(tmp_path, existing, **changes):
    """Return what `mpifl.run` gives for the tiny configuration under one id."""
    output = {"folder": str(tmp_path), "id": "one", "existing": existing, **changes.pop("output", {})}
    return mpifl.run(str(CONFIG), output=output, **changes)


class Tells:
    """Counts rounds; raises an exception after one of them."""

    def __init__(self, fails=0):
        self.rounds, self.fails = [], fails

    def on_round(self, done):
        self.rounds.append(done.step)
        if done.step == self.fails:
            raise KeyError("gone")


def test_a_run_is_refused_or_reused_or_replaced(tmp_path):
    """A reused run trains nothing; a replaced one is another run in the same folder."""
    first, tells = tiny(tmp_path, "refuse"), Tells()
    with pytest.raises(mpifl.UserError, match=r"output\.id = 'one': a run of that name is there already"):
        tiny(tmp_path, "refuse")
    again = tiny(tmp_path, "reuse", callbacks=[tells], system={"threads": 1})
    assert (again.summary, tells.rounds) == (first.summary, [])
    was = json.loads((again.folder / "run.json").read_text())["id"]
    (again.folder / "mine.txt").write_text("of the old run")
    other = tiny(tmp_path, "replace", rounds=1, callbacks=[tells])
    assert (other.summary["rounds"], tells.rounds) == (1, [1])
    assert json.loads((other.folder / "run.json").read_text())["id"] != was
    assert not (other.folder / "mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-one"]


def test_an_unfinished_run_goes_on_if_it_may(tmp_path):
    whole = mpifl.run(str(CONFIG), rounds=4, output={"folder": str(tmp_path / "whole")})
    with pytest.raises(KeyError):
        tiny(tmp_path, "reuse", rounds=4, callbacks=[Tells(2)])
    with pytest.raises(mpifl.UserError, match=r"local\.lr = 0\.5: the run began with 0\.1"):
        tiny(tmp_path, "reuse", rounds=4, local={"lr": 0.5})
    tells = Tells()
    run = tiny(tmp_path, "reuse", rounds=4, callbacks=[tells])
    assert tells.rounds == [3, 4]
    assert run.summary["digest"] == whole.summary["digest"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rounds": 1}, "rounds"),  # fewer are another run, too
        ({"seed": 1}, "seed.data"),
        ({"stop": {"bytes": 10**9}}, "stop.bytes"),
        ({"output": {"updates": True}}, "output.updates"),  # a file that the complete run lacks
    ],
)
def test_a_complete_run_of_other_options_is_not_returned(tmp_path_factory, changes, key):
    folder = tmp_path_factory.getbasetemp() / "complete"
    tiny(folder, "reuse")
    with refusal_of(key, "the complete run in"):
        tiny(folder, "reuse", **changes)


def test_a_run_of_code_or_data_that_have_changed_is_not_returned(tmp_path):
    file, table = tmp_path / "metric.py", tmp_path / "table.csv"
    file.write_text(METRIC)
    table.write_text("a,b,y\n" + "".join(f"{i / 40},{i % 3},{i % 2}\n" for i in range(40)))
    given = {
        "model": {"name": "mlp", "hidden": [2]},
        "data": {
            "source": {"name": "table", "path": str(table), "target": ["y"]},
            "scenario": {"name": "iid", "clients": 2},
        },
        "evaluation": {"metrics": [f"{file}:hits"]},
    }
    runs = tmp_path / "runs"
    tiny(runs, "reuse", **given)
    tiny(runs, "reuse", **given)
    file.write_text(METRIC.replace("float()", "double()"))
    with pytest.raises(mpifl.UserError, match="before a file of your own changed"):
        tiny(runs, "reuse", **given)
    file.write_text(METRIC)
    table.write_text(table.read_text().replace("0.5,", "0.6,"))
    with pytest.raises(mpifl.UserError, match=r"samples of its data: .* give another output\.id"):
        tiny(runs, "reuse", **given)


def test_only_run_folders_that_nothing_uses_are_deleted(tmp_path):
    mine = tmp_path / "tiny-one"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    with pytest.raises(mpifl.UserError, match="is not a run folder of mpifl, and is not deleted"):
        tiny(tmp_path, "replace")
    (mine / "config.yaml").touch()
    with pytest.raises(mpifl.UserError, match="is not a run folder of mpifl, and is not deleted"):
        tiny(tmp_path, "replace")
    assert {path.name for path in mine.iterdir()} == {"thesis.tex", "config.yaml"}
    runs = tmp_path / "runs"
    run = tiny(runs, "replace")
    with pytest.raises(mpifl.UserError, match="which this run reads"):
        tiny(runs, "replace", start={"run": str(run.folder)})
    with (run.folder / "run.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(mpifl.UserError, match="another process is running it"):
            tiny(runs, "replace")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "tiny-one").symlink_to(run.folder)
    with pytest.raises(mpifl.UserError, match="is not deleted"):
        tiny(tmp_path / "linked", "replace")
    with pytest.raises(mpifl.UserError, match=r"local\.lr"):
        tiny(runs, "replace", local={"lr": -1.0})
    assert mpifl.load(run.folder).summary == run.summary


def test_the_command_does_the_same(tmp_path, capsys):
    run = ["run", str(CONFIG), "--output.folder", str(tmp_path), "-q"]
    assert main([*run, "--output.existing", "reuse"]) == 2
    assert "output.existing = 'reuse': has no effect without output.id" in capsys.readouterr().err
    run += ["--output.id", "one"]
    assert main([*run, "--output.existing", "reuse"]) == 0
    assert main([*run, "--output.existing", "reuse"]) == 0
    assert f"{tmp_path / 'tiny-one'} is complete" in capsys.readouterr().out
    assert main([*run, "--output.existing", "replace", "--resume"]) == 2
    assert main([*run, "--output.existing", "replace", "--rounds", "1"]) == 0
    assert mpifl.load(tmp_path / "tiny-one").summary["rounds"] == 1
    assert main(["plan", *run[1:], "--output.existing", "replace", "--time", "no"]) == 0


def test_a_folder_in_which_no_run_began_is_used(tmp_path):
    (tmp_path / "tiny-one").mkdir()
    (tmp_path / "tiny-one" / "config.yaml").touch()
    assert tiny(tmp_path, "reuse").summary["rounds"] == 2
