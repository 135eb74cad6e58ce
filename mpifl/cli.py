"""The command line: run, plan, prepare, data, list, show, cite."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mpifl.core.process import keep_freed

from .comm import CannotGoOn, RankLost, Transport, asked_of, connect
from .core.errors import CodeFailed, Stopped, UserError, nearest, require
from .core.files import is_full

if TYPE_CHECKING:
    from mpifl.experiment.schema import Config

STOPPED = 75  # sysexits' EX_TEMPFAIL: try again

FLAGS = ("witness", "bind-report", "from-start")  # options without a value

Command = Callable[[Transport, argparse.Namespace], None]
COMMANDS: dict[str, tuple[Command, str, dict[str, str]]] = {}


def command(usage: str, **options: str) -> Callable[[Command], Command]:
    """Register a command; its docstring is its help, `usage` its argument, `options` name and help."""

    def register(function: Command) -> Command:
        COMMANDS[function.__name__] = (function, usage, options)
        return function

    return register


class NotWell(Exception):
    """The doctor, or the witness, found something; all is said."""


BINDING = {"bind-report": "print host, device, CPU mask and threads of every rank"}


@command("CONFIG", **BINDING)
def run(transport: Transport, args: argparse.Namespace) -> None:
    """Run a configuration; options are --key.path value. --resume goes on with that output.id, if begun."""
    from mpifl.comm import on_server
    from mpifl.experiment.loader import load_everywhere
    from mpifl.experiment.run import run as run_experiment

    again = "--resume" in args.options
    args.options = [word for word in args.options if word != "--resume"]
    config = load_everywhere(transport, args.CONFIG, args.options)
    if config.vary:
        remedy = (
            f"`mpifl study {args.CONFIG}` runs all cases; --vary null runs what stands beside them, alone"
        )
        raise UserError("vary", ", ".join(map(str, config.vary)), remedy)
    require(not again or config.output.id is not None, "--resume", True, "needs an output.id: which run?")
    folder = Path(config.output.folder) / f"{config.name}-{config.output.id}"
    if again and on_server(transport, lambda: is_begun(folder)):
        args.RUN, args.from_start = str(folder), True
        resume(transport, args)
    else:
        run_experiment(config, transport, args.quiet, bind_report=args.bind_report)


FROM_START = {
    "from-start": "begin again where no checkpoint was written, and drop the figures that are there"
}


@command("RUN", **BINDING, **FROM_START)
def resume(transport: Transport, args: argparse.Namespace) -> None:
    """Go on with a run from its last checkpoint, at any number of ranks; options are --key.path value. A
    study's folder: run what is left of it.
    """
    from mpifl.comm import on_server
    from mpifl.experiment.loader import load_everywhere
    from mpifl.experiment.run import run as run_experiment
    from mpifl.experiment.sweep import STUDY, go_on

    folder = Path(args.RUN)
    if on_server(transport, (folder / STUDY).is_file):
        none_left(args)
        go_on(folder, transport, args.quiet)
        return
    complete = on_server(transport, lambda: is_complete(folder))
    if complete:
        if transport.is_server:
            print(f"{folder} is complete: {folder / 'summary.json'}")
        return
    config = load_everywhere(transport, str(folder / "config.yaml"), args.options)
    run_experiment(config, transport, args.quiet, folder, args.bind_report, args.from_start)


def is_begun(folder: Path) -> bool:
    """Return whether there is a run to go on with; remove a folder in which none was begun yet."""
    if not (folder / "run.json").exists() and folder.exists():  # killed while it was made
        for name in ("config.yaml", ".writable"):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty, so it is something else
            folder.rmdir()
    return (folder / "run.json").exists()


def is_complete(folder: Path) -> bool:
    """Return whether a run came to its end."""
    remedy = "is no run folder: it has no run.json and config.yaml"
    there = all((folder / name).is_file() for name in ("run.json", "config.yaml"))
    require(there, "RUN", str(folder), remedy)
    return (folder / "summary.json").is_file()


@command("CONFIG")
def study(transport: Transport, args: argparse.Namespace) -> None:
    """Run a configuration for every combination of what its `vary` names; write a table and a figure."""
    from mpifl.experiment.sweep import study as run_study

    run_study(args.CONFIG, args.options, transport, args.quiet)


@command("")
def sweep(transport: Transport, args: argparse.Namespace) -> None:
    """Measure what messages and collectives cost over these ranks, and how well that foretells a round."""
    from mpifl.tools.collective_calibration import sweep as measure

    none_left(args)
    text = measure(transport)
    if transport.is_server:
        print(text)


@command("RUN")
def retime(transport: Transport, args: argparse.Namespace) -> None:
    """Work out a finished run's times under another network: --network.name wired. Trains nothing."""
    from mpifl.comm import on_server
    from mpifl.experiment.retime import retime as retime_run

    folder = on_server(transport, lambda: retime_run(args.RUN, args.options))
    if transport.is_server and not args.quiet:
        print(f"results: {folder}")


