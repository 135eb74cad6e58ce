"""`mpifl check`: sound methods pass; each kind of mistake is found and named."""

from __future__ import annotations

import pytest

from mpifl.cli import main
from mpifl.kernels import bindings

HEAD = """
import itertools
import os
from dataclasses import dataclass

import numpy as np

from mpifl.core.method import Algorithm
from mpifl.core.mixing import Plan, average

COUNTER = itertools.count()


@dataclass(frozen=True)
class Mine(Algorithm):
    paper = "@misc{me, author = {A}, title = {T}, year = {2026}}"

    def local_update(self, message, state, client, key):
        trained = client.sgd(message["model"][0], key)
        return client.report({"weight": WEIGHT}, model=trained.vector), state

    def aggregate(self, server, notes):
        return Plan([average(notes, weights=notes["weight"].reshape(len(notes.client), -1)[:, 0])])
"""
SOUND = "float(client.id + 1)"
NAMES = "Algorithm, PlainVisit, PlainVisits"


def tried(tmp_path, monkeypatch, capsys, weight: str, *words: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of a check of `Mine`, whose clients weigh so much."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD.replace("WEIGHT", weight))
    code = main(["check", "mine.py:Mine", *(words or ("--ranks", "1"))])
    return code, capsys.readouterr().out.splitlines()


def test_a_sound_method_passes(tmp_path, monkeypatch, capsys):
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND, "--ranks", "2", "--rounds", "2")
    assert code == 0
    assert lines[0] == "mine.py:Mine in 2 server steps with 6 clients"
    assert [line[:5] for line in lines[1:]] == ["ok   "] * 8
    assert "ok   2 ranks: the same digest and bytes" in lines


@pytest.mark.parametrize(
    ("weight", "found", "remedy"),
    [
        ("np.random.default_rng().random()", "FAIL the same run again: another digest", "draw from `key`"),
        ("float(next(COUNTER))", "FAIL the same run again: another digest", "keep nothing in the object"),
        ("[1.0] * (1 + int(message['model'][0, 0] != client.init[0]))", "FAIL bytes: ", "`extra_bytes`"),
        ("np.ones(client.id + 1)", "FAIL a run: ", "one shape for all clients"),
        ("float(message['model'][0].mul_(0.5)[0]) * 0 + 1", "FAIL local_update changed its message", "clone"),
        ("1 / 0", "FAIL a run: ", "ZeroDivisionError"),
    ],
    ids=["other generator", "module", "bytes", "shapes", "arguments", "exception"],
)
def test_a_mistake_is_found(weight, found, remedy, tmp_path, monkeypatch, capsys):
    code, lines = tried(tmp_path, monkeypatch, capsys, weight)
    assert code == 1
    (at,) = [i for i, line in enumerate(lines) if line.startswith("FAIL")]
    assert lines[at].startswith(found)
    assert remedy in "\n".join(lines[at:])


KEPT = """
    def server_update(self, old, new):
        counts = {"steps": new.algorithm_state.get("steps", np.zeros(1)) + 1}
        object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
        return replace(new, algorithm_state=counts | {"kept": np.array([float(self.steps)])})
"""


IN_PLACE = """
    needs = Needs(server_update=DECLARED)

    def server_update(self, old, new):
        new.tables["model"].mul_(0.5)
        return new
"""


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        ("True", "FAIL server_update changed its new server"),
        ("False", "FAIL a run: Mine.server_update: step 1: changed table 'model'"),
    ],
)
def test_rows_that_are_changed_in_place_are_found(declared, found, tmp_path, monkeypatch, capsys):
    text = HEAD.replace("import Algorithm\n", "import Algorithm, Needs\n")
    monkeypatch.setitem(globals(), "HEAD", text + IN_PLACE.replace("DECLARED", declared))
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND)
    assert code == 1
    (said,) = [line for line in lines if line.startswith("FAIL")]
    assert said.startswith(found)


def test_what_is_not_in_a_checkpoint_is_found(tmp_path, monkeypatch, capsys):
    """A counter in the object of a method begins again when the run goes on."""
    text = HEAD.replace("import dataclass\n", "import dataclass, replace\n") + KEPT
    monkeypatch.setitem(globals(), "HEAD", text)
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND)
    assert code == 1
    assert "FAIL stopped after 2 steps and resumed: another digest" in lines
    assert "ok   the same run again: the same digest" in lines, "every run has an object of its own"


PLAIN = """
    def plain_visit(self):
        return PlainVisit(mu=MU)

    def local_update(self, message, state, client, key):
        x = message["model"][0]
        trained = client.sgd(x, key, direction=lambda g, w: g + 0.5 * (w - x))
        return client.report(model=trained.vector, metrics={"train_loss": trained.loss}), state

    def aggregate(self, server, notes):
        return Plan([average(notes)])
"""


@pytest.mark.skipif(not bindings.TRAINING_AVAILABLE, reason="the kernels are there")
@pytest.mark.parametrize(("mu", "passed"), [("0.5", True), ("0.4", False), ("None", False)])
def test_a_plain_visit_that_is_no_local_update_is_found(mu, passed, tmp_path, monkeypatch, capsys):
    text = HEAD[: HEAD.index("    def local_update")] + PLAIN.replace("MU", mu)
    text = text.replace("(Algorithm)", "(PlainVisits, Algorithm)").replace(
        "import Algorithm", f"import {NAMES}"
    )
    monkeypatch.setitem(globals(), "HEAD", text)
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND)
    (line,) = [line for line in lines if "plain_visit" in line and line[:4] in ("ok  ", "FAIL")]
    assert line.endswith("the same digest" if passed else "another digest")
    assert code == (0 if passed else 1)
    assert len([line for line in lines if line.startswith("FAIL")]) == (not passed)


@pytest.mark.nightly
def test_what_depends_on_the_rank_is_found(tmp_path, monkeypatch, capsys):
    weight = 'float(1 + int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)))'
    code, lines = tried(tmp_path, monkeypatch, capsys, weight, "--ranks", "3", "--rounds", "1")
    assert code == 1
    assert "FAIL 3 ranks: another digest" in lines


def test_a_method_without_a_hook_that_it_needs_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD[: HEAD.index("    def aggregate")])
    assert main(["check", "mine.py:Mine"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("does not define `aggregate`, which it needs; add it")


def test_what_is_no_method_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    a: int = 1\n"
    )
    assert main(["check", "mine.py:Mine"]) == 2
    assert "is not a subclass of mpifl.Algorithm" in capsys.readouterr().err


def test_methods_that_need_single_uploads_and_server_sets_get_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "ccfl", "--ranks", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ccfl in 24 server steps with 6 clients"
    assert not [line for line in lines if line.startswith("FAIL")]
