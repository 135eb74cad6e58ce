"""Every line of configuration on the page about data is one that mpifl takes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from mpifl.data import SCENARIOS, SOURCES
from mpifl.experiment.loader import chosen

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_lines_of_the_data_page_build():
    found = [yaml.safe_load(text) for text in re.findall(r"`(\{name: [^`]*\})`", PAGE)]
    assert len(found) > 20
    for tree in found:
        chosen(SCENARIOS if tree["name"] in SCENARIOS else SOURCES, tree, "data")


def test_every_source_and_scenario_is_on_the_data_page():
    words = set(re.findall(r"[a-z_0-9]+", PAGE))
    assert set(SCENARIOS) | set(SOURCES) <= words
