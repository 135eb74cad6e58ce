"""The identity of a run: all that determines its numbers bit for bit, besides its settings.

Runs with equal settings (`deciding`) and equal identities have equal digests. `summary.json` holds all three.
A resumed run and `mpifl compare` report the entries in which identities differ.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mpifl
from mpifl.core import instructions, torch_state
from mpifl.core.errors import first_of
from mpifl.kernels import bindings

CODE, OWN, PLUGINS = "code", "own_code", "plugins"
CODES = (CODE, OWN, PLUGINS)  # these can change more than the last bits
ENDED = "ended"  # entry of a run that ended where its settings do not say, see `ended`
EARLIER = "earlier"  # entry of a run that was resumed with another identity, see `resumed`
PACKAGES = (  # packages that compute numbers; UMAP uses the last two
    *("mpifl", "torch", "numpy", "scipy", "scikit-learn"),
    *("POT", "umap-learn", "numba", "pynndescent"),
)
EINSUM = "opt_einsum"  # where it is installed, it orders the products of torch.einsum
LIBRARY_VARIABLES = "library_variables"
REPLACED = "replaced"
MACHINE = (  # see `machine`
    *("device", "processor", "instructions", LIBRARY_VARIABLES, REPLACED, "kernels", "compiler", CODE),
    *PACKAGES,
    EINSUM,
)
CONVOLUTIONS, WINOGRAD = "convolutions", "wide ones by Winograd's algorithm (rounding 1e-5, PyTorch 1e-6)"
NONE = "none"
MOST_NAMES = 3  # of runs in a line
SAME = ("name", "output", "system", "checkpoint", "vary", "table", "tune")  # sections that decide no number
OF_A_MACHINE = ("data.root", "data.cache")  # locations of the data


@cache  # the version of a loaded package does not change, and looking it up takes milliseconds
def version_of(package: str) -> str | None:
    """Return the version of a package, None if it is not installed; for mpifl, that of its sources."""
    if package == mpifl.__name__:
        return mpifl.__version__
    from importlib.metadata import PackageNotFoundError, version  # takes longer than all of this module

    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def code() -> str:
    """Return a hash of mpifl's Python sources, 12 hexadecimal digits, without the examples of its pages.

    A wheel holds the examples, where a checkout has a link to them.
    """
    sha, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] in ("docs", "configs", "launch"):
            continue
        sha.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:12]


def processor(field: str = "model name") -> str:
    """Return a field of the processor from /proc/cpuinfo, by default its model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith(field)), platform.processor())


def machine(gpu: str | None = None) -> dict[str, str]:
    """Return the properties of this rank's machine and software that determine its numbers bit for bit.

    Args:
        gpu: name of the GPU that the rank trains on; None for the CPU.

    Returns:
        `device`, `processor`, `instructions`, `library_variables` (environment variables that change how
        libraries compute; left out if none is set), `replaced` (functions of PyTorch that other code has
        replaced, and its hooks on all modules; left out if there is none), `kernels` (hash of the C sources,
        or `none`), `compiler`, `code`, the version of each of `PACKAGES`, and `opt_einsum` (left out where it
        is not installed).
    """
    build = bindings.BUILD if bindings.TRAINING_AVAILABLE else {}
    values = (
        gpu or "cpu",
        processor(),
        instructions.in_use(),
        instructions.variables(),
        ", ".join(torch_state.replaced()),
        build.get("sources", NONE),
        f"{build['compiler']}, {build['flags']}" if build else NONE,
        code(),
        *(str(version_of(name)) for name in PACKAGES),
        version_of(EINSUM) or "",
    )
    return {name: value for name, value in zip(MACHINE, values, strict=True) if value}


