"""Metrics of users: by hand, beside accuracy in every table, and what cannot be one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import own_metrics
from support.runs import CONFIG

import mpifl
from mpifl.core.errors import CodeFailed
from mpifl.experiment import loader
from mpifl.experiment.schema import Config, EvaluationConfig
from mpifl.experiment.section_checks import check_sections
from mpifl.training.own_metrics import load_metrics

FILE = own_metrics.__file__
OWN = ("hits", "top2", "error_rate")
LOGITS = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 5.0, 4.0], [0.0, 1.0, 2.0]])
LABELS = torch.tensor([0, 2, 1, 1])


def test_values_of_one_client_by_hand():
    """Predicted are 0, 0, 1, 2; two best are 01, 01, 12, 12.

    Label 0 is recalled 1 of 1, label 1: 1 of 2, label 2: 0 of 1.
    """
    top2, recalled = load_metrics([f"{FILE}:top2", f"{FILE}:recalled"])
    assert (top2.name, recalled.name) == ("top2", "recalled")
    assert top2(LOGITS, LABELS, 0) == 3 / 4
    assert recalled(LOGITS, LABELS, 0) == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert math.isnan(top2(LOGITS[:0], LABELS[:0], 0))


WRITING = """
def first(logits, labels):
    logits.zero_()
    labels.fill_(-1)
    return 0.0

def second(logits, labels):
    return (logits.argmax(1) == labels).float().mean()
"""


def test_a_metric_that_writes_into_its_arguments_changes_no_other_figure(tmp_path):
    """The labels are those that the next evaluation of the client reads, too."""
    (tmp_path / "mine.py").write_text(WRITING)
    evaluation = {"metrics": [f"{tmp_path / 'mine.py'}:{name}" for name in ("first", "second")], "every": 1}
    own = mpifl.run(str(CONFIG), evaluation=evaluation, output={"folder": str(tmp_path), "id": "own"})
    plain = mpifl.run(str(CONFIG), evaluation={"every": 1}, output={"folder": str(tmp_path), "id": "plain"})
    assert own.metrics["accuracy_mean"].tolist() == plain.metrics["accuracy_mean"].tolist()
    assert own.metrics["second_mean"].tolist() == pytest.approx(plain.metrics["accuracy_mean"].tolist())


def test_a_metric_that_draws_has_the_same_value_whatever_was_drawn_before(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import random\nimport numpy as np\nimport torch\n\n"
        "def drawn(logits, labels):\n    return random.random() + np.random.rand() + torch.rand(())\n"
    )
    (drawn,) = load_metrics([f"{tmp_path / 'mine.py'}:drawn"])
    value = drawn(LOGITS, LABELS, 3)
    before = torch.random.get_rng_state()
    assert drawn(LOGITS, LABELS, 3) == value != drawn(LOGITS, LABELS, 4)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedem", "fedavg_ft"], ids=["one model", "mixture", "tuned"])
def test_a_copy_of_the_accuracy_has_its_values_in_all_tables(tmp_path, algorithm):
    evaluation = {"metrics": [f"{FILE}:{name}" for name in OWN], "train": True, "by": ["group"], "every": 1}
    output = {"folder": str(tmp_path), "id": "own"}
    run = mpifl.run(str(CONFIG), algorithm=algorithm, evaluation=evaluation, output=output)
    metrics, clients = run.metrics, run.clients
    for mine, known in (("mean", "mean"), ("min", "worst"), ("std", "std"), ("group1_mean", "group1_mean")):
        assert metrics[f"hits_{mine}"].tolist() == metrics[f"accuracy_{known}"].tolist()
        assert metrics[f"hits_train_{mine}"].tolist() == metrics[f"accuracy_train_{known}"].tolist()
    assert clients["hits"].tolist() == clients["accuracy"].tolist()
    assert metrics["hits_max"].iloc[-1] == clients["hits"].max()
    assert (clients["top2"] >= clients["hits"]).all()
    assert (clients["top2"] > clients["hits"]).any()
    assert run.summary["top2_mean"] == metrics["top2_mean"].iloc[-1]
    assert run.summary["directions"] == {"hits": 0, "top2": 0, "error_rate": -1}
    if algorithm == "fedavg_ft":
        assert clients["hits_initial"].tolist() == clients["accuracy_initial"].tolist()
    plain = mpifl.run(str(CONFIG), algorithm=algorithm, output={"folder": str(tmp_path), "id": "plain"})
    assert run.summary["digest"] == plain.summary["digest"]


REFUSED = {
    "top2": "give package.module:function",
    "FILE:nothing": "has no 'nothing'",
    "FILE:Kind": "is not a function",
    "FILE:accuracy_of_mine": "the name accuracy_of_mine is that of a column already",
    "FILE:sideways": "better = 'up': set it to 1 where higher is better, to -1 where lower is",
    "FILE:top2 FILE:top2": "its columns would be those of",
    "FILE:top2 FILE:top2_again": "its columns would be those of",
}


@pytest.mark.parametrize(("paths", "said"), REFUSED.items())
def test_what_cannot_be_a_metric_is_refused_before_a_folder_is_made(tmp_path, paths, said):
    given = paths.replace("FILE", FILE).split()
    with pytest.raises(mpifl.UserError, match=r"evaluation\.metrics") as error:
        mpifl.run(str(CONFIG), evaluation={"metrics": given}, output={"folder": str(tmp_path / "runs")})
    assert said in error.value.remedy
    assert not (tmp_path / "runs").exists()


NAMES = {
    "mse": {"task": "regression"},
    "r2_adjusted": {"task": "regression"},
    "macro": {"task": {"name": "classification", "metrics": ["macro_f1"]}},
    "epsilon": {},
    "clip": {},
    "attacker": {},
    "work": {},
    "secure_dropped": {},
    "tuned": {},
    "tuned_size_head": {},
}


@pytest.mark.parametrize(("name", "changes"), NAMES.items())
def test_names_that_a_run_writes_itself_are_refused(name, changes, tmp_path):
    """Those of the task's metrics and what begins with them, and those of privacy, rounds and fine-tuning."""
    file = tmp_path / "mine.py"
    file.write_text(f"def {name}(output, labels):\n    return 7.0\n")
    config = loader.load(str(CONFIG), [])
    config = replace(config, evaluation=EvaluationConfig(metrics=(f"{file}:{name}",)))
    task = loader.from_tree(Config, {**loader.to_tree(config), **changes}).task
    with pytest.raises(mpifl.UserError, match=r"evaluation\.metrics = .*: the name .* is that of a column"):
        check_sections(replace(config, task=task))