@command(
    "RUN...",
    out="folder to write (default: report, beside the first run)",
    target="accuracy in [0, 1] whose bytes and time are wanted (default: 95 %% of the best)",
)
def report(transport: Transport, args: argparse.Namespace) -> None:
    """Write one HTML file over several runs, and its figures as SVG, PNG and PDF."""
    from mpifl.comm import on_server
    from mpifl.results.report import report as write_report

    none_left(args)
    page = on_server(transport, lambda: write_report(args.RUN, args.out, _target(args)))
    if transport.is_server and not args.quiet:
        print(f"report: {page}")


@command("RUN...", csv="CSV file to write", latex="LaTeX file to write", target="see `mpifl report`")
def compare(transport: Transport, args: argparse.Namespace) -> None:
    """Print a table of final figures of several runs."""
    from mpifl.results.report import as_latex, as_text, warnings
    from mpifl.results.report import compare as compare_runs
    from mpifl.results.run_folder import write_csv

    none_left(args)
    rows, target = compare_runs(args.RUN, _target(args))
    if transport.is_server:
        print(f"{as_text(rows)}\ntarget: mean accuracy {100 * target:.2f} %")
        for text in warnings(args.RUN):
            print(f"mpifl: last bits of these runs may differ, {text}", file=sys.stderr)
        try:
            if args.csv:
                write_csv(Path(args.csv), rows)
            if args.latex:
                Path(args.latex).write_text(as_latex(rows))
        except OSError as error:
            place = error.filename
            raise UserError("--csv, --latex", place, f"cannot be written ({error.strerror})") from error


