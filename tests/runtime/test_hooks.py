"""Mistakes of a method's author: each is refused where it is made, with class, hook and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support import toy
from support.fake_device import DEVICE, on_device
from support.nightly import covering
from support.runs import CONFIG

from mpifl.algorithms.fedavg import FedAvg
from mpifl.cli import main
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.capabilities import (
    ComparedUploads,
    NewClients,
    OneShotStatistics,
    Question,
    RememberedUploads,
    SecondLook,
)
from mpifl.core.client import Client, Direction
from mpifl.core.errors import CodeFailed, MethodError, NotFinite, UserError
from mpifl.core.mixing import add, average, blend, by_cluster, carry, in_turn, rows, sample_weights
from mpifl.core.plan import Mixing, Plan
from mpifl.core.rng import key
from mpifl.core.types import Message, Notes, Report, Server
from mpifl.experiment.schema import EvaluationConfig
from mpifl.experiment.section_checks import check_needs
from mpifl.simulation.policies import Buffer, EveryArrival, Policy
from mpifl.traffic.compression import Payload

NEVER = EvaluationConfig(every=0)
KEY = key(0)
CHOICE: dict[str, Callable[..., Any]] = {}  # hook -> what it does in the test at hand


@dataclass(frozen=True)
class Mine(Algorithm):
    """FedAvg, but for the hook that the test at hand replaces."""

    needs: ClassVar[Needs] = Needs()

    def local_update(self, message, state, client, key):
        """Report the model as it came."""
        usual = client.report({"seen": client.visit}, model=message["model"][0] + 0), {}
        return CHOICE.get("local_update", lambda *_: usual)(message, state, client)

    def aggregate(self, server, notes):
        """Average."""
        return CHOICE.get("aggregate", lambda s, n: Plan([average(n)]))(server, notes)

    def setup(self, problem, fingerprints, key):
        """Start from one model."""
        usual = super().setup(problem, fingerprints, key)
        return CHOICE.get("setup", lambda s: s)(usual)

    def reads(self, server, k):
        """Read the only row."""
        return CHOICE.get("reads", lambda s, k: {"model": (0,)})(server, k)

    def evaluate(self, message, state, client, split):
        """Evaluate the only row."""
        return CHOICE.get("evaluate", super().evaluate)(message, state, client, split)

    def server_update(self, old, new):
        """Change nothing."""
        return CHOICE.get("server_update", lambda old, new: new)(old, new)


@dataclass(frozen=True)
class Plain(FedAvg):
    """FedAvg with the usual reads."""

    def aggregate(self, server, notes):
        """Average, or what the test wants."""
        return CHOICE["aggregate"](server, notes)


@pytest.fixture(autouse=True)
def usual():
    """Forget the last test's choice."""
    CHOICE.clear()


def declaring(cls: type, capability: type, **names: str) -> Any:
    """Return a method of a class that declares a capability with these names of uploads."""
    return type(cls.__name__, (capability, cls), names)()


