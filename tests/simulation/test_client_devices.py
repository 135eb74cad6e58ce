"""Devices of clients: measured ones, classes of them, and the hours of a day; by hand and as identities."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import runs

from mpifl import cli
from mpifl.core.errors import UserError
from mpifl.core.rng import key
from mpifl.data.build import open_federation
from mpifl.experiment.loader import load
from mpifl.experiment.section_checks import check_sections
from mpifl.simulation.availability import Availability, Presence
from mpifl.simulation.client_devices import Classes, DeviceClass, Measured, exact_counts
from mpifl.simulation.delays import Constant, Exponential
from mpifl.simulation.durations import visit_duration
from mpifl.simulation.network import LinkRates, Links
from mpifl.sweeps.retime import retime

PHONES = Path(__file__).parents[2] / "mpifl" / "configs" / "devices" / "phones.csv"
TINY = str(runs.CONFIG)
TWO = "device,seconds,uplink_bytes_s\nslow,4,1Mbit/s\nslow,6,1Mbit/s\nfast,1,10Mbit/s\n"


def duration_of(devices, num_clients=6, delay=None, network=None, away=None, fleet=None):
    """Return how long visits take on some devices."""
    away = away or Availability()
    delay, network = delay or Constant(), network or Links()
    return visit_duration(delay, network, away, key(0), num_clients, 0, devices, fleet)


@pytest.fixture
def two(tmp_path) -> str:
    """A file of two devices, one of them measured twice."""
    file = tmp_path / "two.csv"
    file.write_text(TWO)
    return str(file)


def test_fifteen_phones_drive_forty_clients():
    """Each client keeps its phone, whose own measurements its visits draw; another seed draws others."""
    phones = {}
    for line in PHONES.read_text().splitlines()[1:]:
        name, seconds, *_ = line.split(",")
        phones.setdefault(name, set()).add(float(seconds))
    assert len(phones) == 15
    found = duration_of(Measured("phones.csv"), 40)
    assert set(found.devices) <= set(phones)
    assert len(set(found.devices)) > 8
    drawn = Counter()
    for k, name in enumerate(found.devices):
        seconds = [found.delay.seconds(k, v, found.key) for v in range(20)]
        assert set(seconds) <= phones[name]
        drawn[len(set(seconds))] += 1
    assert max(drawn) > 2, "visits differ"
    assert duration_of(Measured("phones.csv"), 40).devices == found.devices
    turns = duration_of(Measured("phones.csv", "round_robin"), 40).devices
    assert turns[:15] == tuple(phones)
    assert turns[15:30] == turns[:15]


def test_a_visit_takes_time_and_link_of_one_measurement(two):
    """1 Mbit/s are 125 000 bytes a second: a million bytes take 8 s beside 4 or 6 s, or 0.8 s beside 1 s."""
    found = duration_of(Measured(two, "round_robin"), 2)
    ends = {found.end(0, v, 0.0, 0, 10**6) for v in range(20)}
    assert ends == {12.0, 14.0}
    assert {found.end(1, v, 0.0, 0, 10**6) for v in range(3)} == {1.8}
    assert found.network.counts_bytes
    assert found.rates(1, 0) == LinkRates(inf, 1.25e6, 0.0)


def test_seconds_per_sample_are_those_of_all_passes(tmp_path):
    file = tmp_path / "each.csv"
    file.write_text("device,seconds_per_sample\nphone,20ms\n")
    devices = Measured(str(file))
    fleet = replace(devices.fleet(2, key(0)), samples=lambda k, v: 100 * (k + 1) + v)
    found = duration_of(devices, 2, fleet=fleet)
    assert_allclose([found.end(0, 0, 0.0), found.end(1, 5, 0.0)], [2.0, 4.1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device,seconds,seconds_per_sample\na,1,1\n", "needs one of the columns"),
        ("device\na\n", "needs one of the columns"),
        ("phone,seconds\na,1\n", "has no column device"),
        ("device,seconds\n", "has no row"),
        ("device,seconds\na,-1\n", "line 2: seconds = -1.0: use 0 or more seconds"),
        ("device,seconds\na,nan\n", "use 0 or more seconds"),
        ("device,seconds\n ,1\n", "name the device"),
        ("device,seconds,uplink_bytes_s\na,1,0\n", "use a positive rate"),
        ("device,seconds,uplink_bytes_s\na,1,1MB\n", "line 2: uplink_bytes_s = 1MB: MB is the unit of a"),
    ],
)
def test_a_broken_file_of_measurements_is_refused(text, message, tmp_path):
    file = tmp_path / "broken.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        duration_of(Measured(str(file)))


def test_shares_of_classes_are_exact():
    assert exact_counts([0.5, 0.3, 0.2], 10) == [5, 3, 2]
    assert exact_counts([1 / 3, 1 / 3, 1 / 3], 10) == [4, 3, 3]
    assert exact_counts([0.1] * 10, 10) == [1] * 10
    devices = Classes({"new": DeviceClass(0.3), "old": DeviceClass(0.7)})
    names = duration_of(devices, 10).devices
    assert Counter(names) == {"new": 3, "old": 7}
    others = devices.fleet(10, key(1).of("devices")).names
    assert Counter(others) == Counter(names)
    assert others != names, "who is in a class is drawn"


def test_a_class_changes_speed_link_and_latency_by_hand():
    """4 s at half the speed are 8 s; 100 bytes at 10 a second 10 s, twice 0.5 s of latency: 19 s."""
    slow = DeviceClass(0.5, speed=0.5, uplink_bytes_s=10.0, latency_s=0.5)
    found = duration_of(Classes({"slow": slow, "plain": DeviceClass(0.5)}), 4, Constant(4.0))
    ends = {name: found.end(k, 0, 0.0, 100, 100) for k, name in enumerate(found.devices)}
    assert ends == {"slow": 19.0, "plain": 4.0}


def test_a_class_has_an_availability_of_its_own():
    """Its devices are there in the second half of a day of 10 s: work of 6 s from 0 ends at 16."""
    night = Availability(profile=(0.0, 1.0), day_s=10.0)
    found = duration_of(Classes({"night": DeviceClass(0.5, availability=night), "day": DeviceClass(0.5)}), 2)
    at = {name: k for k, name in enumerate(found.devices)}
    assert found.presence.end(at["night"], 0.0, 6.0) == 16.0
    assert found.presence.end(at["day"], 0.0, 6.0) == 6.0
    assert not found.presence.always


def test_a_day_with_nothing_left_to_chance_by_hand():
    """Slots of 6 h: away, there, there, away; a shift of 1 h. 13 h of work from 0 end at 8 h next day."""
    hour = 3600.0
    presence = Presence(Availability(profile=(0.0, 1.0, 1.0, 0.0), shift_s=hour), key(0))
    assert presence.next_available(3, 0.0) == 7 * hour
    assert presence.end(3, 0.0, 13 * hour) == (24 + 7 + 1) * hour
    here = [presence.is_available(0, h * hour + 1) for h in range(24)]
    assert_array_equal(np.flatnonzero(here), np.arange(7, 19))
    edges = Presence(Availability(profile=(0.0, 1.0, 0.0), day_s=0.3), key(0))
    ends = [edges.end(0, 0.1 * i, 0.05) for i in range(300)]
    assert ends == sorted(ends), "rounding loses no slot"


def test_a_days_profile_has_its_shares_in_every_slot_of_any_clients_day():
    """40 clients over 50 days, looked at in the middle of each slot; four standard errors."""
    shares = (0.1, 0.9, 0.5)
    presence = Presence(Availability(profile=shares, day_s=3.0), key(0))
    here = np.array(
        [
            [[presence.is_available(k, 3 * d + s + 0.5) for s in range(3)] for d in range(50)]
            for k in range(40)
        ]
    )
    for s, share in enumerate(shares):
        assert_allclose(here[:, :, s].mean(), share, atol=4 * np.sqrt(share * (1 - share) / 2000))
    assert not (here[0] == here[1]).all(), "clients are drawn apart"
    spread = Presence(Availability(profile=(0.0, 1.0), day_s=2.0, spread_s=2.0), key(0))
    assert 8 < sum(spread.is_available(k, 0.5) for k in range(40)) < 32, "days begin at other times"


def test_how_long_visits_last_travels_between_ranks(two):
    """Rank 0 opens the clock and tells the others what it decided."""
    night = DeviceClass(0.5, 0.5, 10.0, availability=Availability(profile=(0.0, 1.0), day_s=10.0))
    for devices in (Measured(two), Classes({"night": night, "plain": DeviceClass(0.5)})):
        found = duration_of(devices, 4, delay=Exponential(2.0) if isinstance(devices, Classes) else None)
        again = pickle.loads(pickle.dumps(found))
        assert [again.end(k, 1, 0.5, 9, 9) for k in range(4)] == [
            found.end(k, 1, 0.5, 9, 9) for k in range(4)
        ]


def test_a_profile_of_ones_is_always():
    presence = Presence(Availability(profile=(1.0, 1.0)), key(0))
    assert presence.always
    assert presence.end(0, 1.0, 2.0) == 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Availability(profile=(0.0, 0.001)), "the largest at least 0.01"),
        (lambda: Availability(off_s=3.0, profile=(1.0,)), "leave one of them out"),
        (lambda: Availability(shift_s=3.0), "shift_s = 3.0: has no effect without profile"),
        (lambda: Availability(day_s=60.0), "day_s = 60.0: has no effect without profile"),
        (lambda: Classes({"a": DeviceClass(0.5)}), "the shares sum to 0.5"),
    ],
)
def test_impossible_devices_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def measured(file: str, *more: str) -> list[str]:
    """Return the options of a run on measured devices."""
    return ["--devices", f"{{name: measured, file: '{file}'}}", *more]


CLASSES = "{name: classes, classes: {a: {share: 0.5, speed: 2}, b: {share: 0.5}}}"
OWN = "{name: classes, classes: {a: {share: 0.5, uplink_bytes_s: 9, AWAY}, b: {share: 0.5, UP, AWAY}}}"
OWN = OWN.replace("AWAY", "availability: {profile: [1, 0.3]}")
OWN_LINKS, HALF_OWN = OWN.replace("UP", "uplink_bytes_s: 7"), OWN.replace("UP", "speed: 2")
LINKED = "device,seconds,uplink_bytes_s,downlink_bytes_s,latency_s\nslow,4,1Mbit/s,1Mbit/s,0\n"
STEPS = ["--algorithm", "fedasync", "--policy", "{name: client_decides}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (measured("FILE", "--delay", "{name: uniform}"), "delay = .*computing times are those of"),
        (measured("FILE", "--network", "wired"), "has computing times of its own"),
        (measured("FILE", "--network.uplink_bytes_s", "5"), "network.uplink_bytes_s = 5.0: has no effect"),
        (
            measured("FILE", "--network", "{downlink_bytes_s: 9, rho: 4}"),
            "network.rho = 4.0: has no effect: .*two.csv has uplink_bytes_s; leave one of them out",
        ),
        (measured("LINKED", "--network", "tiers"), r"network.tiers = .*: has no effect: .*linked.csv has "),
        (measured("LINKED", "--network", "{name: trace, file: x.csv}"), r"network.file = 'x.csv': has no "),
        (
            ["--devices", OWN_LINKS, "--network.uplink_bytes_s", "1000"],
            "network.uplink_bytes_s = 1000.0: has no effect: every class has uplink_bytes_s; leave one of",
        ),
        (
            ["--devices", OWN_LINKS, "--network", "{name: wired, rho: 4}"],
            "network.rho = 4.0: has no effect: every class has uplink_bytes_s; leave one of",
        ),
        (
            ["--devices", HALF_OWN, "--availability", "{on_s: 10, off_s: 5}"],
            "availability = .*: has no effect: every class has availability; leave one of them out",
        ),
        (measured("nowhere.csv"), "devices.file = 'nowhere.csv': there is no such file"),
        (measured("FILE", *STEPS), "devices = .*virtual time is made of steps"),
        (["--devices", CLASSES, *STEPS], "devices = .*virtual time is made of steps"),
        (
            ["--devices", "{name: classes, classes: {a: {share: 1, spede: 2}}}"],
            "classes.a.spede = 2: unknown",
        ),
        (["--devices", "{name: classes, classes: [a]}"], "must be a mapping"),
    ],
)
def test_devices_without_effect_and_unknown_ones_are_refused(options, message, two, tmp_path):
    linked = tmp_path / "linked.csv"
    linked.write_text(LINKED)
    given = [o.replace("FILE", two).replace("LINKED", str(linked)) for o in options]
    with pytest.raises(UserError, match=message):
        check_sections(load(TINY, given))


@pytest.mark.parametrize(
    "options",
    [
        measured("FILE", "--network", "tiers"),
        measured("FILE", "--network", "{downlink_bytes_s: 9, spread: 0.5}"),
        ["--devices", HALF_OWN, "--network.uplink_bytes_s", "1000"],
        ["--devices", OWN_LINKS, "--network", "{downlink_bytes_s: 9, latency_s: 1}"],
        ["--devices", CLASSES, "--availability", "{on_s: 10, off_s: 5}"],
        ["--devices", OWN_LINKS, "--network", "wired"],
    ],
)
def test_what_some_devices_leave_to_other_sections_is_taken(options, two):
    check_sections(load(TINY, [o.replace("FILE", two) for o in options]))


# -- whole runs ----------------------------------------------------------------------------------------------

SPREAD = ["--delay", "{name: exponential, mean_s: 2}", "--rounds", "8", "--cohort_size", "3"]
ASYNC = [*SPREAD, "--algorithm", "fedasync", "--policy", "every_arrival"]
NEUTRAL = [
    *("--devices", "{name: classes, classes: {a: {share: 0.5}, b: {share: 0.5}}}"),
    *("--per_client", "{b: {epochs: 1}, 3: {lr: 0.1}}"),
]


def run(folder: Path, name: str, options: list[str]) -> Path:
    """Run the tiny configuration; return its folder."""
    place = ["--output.folder", str(folder), "--output.id", name, "-q"]
    assert cli.main(["run", TINY, *options, *place]) == 0
    return folder / f"tiny-{name}"


def test_classes_that_change_nothing_change_nothing_but_the_column(tmp_path):
    plain, neutral = (run(tmp_path, n, [*ASYNC, *o]) for n, o in (("p", []), ("n", NEUTRAL)))
    assert runs.figures_of(plain)["digest"] == runs.figures_of(neutral)["digest"]
    for table in ("events.csv", "clients.csv", "visits.csv"):
        one, other = runs.columns_of(plain / table), runs.columns_of(neutral / table)
        devices = other.pop("device", [])
        assert one == other, table
        assert len(devices) == len(one["client"]), table
        assert set(devices) <= {"a", "b"}


def test_devices_of_a_run_can_be_retimed(two, tmp_path):
    """The times of a run on measured devices, without training it again, and back."""
    options = ["--rounds", "3", "--participation", "0.5"]
    plain = run(tmp_path, "plain", options)
    there = run(tmp_path, "there", [*options, *measured(two)])
    assert cli.main(["retime", str(plain), *measured(two), "--output.id", "again"]) == 0
    again = tmp_path / "tiny-again"
    for table in ("metrics.csv", "visits.csv", "clients.csv"):
        assert runs.columns_of(there / table) == runs.columns_of(again / table), table
    assert runs.columns_of(there / "metrics.csv") != runs.columns_of(plain / "metrics.csv")
    assert cli.main(["retime", str(again), "--devices", "alike", "--output.id", "back"]) == 0
    assert runs.columns_of(tmp_path / "tiny-back" / "clients.csv") == runs.columns_of(plain / "clients.csv")
    other = run(tmp_path, "other", [*NEUTRAL, "--rounds", "1"])
    with pytest.raises(UserError, match="train in another way on other devices"):
        retime(str(other), ["--devices.classes.b.speed", "2"])


DRIFT = [
    *("--algorithm", "fedasync", "--rounds", "40"),
    *("--policy", "{name: client_decides, uploads: {name: drift, threshold: 0.25, longest: 10}}"),
    "--data.scenario",
    "{name: ccfl, clusters: 4, clients: 8, smallest: 30, largest: 60, test_images: 20, public: 20}",
]


def drifting(folder: Path, text: str) -> Iterator[tuple[list[int], Callable[[int], int], float]]:
    """Run clients that await drift on measured devices; yield for each visit its cycles, the samples of the
    client in a cycle, and its seconds.
    """
    (folder / "phone.csv").write_text(text)
    done = run(folder, "drift", [*DRIFT, *measured(str(folder / "phone.csv"))])
    config = load(TINY, DRIFT)
    data = open_federation(config.data, config.seed.data)  # nobody awaits drift in these
    columns = runs.columns_of(done / "events.csv")
    rows = zip(*(columns[name] for name in ("client", "visit", "start", "time")), strict=True)
    for k, visit, start, end in rows:
        cycles = cycles_of(partial(data.mixture, int(k)), int(visit))
        yield cycles, partial(data.num_samples, int(k)), float(end) - float(start)


def cycles_of(shares: Callable[[int], np.ndarray], visit: int) -> list[int]:
    """Return the cycles of a visit; the last is the first whose shares lie .25 from those of the last of the
    visit before, or the tenth.
    """
    cycles = [0]
    for _ in range(visit):
        last = cycles[-1]
        far = [c for c in range(last + 1, last + 11) if abs(shares(last) - shares(c)).sum() / 2 >= 0.25]
        cycles = [*range(last + 1, (far or [last + 10])[0] + 1)]
    return cycles


def test_cycles_last_as_long_as_the_samples_in_each_of_them_say(tmp_path):
    """10 ms a sample, of every cycle since the last upload."""
    found = [*drifting(tmp_path, "device,seconds_per_sample\nphone,10ms\n")]
    for cycles, samples, seconds in found:
        assert seconds == pytest.approx(0.01 * sum(map(samples, cycles)))
    assert sum(len(cycles) > 1 for cycles, *_ in found) > 5


def test_the_last_cycle_of_a_visit_and_its_link_are_of_one_measurement(tmp_path):
    """Twice 500 s of latency beside 100 s of computing, none beside 1 s."""
    found = drifting(tmp_path, "device,seconds,latency_s\nphone,1,0\nphone,100,500\n")
    assert {round(seconds) for cycles, _, seconds in found if len(cycles) == 1} == {1, 1100}


NORMED = """
import math
from torch import nn