def none_left(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that a command does not know."""
    if args.options:
        raise UserError(
            "option", args.options[0], f"{args.command} does not know it; see mpifl {args.command} --help"
        )


def _target(args: argparse.Namespace) -> float | None:
    """Return the accuracy of --target."""
    if args.target is None:
        return None
    try:
        value = float(args.target)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UserError("--target", args.target, "take an accuracy in [0, 1]")
    return value


@command(
    "",
    runs="folder whose disk is checked (default: runs)",
    witness="instead, hold mpifl's counts of MPI bytes against Open MPI's own monitoring",
)
def doctor(transport: Transport, args: argparse.Namespace) -> None:
    """Check this job before an expensive run: MPI, cores, GPUs, versions, clocks, speed, data, disk."""
    from mpifl.tools.doctor import doctor as examine
    from mpifl.tools.mpi_traffic_check import witness

    def say(text: str) -> None:
        print(text, flush=True)

    none_left(args)
    well = witness(transport, say) if args.witness else examine(transport, args.runs or "runs", say)
    if not well:
        transport.final_barrier()
        raise NotWell


@command("CONFIG")
def plan(transport: Transport, args: argparse.Namespace) -> None:
    """Say what a run would do, without training: sizes, collectives, memory, bytes per round."""
    from mpifl.experiment.loader import load_everywhere
    from mpifl.experiment.plan import describe

    config = load_everywhere(transport, args.CONFIG, args.options)
    text = describe(config, transport)
    if transport.is_server:
        print(f"{text}{_not_varied(config)}")


@command("CONFIG")
def prepare(transport: Transport, args: argparse.Namespace) -> None:
    """Fetch what a configuration reads, where there is a network, and prepare its cache."""
    from mpifl.comm import on_server
    from mpifl.experiment.loader import load_everywhere

    from .data import prepare as prepare_data

    config = load_everywhere(transport, args.CONFIG, args.options)
    on_server(
        transport, lambda: prepare_data(config.data, config.seed.data, download=True, progress=print) and None
    )


@command("CONFIG", sheet="PNG file to write (default: <name>-data.png in the current folder)")
def data(transport: Transport, args: argparse.Namespace) -> None:
    """Look at a configuration's clients: prints a table, writes a sheet of sample images and counts."""
    from mpifl.comm import on_server
    from mpifl.experiment.data_preview import look
    from mpifl.experiment.loader import load_everywhere

    config = load_everywhere(transport, args.CONFIG, args.options)
    sheet = Path(args.sheet or f"{config.name}-data.png")
    text = on_server(transport, lambda: look(config, sheet, lambda line: args.quiet or print(line)))
    if transport.is_server:
        print(f"{text}{_not_varied(config)}\n\nsheet: {sheet}")


def _not_varied(config: Config) -> str:
    """Return what is said where only one of many cases is looked at."""
    keys = ", ".join(map(str, config.vary or ()))
    return f"\n\nvary: `mpifl study` gives other values to {keys}; this is without them" if keys else ""


@command("WHAT")
def list(transport: Transport, args: argparse.Namespace) -> None:
    """List algorithms, data (sources and scenarios) or models."""
    tables = _catalogues()
    if args.WHAT not in tables:
        raise UserError("list", args.WHAT, nearest(args.WHAT, [*tables]))
    if transport.is_server:
        for title, catalogue in tables[args.WHAT].items():
            print(title)
            for name, cls in catalogue.items():
                print(f"  {name:22} {_first_sentence(cls)}")


@command("NAME")
def show(transport: Transport, args: argparse.Namespace) -> None:
    """Show a method, model, source or scenario: what it is, its paper, its fields and defaults."""
    parts = [part for group in _catalogues().values() for part in group.values()]
    found = [part[args.NAME] for part in parts if args.NAME in part]
    if not found:
        raise UserError("show", args.NAME, nearest(args.NAME, [name for part in parts for name in part]))
    if transport.is_server:
        print("\n\n".join(describe_class(args.NAME, cls) for cls in found))


@command("CONFIG")
def cite(transport: Transport, args: argparse.Namespace) -> None:
    """Print the BibTeX of what a configuration uses."""
    from mpifl.algorithms.registry import citation
    from mpifl.experiment.loader import load_everywhere

    config = load_everywhere(transport, args.CONFIG, args.options)
    if transport.is_server:
        print(citation(type(config.algorithm)))


@command(
    "WORKLOAD...",
    json="file to write the figures to",
    turns="turns that each job takes (default: by workload)",
    ranks="ranks of mpirun, the server included (default: 3)",
)
def bench(transport: Transport, args: argparse.Namespace) -> None:
    """Measure workloads W1 to W6 (default: all) on this machine, each beside a plain PyTorch loop;
    `population`: a million registered clients; `scaling W1`: one workload on 1 to n workers.
    """
    from mpifl.benchmarks.compare import main as measure

    require(transport.size == 1, "bench", transport.size, "starts mpirun itself: start it without one")
    measure(args.WORKLOAD, args.options, args.ranks, args.turns, args.json)


def _catalogues() -> dict[str, dict[str, dict[str, type]]]:
    from mpifl.algorithms.registry import CATALOGUE

    from .data import SCENARIOS, SOURCES
    from .models import MODELS

    return {
        "algorithms": {"algorithms": dict(CATALOGUE)},
        "data": {"sources": dict(SOURCES), "scenarios": dict(SCENARIOS)},
        "models": {"models": dict(MODELS)},
    }


def _first_sentence(cls: type) -> str:
    paragraph = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return paragraph if len(paragraph) <= 110 else paragraph.split(". ")[0].rstrip(".") + "."


def describe_class(name: str, cls: type) -> str:
    """Return what `mpifl show` fingerprints."""
    from mpifl.algorithms.registry import citation

    from .core.algorithm import Algorithm

    lines = [name, "=" * len(name), ""]
    module = inspect.getdoc(sys.modules[cls.__module__])
    if issubclass(cls, Algorithm) and module:
        lines += [module, ""]
    lines += [inspect.getdoc(cls) or "", "", "Fields and defaults:"]
    for f in dataclasses.fields(cls):
        default = "required" if f.default is dataclasses.MISSING else repr(f.default)
        lines.append(f"  {f.name}: {f.type} = {default}")
    if issubclass(cls, Algorithm):
        lines += ["", citation(cls)]
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, once for all ranks."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError`."""
        raise UserError("command line", self.prog, f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    out = Parser("mpifl", description=sys.modules["mpifl"].__doc__)
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, usage, options) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=inspect.getdoc(function), description=inspect.getdoc(function), allow_abbrev=False
        )
        several = usage.endswith("...")
        if usage:
            sub.add_argument(usage.rstrip("."), nargs="*" if several else None)
        for option, text in options.items():
            if option in FLAGS:
                sub.add_argument(f"--{option}", action="store_true", help=text)
            else:
                sub.add_argument(f"--{option}", metavar="VALUE" if several else "PATH", help=text)
        sub.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return out