def uploading(vector: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """Return a local update that uploads what `vector` makes of the model [d]."""
    return lambda message, state, client: (client.report(model=vector(message["model"][0])), {})


def step(method: Algorithm, folder: Path, policy: Policy | None = None) -> toy.Run:
    """Take one step, in rounds or under a policy; nobody is evaluated before it."""
    if policy is None:
        return toy.run(method, toy.Tiny(), folder, steps=1, evaluate=False)
    return toy.events(method, toy.Tiny(), folder, steps=1, policy=policy, evaluation=NEVER)


WRONG_UPLOADS = {  # what is uploaded, and a word of the message
    "float64": (lambda w: w.double(), "float64"),
    "int": (lambda w: w.int(), "int32"),
    "half": (lambda w: w.half(), "float16"),
    "short": (lambda w: w[:-1], "bring"),
    "long": (lambda w: torch.cat([w, w]), "bring"),
    "bool": (lambda w: w > 0, "bool"),
    "scalar": (lambda w: w.sum(), "shape"),
    "cube": (lambda w: w[None, None], "shape"),
    "empty": (lambda w: w[:0], "shape"),
    "numpy": (lambda w: w.numpy(), "ndarray"),
    "nothing": (lambda w: None, "None"),
    "sparse": (lambda w: w.to_sparse(), "sparse"),
    "nan": (lambda w: w / 0 * 0, "not finite"),
    "infinite": (lambda w: w + torch.inf, "not finite"),
}


def id_of(value: object) -> str:
    """Return the name of a kind, or of a policy."""
    return value if isinstance(value, str) else "rounds" if value is None else type(value).__name__


@pytest.mark.parametrize(
    ("kind", "policy"), covering([*WRONG_UPLOADS], [None, Buffer(2), EveryArrival()], ids=id_of)
)
def test_an_upload_that_is_no_float32_vector_of_the_model_is_refused(kind, policy, tmp_path):
    make, word = WRONG_UPLOADS[kind]
    CHOICE["local_update"] = uploading(make)
    with pytest.raises(MethodError, match=word) as caught:
        step(Mine(), tmp_path, policy)
    assert "'model'" in str(caught.value)
    if word != "bring":  # found where it was made; whether it fits is known where it is mixed
        assert "Mine.local_update: client " in str(caught.value)
        assert "visit 0" in str(caught.value)


def test_an_upload_on_a_device_where_nobody_trains_is_refused(tmp_path):
    CHOICE["local_update"] = uploading(on_device)
    with pytest.raises(MethodError, match=str(DEVICE)):
        toy.run(Mine(), toy.Tiny(), tmp_path, steps=1, evaluate=False)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: torch.stack([w, w + 9], 1).reshape(-1)[::2],
        lambda w: torch.stack([w, w + 9], 1).T[:1],
        lambda w: w.clone().requires_grad_(),
    ],
    ids=["strided", "transposed", "with-gradient"],
)
def test_uploads_that_lie_crosswise_in_memory_are_mixed_as_they_are_meant(view, tmp_path):
    CHOICE["local_update"] = uploading(lambda w: view(w))
    done = toy.run(Mine(), toy.Tiny(), tmp_path, steps=1, evaluate=False)
    assert_allclose(done.server.tables["model"], done.servers[0].tables["model"], rtol=1e-6)


def test_statistics_and_remembered_uploads_are_checked_too(tmp_path):
    class Giving(OneShotStatistics, FedAvg):
        def fingerprint(self, client, shown, key):
            return client.report(profile=shown["init"][0].double())

    with pytest.raises(MethodError, match=r"Giving.fingerprint: client 0, .* 'profile' is float64"):
        toy.run(Giving(), toy.Tiny(), tmp_path, evaluate=False)
    CHOICE["local_update"] = uploading(lambda w: w.double())
    with pytest.raises(MethodError, match="float64"):
        toy.run(declaring(Mine, RememberedUploads), toy.Tiny(), tmp_path, evaluate=False)


def test_clients_upload_alike(tmp_path):
    CHOICE["local_update"] = lambda m, s, client: (
        client.report(model=m["model"][0] if client.id != 2 else m["model"][0][:5]),
        {},
    )
    with pytest.raises(MethodError, match=r"client 0 uploads 'model' .*, client 2 'model' \[1, 5\]"):
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False)


def test_values_too_large_for_the_payload_are_not_finite(tmp_path):
    CHOICE["local_update"] = uploading(lambda w: w + 1e6)
    with pytest.raises(NotFinite, match=r"payload.dtype float16: .* body\.fc1\.weight: 1e\+06"):
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False, payload=Payload("float16"))


# -- what local_update returns beside uploads ----------------------------------------------------------------


def _sgd(message: Message, client: Client, direction: Direction) -> Report:
    """Return the report of a training with a `direction`."""
    return client.report(model=client.sgd(message["model"][0], KEY, direction=direction).vector)


