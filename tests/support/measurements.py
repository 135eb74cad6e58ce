"""The command line of the measurements in `tests/campaigns`: what `mpifl bench` has, for one measurement."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpifl.benchmarks.command import keep_figures
from mpifl.core.errors import UserError

HELP = {
    "ranks": "ranks of mpirun, the server included",
    "turns": "turns of each job",
    "clients": "clients of the federation",
    "new": "clients with new evidence",
    "workload": "a workload of `mpifl bench`",
}
KEYS = "Keys of the configuration are options, too: --key.path value."


def command(
    description: str,
    measure: Callable[..., dict[str, Any]],
    defaults: Mapping[str, Any],
    words: Sequence[str] | None = None,
) -> int:
    """Measure as a command line says, print the figures and return the exit code.

    Args:
        description: What is measured.
        measure: Takes the options by name, and `options`: keys of the configuration and values.
        defaults: Option -> its default; None is for the measurement to choose.
        words: The command line; None for that of the process.
    """
    parser = argparse.ArgumentParser(description=description, epilog=KEYS, allow_abbrev=False)
    for name, default in defaults.items():
        kind = str if name == "workload" else int
        text = HELP[name] if default is None else f"{HELP[name]} (default: {default})"
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="W1" if kind is str else "COUNT", help=text
        )
    parser.add_argument("--json", metavar="FILE", help="file to write the figures to")
    args, options = parser.parse_known_args(words)
    asked = {name: getattr(args, name) for name in defaults}
    try:
        for name, value in asked.items():
            if isinstance(value, int) and value < 1:
                raise UserError(f"--{name}", value, "use 1 or more")
        keep_figures(lambda: measure(**asked, options=options), args.json)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
