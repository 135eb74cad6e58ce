"""What is installed is what is tested; configurations, job scripts and pages travel with the package."""

import email
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mpifl.cli import main
from mpifl.results.identity import code
from mpifl.tools.documentation import pages
from mpifl.tools.starter_files import JOB_SCRIPTS

pytestmark = pytest.mark.in_turn

ROOT = Path(__file__).resolve().parents[2]


def declared() -> list[Requirement]:
    """Return all requirements of setup.cfg, the extras included."""
    setup = ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    found = [Requirement(line) for text in texts for line in text.strip().splitlines()]
    return [requirement for requirement in found if requirement.name != setup["metadata"]["name"]]


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


def sources(folder: Path) -> Path:
    """Copy to a folder what an installation is made from, without built kernels; return it."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("mpifl", "configs", "docs", "launch"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def pip(folder: Path, *words: object) -> None:
    """Run pip without a network and without a compiler."""
    command = [
        sys.executable,
        "-m",
        "pip",
        *map(str, words),
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "CC": "false"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A folder with what a wheel installs, built without the kernels."""
    source, out = sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    pip(out, "wheel", "-w", out, source)
    (file,) = out.glob("*-py3-none-linux_*.whl")  # one for all versions of Python, by its tag
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


def test_the_description_on_an_index_has_no_link_that_needs_the_repository(wheel):
    (metadata,) = wheel.glob("mpifl-*.dist-info/METADATA")
    message = email.message_from_string(metadata.read_text())
    text = message.get_payload()
    assert text.startswith("# mpifl\n")
    assert message["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"\]\((?!https://)", text) == [], "no page, no picture"
    named = set(re.findall(r"\(`mpifl docs ([^`]+)`\)", text))
    assert named <= set(pages())
    assert len(named) > 20


def test_a_wheel_has_job_scripts_and_configurations(wheel):
    assert said(wheel, "launch", "slurm") == (ROOT / "launch" / "slurm").read_text()
    assert (wheel / "mpifl" / "configs" / "quickstart.yaml").is_file()


def test_a_wheel_carries_no_pictures_and_no_programs_of_the_site(wheel):
    carried = {path.suffix for path in (wheel / "mpifl" / "docs").rglob("*") if path.is_file()}
    assert carried == {".md", ".py", ".yaml", ".ipynb"}
    assert not (wheel / "mpifl" / "docs" / "site.py").exists()


def test_a_wheel_and_a_checkout_are_the_same_code(wheel):
    command = [sys.executable, "-c", "from mpifl.results.identity import code; print(code())"]
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(command, cwd=wheel.parent, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == code(), done.stderr


@pytest.mark.nightly(seconds=60)
def test_types_are_visible_after_an_editable_installation(tmp_path):
    """To type checkers, which do not run the hooks of an editable installation."""
    (tmp_path / "source").mkdir()
    source, place = sources(tmp_path / "source"), tmp_path / "environment"
    venv.create(place, system_site_packages=True, with_pip=False)
    pip(tmp_path, "install", "--ignore-installed", "--prefix", place, "-e", source)
    (tmp_path / "mine.py").write_text("import mpifl\nwrong: int = mpifl.__version__\n")
    check = [sys.executable, "-m", "mypy", "--python-executable", place / "bin" / "python", "mine.py"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")
    }
    done = subprocess.run(
        [*map(str, check), "--follow-imports=silent"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert 'expression has type "str", variable has type "int"' in done.stdout, done.stdout