RETURNED = {
    "report alone": (lambda m, s, c: c.report(model=m["model"][0]), "return"),
    "nothing": (lambda m, s, c: None, "None"),
    "no report": (lambda m, s, c: ({"model": m["model"][0]}, {}), "dict"),
    "state no mapping": (lambda m, s, c: (c.report(model=m["model"][0]), None), "state"),
    "state of numbers": (lambda m, s, c: (c.report(model=m["model"][0]), {"a": 1.0}), "tensor"),
    "undeclared state": (lambda m, s, c: (c.report(model=m["model"][0]), {"a": m["model"]}), "state=True"),
    "another client's": (lambda m, s, c: (replace(c.report(model=m["model"][0]), client=0), {}), "client 0"),
    "words for notes": (lambda m, s, c: (c.report({"a": "b"}, model=m["model"][0]), {}), "note 'a'"),
    "words for metrics": (lambda m, s, c: (c.report({}, {"a": "b"}, model=m["model"][0]), {}), "metric 'a'"),
    "ragged notes": (lambda m, s, c: (c.report({"a": np.ones(c.id)}, model=m["model"][0]), {}), "shape"),
    "no such table": (lambda m, s, c: (c.report(model=m["head"][0]), {}), "'head'"),
    "no auxiliary": (lambda m, s, c: (c.auxiliary.report(), {}), "auxiliary"),
    "a table for a model": (lambda m, s, c: (c.report(model=c.sgd(m["model"], KEY).vector), {}), "vector = "),
    "a loss of no model": (
        lambda m, s, c: (c.report(model=c.loss(m["model"][0][:5])), {}),
        r"vector = \[5\]",
    ),
    "no direction": (lambda m, s, c: (_sgd(m, c, lambda g, w: None), {}), "direction = 'NoneType'"),
    "direction of one": (lambda m, s, c: (_sgd(m, c, lambda g, w: g.sum()), {}), r"direction = \[\]"),
    "no such part": (lambda m, s, c: (c.layout.part("hed"), {}), "no part 'hed' .*'head'"),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_what_local_update_returns_is_checked(kind, tmp_path):
    made, word = RETURNED[kind]
    CHOICE["local_update"] = lambda m, s, c: (
        made(m, s, c) if c.id else (c.report({"a": 1} if "notes" in kind else {}, model=m["model"][0]), {})
    )
    with pytest.raises(MethodError, match=word) as caught:
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False)
    assert "Mine.local_update: " in str(caught.value)
    assert "client 1" in str(caught.value)


@dataclass(frozen=True)
class Alone(Mine):
    """Says that its clients send nothing."""

    needs: ClassVar[Needs] = Needs(alone=True)

    def local_update(self, message, state, client, key):
        """Return what the test wants."""
        return CHOICE["local_update"](message, state, client)

    def aggregate(self, server, notes):
        """Mix nothing."""
        return Plan([])


def test_clients_that_train_alone_send_nothing(tmp_path):
    CHOICE.update(reads=lambda s, k: {}, local_update=lambda m, s, c: (c.report(), {}))
    toy.run(Alone(), toy.Tiny(), tmp_path / "a", evaluate=False)
    CHOICE["local_update"] = lambda m, s, c: (c.report(model=c.init), {})
    with pytest.raises(MethodError, match=r"Alone.local_update: client 0, visit 0: uploads model; needs"):
        toy.run(Alone(), toy.Tiny(), tmp_path / "b", evaluate=False)
    CHOICE.update(reads=lambda s, k: {"model": (0,)}, local_update=lambda m, s, c: (c.report(), {}))
    with pytest.raises(MethodError, match=r"Alone.local_update: client 0, visit 0: downloads model; needs"):
        toy.run(Alone(), toy.Tiny(), tmp_path / "c", evaluate=False)


@pytest.mark.parametrize(
    ("capability", "name"),
    [(ComparedUploads, "gram"), (RememberedUploads, "remembered"), (ComparedUploads, "row_distance")],
)
def test_a_capability_that_names_no_upload_is_refused(capability, name, tmp_path):
    with pytest.raises(MethodError, match="'delta'"):
        toy.run(declaring(Mine, capability, **{name: "delta"}), toy.Tiny(), tmp_path, evaluate=False)