def test_a_metric_of_another_task_is_free(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def mse(output, labels):\n    return 7.0\n")
    evaluation = EvaluationConfig(metrics=(f"{file}:mse",))
    check_sections(replace(loader.load(str(CONFIG), []), evaluation=evaluation))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", r"broken, client 0: ZeroDivisionError: of mine"),
        ("words", r"client 0: returned str; return one"),
    ],
)
def test_a_metric_that_fails_is_named_with_its_client(tmp_path, name, said):
    with pytest.raises((CodeFailed, mpifl.UserError), match=said) as error:
        mpifl.run(str(CONFIG), evaluation={"metrics": [f"{FILE}:{name}"]}, output={"folder": str(tmp_path)})
    if name == "broken":
        assert "ZeroDivisionError" in error.value.trace
        assert "training/client.py" not in error.value.trace


METHOD = """
from dataclasses import dataclass
from mpifl import Algorithm, Plan, average

@dataclass(frozen=True)
class Own(Algorithm):
    def aggregate(self, server, notes):
        return Plan([average(notes)])

    def evaluate(self, message, state, client, split):
        return {"accuracy": 0.5, "loss": 1.0}
"""


def test_a_method_with_an_evaluation_of_its_own_is_told_what_to_add(tmp_path):
    (tmp_path / "method.py").write_text(METHOD)
    with pytest.raises(mpifl.UserError, match=r"Own\.evaluate: scores no top2; .*client\.measure"):
        mpifl.run(
            str(CONFIG),
            algorithm=f"{tmp_path / 'method.py'}:Own",
            evaluation={"metrics": [f"{FILE}:top2"]},
            output={"folder": str(Path(tmp_path) / "runs")},
        )
