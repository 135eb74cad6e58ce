"""The version by PEP 440 that tells checkouts apart."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

import mpifl
from mpifl.core import version

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def git(folder: Path, *words: str) -> str:
    """Run a command of Git in a folder; return what it prints."""
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, text: str) -> str:
    """Commit a file with this text; return the commit as versions name it."""
    (folder / "file").write_text(text)
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", text)
    return git(folder, "rev-parse", "--short=8", "HEAD")


def test_a_version_counts_the_commits_before_and_after_the_tag_of_its_release(tmp_path):
    git(tmp_path, "init", "-q")
    assert version.of_checkout(tmp_path, "1.0.0") == "1.0.0", "no commit: nothing to count"
    first = commit(tmp_path, "one")
    found = [version.of_checkout(tmp_path, "1.0.0")]
    assert found == [f"1.0.0.dev1+g{first}"]
    (tmp_path / "file").write_text("changed")
    assert version.of_checkout(tmp_path, "1.0.0") == f"{found[0]}.dirty"
    git(tmp_path, "checkout", "-q", "file")
    git(tmp_path, "tag", "v0.9.0")
    git(tmp_path, "tag", "another")
    second = commit(tmp_path, "two")
    third = commit(tmp_path, "three")
    found.append(version.of_checkout(tmp_path, "1.0.0"))
    assert found[-1] == f"1.0.0.dev2+g{third}", "two commits after the release before"
    git(tmp_path, "tag", "v1.0.0")
    found.append(version.of_checkout(tmp_path, "1.0.0"))
    assert found[-1] == "1.0.0"
    (tmp_path / "file").write_text("changed")
    assert version.of_checkout(tmp_path, "1.0.0") == f"1.0.0+0.g{third}.dirty"
    fourth = commit(tmp_path, "four")
    found.append(version.of_checkout(tmp_path, "1.0.0"))
    assert found[-1] == f"1.0.0+1.g{fourth}"
    assert sorted(map(Version, found[1:])) == list(map(Version, found[1:]))
    git(tmp_path, "checkout", "-q", second)
    assert version.of_checkout(tmp_path, "1.0.0") == f"1.0.0.dev1+g{second}"


def test_without_git_or_history_the_version_is_that_of_the_release(tmp_path, monkeypatch):
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert version.of_checkout(tmp_path, "1.0.0") == "1.0.0"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version.of_checkout(Path(__file__).parent, "1.0.0") == "1.0.0"


def test_an_installation_of_other_sources_does_not_name_the_version_of_these(tmp_path, monkeypatch):
    """`mpifl` in a path without a history, while another mpifl is installed."""
    monkeypatch.setattr(mpifl, "__file__", str(tmp_path / "mpifl" / "__init__.py"))
    monkeypatch.setattr(mpifl, "__version__", "3.0.0")
    assert version.in_use.__wrapped__() == "3.0.0"
    folder = tmp_path / "mpifl-3.0.0.dev5+g1234.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mpifl\nVersion: 3.0.0.dev5+g1234\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert version.in_use.__wrapped__() == "3.0.0.dev5+g1234", "its own metadata do"