def test_several_vectors_have_no_distance_to_a_row(tmp_path):
    class Pair(Mine):
        def local_update(self, message, state, client, key):
            w = message["model"][0]
            return client.report(model=torch.stack([w, w])), {}

    method = declaring(Pair, ComparedUploads, row_distance="model")
    with pytest.raises(MethodError, match=r"'model', which row_distance names, has shape \(2, \d+\)"):
        toy.run(method, toy.Tiny(), tmp_path, evaluate=False)


@pytest.mark.parametrize(
    "hook",
    [
        *("fingerprint", "assign_new_clients", "new_clients", "ask", "answer", "compare"),
        *("inspect", "appraise", "compares"),
    ],
)
def test_a_hook_that_would_never_be_called_is_refused(hook, tmp_path):
    method = type("Mine", (Mine,), {hook: lambda self, *args: None})()
    with pytest.raises(MethodError, match=rf"Mine.{hook}: .*inherit from"):
        toy.start(method, toy.Tiny(), tmp_path)


# -- what is decided on rank 0 -------------------------------------------------------------------------------


def weighing(weights: Callable[[Notes], np.ndarray], **options: Any) -> Callable[..., Plan]:
    """Return a decision with these weights."""
    return lambda server, notes: Plan([Mixing(weights(notes), **options)])


def one(notes: Notes, value: float = 1.0) -> np.ndarray:
    """Return weights [1, m]."""
    return np.full((1, len(notes)), value / len(notes))


PLANS: dict[str, tuple[Callable[..., Any], str]] = {
    "nan": (weighing(lambda n: one(n, np.nan)), "weights are not finite"),
    "infinite": (weighing(lambda n: one(n, np.inf)), "weights are not finite"),
    "one nan": (weighing(lambda n: one(n) * np.where(n.client == 3, np.nan, 1)), "weights are not finite"),
    "huge": (weighing(lambda n: one(n, 1e300)), "overflow"),
    "keep nan": (weighing(one, keep=np.array([np.nan])), "keep"),
    "keep too long": (weighing(one, keep=np.ones(2)), "keep has shape"),
    "keep too wide": (weighing(one, keep=np.ones((1, 2))), "keep has shape"),
    "flat weights": (weighing(lambda n: one(n)[0]), "weights"),
    "a list": (weighing(lambda n: one(n).tolist()), "weights"),
    "too few weights": (weighing(lambda n: one(n)[:, :-1]), "upload"),
    "no rows": (weighing(lambda n: one(n)[:0]), "weights"),
    "unknown table": (weighing(one, into="head"), "table"),
    "unknown upload": (weighing(one, of="delta"), "upload 'delta'"),
    "part too narrow": (weighing(one, part=(slice(0, 3),)), "part"),
    "part beyond": (weighing(one, part=(slice(1, 10**6),)), "part"),
    "second after more rows": (
        lambda s, n: Plan([carry(np.ones((2, 1))), Mixing(one(n), keep=np.ones(1))]),
        "mixing 1",
    ),
    "mixing for a plan": (lambda s, n: average(n), "Plan"),
    "mixing in a plan": (lambda s, n: Plan(average(n)), "Plan"),
    "list for a plan": (lambda s, n: [average(n)], "Plan"),
    "nothing": (lambda s, n: None, "None"),
    "no mixing": (lambda s, n: Plan([one(n)]), "mixing 0"),
    "short assign": (lambda s, n: Plan([], assign=s.assign[:-1]), "assign"),
    "float assign": (lambda s, n: Plan([], assign=s.assign + 0.5), "assign"),
    "negative assign": (lambda s, n: Plan([], assign=s.assign - 1), "row -1"),
    "state no mapping": (lambda s, n: Plan([], algorithm_state=np.ones(3)), "algorithm_state"),
    "state of an object": (lambda s, n: Plan([], algorithm_state={"a": object()}), "'a' is an object"),
    "state of a tensor": (lambda s, n: Plan([], algorithm_state={"a": torch.ones(2)}), "'a' is Tensor"),
    "ragged state": (lambda s, n: Plan([], algorithm_state={"a": [[1], [1, 2]]}), "'a' is a list"),
    "state without a name": (lambda s, n: Plan([], algorithm_state={3: np.ones(2)}), "named 3"),
    "missing need": (lambda s, n: Plan([average(n, n["gram"][0])]), "ComparedUploads"),
    "missing need by column": (lambda s, n: Plan([average(n, n.columns["gram"][0])]), "ComparedUploads"),
    "missing note": (lambda s, n: Plan([average(n, n["loss"])]), "'loss'"),
    "weights that cancel": (
        lambda s, n: Plan([average(n, np.array([1, -1, 0, 0, 0, 0]))]),
        "weights of row 0",
    ),
    "exit": (lambda s, n: exit_with(0), "sys.exit"),
}


