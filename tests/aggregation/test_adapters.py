"""Adapters whose ranks differ, and means of products, in whole steps: zeros, bytes, models, refusals."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from support import toy
from support.each import for_each
from support.nightly import mostly_nightly
from torch.testing import assert_close

from mpifl.aggregation.adapters import ClientRanks
from mpifl.algorithms.registry import CATALOGUE
from mpifl.core.errors import MethodError, UserError
from mpifl.core.plan import Mixing, Plan
from mpifl.core.rng import key
from mpifl.core.types import Notes, Server
from mpifl.experiment.filters import adapter_columns
from mpifl.experiment.section_checks import check_sections
from mpifl.forecast.traffic import forecast
from mpifl.models import MODELS, LoRA
from mpifl.protection.attacks import Noise
from mpifl.protection.privacy import CentralPrivacy, LocalPrivacy
from mpifl.protection.robust_rules import Median
from mpifl.protection.secure_sum import MaskedSums
from mpifl.simulation.client_devices import Classes, DeviceClass
from mpifl.simulation.delays import Constant
from mpifl.simulation.network import Links
from mpifl.traffic.compression import Payload, TopK
from mpifl.training.config import LocalConfig

RANK, RANKS = 4, (1, 1, 4, 2, 4, 4)  # of the six clients of `toy.Tiny`
GIVEN = {"0-1": 1, "3": 2}
WIDTH = 16 + 8  # of an adapter of rank 1 of the hidden layer of `toy.mlp(8)`
HEAD = 8 * 3 + 3
FEDAVG = CATALOGUE["fedavg"]()


def model(**options):
    return MODELS["mlp"](hidden=(8,), lora=LoRA(rank=RANK, **options))


def several(**options):
    return {"model": model(ranks=GIVEN, **options)}


def lacking(context) -> dict[int, torch.Tensor]:
    """Return rank -> which numbers of a model it lacks."""
    columns, d = adapter_columns(context), context.problem.layout.size
    found = {rank: columns.beyond("model", d, rank) for rank in {*RANKS}}
    return {rank: torch.zeros(d, dtype=torch.bool) if x is None else x for rank, x in found.items()}


def products(context, models: torch.Tensor) -> torch.Tensor:
    """Return the product B A [n, out, in] of the hidden layer of models [n, d]."""
    (f,) = adapter_columns(context).factors("model", models.shape[1])
    a, b = f.take(models.double())
    return b @ a


def truncated(product: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(product.double(), full_matrices=False)
    return (u[..., :, :rank] * s[..., None, :rank]) @ vh[..., :rank, :]


# -- zeros ---------------------------------------------------------------------------------------------------

OPTIMISERS = {
    "momentum": LocalConfig(epochs=3, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": LocalConfig(epochs=3, batch_size=5, lr=0.1, optimizer="adam", weight_decay=0.01),
}


@pytest.mark.parametrize("local", OPTIMISERS.values(), ids=[*OPTIMISERS])
def test_no_optimiser_moves_what_a_rank_lacks(local, tmp_path):
    """Before the filter sees it: both factors of a direction are 0, and each is a factor of the gradient."""
    context = toy.context_of(toy.config_of(FEDAVG, model=model(), local=local), toy.Tiny())
    client = toy.start(FEDAVG, toy.Tiny(), tmp_path, model=model(), local=local)[0].config.clients.client(0)
    lacks = lacking(context)[2]
    whole = 0.3 * torch.from_numpy(key(0, "start").numpy().normal(size=len(lacks))).float()
    trained, all_of_it = (client.sgd(x, key(0)).vector for x in (whole.masked_fill(lacks, 0.0), whole))
    assert not trained[lacks].any()
    assert (all_of_it != whole)[lacks].float().mean() > 0.5  # the others are units that no sample excites
    assert (trained != whole)[~lacks].float().mean() > 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"privacy": LocalPrivacy(clip=1.0, noise_multiplier=1.0)},
        {"attack": Noise(share=0.5)},
        {"algorithm": CATALOGUE["hypcluster"](num_clusters=2)},
        {"algorithm": CATALOGUE["fedem"](num_components=2)},
        {"algorithm": CATALOGUE["scaffold"]()},
        {"payload": Payload(dtype="bfloat16")},
    ],
    ids=["plain", "noise", "attack", "rows that start apart", "several rows", "controls", "rounded"],
)
def test_uploads_and_served_models_have_the_ranks_of_their_clients(changes, tmp_path, monkeypatch):
    seen: dict[int, list[torch.Tensor]] = {}
    plain = ClientRanks.client

    def client(self, report, visit):
        out = plain(self, report, visit)
        seen.setdefault(report.client, []).extend([*out.vectors.values(), *visit.message.vectors.values()])
        return out

    monkeypatch.setattr(ClientRanks, "client", client)
    algorithm = changes.get("algorithm", FEDAVG)
    others = {name: value for name, value in changes.items() if name != "algorithm"}
    run = toy.run(algorithm, toy.Tiny(), tmp_path, **several(), **others)
    lacks = lacking(toy.context_of(toy.config_of(algorithm, **several()), toy.Tiny()))
    assert sorted(seen) == list(range(6))
    for k, vectors in seen.items():
        assert not any(x[..., lacks[RANKS[k]][: x.shape[-1]]].any() for x in vectors)
        assert any((x[..., ~lacks[RANKS[k]][: x.shape[-1]]] != 0).float().mean() > 0.5 for x in vectors)
    for k in range(6):
        message = run.served[k][0]
        assert not any(x[..., lacks[RANKS[k]][: x.shape[-1]]].any() for x in message.vectors.values())


def test_a_client_without_downloads_begins_with_its_rank(tmp_path):
    local = toy.run(CATALOGUE["local"](), toy.Tiny(), tmp_path, **several())
    lacks = lacking(toy.context_of(toy.config_of(FEDAVG, **several()), toy.Tiny()))
    for k, trained in enumerate(local.models()):
        assert not trained[lacks[RANKS[k]]].any()
        assert trained[~lacks[RANKS[k]]].any()


def test_devices_and_numbers_give_clients_their_ranks():
    """Half of the devices are small, and a number goes before a device."""
    devices = Classes(classes={"small": DeviceClass(0.5), "large": DeviceClass(0.5)})
    config = toy.config_of(FEDAVG, model=model(ranks={"small": 1, "large": 2, "4-5": 3}), devices=devices)
    context = toy.context_of(config, toy.Tiny())
    small = [k for k, name in enumerate(context.duration.devices) if name == "small"]
    assert len(small) == 3
    assert context.ranks == (*(1 if k in small else 2 for k in range(4)), 3, 3)
    assert toy.context_of(toy.config_of(FEDAVG, model=model()), toy.Tiny()).ranks == ()


# -- bytes ---------------------------------------------------------------------------------------------------

SIZES = np.array([4 * (r * WIDTH + HEAD) for r in RANKS])


@pytest.mark.parametrize("average", ["factors", "product"])
def test_both_ways_clients_move_the_numbers_of_their_rank(average, tmp_path):
    """4 bytes of r (16 + 8) + 27 numbers; a row that is sent once has the largest rank of its readers."""
    run = toy.run(FEDAVG, toy.Tiny(), tmp_path, steps=3, **several(average=average))
    ledger = run.server_step.ledger
    assert_array_equal(ledger.up, 3 * SIZES)
    assert_array_equal(ledger.down, 3 * SIZES)
    down, up = (
        ledger.entries[1, way, "model", cast, "0"] for way, cast in (("down", "broadcast"), ("up", "unicast"))
    )
    assert (down.bytes, up.bytes, down.group_bytes) == (SIZES.sum(), SIZES.sum(), SIZES.max())
    assert (down.numbers, up.numbers) == (SIZES.sum() // 4, SIZES.sum() // 4)
    assert ledger.cast_bytes(1) == SIZES.max()


def test_each_model_of_an_upload_has_the_numbers_of_the_rank(tmp_path):
    run = toy.run(CATALOGUE["fedem"](num_components=2), toy.Tiny(), tmp_path, steps=1, **several())
    entries = run.server_step.ledger.entries.values()
    sums = {
        way: sum(e.bytes for e in entries if (e.direction, e.name) == (way, "model"))
        for way in ("down", "up")
    }
    assert sums == {"down": 2 * SIZES.sum(), "up": 2 * SIZES.sum()}


def test_the_forecast_knows_the_ranks_of_those_who_take_part(tmp_path):
    found = forecast(toy.context_of(toy.config_of(FEDAVG, rounds=3, **several()), toy.Tiny()))
    assert found.total == (3 * SIZES.sum(), 3 * SIZES.sum())
    config = toy.config_of(FEDAVG, rounds=3, cohort_size=3, **several())
    some = forecast(toy.context_of(config, toy.Tiny()))
    run = toy.run(FEDAVG, toy.Tiny(), tmp_path, steps=3, cohort_size=3, **several())
    ledger = run.server_step.ledger
    assert some.total == (ledger.total("down"), ledger.total("up"))
    assert ledger.total("up") not in (3 * SIZES[:3].sum(), 9 * SIZES[0])


def test_a_slow_link_takes_as_long_as_the_numbers_of_a_rank(tmp_path):
    """At 1 byte a second both ways, without computing, a visit takes twice the bytes of its rank."""
    links = Links(uplink_bytes_s=1.0, downlink_bytes_s=1.0)
    changes = {"network": links, "delay": Constant(value_s=0.0), **several()}
    run = toy.events(CATALOGUE["fedasync"](), toy.Tiny(), tmp_path, steps=12, **changes)
    assert {row["client"] for row in run.arrivals} == set(range(6))
    for row in run.arrivals:
        assert row["time"] - row["start"] == pytest.approx(2 * SIZES[row["client"]])


# -- products ------------------------------------------------------------------------------------------------


def of_step(run: toy.Run, context, step: int = -1):
    """Return the mean product of the uploads of a step, and the product of its row."""
    return products(context, run.servers[step].tables["model"])[0]


@pytest.mark.parametrize("ranks", [{}, GIVEN], ids=["one rank", "several"])
def test_the_row_has_the_best_adapter_for_the_mean_product_of_its_uploads(ranks, tmp_path, monkeypatch):
    """And each client gets the best one of its own rank."""
    seen: list[tuple[float, torch.Tensor]] = []
    monkeypatch.setattr(
        "mpifl.aggregation.adapters.ProductMeans.client",
        lambda self, report, visit: seen.append((report.num_samples, report.vectors["model"])) or report,
        raising=False,
    )
    monkeypatch.setattr("mpifl.aggregation.adapters.ProductMeans.at_clients", True)
    changes = {"model": model(average="product", ranks=ranks)}
    run = toy.run(FEDAVG, toy.Tiny(), tmp_path, steps=2, **changes)
    context = toy.context_of(toy.config_of(FEDAVG, **changes), toy.Tiny())
    last = seen[-6:]
    share = torch.tensor([n for n, _ in last], dtype=torch.float64)
    share = share / share.sum()
    uploads = torch.stack([x for _, x in last])
    mean = torch.einsum("m,moi->oi", share, products(context, uploads))
    row = run.server.tables["model"]
    assert_close(products(context, row)[0], truncated(mean, RANK), atol=1e-6, rtol=1e-5)
    (f,) = adapter_columns(context).factors("model", row.shape[1])
    beside = torch.ones(row.shape[1], dtype=torch.bool)
    beside[f.a] = beside[f.b] = False
    assert_close(row[0, beside], (share @ uploads.double())[beside].float(), atol=1e-6, rtol=1e-5)
    lost = (mean - truncated(mean, RANK)).norm() / mean.norm()
    assert 0 < float(lost) < 1
    figures = run.server_step.config.filters.figures()
    assert figures == pytest.approx({"lora_lost": float(lost)}, rel=1e-4)
    for k in range(6):
        rank = RANKS[k] if ranks else RANK
        served = run.served[k][0].vectors["model"]
        assert_close(products(context, served)[0], truncated(mean, rank), atol=1e-6, rtol=1e-5)


def test_one_client_alone_trains_as_with_factors_but_for_the_choice_of_them(tmp_path):
    """One step: the product of the new row is that of the upload."""
    one, other = (
        toy.run(FEDAVG, toy.Tiny(1, 1), tmp_path / name, steps=1, model=model(average=name))
        for name in ("factors", "product")
    )
    context = toy.context_of(toy.config_of(FEDAVG, model=model()), toy.Tiny(1, 1))
    found, wanted = (products(context, run.server.tables["model"]) for run in (other, one))
    assert wanted.abs().max() > 1e-3
    assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert other.server_step.config.filters.figures()["lora_lost"] < 1e-6


def test_an_asynchronous_server_blends_products(tmp_path):
    """FedAsync: (1 - a) of the old product and a of the new one, in the best adapter."""
    algorithm = CATALOGUE["fedasync"]()
    run = toy.events(algorithm, toy.Tiny(), tmp_path, steps=4, **several(average="product"))
    context = toy.context_of(toy.config_of(algorithm, **several()), toy.Tiny())
    assert run.plans[-1].mixings[0].keep is not None
    assert 0 < float(of_step(run, context).abs().max()) < 1
    assert torch.linalg.matrix_rank(of_step(run, context), atol=1e-6) <= RANK


@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        ["fedprox", "ifca", "oracle", "hypcluster", "fedper", "fedrep", "fedbabu", "fedavg_memory", "emdcfl"],
        ["ifca", "fedper", "fedavg_memory", "emdcfl"],
    ),
)
def test_methods_that_mix_models_mix_their_products(name, tmp_path):
    options = {"ifca": {"num_clusters": 2}, "hypcluster": {"num_clusters": 2}}
    options["emdcfl"] = {"sample_cap": 8, "epsilon": 0.05}
    algorithm = CATALOGUE[name](**options.get(name, {}))
    run = toy.run(algorithm, toy.Tiny(), tmp_path, model=model(average="product"))
    assert run.server_step.config.filters.figures()["lora_lost"] > 0
    table = next(iter(run.server.tables))
    context = toy.context_of(toy.config_of(algorithm, model=model(average="product")), toy.Tiny())
    rows = run.server.tables[table]
    (f,) = adapter_columns(context).factors(table, rows.shape[1])
    a, _ = f.take(rows.double())
    moved = (rows != run.servers[0].tables[table]).any(1)
    assert moved.any()
    assert_close(
        a[moved] @ a[moved].mT, torch.eye(RANK).double().expand(int(moved.sum()), -1, -1), atol=1e-5, rtol=0
    )


# -- refusals ------------------------------------------------------------------------------------------------

REFUSED = {
    "flhc": "FLHC averages changes of models",
    "fedbuff": "FedBuff averages changes of models",
    "fednova": "FedNova changes averages by a step of its own",
    "fedavgm": "FedAvgM changes averages by a step of its own",
    "fedamp": "FedAMP keeps state at its clients, which may hold factors",
    "fesem": "FeSEM compares the numbers of uploads",
    "ditto": "Ditto keeps state at its clients, which may hold factors",
    "scaffold": "SCAFFOLD averages changes of models",
    "fedsoft_async": "FedSoftAsync mixes the numbers of models at its clients",
    "local": "Local keeps state at its clients, which may hold factors",
}


@for_each("name", REFUSED)
def test_methods_that_do_more_with_factors_than_average_them_refuse_products(name):
    policy = {"policy": toy.EveryArrival()} if name in ("fedbuff", "fedsoft_async") else {}
    check_sections(toy.config_of(CATALOGUE[name](), model=model(), **policy))
    with pytest.raises(UserError, match=rf"model.lora.average = 'product': {REFUSED[name]}.* use factors"):
        check_sections(toy.config_of(CATALOGUE[name](), model=model(average="product"), **policy))


def test_methods_that_average_no_adapters_refuse_products():
    config = partial(toy.config_of, CATALOGUE["lgfedavg"]())
    toy.context_of(config(model=model()), toy.Tiny())
    with pytest.raises(UserError, match=r"model.lora.average = 'product': has no effect: .* no part with"):
        toy.context_of(config(model=model(average="product")), toy.Tiny())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm": CATALOGUE["cfl"]()}, "CFL compares"),
        ({"algorithm": CATALOGUE["emdcfl"]()}, "EMDCFL shows clients the models of others"),
        ({"algorithm": CATALOGUE["ucfl"]()}, "UCFL sends statistics before training"),
    ],
)
def test_methods_that_compare_models_refuse_several_ranks(changes, told):
    with pytest.raises(UserError, match=rf"model.lora.ranks = .*: {told}"):
        check_sections(toy.config_of(changes["algorithm"], **several()))


@for_each(
    ("options", "section", "message"),
    [
        ({"ranks": GIVEN}, {"payload": Payload(compression=TopK())}, "payload.compression = 'top_k'"),
        ({"ranks": GIVEN}, {"secure_aggregation": MaskedSums()}, "secure_aggregation.name = 'masks'"),
        ({"ranks": GIVEN}, {"robust": Median()}, "robust.name = 'median'"),
        ({"average": "product"}, {"robust": Median()}, "robust.name = 'median'"),
        ({"average": "product"}, {"secure_aggregation": MaskedSums()}, "secure_aggregation.name = 'masks'"),
        (
            {"average": "product"},
            {"privacy": CentralPrivacy(clip=1.0, noise_multiplier=1.0)},
            "model.lora.average = 'product'|privacy.name = 'central'",
        ),
        (
            {"average": "product"},
            {"local": LocalConfig(keep_optimizer=True, momentum=0.9)},
            "local.keep_optimizer = True",
        ),
        ({"ranks": {"9": 1}}, {}, "model.lora.ranks = 9: there are 6 clients"),
        ({"ranks": {"phone": 1}}, {}, "model.lora.ranks = '?phone"),
        ({"ranks": {"1": 1, "0-2": 2}}, {}, "model.lora.ranks = 0-2: client 1"),
    ],
)
def test_what_does_not_go_together_is_refused(options, section, message):
    with pytest.raises(UserError, match=message):
        toy.context_of(toy.config_of(FEDAVG, model=model(**options), **section), toy.Tiny())


def test_ranks_are_at_most_the_rank_and_need_adapters():
    with pytest.raises(UserError, match=r"lora.ranks.3 = 5: rank is the largest, and it is 4"):
        LoRA(rank=4, ranks={"3": 5})
    for unused in ({"ranks": {"3": 1}}, {"average": "product"}):
        with pytest.raises(UserError, match="has no effect without adapters"):
            LoRA(**unused)


def test_clients_that_read_mixtures_of_rows_are_refused(tmp_path):
    class Own(type(FEDAVG)):
        def reads(self, server: Server, k: int):
            return {"model": np.ones(1)}

    with pytest.raises(MethodError, match="clients read mixtures of rows of 'model'"):
        toy.run(Own(), toy.Tiny(2, 1), tmp_path, steps=1, model=model(average="product"))


@pytest.mark.parametrize("weights", [[[0.5, 0.6]], [[1.5, -0.5]]])
def test_a_plan_that_mixes_no_models_is_refused(weights, tmp_path):
    """A method of one's own whose uploads are added, or extrapolated."""

    class Own(type(FEDAVG)):
        def aggregate(self, server: Server, notes: Notes) -> Plan:
            return Plan([Mixing(np.array(weights), into="model", of="model")])

    with pytest.raises(MethodError, match="product mixes models with weights that sum to 1"):
        toy.run(Own(), toy.Tiny(2, 1), tmp_path, steps=1, model=model(average="product"))
