"""The federation's bytes as `mpifl plan` forecasts them, for every method, against the ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from support import fake_device, toy
from support.cases import OPTIONS
from support.nightly import covering, mostly_nightly

from mpifl.aggregation.client_store import ClientStore
from mpifl.algorithms.fedavg import FedAvg
from mpifl.algorithms.ifca import IFCA
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.algorithm import Algorithm, Needs
from mpifl.core.capabilities import RowUpdates
from mpifl.core.mixing import average
from mpifl.core.plan import Plan
from mpifl.forecast.traffic import TrafficForecast, compared, forecast
from mpifl.protection.privacy import CentralPrivacy
from mpifl.protection.secure_sum import MaskedSums, SecureConfig
from mpifl.simulation.delays import DELAYS
from mpifl.simulation.policies import POLICIES
from mpifl.traffic.compression import COMPRESSIONS, Payload
from mpifl.traffic.ledger import Ledger
from mpifl.training.config import LocalConfig

pytestmark = pytest.mark.usefixtures("flat_plane")
ROUNDS = 3
TOP_K = Payload(compression=COMPRESSIONS["top_k"](0.2), error_feedback=True)
KEEPING = LocalConfig(keep_optimizer=True, momentum=0.9)
METHODS = [name for name, cls in CATALOGUE.items() if not cls().needs.single_upload]


def foretold(name: str, options: dict[str, object] | None = None, **changes) -> TrafficForecast:
    """Return the forecast of three rounds."""
    return forecast_of(CATALOGUE[name](**(OPTIONS.get(name, {}) if options is None else options)), **changes)


def forecast_of(method: Algorithm, **changes) -> TrafficForecast:
    """Return the forecast of three rounds of a method."""
    return forecast(toy.context_of(toy.config_of(method, rounds=ROUNDS, **changes), toy.Tiny()))


def sent(name: str, folder, **changes) -> tuple[int, int]:
    """Return what three rounds sent: (down, up)."""
    return sent_by(CATALOGUE[name](**OPTIONS.get(name, {})), folder, **changes)


def sent_by(method: Algorithm, folder, **changes) -> tuple[int, int]:
    """Return what three rounds of a method sent: (down, up)."""
    done = toy.run(method, toy.Tiny(), folder, ROUNDS, False, **changes)
    return done.server_step.ledger.total("down"), done.server_step.ledger.total("up")


FEW = (  # of the usual run: of each way to move models; all others, nightly
    *("fedavg", "scaffold", "ifca", "fedem", "ucfl", "cflgp", "pfedgraph", "fedcuau", "emdcfl", "pacfl"),
    *("fedper", "fedfomo", "feddrift", "flt", "fedccfa", "csafl"),
)


@pytest.mark.parametrize("name", mostly_nightly(METHODS, FEW))
def test_the_ledger_holds_what_was_foretold(name, tmp_path):
    said = foretold(name, participation=0.5)
    found = sent(name, tmp_path, participation=0.5)
    if said.total is None:
        assert said.why == CATALOGUE[name].traffic_depends_on != ""
    else:
        assert said.total == found
    with fake_device.gpu():
        again = foretold(name, participation=0.5)
        same = (again.total, again.per_round, again.why) == (said.total, said.per_round, said.why)
        assert same, "where a model is trained does not matter"


LOOKS = [("together", "clients"), ("once", "clients"), ("seen", "clients"), ("once", "server")]


@pytest.mark.parametrize(("way", "participation"), covering(LOOKS, [0.34, 0.5, 0.7, 1.0], ids=str))
def test_second_looks_are_foretold(way, participation, tmp_path):
    looks, samples = way
    method = CATALOGUE["emdcfl"](looks=looks, samples=samples, sample_share=0.3)
    said = forecast_of(method, participation=participation)
    assert said.total == sent_by(method, tmp_path, participation=participation)


@pytest.mark.parametrize("parallel", [False, True])
def test_streams_of_a_number_that_the_statistics_give_are_foretold_if_a_client_moves_one(parallel, tmp_path):
    method = CATALOGUE["ucfl"](streams=-1, parallel=parallel, noise_batch=4.0)
    said, found = forecast_of(method), sent_by(method, tmp_path)
    assert said.total == (None if parallel else found)
    assert said.why == ("how many streams the statistics give" if parallel else "")


def test_steps_of_one_batch_are_foretold_too():
    one, whole = (foretold("cflgp", {"num_clusters": 2, "protocol": p}) for p in ("gradient", "gap"))
    assert (one.per_round, one.fingerprints) == (whole.per_round, whole.fingerprints)


@pytest.mark.parametrize("name", ["emdcfl", "fedfomo", "flexcfl", "fedsoft"])
def test_terms_that_grow_with_the_cohort_are_foretold_for_everyone_too(name, tmp_path):
    assert foretold(name).total == sent(name, tmp_path)


def test_the_seed_of_fedcuau_is_foretold_in_float16(tmp_path):
    """Statistics of six clients: each downloads a seed, 4 bytes, and uploads its last layer of 27 numbers."""
    payload = Payload("float16")
    done = toy.run(CATALOGUE["fedcuau"](), toy.Tiny(), tmp_path, 1, False, payload=payload)
    ledger = done.server_step.ledger
    assert foretold("fedcuau", payload=payload).fingerprints == (6 * 4, 6 * 27 * 2)
    assert (ledger.total("down", 0), ledger.total("up", 0)) == (6 * 4, 6 * 27 * 2)


@pytest.mark.parametrize("name", ["fedavg", "emdcfl", "ucfl", "ifca"])
def test_the_form_of_messages_is_foretold(name, tmp_path):
    payload = Payload("bfloat16", header_bytes=20)
    assert foretold(name, payload=payload).total == sent(name, tmp_path, payload=payload)
    assert foretold(name, payload=payload).total < foretold(name).total


@pytest.mark.parametrize("name", ["fedavg", "ifca"])
@pytest.mark.parametrize(
    "privacy", [CentralPrivacy(1.0), CentralPrivacy(1.0, quantile=0.5, quantile_noise=5.0)]
)
def test_what_clients_add_for_privacy_is_foretold(name, privacy, tmp_path):
    """Adaptive clipping: a note of each client says whether its update was within the clip."""
    assert foretold(name, privacy=privacy).total == sent(name, tmp_path, privacy=privacy)


@dataclass(frozen=True)
class Telling(RowUpdates, Algorithm):
    """FedAvg whose clients also report the update, which the server can work out: nobody sends it."""

    paper = CATALOGUE["fedavg"].paper

    def local_update(self, message, state, client, key):
        """Report model and update."""
        x = message["model"][0]
        w = client.sgd(x, key).vector
        return client.report(unsent=("update",), model=w, update=w - x), state

    def aggregate(self, server, notes):
        """Average the models."""
        return Plan([average(notes)])


@pytest.mark.parametrize(
    ("method", "dropout", "why"),
    [
        (FedAvg(), 0.0, ""),
        (FedAvg(), 0.2, "who drops out, so that no masked upload comes"),
        (IFCA(2), 0.0, "who is in which cluster"),
        (IFCA(2), 0.2, "who is in which cluster, and who drops out, so that no masked upload comes"),
    ],
)
def test_what_the_bytes_of_masked_uploads_depend_on(method, dropout, why):
    assert forecast_of(method, secure_aggregation=MaskedSums(dropout=dropout)).why == why


@pytest.mark.parametrize("secure", [MaskedSums(), SecureConfig()], ids=["masked", "in the clear"])
def test_vectors_that_are_not_sent_count_in_no_forecast(secure, tmp_path):
    said = forecast_of(Telling(), secure_aggregation=secure)
    assert said.total == sent_by(Telling(), tmp_path, secure_aggregation=secure)


@pytest.mark.parametrize(
    ("name", "policy", "uploads"),
    [
        ("fedavg", POLICIES["every_arrival"](), 1),
        ("fedasync", POLICIES["every_arrival"](), 1),
        ("fedbuff", POLICIES["buffer"](size=2), 2),
        ("fedavg", POLICIES["waves"](size=2), 2),
        ("fedavg", POLICIES["barrier"](), 3),
        ("fedavg", POLICIES["client_decides"](), 1),
    ],
)
def test_a_step_of_an_asynchronous_run_moves_its_uploads_not_the_cohort(name, policy, uploads, tmp_path):
    """In the ledger an upload is a model; per visit a download, too."""
    changes = {"cohort_size": 3, "policy": policy}
    changes |= {"delay": DELAYS["exponential"]()} if policy.in_seconds else {}
    said = foretold(name, **changes)
    done = toy.events(CATALOGUE[name](), toy.Tiny(), tmp_path, ROUNDS, **changes)
    assert ROUNDS * said.per_round[1] == done.server_step.ledger.total("up")
    size = 4 * done.server_step.problem.layout.size
    assert said.per_round == (uploads * size, uploads * size)


@pytest.mark.parametrize(("late", "senders"), [("stopped", 3), ("sent", 5)])
def test_uploads_that_come_too_late_are_foretold(late, senders, tmp_path):
    """Five are drawn where three are wanted."""
    policy = POLICIES["over_selection"](extra=0.5, late=late)
    changes = {"cohort_size": 3, "policy": policy, "delay": DELAYS["exponential"]()}
    said = foretold("fedavg", **changes)
    done = toy.events(CATALOGUE["fedavg"](), toy.Tiny(), tmp_path, ROUNDS, **changes)
    ledger = done.server_step.ledger
    assert tuple(ROUNDS * size for size in said.per_round) == (ledger.total("down"), ledger.total("up"))
    assert 5 * said.per_round[1] == senders * said.per_round[0]


@pytest.mark.parametrize("num_models", [1, 3])
@pytest.mark.parametrize("variant", ["paper", "ucfl"])
def test_the_number_of_the_row_that_a_compressed_upload_is_counted_from_is_foretold(
    variant, num_models, tmp_path
):
    """FedFomo's clients read several models from round 2 on: four bytes say which is the nearest."""
    method = CATALOGUE["fedfomo"](num_models=num_models, variant=variant)
    changes = {"participation": 0.5, "payload": Payload(compression=COMPRESSIONS["top_k"](0.1))}
    assert forecast_of(method, **changes).total == sent_by(method, tmp_path, **changes)


