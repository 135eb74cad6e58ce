"""`mpifl check`: sound methods pass; each kind of mistake is found and named."""

from __future__ import annotations

import subprocess
from functools import partial

import pytest

from mpifl.cli import main
from mpifl.kernels import bindings
from mpifl.tools import method_check
from mpifl.traffic.compression import Coder

HEAD = """
import itertools
import os
from dataclasses import dataclass

import numpy as np

from mpifl.core.method import Algorithm
from mpifl.core.mixing import average
from mpifl.core.plan import Plan

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
SHORT = ("--ranks", "1", "--rounds", "2")
AT_NIGHT = partial(pytest.param, marks=pytest.mark.nightly(spread=True))
NAMES = "Algorithm, PlainVisit, PlainVisits"


def tried(tmp_path, monkeypatch, capsys, weight: str, *words: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of a check of `Mine`, whose clients weigh so much."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD.replace("WEIGHT", weight))
    code = main(["check", "mine.py:Mine", *(words or ("--ranks", "1"))])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_sound_method_passes(ranks, tmp_path, monkeypatch, capsys):
    """It has one row, and hears nothing of rows."""
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND, "--ranks", str(ranks), "--rounds", "2")
    assert code == 0
    assert lines[0] == "mine.py:Mine in 2 server steps with 6 clients"
    (over,) = (line for line in lines if "ranks: " in line)
    assert [line[:5] for line in lines[1:] if line != over] == ["ok   "] * 7
    told = {1: "note over several ranks: not tried (--ranks 1)", 2: "ok   2 ranks: the same digest and bytes"}
    assert over == told[ranks]
    assert not any("rows of table" in line for line in lines)


TWO_ROWS = """
    def setup(self, problem, fingerprints, key):
        rows = torch.stack([problem.init(0), problem.init(1)])
        return Server({"model": rows}, np.arange(problem.num_clients) * 0)

    def aggregate(self, server, notes):
        labels = LABELS[notes.client]
        weights = np.ones(len(notes))
        return Plan([by_cluster(labels, 2, weights)], assign=LABELS)
"""


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("0 * server.assign", "note 1 of the 2 rows of table 'model' are read by no client: row 1"),
        ("np.arange(len(server.assign)) % 2", "ok   clients read each of the 2 rows of table 'model'"),
    ],
    ids=["nobody is assigned", "half of them are"],
)
def test_a_row_that_no_client_reads_is_said_and_is_no_failure(labels, said, tmp_path, monkeypatch, capsys):
    """A clustered method that assigns nobody to its second row trains one model, as FedAvg does."""
    head = HEAD[: HEAD.index("    def aggregate")].replace("import average", "import by_cluster")
    head = head.replace("import numpy as np", "import numpy as np\nimport torch")
    head = head.replace("import Algorithm", "import Algorithm, Server")
    monkeypatch.setitem(globals(), "HEAD", head + TWO_ROWS.replace("LABELS", f"({labels})"))
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND, *SHORT)
    assert code == 0
    assert said in lines
    assert len([line for line in lines if "rows of table" in line]) == 1


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
    code, lines = tried(tmp_path, monkeypatch, capsys, weight, *SHORT)
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
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND, *SHORT)
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
@pytest.mark.parametrize(("mu", "passed"), [("0.5", True), ("0.4", False), AT_NIGHT("None", False)])
def test_a_plain_visit_that_is_no_local_update_is_found(mu, passed, tmp_path, monkeypatch, capsys):
    text = HEAD[: HEAD.index("    def local_update")] + PLAIN.replace("MU", mu)
    text = text.replace("(Algorithm)", "(PlainVisits, Algorithm)").replace(
        "import Algorithm", f"import {NAMES}"
    )
    monkeypatch.setitem(globals(), "HEAD", text)
    code, lines = tried(tmp_path, monkeypatch, capsys, SOUND, *SHORT)
    (line,) = [line for line in lines if "plain_visit" in line and line[:4] in ("ok  ", "FAIL")]
    assert line.endswith("the same digest" if passed else "another digest")
    assert code == (0 if passed else 1)
    assert len([line for line in lines if line.startswith("FAIL")]) == (not passed)


FEW = """
    def aggregate(self, server, notes):
        if len(notes.client) < 6:
            raise ValueError("where is everybody?")
        return Plan([average(notes)])