def broken_off(transport: Transport, error: RankLost | CannotGoOn) -> int:
    """End a job that has lost a rank where the others cannot go on without it."""
    if not transport.is_server:
        time.sleep(2.0)  # rank 0 speaks first, if it is left
    gone = [name for name in (*transport.lost, *transport.missing()) if name not in str(error)]
    names = "; ".join(gone) or f"a rank ({error})"
    text = f"lost {names} before the first step; start the job again"
    if isinstance(error, CannotGoOn):
        text = f"lost {names}; {error}" if gone else str(error)
    print(f"mpifl: {text}", file=sys.stderr, flush=True)
    transport.abort(1)
    return 1


def main(argv: Sequence[str]) -> int:
    """Run one command on every rank and return the exit code: 0; 2 for bad input; 75 for a run that was
    stopped and can go on; 1 for anything else.
    """
    keep_freed()
    try:
        args, rest = parser().parse_known_args(argv)
        args.options = rest
        transport = connect(monitored=getattr(args, "witness", False))
    except UserError as error:
        if asked_of(os.environ).rank:
            time.sleep(2.0)  # rank 0 speaks for all; a launcher ends it where another one leaves first
        else:
            print(f"mpifl: {error}", file=sys.stderr, flush=True)
        return 2
    code = _outcome(transport, args)
    transport.leave(code)
    return code


def _outcome(transport: Transport, args: argparse.Namespace) -> int:
    """Run the command; say what went wrong, and return the exit code."""
    try:
        COMMANDS[args.command][0](transport, args)
        sys.stdout.flush()
    except UserError as error:
        return failed(transport, error, f"mpifl: {error}", 2)
    except CodeFailed as error:
        return failed(transport, error, f"{error.trace}mpifl: {error}", error.code)
    except NotWell:
        return 1
    except BrokenPipeError:  # the reader left: mpifl list methods | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Stopped as end:
        if transport.is_server:
            print(f"mpifl: {end}", file=sys.stderr, flush=True)
        transport.final_barrier()
        return STOPPED
    except (RankLost, CannotGoOn) as error:
        return broken_off(transport, error)
    except (SystemExit, KeyboardInterrupt) as end:  # of the user's own code: mpifl itself raises neither
        code = 130 if isinstance(end, KeyboardInterrupt) else 1
        what = f"rank {transport.rank}: {type(end).__name__}({end}) outside of a method's hooks"
        return failed(transport, CodeFailed(what, code=code), f"mpifl: {what}", code)
    except BaseException as error:
        if is_full(error):
            text = f"{error}; make room, then go on from the last checkpoint: mpifl resume RUN"
            print(f"mpifl: rank {transport.rank}: {text}", file=sys.stderr, flush=True)
            transport.abort(1)
            return 1
        if transport.size == 1 and not isinstance(error, Exception):
            raise
        trace = traceback.format_exc()
        print(f"mpifl: rank {transport.rank} failed\n{trace}", file=sys.stderr, flush=True)
        transport.abort(1)
        return 1
    return 0


def failed(transport: Transport, error: Exception, text: str, code: int) -> int:
    """End all ranks with one message and an exit code, by force only where others do not hear of it."""
    transport.fail(error)
    if transport.is_server:
        print(text, file=sys.stderr, flush=True)
    if not transport.final_barrier():
        if not transport.is_server:
            print(f"{text} (on rank {transport.rank})", file=sys.stderr, flush=True)
        transport.abort(code)
    return code