def exit_with(code: int) -> None:
    """End the process, as a method must not."""
    raise SystemExit(code)


@pytest.mark.parametrize(("kind", "policy"), covering([*PLANS], [None, Buffer(6)], ids=id_of))
def test_a_decision_that_cannot_be_carried_out_is_refused(kind, policy, tmp_path):
    CHOICE["aggregate"], word = PLANS[kind]
    with pytest.raises(MethodError) as caught:
        step(Mine(), tmp_path, policy)
    assert str(caught.value).startswith("Mine.aggregate: ")
    assert word in str(caught.value)


@pytest.mark.parametrize("beyond", [1, 7])
def test_an_assignment_beyond_the_rows_is_refused(beyond, tmp_path):
    CHOICE["aggregate"] = lambda s, n: Plan([average(n)], assign=np.where(n.client == 4, beyond, 0))
    with pytest.raises(MethodError, match=f"client 4 row {beyond}.*1 rows"):
        toy.run(Plain(), toy.Tiny(), tmp_path, evaluate=False)


READS = {
    "beyond": {"model": (1,)},
    "negative": {"model": (-1,)},
    "no table": {"head": (0,)},
    "nothing of it": {"model": ()},
    "a number": {"model": 0},
    "no mapping": (0,),
    "too many shares": {"model": np.ones(2)},
    "shares not finite": {"model": np.array([np.nan])},
    "no share": {"model": np.zeros(1)},
}


@pytest.mark.parametrize("policy", [None, EveryArrival()], ids=["rounds", "arrivals"])
@pytest.mark.parametrize("kind", READS)
def test_reads_of_what_is_not_there_are_refused(kind, policy, tmp_path):
    CHOICE["reads"] = lambda server, k: READS[kind]
    with pytest.raises(MethodError, match=r"Mine.reads: client \d"):
        step(Mine(), tmp_path, policy)


def test_rows_that_a_client_is_evaluated_with_exist(tmp_path):
    method = type("Mine", (Mine,), {"serves": lambda self, server, k: {"model": (3,)}})()
    with pytest.raises(MethodError, match=r"Mine.serves: client 0"):
        toy.run(method, toy.Tiny(), tmp_path, steps=1)


SERVERS = {
    "none": lambda s: None,
    "half": lambda s: replace(s, tables={"model": s.tables["model"].half()}),
    "flat": lambda s: replace(s, tables={"model": s.tables["model"][0]}),
    "nan": lambda s: replace(s, tables={"model": s.tables["model"] * torch.nan}),
    "no rows": lambda s: replace(s, tables={"model": s.tables["model"][:0]}),
    "numpy": lambda s: replace(s, tables={"model": s.tables["model"].numpy()}),
    "short assign": lambda s: replace(s, assign=s.assign[:2]),
    "state of objects": lambda s: replace(s, algorithm_state={"a": np.array([None])}),
    "state no mapping": lambda s: replace(s, algorithm_state=np.ones(3)),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_the_first_server_is_checked(kind, tmp_path):
    CHOICE["setup"] = SERVERS[kind]
    with pytest.raises(MethodError, match=r"Mine.setup: "):
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False)


