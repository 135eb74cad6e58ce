"""Units of configuration keys, against values worked out by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.each import for_each

from mpifl.cli import main
from mpifl.core.errors import UserError
from mpifl.core.units import ENDINGS, Unit, quantity, unit_of
from mpifl.experiment.loader import dump, from_tree, load

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.yaml")


@dataclass
class Mine:
    """A section of one's own.

    Attributes:
        wait_s: seconds, by its name.
        pause: minutes, by its declaration.
        sizes_mb: megabytes.
        label_s: no number.
    """

    wait_s: float = 1.0
    pause: float | None = field(default=None, metadata={"unit": ENDINGS["minutes"]})
    sizes_mb: tuple[int, ...] = ()
    label_s: str = ""


@for_each(
    ("text", "ending", "value"),
    [
        ("20ms", "_s", 0.02),
        ("3min", "_s", 180.0),
        ("1.5 h", "_s", 5400.0),
        ("250us", "_s", 0.00025),
        ("2d", "minutes", 2880.0),
        ("90s", "minutes", 1.5),
        ("0.02", "_s", 0.02),
        ("1e-3", "_s", 0.001),
        ("1Mbit/s", "bytes_s", 125_000.0),
        ("1 Mbps", "bytes_s", 125_000.0),
        ("1MB/s", "bytes_s", 1_000_000.0),
        ("1MiB/s", "bytes_s", 1_048_576.0),
        ("1Mibit/s", "bytes_s", 131_072.0),
        ("10_000B/s", "bytes_s", 10_000.0),
        ("2GB", "_mb", 2000.0),
        ("2GiB", "_mb", 2147.483648),
        ("8kbit", "bytes", 1000.0),
    ],
)
def test_quantities_become_numbers_in_the_unit_of_their_key(text, ending, value):
    assert quantity(text, ENDINGS[ending], "key") == value


@for_each(
    ("text", "ending", "message"),
    [
        ("1MB", "bytes_s", "MB is the unit of a size; bytes per second are asked, such as 1Mbit/s"),
        ("20ms", "bytes_s", "ms is the unit of a time; bytes per second are asked"),
        ("1Mbit/s", "_s", "Mbit/s is the unit of a rate; seconds are asked, such as 20ms"),
        ("1Mb/s", "bytes_s", "'Mb/s' can be bits or bytes: write Mbit/s or MB/s"),
        ("2Kb", "_mb", "'Kb' can be bits or bytes: write kbit or kB"),
        ("2Kib", "_mb", "'Kib' can be bits or bytes: write Kibit or KiB"),
        ("2KB", "_mb", "'KB' can be 1000 or 1024: write kB or KiB"),
        ("2 parsecs", "_s", "'parsecs' is not a known unit; seconds are asked"),
        ("soon", "_s", "is not a number; seconds are asked"),
        ("", "_s", "is not a number"),
        ("3 rounds", "rounds", "is not a number; server steps are asked"),
    ],
)
def test_other_units_are_refused_and_the_right_one_is_named(text, ending, message):
    with pytest.raises(UserError, match=message):
        quantity(text, ENDINGS[ending], "key")


def test_a_field_declares_its_unit_by_its_name_or_by_itself():
    found = from_tree(Mine, {"wait_s": "20ms", "pause": "2h", "sizes_mb": ["1GB", 3], "label_s": "5min"})
    assert found == Mine(0.02, 120.0, (1000, 3), "5min")
    assert unit_of(Mine, "pause") == Unit("minutes", "time", ENDINGS["minutes"].factor)
    assert from_tree(Mine, {"pause": None}).pause is None
    with pytest.raises(UserError, match="sizes_mb = 1kB: must be a whole number of megabytes"):
        from_tree(Mine, {"sizes_mb": ["1kB"]})


def test_a_configuration_with_units_is_that_with_numbers():
    """Also for a section whose name is left out: that of the default."""
    units = ["--network.uplink_bytes_s", "1Mbit/s", "--network.latency_s", "20ms", "--checkpoint.minutes"]
    plain = ["--network", "{name: links, uplink_bytes_s: 125000, latency_s: 0.02}", "--checkpoint.minutes"]
    one, other = load(TINY, [*units, "2h"]), load(TINY, [*plain, "120"])
    assert one == other
    assert dump(one) == dump(other)


def test_the_texts_that_the_reference_shows_are_taken(capsys):
    main(["show", "network.uplink_bytes_s"])
    said = capsys.readouterr().out
    assert "in bytes per second" in said
    shown = re.findall(r"\d+\w+/s", said)
    rates = [load(TINY, ["--network.name", "links", "--network.uplink_bytes_s", text]) for text in shown]
    assert [config.network.uplink_bytes_s for config in rates] == [125_000, 125_000, 125_000_000]
