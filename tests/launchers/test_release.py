"""`launch/release`: refusals at once; nightly, the archive, the wheels and the numbers of their kernels."""

from __future__ import annotations

import email
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAVELS = (
    "CHANGELOG.md",
    "CITATION.cff",
    "constraints.txt",
    "tests/conftest.py",
    "launch/release",
    "configs/quickstart.yaml",
)


def checkout(place: Path) -> Path:
    """Return a clone of this repository with its uncommitted changes, committed."""
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, place], check=True)
    listed = ["git", "-C", ROOT, "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    git(place, "add", "-A")
    git(place, "commit", "-q", "--allow-empty", "-m", "as it is here")
    return place


def git(folder: Path, *words: str) -> None:
    """Run a command of Git in a folder."""
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    subprocess.run(["git", "-C", folder, *who, *words], check=True)


def release(place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run launch/release of a checkout."""
    command = ["bash", str(place / "launch" / "release"), *words]
    given = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(
        command, env=given, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1500
    )


needs_history = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source archive has no history")


@needs_history
def test_what_cannot_be_released_is_refused_before_anything_is_built(tmp_path):
    place = checkout(tmp_path / "checkout")
    (tmp_path / "programs").mkdir()
    for name in ("bash", "dirname", "realpath", "cat", "sed", "git"):
        (tmp_path / "programs" / name).symlink_to(str(shutil.which(name)))
    refusals = {
        ("--finale",): "--finale: use --final, --python PYTHON, --no-install",
        ("--python",): "--python needs a Python, as in --python python3.12",
        ("--python", "python0"): "--python python0: no Python from 3.11 on",
        ("--final",): "commit everything, then git tag v",
    }
    for words, message in refusals.items():
        done = release(place, *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("release: ")
        assert message in done.stderr
    done = release(place, "--no-install", PATH=str(tmp_path / "programs"), CC="gcc")
    assert done.returncode == 2
    assert done.stderr == "release: no gcc: install it (on Debian: apt-get install git gcc libc6-dev)\n"
    assert not (place / "dist").exists()


@needs_history
@pytest.mark.nightly
def test_a_release_has_its_version_the_kernels_and_everything_for_the_tests(tmp_path):
    """At its tag. The kernels of the wheels, emulated ones included, are compared where there is QEMU."""
    if shutil.which("gcc") is None:
        pytest.skip("no compiler")
    place = checkout(tmp_path / "checkout")
    (version,) = [
        line.split('"')[1]
        for line in (place / "mpifl/__init__.py").read_text().splitlines()
        if "__version__ =" in line
    ]
    git(place, "tag", f"v{version}")
    done = release(place, "--final", "--no-install")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"== mpifl {version}\n" in done.stdout
    if "kernels on emulated processors" in done.stdout:
        assert "\nequal bits\n" in done.stdout
    (archive,) = (place / "dist").glob("*.tar.gz")
    assert archive.name == f"mpifl-{version}.tar.gz"
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    listed = subprocess.run(["git", "-C", place, "ls-files"], check=True, capture_output=True, text=True)
    followed = {name for name in listed.stdout.split() if not (place / name).is_symlink()}
    assert followed <= names, "every file of the repository but links to its folders"
    assert names >= set(TRAVELS)
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    wheels = sorted((place / "dist").glob("*.whl"))
    assert wheels
    for wheel in wheels:
        arch = wheel.stem.rpartition("manylinux_2_17_")[2]
        assert wheel.name == f"mpifl-{version}-py3-none-manylinux2014_{arch}.manylinux_2_17_{arch}.whl"
        with zipfile.ZipFile(wheel) as files:
            inside = set(files.namelist())
            (metadata,) = (name for name in inside if name.endswith("/METADATA"))
            message = email.message_from_bytes(files.read(metadata))
        assert message["Version"] == version
        assert {name for name in inside if name.endswith(".so")} == {
            f"mpifl/kernels/{name}.so" for name in ("reductions", "training", "channels_last")
        }
        assert not [name for name in inside if name.startswith(("tests/", "configs/", "docs/"))]


EMULATED = Path(__file__).parents[1] / "kernels" / "emulated.py"


def emulated():
    """Return the module that compares kernels on emulated processors."""
    spec = importlib.util.spec_from_file_location("emulated", EMULATED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_of_another_processor_that_return_other_bits_are_named():
    one, other = "train 1234", "forward 5678"
    compare = emulated()
    here = ["max_abs 1", one, other]
    assert compare.differences({"this processor": here, "a": here, "b": ["max_abs 1", compare.OLD]}) == []
    changed = compare.differences({"this processor": here, "a": ["max_abs 1", one, "forward 9"]})
    assert changed == ["a: forward 9, here forward 5678"]
    assert compare.differences({"this processor": here, "b": ["max_abs 2", compare.OLD]}) == [
        "b: max_abs 2, here max_abs 1"
    ]


@pytest.mark.nightly
def test_kernels_have_the_same_bits_on_emulated_processors(tmp_path):
    compare = emulated()
    if lacking := compare.missing():
        pytest.skip(lacking)
    folders = {}
    for arch, compiler in compare.COMPILERS.items():
        folders[arch] = tmp_path / arch / "libraries"
        folders[arch].mkdir(parents=True)
        for name, contract in (("reductions", "off"), ("training", "fast"), ("channels_last", "fast")):
            flags = [
                "-O3",
                "-fno-math-errno",
                "-fno-trapping-math",
                f"-ffp-contract={contract}",
                "-Wno-psabi",
            ]
            source, out = ROOT / "mpifl" / "kernels" / f"{name}.c", folders[arch] / f"{name}.so"
            subprocess.run([compiler, *flags, "-fPIC", "-shared", source, "-lm", "-o", out], check=True)
    (tmp_path / "programs").mkdir()
    found = compare.results(folders, tmp_path / "programs")
    assert len(found) == 4
    assert compare.differences(found) == []
