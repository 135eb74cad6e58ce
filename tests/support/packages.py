"""Installed packages that add to mpifl: modules and metadata as pip leaves them, in a folder of a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

METHOD = '''"""FedAvg, whose server takes a step of its own."""

from dataclasses import dataclass

from mpifl.core.method import Algorithm, Needs, PlainVisits, Plan, RowUpdates
from mpifl.core.mixing import blend, sample_weights
from mpifl.core.options import PositiveShare


@dataclass(frozen=True)
class Slow(PlainVisits, RowUpdates, Algorithm):
    """One model, changed slowly.

    Attributes:
        eta: step of the server.
    """

    eta: PositiveShare = 0.5

    paper = "doe2026slow"
    needs = Needs(averages=True)

    def aggregate(self, server, notes):
        return Plan([blend(self.eta * sample_weights(notes))])
'''
PAPERS = """@misc{doe2026slow,
  author = {Doe},
  title = {Slow},
  year = {2026}
}
"""


def install(
    folder: Path, name: str, version: str, entries: Mapping[str, Mapping[str, str]], files: Mapping[str, str]
) -> Path:
    """Write a package into a folder as pip does with `--target`, and return the folder.

    Args:
        folder: the folder, which a test puts on the path.
        name: name of the package.
        version: its version.
        entries: group without `mpifl.` -> name -> `module:Class`.
        files: path -> text of its files.
    """
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [
        "\n".join([f"[mpifl.{group}]", *(f"{one} = {path}" for one, path in names.items())])
        for group, names in entries.items()
    ]
    (about / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (about / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    return folder


def install_slow(folder: Path, package: str = "slowly", version: str = "1.0", text: str = METHOD) -> Path:
    """Install a package with the method `slow`, in a module of the package's name, and its paper."""
    files = {f"{package}/__init__.py": "", f"{package}/method.py": text, f"{package}/papers.bib": PAPERS}
    return install(folder, package, version, {"algorithms": {"slow": f"{package}.method:Slow"}}, files)
