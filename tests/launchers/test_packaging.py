"""What is installed is what is tested, and configurations travel with the package."""

from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mpifl.cli import main
from mpifl.tools.scaffold import JOB_SCRIPTS

ROOT = Path(__file__).resolve().parents[2]


def declared() -> list[Requirement]:
    """Return all requirements of setup.cfg, the extras included."""
    setup = ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return [Requirement(line) for text in texts for line in text.strip().splitlines()]


def test_every_requirement_has_a_tested_version_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    for requirement in declared():
        version = tested[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} but tested with {version}"
    assert (tested["torch"], tested["torchvision"]) == ("2.13.0", "0.28.0")


@pytest.mark.parametrize("name", JOB_SCRIPTS)
def test_a_job_script_is_printed_whole_and_needs_no_other_file(name, capsys):
    assert main(["launch", name]) == 0
    text = capsys.readouterr().out
    assert text == (ROOT / "launch" / name).read_text()
    assert "common.sh" not in text


def test_configurations_are_seen_from_within_the_package():
    inside = {p.relative_to(ROOT / "mpifl" / "configs") for p in (ROOT / "mpifl" / "configs").rglob("*.yaml")}
    outside = {p.relative_to(ROOT / "configs") for p in (ROOT / "configs").rglob("*.yaml")}
    assert inside == outside
    assert Path("quickstart.yaml") in inside