@dataclass(frozen=True)
class Chatty(Algorithm):
    """FedAvg whose clients note two numbers in round 1, and five in the others."""

    needs = Needs(round_number=True)

    def local_update(self, message, state, client, key):
        """Train; the note grows with the rounds."""
        w = client.sgd(message["model"][0], key)
        return client.report({"trend": np.zeros(5 if client.step > 1 else 2)}, {}, model=w.vector), {}

    def extra_bytes(self, run):
        """Count three numbers more in all rounds but the first."""
        return 0, (run.num_rounds - 1) * run.num_sampled * (run.message_bytes(3, messages=0, note=True))

    def aggregate(self, server, notes):
        """Average by samples."""
        return Plan([average(notes)])


@dataclass(frozen=True)
class Undecided(Chatty):
    """Its traffic depends on what it finds."""

    traffic_depends_on = "what it finds"


def test_a_users_method_adds_what_differs_from_round_to_round(tmp_path):
    payload = Payload(header_bytes=20)
    said = forecast_of(Chatty(), participation=0.5, payload=payload)
    assert said.total == sent_by(Chatty(), tmp_path, participation=0.5, payload=payload)
    assert said.total[1] == ROUNDS * said.per_round[1] + 2 * 3 * 3 * 4


def test_a_users_method_says_what_its_traffic_depends_on():
    said = forecast_of(Undecided())
    assert said.total is None
    assert said.why == "what it finds"
    assert said.per_round == forecast_of(Chatty()).per_round