"""
STOPPED = """
    def aggregate(self, server, notes):
        if server.version and not hasattr(self, "begun"):
            raise ValueError("nobody told me")
        object.__setattr__(self, "begun", True)
        return Plan([average(notes)])
"""
IDLE = """
    def local_update(self, message, state, client, key):
        return client.report({"weight": 1.0}, model=message["model"][0].clone()), state
"""


@pytest.mark.parametrize(
    ("more", "says", "code"),
    [
        (FEW, ["FAIL rounds with 3 clients: ", "where is everybody?"], 1),
        (STOPPED, ["FAIL stopped after 2 steps and resumed: ", "nobody told me"], 1),
        (IDLE, ["note a run: accuracy ", "nothing was learned"], 0),
        ('    paper = ""', ["note no paper", "set `paper`"], 0),
    ],
    ids=["rounds of some clients", "after a stop", "nothing learned", "no paper"],
)
def test_one_trial_and_no_other_tells_a_mistake(more, says, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(globals(), "HEAD", HEAD + more)
    told, lines = tried(tmp_path, monkeypatch, capsys, SOUND)
    assert told == code
    (at,) = [
        i for i, line in enumerate(lines) if line[:4] in ("FAIL", "note") and "ranks: not tried" not in line
    ]
    assert lines[at].startswith(says[0])
    assert says[1] in "\n".join(lines[at : at + 2])


DOWN = """
    def reads(self, server, k):
        return {"model": (0,) * int(os.environ.get("RANKS", 1))}
"""


@pytest.mark.parametrize(
    ("declared", "code", "line"),
    [
        ("trains_once = True", 0, "ok   computation: "),
        AT_NIGHT("trains_once = False", 0, ""),
        ("PASSES", 1, "FAIL"),
    ],
)
def test_what_a_visit_is_declared_to_ask_for_is_compared(declared, code, line, tmp_path, monkeypatch, capsys):
    asks = "def visit_passes(self, held, problem):\n        from mpifl.core.computation import Asked\n"
    asks += '        return [Asked("loss", held.train)]'
    own = HEAD.replace('year = {2026}}"', 'year = {2026}}"\n    ' + declared.replace("PASSES", asks))
    monkeypatch.setattr(f"{__name__}.HEAD", own)
    found, lines = tried(tmp_path, monkeypatch, capsys, SOUND, *SHORT)
    assert found == code
    said = [one for one in lines if "computation:" in one]
    assert [one.startswith(line) or line == "FAIL" for one in said] == [True] * bool(line)
    assert line != "FAIL" or "declared were" in said[0]


@pytest.mark.parametrize(
    ("weight", "more", "found"),
    [
        ("float(os.environ.get('RANKS', 3)) + client.id", "", "FAIL 2 ranks: another digest"),
        (f"[{SOUND}] * int(os.environ.get('RANKS', 1))", "", "FAIL 2 ranks: another federation_bytes_up"),
        AT_NIGHT(SOUND, DOWN, "FAIL 2 ranks: another federation_bytes_down"),
        ("1 / ('RANKS' not in os.environ)", "", "FAIL 2 ranks: exit code 1"),
    ],
    ids=["digest", "up", "down", "failure"],
)
def test_what_differs_over_ranks_is_named(weight, more, found, tmp_path, monkeypatch, capsys):
    """The job is a run in this process, in which the method sees another number of ranks."""
    started = subprocess.run

    def job(command, **options):
        if "run" not in command:  # git, for the commit of the code
            return started(command, **options)
        monkeypatch.setenv("RANKS", "2")
        code = main(command[command.index("run") :])
        monkeypatch.delenv("RANKS")
        return subprocess.CompletedProcess(command, code, "", capsys.readouterr().err)

    monkeypatch.setattr(method_check.subprocess, "run", job)
    monkeypatch.setattr(method_check, "mpirun", lambda ranks: ["mpirun", "-n", str(ranks)])
    monkeypatch.setitem(globals(), "HEAD", HEAD + more)
    code, lines = tried(tmp_path, monkeypatch, capsys, weight, "--ranks", "2", "--rounds", "1")
    assert code == 1
    assert [line for line in lines if line.startswith("FAIL")] == [found]


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


@pytest.mark.in_turn
def test_methods_that_need_single_uploads_and_server_sets_get_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "ccfl", "--ranks", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ccfl in 24 server steps with 6 clients"
    assert not [line for line in lines if line.startswith("FAIL")]


TRAINER = """
import itertools
from dataclasses import dataclass