def test_needs_of_another_type_are_refused():
    with pytest.raises(MethodError, match=r"Mine.needs: is a str; assign Needs\(\.\.\.\)"):
        check_needs(declaring(Mine, FedAvg, needs="rounds"))


METRIC = """
from mpifl.algorithms.fedasync import FedAsync
from mpifl.algorithms.fedavg import FedAvg

class Reports:
    def local_update(self, message, state, client, key):
        report, state = super().local_update(message, state, client, key)
        return client.report(report.notes, {"NAME": 1.0}, **report.vectors), state

class InRounds(Reports, FedAvg):
    pass

class Late(Reports, FedAsync):
    pass
"""


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("loss", "both"),
        ("round", "both"),
        ("accuracy_mean", "both"),
        ("arrivals", "Late"),
        ("own", "neither"),
    ],
)
def test_a_metric_does_not_replace_a_column(name, taken, tmp_path, capsys):
    """A loss of training called `loss` stood in `metrics.csv` in place of that of the evaluation."""
    (tmp_path / "m.py").write_text(METRIC.replace("NAME", name))
    for method, policy in (("InRounds", "rounds"), ("Late", "every_arrival")):
        options = ["--algorithm.name", f"{tmp_path / 'm.py'}:{method}", "--policy", policy, "--rounds", "2"]
        code = main(["run", str(CONFIG), *options, "-q", "--output.folder", str(tmp_path / method)])
        refused = taken in ("both", method)
        assert code == (2 if refused else 0)
        said = f"client.report(metrics=...) = {name!r}: is a column of metrics.csv already"
        assert (said in capsys.readouterr().err) == refused


UPDATES = {
    "undeclared": (
        lambda old, new: replace(new, tables={"model": new.tables["model"] / 2}),
        "server_update=True",
    ),
    "nan": (lambda old, new: replace(new, tables={"model": new.tables["model"] / 0}), "not finite"),
    "gone": (lambda old, new: replace(new, tables={}), "gone"),
    "state": (lambda old, new: replace(new, algorithm_state={"a": {1, 2}}), "'a' is a set"),
    "none": (lambda old, new: None, "None"),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_what_server_update_returns_is_checked(kind, tmp_path):
    CHOICE["server_update"], word = UPDATES[kind]
    with pytest.raises(MethodError, match=rf"Mine.server_update: .*{word}"):
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False)


SCORES = {
    "none": lambda m, s, c, split: None,
    "number": lambda m, s, c, split: 0.5,
    "no loss": lambda m, s, c, split: {"accuracy": 0.5},
    "words": lambda m, s, c, split: {"accuracy": "good", "loss": 1.0},
    "of no model": lambda m, s, c, split: c.evaluate(m["model"][0][:3], split),
    "not identical": lambda m, s, c, split: {"accuracy": 0.5, "loss": 1.0, f"of {c.id}": 1.0},
}


@pytest.mark.parametrize("kind", SCORES)
def test_scores_are_checked(kind, tmp_path):
    CHOICE["evaluate"] = SCORES[kind]
    with pytest.raises(MethodError, match=r"Mine.evaluate: "):
        toy.run(Mine(), toy.Tiny(), tmp_path, steps=1)


def test_an_exception_of_a_hook_on_rank_0_is_shown_from_the_method_on(tmp_path):
    CHOICE["aggregate"] = lambda s, n: 1 / 0
    with pytest.raises(CodeFailed, match=r"Mine.aggregate: step 1: ZeroDivisionError") as caught:
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False)
    assert "test_hooks.py" in caught.value.trace
    assert "mpifl/runtime" not in caught.value.trace