def test_a_finished_run_is_not_lost_for_want_of_a_forecast(tmp_path):
    """A method whose hooks stumble where nothing was trained: its summary says so."""

    class Stumbling(type(CATALOGUE["fedavg"]())):
        """Raises when asked what it would do."""

        def reads(self, server, k):
            """Fail."""
            raise ZeroDivisionError("no rows")

    context = toy.context_of(toy.config_of(Stumbling()), toy.Tiny())
    said = compared(context, Ledger(6))
    why = "no forecast: CodeFailed: Stumbling.reads: client 0: ZeroDivisionError: no rows"
    assert said == {"down": None, "up": None, "why": why}


UNCOMPRESSED = {"cflgp", "local"}  # profiles cannot be worked out of what arrives; Local sends nothing
SOME_NIGHT = pytest.mark.nightly(spread=True)
ALSO_CODED = ("fedavg", "scaffold", "ditto", "fedem")  # usually; all others, nightly
KEPT = [
    *(pytest.param(name, {}, marks=[SOME_NIGHT] * (name not in (*FEW, *ALSO_CODED))) for name in METHODS),
    *(
        pytest.param(name, {"payload": TOP_K}, marks=[SOME_NIGHT] * (name not in ALSO_CODED))
        for name in METHODS
        if name not in UNCOMPRESSED
    ),
    *(
        (name, {"local": KEEPING})
        for name in ("local", "fedavg", "fedavg_memory", "ditto", "fedrep", "fedem")
    ),
    ("fedavg", {"local": replace(KEEPING, optimizer="adam")}),
    *((f"pfedme {variant}", {}) for variant in ("ucfl", "ucfl_nesterov")),
]


@pytest.mark.parametrize(("name", "changes"), KEPT, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_what_clients_keep_is_foretold(name, changes, tmp_path, monkeypatch):
    """State of the method, remembered uploads, residuals of compression and moments, as they are stored."""
    stored, save = {}, ClientStore.save

    def heard(store, kind, k, visit, tensors):
        stored[kind, k] = sum(tensor.nbytes for tensor in tensors.values())
        save(store, kind, k, visit, tensors)

    monkeypatch.setattr(ClientStore, "save", heard)
    method, _, variant = name.partition(" ")
    options = {"variant": variant, "personal_lr": 0.01} if variant else OPTIONS.get(method, {})
    said = foretold(method, options, **changes)
    toy.run(CATALOGUE[method](**options), toy.Tiny(), tmp_path, ROUNDS, False, **changes)
    assert sum(size for (_, k), size in stored.items() if k == 0) == said.kept
    if method in ("scaffold", "ditto", "fesem", "fedavg", "fedem"):
        assert (said.kept == 0) == (method == "fedavg" and not changes)
