"""The identity of a run: what decides the last bits of its numbers beside configuration and seeds.

Runs with equal configurations and equal identities have equal digests. `summary.json` holds the identity
beside the digest; a resumed run and `mpifl compare` name what differs.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mpifl
from mpifl.core import instructions
from mpifl.kernels import bindings

from .tables import first_of

CODE, OWN = "code", "own_code"
CODES = (CODE, OWN)  # they decide more than last bits
PACKAGES = (  # packages that compute numbers; the last two are below UMAP
    *("mpifl", "torch", "numpy", "scipy", "scikit-learn"),
    *("POT", "umap-learn", "numba", "pynndescent"),
)
LIBRARY_VARIABLES = "library_variables"
MACHINE = (  # see `machine`
    *("device", "processor", "instructions", LIBRARY_VARIABLES, "kernels", "compiler", CODE),
    *PACKAGES,
)
NONE = "none"
MOST_NAMES = 3  # of runs in a line


@cache  # a package in use keeps its version, and to look it up takes milliseconds
def version_of(package: str) -> str | None:
    """Return the version of a package, None where it is not installed; that of mpifl is the sources' own."""
    if package == mpifl.__name__:
        return mpifl.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def code() -> str:
    """Return a hash of mpifl's Python sources, 12 hexadecimal digits."""
    sha, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        sha.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:12]


def processor(field: str = "model name") -> str:
    """Return what /proc/cpuinfo says of the processor, its name by default."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith(field)), platform.processor())


def machine(gpu: str | None = None) -> dict[str, str]:
    """Return what decides the last bits of what this rank computes.

    Args:
        gpu: name of the GPU that it trains on; None for the CPU.

    Returns:
        `device`, `processor`, `instructions`, `library_variables` (of the environment, by which libraries
        compute otherwise; left out where none is set), `kernels` (hash of the C sources, or `none`),
        `compiler`, `code` and the version of each of `PACKAGES`.
    """
    build = bindings.BUILD if bindings.TRAINING_AVAILABLE else {}
    values = (
        gpu or "cpu",
        processor(),
        instructions.in_use(),
        instructions.variables(),
        build.get("sources", NONE),
        f"{build['compiler']}, {build['flags']}" if build else NONE,
        code(),
        *(str(version_of(name)) for name in PACKAGES),
    )
    return {name: value for name, value in zip(MACHINE, values, strict=True) if value}


def of_machine(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that no option decides, and the code of one's own."""
    return {name: found[name] for name in (*MACHINE, OWN) if name in found}


def identity(options: Mapping[str, Any], machines: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the identity of a run, with a short hash of it under `hash`.

    Args:
        options: settings that decide last bits.
        machines: `machine` of each rank; where they differ, the values are joined.
    """
    found: dict[str, Any] = {**options}
    for name in dict.fromkeys(name for one in machines for name in one):
        found[name] = " | ".join(sorted({one.get(name, NONE) for one in machines}))
    text = json.dumps(found, sort_keys=True, default=str)
    return {"hash": hashlib.sha256(text.encode()).hexdigest()[:12], **found}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries in which two identities differ, without their hashes."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if name != "hash" and one.get(name) != other.get(name)]


def describe_differences(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each entry in which the identities of runs differ.

    Classes of one's own are left out: runs of several methods differ in them as they differ in options.

    Args:
        found: name of the run -> its identity; an empty one, of an older version, is left out.
    """
    known = {run: one for run, one in found.items() if one}
    first = next(iter(known.values()), {})
    names = dict.fromkeys(name for one in known.values() for name in differences(first, one) if name != OWN)
    return [f"{name}: {_kinds((run, one.get(name)) for run, one in known.items())}" for name in names]


@dataclass(frozen=True)
class Origin:
    """What the numbers of a run come from.

    Attributes:
        configuration: its settings without seeds, as a text.
        data: the settings of its data, as a text.
        data_seed: the seed of its data, as a text.
        identity: empty for a run of an older version.
        content: digests of its data by name, see `Federation.content`; empty for a run of an older version.
    """

    configuration: str
    data: str
    data_seed: str
    identity: Mapping[str, Any]
    content: Mapping[str, Any]


def describe_origins(found: Mapping[str, Origin]) -> list[str]:
    """Return a line for each thing in which runs differ beside their configurations and seeds.

    Runs of one configuration have one code of their user's; those with the same settings of data have the
    same samples and the same files, and with the same seed the same split.

    Args:
        found: name of the run -> where its numbers come from.
    """
    runs = found.items()
    lines = describe_differences({run: o.identity for run, o in runs})
    lines += _unlike(
        f"{OWN} (in one configuration)", ((o.configuration, run, o.identity.get(OWN)) for run, o in runs)
    )
    for name in ("samples", "files"):
        values = [(o.data, run, o.content.get(name)) for run, o in runs]
        lines += _unlike(f"{name} of the data (under the same data)", values)
    splits = ((f"{o.data} {o.data_seed}", run, o.content.get("split")) for run, o in runs)
    return lines + _unlike("split of the data (under the same data and seed)", splits)


def _unlike(name: str, values: Iterable[tuple[str, str, Any]]) -> list[str]:
    """Return a line for each set of settings under which runs differ in a value.

    Args:
        name: of the value.
        values: settings, run, value; None where it is not known.
    """
    alike: dict[str, list[tuple[str, Any]]] = {}
    for settings, run, value in values:
        if value is not None:
            alike.setdefault(settings, []).append((run, value))
    return [f"{name}: {_kinds(some)}" for some in alike.values() if len({str(v) for _, v in some}) > 1]


def _kinds(values: Iterable[tuple[str, Any]]) -> str:
    runs: dict[str, list[str]] = {}
    for run, value in values:
        runs.setdefault(str(value), []).append(run)
    return "; ".join(f"{value} ({first_of(names, MOST_NAMES)})" for value, names in runs.items())


def line(found: Mapping[str, Any]) -> str:
    """Return an identity in one line."""
    build = found["kernels"]
    kernels = "no kernels" if build == NONE else f"kernels {build} ({found['compiler'].split(',')[0]})"
    if found.get("compiled") is False:  # by system.kernels, or because the task's loss is none they know
        kernels = "trained by PyTorch, not by the kernels"
    if "precision" in found:
        kernels = f"trained in {found['precision']} by PyTorch, not by the kernels"
    parts = [kernels, f"{found['processor']} ({found['instructions']})", f"threads {found['threads']}"]
    parts += [found[LIBRARY_VARIABLES]] if LIBRARY_VARIABLES in found else []
    parts += [] if found["device"] == "cpu" else [found["device"]]
    parts += [f"{name} {found[name]}" for name in ("torch", "numpy", "mpifl")]
    parts += [f"{name.replace('_', ' ')} {found[name]}" for name in CODES if name in found]
    return f"numbers {found['hash']}: {', '.join(parts)}"