def test_numbers_that_overflow_in_a_hook_are_not_taken_for_want_of_memory(tmp_path):
    def overflow(server, notes):
        raise FloatingPointError("overflow encountered in multiply")

    CHOICE["aggregate"] = overflow
    with pytest.raises(CodeFailed, match="FloatingPointError: overflow encountered") as caught:
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False)
    assert "test_hooks.py" in caught.value.trace


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_hook_on_rank_0_without_memory_is_named_in_one_line(make, tmp_path):
    CHOICE["aggregate"] = lambda s, n: make((10**8, 10**8))
    with pytest.raises(MethodError, match=r"Mine.aggregate: step 1: .*no memory.*; use fewer clients"):
        toy.run(Mine(), toy.Tiny(), tmp_path, evaluate=False)


@pytest.mark.parametrize("drops", ["abort", "drop"])
@pytest.mark.parametrize(("end", "code"), [(SystemExit(0), 2), (KeyboardInterrupt(), 130)])
def test_code_of_a_client_cannot_end_the_process(end, code, drops, tmp_path):
    def leave(message, state, client):
        raise end

    CHOICE["local_update"] = leave
    with pytest.raises((UserError, CodeFailed), match=r"Mine.local_update: client 0, visit 0") as caught:
        toy.run(Mine(), toy.Tiny(), tmp_path, on_client_error=drops)
    assert getattr(caught.value, "code", 2) == code


# -- nobody is chosen ----------------------------------------------------------------------------------------


def notes_of(*num_samples: int) -> Notes:
    """Return notes of clients 0, 1, ... with these sample counts."""
    m = len(num_samples)
    return Notes(np.arange(m), np.array(num_samples), np.zeros(m, np.int64), np.ones(m, bool))


