"""The version in use; checkouts of one release differ in their commits. `setup.py` uses this file, too."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TAGGED = re.compile(r"v(?P<release>\d[^-]*)-(?P<distance>\d+)-(?P<commit>g[0-9a-f]+)(?P<dirty>-dirty)?")


@cache
def in_use() -> str:
    """Return the version of the mpifl that runs: of its checkout, else of its installation."""
    import mpifl

    package, release = Path(mpifl.__file__).resolve().parent, mpifl.__version__
    if (package.parent / ".git").exists():
        return of_checkout(package.parent, release)
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(mpifl.__name__)
    except PackageNotFoundError:
        return release
    here = Path(str(found.locate_file(mpifl.__name__))).resolve() == package
    return found.version if here and found.version.startswith(release) else release


def of_checkout(folder: Path, release: str) -> str:
    """Return a version by PEP 440 for the commit that a folder has checked out.

    Args:
        folder: top of the checkout.
        release: the release that its sources name, as in 1.0.0.

    Returns:
        `release` at its tag (`v1.0.0`) without uncommitted changes; `1.0.0+3.g1a2b3c4d` three commits after
        it; before it `1.0.0.dev45+g1a2b3c4d`, with the number of commits since the last tag or, without a
        tag, of all; `.dirty` follows where files of the repository have changed. `release` where Git or its
        history is missing.
    """
    described = _git(folder, "describe", "--tags", "--long", "--dirty", "--abbrev=8", "--match", "v[0-9]*")
    if tagged := TAGGED.fullmatch(described):
        dirty = ".dirty" if tagged["dirty"] else ""
        if tagged["release"] != release:
            return f"{release}.dev{tagged['distance']}+{tagged['commit']}{dirty}"
        if tagged["distance"] == "0" and not dirty:
            return release
        return f"{release}+{tagged['distance']}.{tagged['commit']}{dirty}"
    commit, _, dirty = _git(
        folder, "describe", "--always", "--dirty", "--abbrev=8", "--exclude", "*"
    ).partition("-")
    count = _git(folder, "rev-list", "--count", "HEAD")
    return f"{release}.dev{count}+g{commit}{'.dirty' if dirty else ''}" if commit and count else release


def _git(folder: Path, *words: str) -> str:
    """Return what a command of Git prints; nothing if it fails or Git is missing."""
    import subprocess  # takes time at the start of a command, which needs it only here

    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
