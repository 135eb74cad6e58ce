"""The second look over ranks: the numbers of one process, and bytes that a count of pairs explains."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi.exchanges import METHODS, WAYS, all_found
from support import toy
from support.runs import CONFIG, Runs

from mpifl.comm.single import Single
from mpifl.experiment import loader
from mpifl.experiment.build import build
from mpifl.forecast.traffic import look_bytes_of_ranks

SCRIPT = Path(__file__).with_name("exchanges.py")
SAME = ("columns", "clients", "fresh", "model", "visits", "dropped", "ledger", "computed", "by client")
PAYLOAD, SHOWN, ANSWERED = 5, 2, 3  # numbers that a client of `Asking` sends


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process finds."""
    return json.loads(json.dumps(all_found(Single())))


@pytest.fixture(
    scope="module", params=[3, *(pytest.param(p, marks=pytest.mark.nightly) for p in (2, 4, 5, 7))]
)
def there(request, mpirun, tmp_path_factory) -> dict[str, Any]:
    """What some ranks find."""
    file = tmp_path_factory.mktemp("looks") / "found.json"
    end = mpirun(request.param, SCRIPT, file, env=toy.PYTHONPATH | {"PYTHONPATH": path()})
    assert end.returncode == 0, end.stderr
    return json.loads(file.read_text())


def path() -> str:
    """Return the folders from which the script imports."""
    return f"{toy.PYTHONPATH['PYTHONPATH']}:{SCRIPT.parents[1]}"


@pytest.mark.in_turn
def test_what_is_found_and_who_is_left_out_do_not_depend_on_the_ranks(alone, there):
    assert len(there) == len(METHODS) * len(WAYS)
    for name, found in there.items():
        for what in SAME:
            assert json.dumps(found[what]) == json.dumps(alone[name][what]), f"{name}: {what}"
        for what in ("columns", "computed", "by client"):
            local = alone[f"{name.split(':')[0]}: local"][what]
            assert json.dumps(found[what]) == json.dumps(local), f"{name}: {what}"


def sent(found: dict[str, Any], purpose: str) -> Counter[str]:
    """Return the bytes of each call of one purpose."""
    out: Counter[str] = Counter()
    for row in found["mpi"]:
        out[row["call"]] += row["bytes"] if row["purpose"] == purpose else 0
    return +out


@pytest.mark.parametrize("name", ["all", "some"])
@pytest.mark.parametrize("way", [*WAYS])
def test_bytes_over_mpi_and_in_the_ledger_differ_by_what_stays_on_a_rank(name, way, there):
    """An extractor goes once to each other rank with a peer, in the federation up and down for each pair.

    A tensor to be compared moves if another rank compares it, in the federation always.
    """
    found = there[f"{name}: {way}"]
    extractors = embeddings = pairs = 0
    for matrix, owners in zip(found["pairs"], map(np.array, found["owners"]), strict=True):
        asks = [(i, j) for i, row in enumerate(matrix) for j, looks in enumerate(row) if looks]
        pairs += len(asks)
        extractors += len({(i, owners[j]) for i, j in asks if owners[j] != owners[i]})
        if "server" in way:
            embeddings += len(asks) * (SHOWN + ANSWERED)
        else:
            embeddings += sum(ANSWERED for i, j in asks if owners[j] != owners[i])
    ledger = Counter[tuple[str, str]]()
    for row in found["ledger"]:
        ledger[row["name"], row["direction"]] += row["bytes"]
    assert ledger["extractor", "up"] == ledger["extractor", "down"] == 4 * pairs * PAYLOAD
    assert ledger["embedding", "up"] == 4 * pairs * (SHOWN + ANSWERED)
    if way == "local":
        assert not sent(found, "extractor") + sent(found, "embedding")
        return
    assert sent(found, "extractor").total() == 4 * PAYLOAD * extractors
    assert sent(found, "embedding").total() == 4 * embeddings
    assert set(sent(found, "embedding")) <= {"alltoallv"}


def test_questions_go_by_the_cheaper_collective(there):
    """If each looks at each, every worker needs every question."""
    workers = max(max(owners) for owners in there["all: workers"]["owners"])
    assert set(sent(there["all: workers"], "extractor")) == ({"allgatherv"} if workers > 1 else set())


@pytest.mark.nightly
@pytest.mark.parametrize("distances", ["workers", "server"])
def test_bytes_between_ranks_are_foretold(distances, mpirun, tmp_path):
    """All clients look at each other in round 1, when ranks are taken for equally fast."""
    options = ("--algorithm", "{name: emdcfl, sample_cap: 32}")
    exchange = ("--system.exchange", f"{{name: mpi, distances: {distances}}}")
    place = ("--output.folder", tmp_path, "--output.id", "x", "--quiet")
    end = mpirun(4, "-m", "mpifl", "run", CONFIG, *options, *exchange, *place, env=toy.PYTHONPATH)
    assert end.returncode == 0, end.stderr
    counted, calls = Counter[str](), Counter[tuple[str, str]]()
    for row in Runs(tmp_path).table("x", "mpi_traffic.csv"):
        counted[row["purpose"]] += int(row["bytes"])
        calls[row["call"] if row["rank"] == "1" else "", row["purpose"]] += int(row["calls"])
    context = build(loader.load(str(CONFIG), [*options, *exchange]), Single())
    said = look_bytes_of_ranks(context, 4)
    assert said is not None
    assert (4 * said.copies, 4 * said.moved) == (counted["extractor"], counted["embedding"])
    assert said.told == calls["send", "exchange"]
    assert said.vectors == calls["allgatherv", "extractor"] + calls["alltoallv", "embedding"]
    rows = Runs(tmp_path).table("x", "ledger.csv")
    ledger = Counter({name: sum(int(r["bytes"]) for r in rows if r["name"] == name) for name in counted})
    assert (8 * said.asked, 4 * said.compared) == (ledger["extractor"], ledger["embedding"])
