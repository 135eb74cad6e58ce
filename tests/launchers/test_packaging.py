"""What is installed is what is tested; configurations, job scripts and pages travel with the package."""

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mpifl.cli import main
from mpifl.tools.starter_files import JOB_SCRIPTS

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A folder with what a wheel installs, built without the kernels."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("mpifl", "configs", "docs", "launch"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skipped)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {**os.environ, "CC": "false"}
    done = subprocess.run(
        [*build, "-w", out, source], cwd=out, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    zipfile.ZipFile(file).extractall(out / "installed")
    return out / "installed"


def said(wheel: Path, *words: str) -> str:
    """Return what a command of the wheel prints, started where the repository is not."""
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    command = [sys.executable, "-m", "mpifl", *words]
    done = subprocess.run(command, cwd=wheel.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_has_the_pages_that_help_names(wheel):
    assert Path(said(wheel, "docs", "--path").strip()) == (wheel / "mpifl" / "docs").resolve()
    assert "mpifl docs how-to" in " ".join(said(wheel, "--help").split())
    assert said(wheel, "docs", "how-to") == printed("docs", "how-to")
    assert said(wheel, "docs") == printed("docs")
    assert said(wheel, "docs", "examples/echo.py") == (ROOT / "docs/examples/echo.py").read_text()


def printed(*words: str) -> str:
    """Return what a command of the repository prints."""
    command = [sys.executable, "-m", "mpifl", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_a_wheel_has_job_scripts_and_configurations(wheel):
    assert said(wheel, "launch", "slurm") == (ROOT / "launch" / "slurm").read_text()
    assert (wheel / "mpifl" / "configs" / "quickstart.yaml").is_file()


def test_a_wheel_carries_no_pictures_and_no_programs_of_the_site(wheel):
    carried = {path.suffix for path in (wheel / "mpifl" / "docs").rglob("*") if path.is_file()}
    assert carried == {".md", ".py", ".yaml", ".ipynb"}
    assert not (wheel / "mpifl" / "docs" / "site.py").exists()