def deciding(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration that decide numbers: its settings.

    Args:
        tree: the configuration, or the part of it that differs from the defaults (`loader.non_default`).
    """
    out = {name: part for name, part in tree.items() if name not in SAME}
    if isinstance(data := out.get("data"), Mapping):
        out["data"] = {name: value for name, value in data.items() if f"data.{name}" not in OF_A_MACHINE}
    return out


def with_replaced(found: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's `machine` with the functions of PyTorch that are replaced by now.

    The user's modules, which every rank imports, may have replaced some since.
    """
    names = dict.fromkeys([*filter(None, found.get(REPLACED, "").split(", ")), *torch_state.replaced()])
    return {**found, **({REPLACED: ", ".join(names)} if names else {})}


def of_machine(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an identity that do not depend on options, foreign code, and `EARLIER`."""
    return {name: found[name] for name in (*MACHINE, OWN, PLUGINS, EARLIER, ENDED) if name in found}


def identity(options: Mapping[str, Any], machines: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the identity of a run, with a short hash of it under `hash`.

    Args:
        options: settings that affect the last bits.
        machines: `machine` of each rank; values that differ between ranks are joined.
    """
    found: dict[str, Any] = {**options}
    for name in dict.fromkeys(name for one in machines for name in one):
        found[name] = " | ".join(sorted({one.get(name, NONE) for one in machines}))
    return _hashed(found)


def _hashed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with their hash."""
    text = json.dumps(found, sort_keys=True, default=str)
    return {"hash": hashlib.sha256(text.encode()).hexdigest()[:12], **found}


def resumed(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the identity of a run that goes on after a step with another identity.

    `EARLIER` names all entries that were different, and up to which step.

    Args:
        then: identity of the run at the checkpoint; it may itself have been resumed.
        now: identity of this launch.
        step: step of the checkpoint.
    """
    known = {name: value for name, value in then.items() if name != EARLIER}
    before = ", ".join(f"{name} {known.get(name, NONE)}" for name in differences(known, now))
    parts = [then[EARLIER]] if EARLIER in then else []
    parts += [f"{before} until step {step}"] if before else []
    found = {name: value for name, value in now.items() if name != "hash"}
    return _hashed({**found, EARLIER: "; ".join(parts)}) if parts else dict(now)


def ended(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the identity of a run that real time or a callback ended: its settings alone do not say where.

    Args:
        found: its identity.
        where: the last step, and what ended the run.
    """
    return _hashed({**{name: value for name, value in found.items() if name != "hash"}, ENDED: where})


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries in which two identities differ, other than their hashes."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if name != "hash" and one.get(name) != other.get(name)]


def describe_differences(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each entry in which the identities of runs differ.

    Hashes of the user's own code and of plug-ins are left out: they differ between methods, as options do.

    Args:
        found: name of the run -> its identity.
    """
    first = next(iter(found.values()), {})
    names = dict.fromkeys(name for one in found.values() for name in differences(first, one))
    shown = [name for name in names if name not in (OWN, PLUGINS)]
    return [f"{name}: {_kinds((run, one.get(name)) for run, one in found.items())}" for name in shown]


@dataclass(frozen=True)
class Origin:
    """The origin of the numbers of a run.

    Attributes:
        configuration: the settings of the run without seeds, as a string.
        data: the settings of its data, as a string.
        data_seed: the seed of its data, as a string.
        identity: its identity.
        content: digests of its data by name, see `Federation.content`.
        files: checksums of the user's own files by the key that names them; empty for none.
    """

    configuration: str
    data: str
    data_seed: str
    identity: Mapping[str, Any]
    content: Mapping[str, Any]
    files: Mapping[str, Any] = field(default_factory=dict)


def describe_origins(found: Mapping[str, Origin]) -> list[str]:
    """Return a line for each property in which runs differ besides their configurations and seeds.

    Args:
        found: name of the run -> its origin.
    """
    return [*describe_differences({run: o.identity for run, o in found.items()}), *describe_inputs(found)]


def describe_inputs(found: Mapping[str, Origin]) -> list[str]:
    """Return a line for each input in which runs differ that should have the same one.

    Runs of one configuration should have the same plug-ins, and the same code and files of the user. Runs
    with the same data settings should have the same samples and files, and with the same data seed also the
    same split.

    Args:
        found: name of the run -> its origin.
    """
    runs = found.items()
    lines = list[str]()
    for name in (OWN, PLUGINS):
        codes = [(o.configuration, run, o.identity.get(name)) for run, o in runs]
        lines += _unlike(f"{name} (in one configuration)", codes)
    for key in dict.fromkeys(key for _, o in runs for key in o.files):
        values = [(o.configuration, run, o.files.get(key)) for run, o in runs]
        lines += _unlike(f"file of {key} (in one configuration)", values)
    for name in ("samples", "files"):
        values = [(o.data, run, o.content.get(name)) for run, o in runs]
        lines += _unlike(f"{name} of the data (under the same data)", values)
    splits = ((f"{o.data} {o.data_seed}", run, o.content.get("split")) for run, o in runs)
    return lines + _unlike("split of the data (under the same data and seed)", splits)


def _unlike(name: str, values: Iterable[tuple[str, str, Any]]) -> list[str]:
    """Return a line for each choice of settings under which runs differ in a value.

    Args:
        name: name of the value.
        values: (settings, run, value); the value is None if it is not known.
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
    if found.get("compiled") is False:  # by system.kernels, or because they lack the task's loss
        kernels = "trained by PyTorch, not by the kernels"
    if "precision" in found:
        kernels = f"trained in {found['precision']} by PyTorch, not by the kernels"
    kernels += f", {CONVOLUTIONS} {found[CONVOLUTIONS]}" if CONVOLUTIONS in found else ""
    parts = [kernels, f"{found['processor']} ({found['instructions']})", f"threads {found['threads']}"]
    parts += [found[LIBRARY_VARIABLES]] if LIBRARY_VARIABLES in found else []
    parts += [f"replaced {found[REPLACED]}"] if REPLACED in found else []
    parts += [] if found["device"] == "cpu" else [found["device"]]
    parts += [f"{name} {found[name]}" for name in ("torch", "numpy", "mpifl")]
    parts += [f"{name.replace('_', ' ')} {found[name]}" for name in CODES if name in found]
    return f"numbers {found['hash']}: {', '.join(parts)}"
