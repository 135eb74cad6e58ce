"""The federation's bytes as `mpifl plan` foretells them, for every method, against the ledger."""

from __future__ import annotations

import pytest
from support import pretended, worlds
from support.cases import OPTIONS

from mpifl.algorithms.registry import CATALOGUE
from mpifl.experiment import traffic_forecast as expected
from mpifl.traffic.ledger import Ledger
from mpifl.traffic.payload import Payload

pytestmark = pytest.mark.usefixtures("flat_plane")
ROUNDS = 3
METHODS = [name for name, cls in CATALOGUE.items() if not cls.needs.one_by_one]


def foretold(name: str, options: dict[str, object] | None = None, **changes) -> expected.Expected:
    """Return what is expected of three rounds."""
    method = CATALOGUE[name](**(OPTIONS.get(name, {}) if options is None else options))
    config = worlds.config_of(method, rounds=ROUNDS, **changes)
    context = expected.without_training(worlds.context_of(config, worlds.Tiny()))
    server, once = expected.first_server(context)
    return expected.expect(context, server, once, expected.empty_report(context, server, 0))


def sent(name: str, folder, **changes) -> tuple[int, int]:
    """Return what three rounds sent: (down, up)."""
    method = CATALOGUE[name](**OPTIONS.get(name, {}))
    done = worlds.run(method, worlds.Tiny(), folder, ROUNDS, False, **changes)
    return done.server_step.ledger.total("down"), done.server_step.ledger.total("up")


@pytest.mark.parametrize("name", METHODS)
def test_the_ledger_holds_what_was_foretold(name, tmp_path):
    said = foretold(name, participation=0.5)
    found = sent(name, tmp_path, participation=0.5)
    if said.total is None:
        assert type(CATALOGUE[name]()).__name__ in expected.DATA_DECIDES
        assert said.why
    else:
        assert said.total == found
    with pretended.gpu():
        assert foretold(name, participation=0.5) == said, "where a model is trained does not matter"


def test_steps_of_one_batch_are_foretold_too():
    one, whole = (foretold("cflgp", {"num_clusters": 2, "protocol": p}) for p in ("gradient", "gap"))
    assert one == whole


@pytest.mark.parametrize("name", ["emdcfl", "fedfomo", "flexcfl", "fedsoft"])
def test_terms_that_grow_with_the_cohort_are_foretold_for_everyone_too(name, tmp_path):
    assert foretold(name).total == sent(name, tmp_path)


@pytest.mark.parametrize("name", ["fedavg", "emdcfl", "ucfl", "ifca"])
def test_the_form_of_messages_is_foretold(name, tmp_path):
    payload = Payload("bfloat16", header_bytes=20)
    assert foretold(name, payload=payload).total == sent(name, tmp_path, payload=payload)
    assert foretold(name, payload=payload).total < foretold(name).total


def test_a_finished_run_is_not_lost_for_want_of_a_forecast(tmp_path):
    """A method whose hooks stumble where nothing was trained: its summary says so."""

    class Stumbling(type(CATALOGUE["fedavg"]())):
        """Raises when asked what it would do."""

        def reads(self, server, k):
            """Fail."""
            raise ZeroDivisionError("no rows")

    context = worlds.context_of(worlds.config_of(Stumbling()), worlds.Tiny())
    said = expected.settled(context, Ledger(6))
    assert said == {"down": None, "up": None, "why": "no forecast: ZeroDivisionError: no rows"}