BUILDERS = {
    "average": lambda n: average(n, np.zeros(3)),
    "rows": lambda n: rows(np.zeros((1, 3))),
    "by_cluster": lambda n: by_cluster(np.full(3, 7), 1, np.ones(3)),
    "add": lambda n: add(np.zeros(3)),
    "blend": lambda n: blend(np.zeros(3)),
    "in_turn": lambda n: in_turn(np.zeros(3)),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_where_nobody_is_chosen_the_row_stays(name):
    mixing = BUILDERS[name](notes_of(1, 2, 3))
    assert_allclose(mixing.weights, 0)
    assert_allclose(mixing.keep, [1])


def test_a_step_in_which_nobody_is_chosen_leaves_the_model(tmp_path):
    CHOICE["aggregate"] = lambda s, n: Plan([average(n, n.num_samples * (n.client > 9))])
    CHOICE["local_update"] = uploading(lambda w: w + 5)
    done = toy.run(Mine(), toy.Tiny(), tmp_path, steps=2, evaluate=False)
    assert torch.equal(done.server.tables["model"], done.servers[0].tables["model"])


@pytest.mark.parametrize("weights", [[1.0, -1.0, 0.0], [np.nan, 1.0, 1.0], [np.inf, 1.0, 1.0]])
def test_weights_that_cannot_be_normalised_are_refused(weights):
    with pytest.raises(UserError, match="weights of row 0"):
        average(notes_of(1, 2, 3), np.array(weights))


def test_shares_of_nobody_are_refused():
    with pytest.raises(UserError, match="num_samples"):
        sample_weights(notes_of(0, 0))


def test_a_carry_without_uploads_is_carried_out_by_events_too(tmp_path):
    CHOICE["aggregate"] = lambda s, n: Plan([carry(np.full((1, 1), 0.5))])
    done = toy.events(Mine(), toy.Tiny(), tmp_path, steps=1, policy=Buffer(2))
    assert_allclose(done.server.tables["model"], done.servers[0].tables["model"] / 2)


ONE = torch.ones(1)
LOOKS = {  # hook of a second look -> what it returns here
    "ask": Question(ONE, ONE),
    "show": ONE,
    "answer": ONE,
    "compare": {"found": 1.0},
}


def looking(**results: Any) -> Algorithm:
    """Return a method whose clients look at each other, with hooks that return `LOOKS`, or `results`."""
    hooks = {name: (lambda self, *args, x=x: x) for name, x in {**LOOKS, **results}.items()}
    return type("Looking", (SecondLook, Mine), hooks)()


@pytest.mark.parametrize("question", [Report(0, 1), Server({}, np.zeros(1)), ONE])
def test_a_server_or_report_is_no_question(question, tmp_path):
    with pytest.raises(MethodError, match=r"Looking.ask: client 0"):
        toy.run(looking(ask=question), toy.Tiny(), tmp_path, evaluate=False)


@pytest.mark.parametrize(
    ("hook", "result"),
    [
        ("ask", Question(ONE, ONE, {"a": "b"})),
        ("compare", {"a": object()}),
        ("compare", {"a": np.ones(2)}),
        ("compare", 1.0),
    ],
)
def test_what_a_look_finds_are_numbers(hook, result, tmp_path):
    with pytest.raises(MethodError, match=rf"Looking.{hook}: client 0, visit 0: "):
        toy.run(looking(**{hook: result}), toy.Tiny(), tmp_path, evaluate=False)


def test_initial_clients_of_a_method_that_nobody_can_join_later_are_refused(tmp_path):
    """All clients send their statistics before training there, whatever the hook returns."""

    class Choosy(OneShotStatistics, Mine):
        def fingerprint(self, client, shown, key):
            return client.report({"n": 1})

        def initial_clients(self, problem, present, key):
            return present[:1]

    with pytest.raises(MethodError, match=r"Choosy.initial_clients: would never be called; .*NewClients"):
        toy.run(Choosy(), toy.Tiny(), tmp_path, evaluate=False)


@pytest.mark.parametrize("sent", [b"x", 1.0, torch.ones(2, dtype=torch.float64)])
@pytest.mark.parametrize("hook", ["ask", "show", "answer"])
def test_clients_exchange_float32_tensors(hook, sent, tmp_path):
    """The peer that answers client 0 is client 1."""
    result = Question(sent) if hook == "ask" else sent
    pattern = rf"Looking.{hook}: client {int(hook == 'answer')}, visit 0: .*clients exchange float32 tensors"
    with pytest.raises(MethodError, match=pattern):
        toy.run(looking(**{hook: result}), toy.Tiny(), tmp_path, evaluate=False)


def test_the_default_of_new_clients_names_what_it_reads(tmp_path):
    class Joining(NewClients, Mine):
        def fingerprint(self, client, shown, key):
            return client.report({"n": 1})

        def assign_new_clients(self, server, fingerprints):
            return Plan([])

    with pytest.raises(MethodError, match=r"Joining.new_clients: .*no algorithm_state 'known'; return it"):
        toy.run(Joining(), toy.Tiny(), tmp_path, evaluate=False)


FIGURES = {
    "labels": (lambda s: np.zeros(2, int), "an integer"),
    "labels of words": (lambda s: ["a"] * 8, "an integer"),
    "labels of floats": (lambda s: np.zeros(8), "an integer"),
    "placed": (lambda s, visited: visited[:3], "a bool"),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_clusters_are_checked_before_they_are_judged(kind, tmp_path, monkeypatch, capsys):
    found, word = FIGURES[kind]
    hook = kind.split()[0]
    monkeypatch.setattr(FedAvg, hook, lambda self, *arguments: found(*arguments))
    assert main(["run", str(CONFIG), "-q", "--rounds", "1", "--output.folder", str(tmp_path)]) == 2
    assert re.search(
        rf"FedAvg.{hook}: step 1: returned .*; return {word} for each of the", capsys.readouterr().err
    )


@pytest.mark.parametrize("pairs", [None, np.ones((6, 6)), np.ones((5, 6), bool)])
def test_pairs_are_an_array_of_the_clients_of_the_step(pairs, tmp_path):
    with pytest.raises(MethodError, match=r"Looking.pairs: .*bool \[6, 6\]"):
        toy.run(looking(pairs=pairs), toy.Tiny(), tmp_path, evaluate=False)