class Normed(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(math.prod(shape)))
        self.head = nn.Linear(math.prod(shape), num_classes)

    def forward(self, x):
        return self.head(self.body(x))
"""


def test_a_sample_that_batch_norm_leaves_out_takes_no_time(tmp_path):
    """10 ms a sample. The largest clients have 280: nine batches of 31, and one that is left out: 2.79 s."""
    (tmp_path / "net.py").write_text(NORMED)
    (tmp_path / "phone.csv").write_text("device,seconds_per_sample\nphone,10ms\n")
    net = ["--model", f"{{name: custom, path: '{tmp_path}/net.py:Normed', head: head}}"]
    options, phones = [*net, "--local.batch_size", "31"], measured(str(tmp_path / "phone.csv"))
    there, plain = run(tmp_path, "there", [*options, *phones]), run(tmp_path, "plain", options)
    assert max(map(int, runs.columns_of(plain / "clients.csv")["train"])) == 280
    times = runs.columns_of(there / "metrics.csv")["virtual_seconds"]
    assert_allclose([float(t) for t in times][-1], 2 * 2.79)
    assert cli.main(["retime", str(plain), *phones, "--output.id", "again"]) == 0
    assert runs.columns_of(tmp_path / "tiny-again" / "metrics.csv")["virtual_seconds"] == times