import torch

import mpifl

COUNTER = itertools.count()


@dataclass(frozen=True)
class Mine(mpifl.Trainer):
    gives = ("direction", "loss", "rate", "outputs")

    def fit(self, module, data, context):
        params, lr, samples = [p for p in module.parameters() if p.requires_grad], LR, 0
        for x, y, index in data.batches():
            LOSS.backward()
            DIRECT
            with torch.no_grad():
                for p in params:
                    if p.grad is not None:
                        p -= lr * p.grad
                    p.grad = None
            samples += len(x)
        return mpifl.Fit(0.0, context.num_steps, samples, lr=lr)
"""
GOOD = {"LR": "0.1", "LOSS": "context.loss(module, x, y, index)", "DIRECT": "context.direct()"}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"DIRECT": "pass"}, "gives `direction`"),
        *(
            AT_NIGHT(*case)
            for case in (
                ({}, ""),
                ({"LOSS": "torch.nn.functional.cross_entropy(module(x), y)"}, "gives `loss`"),
                ({"LR": "0.1 / (1 + next(COUNTER))"}, "the same run again"),
                ({"LR": "float('nan')"}, "a run"),
            )
        ),
    ],
)
def test_a_trainer_is_tried_and_what_it_does_not_give_is_named(changes, found, tmp_path, monkeypatch, capsys):
    """A direction that is ignored, a loss of its own, a counter between visits, a rate that is no number."""
    monkeypatch.chdir(tmp_path)
    text = TRAINER
    for name, code in {**GOOD, **changes}.items():
        text = text.replace(name, code)
    (tmp_path / "mine.py").write_text(text)
    code = main(["check", "mine.py:Mine", "--ranks", "1", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAIL")]
    assert code == (1 if found else 0)
    assert [found in line for line in failed] == [True] * bool(found)
    assert found == "a run" or sum("gives `" in line for line in lines) == 4


CODEC = """
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from mpifl.traffic.compression import Codec, Compression

COUNTER = itertools.count()


@dataclass(frozen=True)
class Halves(Codec):
    def size(self, d, number_bytes):
        return SIZE

    def encode(self, x, key, unbiased):
        return (FROM).numpy().astype("<f2").tobytes()

    def decode(self, data, d):
        return torch.from_numpy(np.frombuffer(data, "<f2").astype(np.float32))
"""


@pytest.mark.parametrize(
    ("size", "sent", "found", "remedy"),
    [
        ("2 * d", "x", "", ""),
        ("2 * d + 1", "x", "FAIL a run: Halves.size: 3 bytes for 1 numbers, and encode returns 2", ""),
        ("2.0 * d", "x", "FAIL size(1) is 2.0", "an integer"),
        ("2 * d", "x + next(COUNTER)", "FAIL 1 numbers coded twice: two results", "`key` alone"),
        ("2 * d", "x.mul_(0.5)", "FAIL 1 numbers: `code` changes its argument", "a copy"),
        ("2 * d", "x / 0", "FAIL a run: Halves.code: numbers that are not finite", ""),
    ],
    ids=["sound", "size", "no integer", "other draws", "argument", "not finite"],
)
def test_a_codec_is_tried_alone_and_in_both_directions(
    size, sent, found, remedy, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "codec.py").write_text(CODEC.replace("SIZE", size).replace("FROM", sent))
    code = main(["check", "codec.py:Halves", "--ranks", "1", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    failed = [at for at, line in enumerate(lines) if line.startswith("FAIL")]
    assert code == bool(found)
    assert len(failed) == bool(found)
    if found:
        assert lines[failed[0]].startswith(found)
        assert remedy in "\n".join(lines[failed[0] :])
    else:
        assert [line for line in lines if "as many as `encode` has made" in line] == lines[-2:]


def test_bytes_that_the_ledger_does_not_count_are_found(tmp_path, monkeypatch, capsys):
    """A ledger that forgets one byte of each upload is not that of the codec."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "codec.py").write_text(CODEC.replace("SIZE", "2 * d").replace("FROM", "x"))
    sizes = Coder.sizes

    def less(self, *given):
        return {name: size - 1 for name, size in sizes(self, *given).items()}

    monkeypatch.setattr(Coder, "sizes", less)
    assert main(["check", "codec.py:Halves", "--ranks", "1", "--rounds", "2"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert failed[0].startswith("FAIL bytes up: ")
