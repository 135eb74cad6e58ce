"""The command line: one function for each command. Imports what is heavy inside of them."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import mpifl
from mpifl.core.errors import UserError, require
from mpifl.core.process import keep_freed

if TYPE_CHECKING:
    from mpifl.comm.transport import Transport

    Command = Callable[[Transport, argparse.Namespace], int | None]

COMMANDS: dict[str, tuple[Command, dict[str, dict[str, Any]]]] = {}
KEYS = """Keys of the configuration are options, too: --key.path value, or --key.path=value; values are YAML.
`mpifl show run` lists the keys of a run; `mpifl show local.lr` explains one: type, default, unit, choices."""


def command(**arguments: dict[str, Any]) -> Callable[[Command], Command]:
    """Register a command; its docstring is its help.

    Args:
        arguments: name -> keywords of argparse. Names in capitals are positional arguments, the others
            options; CONFIG is a configuration, which takes its keys as options, too.
    """

    def register(function: Command) -> Command:
        COMMANDS[function.__name__] = (function, arguments)
        return function

    return register


CONFIG: dict[str, Any] = {"help": "a YAML file, or the name of a configuration that travels with mpifl"}
RUN: dict[str, Any] = {"help": "a run folder"}
RUNS: dict[str, Any] = {"help": "run folders, or folders of them", "nargs": "*", "metavar": "RUN"}
FLAG: dict[str, Any] = {"action": "store_true"}
BIND = {**FLAG, "help": "print host, device, CPU mask and threads of every rank"}
TARGET = {"metavar": "ACCURACY", "help": "accuracy in [0, 1] to reach (default: 95 %% of the best)"}


# -- runs ----------------------------------------------------------------------------------------------------


@command(CONFIG=CONFIG, bind_report=BIND, resume={**FLAG, "help": "go on with the run of that output.id"})
def run(transport: Transport, args: argparse.Namespace) -> None:
    """Run a configuration."""
    from mpifl.comm.transport import on_server
    from mpifl.experiment.loader import load_everywhere
    from mpifl.experiment.run import run as run_experiment
    from mpifl.results.run_folder import is_begun

    config = load_everywhere(transport, args.CONFIG, args.options)
    if config.vary:
        remedy = (
            f"`mpifl sweep {args.CONFIG}` runs all cases; --vary null runs what stands beside them, alone"
        )
        raise UserError("vary", ", ".join(map(str, config.vary)), remedy)
    named = config.output.id is not None
    require(named or not args.resume, "--resume", True, "needs an output.id: which run?")
    folder = Path(config.output.folder) / f"{config.name}-{config.output.id}"
    if args.resume and on_server(transport, lambda: is_begun(folder)):
        args.RUN, args.from_start = str(folder), True
        resume(transport, args)
    else:
        run_experiment(config, transport, args.quiet, bind_report=args.bind_report)


FROM_START = {**FLAG, "help": "begin again where no checkpoint was written, and drop the results"}


@command(RUN=RUN, bind_report=BIND, from_start=FROM_START)
def resume(transport: Transport, args: argparse.Namespace) -> None:
    """Go on with a run from its last checkpoint, at any number of ranks, or with what is left of a sweep."""
    from mpifl.comm.transport import on_server
    from mpifl.experiment.loader import load_everywhere
    from mpifl.experiment.run import run as run_experiment
    from mpifl.experiment.sweep import is_sweep, resume_sweep
    from mpifl.results.run_folder import is_complete

    folder = Path(args.RUN)
    if on_server(transport, lambda: is_sweep(folder)):
        refuse_options(args)
        resume_sweep(folder, transport, args.quiet)
    elif on_server(transport, lambda: is_complete(folder)):
        if transport.is_server:
            print(f"{folder} is complete: {folder / 'summary.json'}")
    else:
        config = load_everywhere(transport, str(folder / "config.yaml"), args.options)
        run_experiment(config, transport, args.quiet, folder, args.bind_report, args.from_start)


ONLY = {"metavar": "KEY=LABEL,...", "action": "append", "help": "only these values of a varied key"}
CASE = {"metavar": "i/N", "help": "only the i-th of N parts: processes with one output.id share a sweep"}
LIST = {**FLAG, "help": "list the cases, and run none"}


@command(CONFIG=CONFIG, only=ONLY, case=CASE, list=LIST)
def sweep(transport: Transport, args: argparse.Namespace) -> None:
    """Run a configuration for every combination of what its `vary` names; write a table and a figure."""
    from mpifl.comm.transport import on_server
    from mpifl.experiment.sweep import Part, listed
    from mpifl.experiment.sweep import sweep as run_sweep

    part = Part.of(args.only or (), args.case)
    if args.list:
        text = on_server(transport, lambda: listed(args.CONFIG, args.options, part))
        if transport.is_server:
            print(text)
    else:
        run_sweep(args.CONFIG, args.options, transport, args.quiet, part)


@command(RUN=RUN)
def retime(transport: Transport, args: argparse.Namespace) -> None:
    """Compute a finished run's times under another network, without training: --network.name wired."""
    from mpifl.comm.transport import on_server
    from mpifl.experiment.retime import retime as retime_run

    folder = on_server(transport, lambda: retime_run(args.RUN, args.options))
    if transport.is_server and not args.quiet:
        print(f"results: {folder}")


# -- before a run --------------------------------------------------------------------------------------------


@command(CONFIG=CONFIG)
def plan(transport: Transport, args: argparse.Namespace) -> None:
    """Say what a run would do, without training: sizes, collectives, memory, bytes per round."""
    from mpifl.experiment.loader import load_everywhere
    from mpifl.experiment.plan import describe
    from mpifl.experiment.sweep import note_on

    config = load_everywhere(transport, args.CONFIG, args.options)
    text = describe(config, transport)
    if transport.is_server:
        print(f"{text}{note_on(config)}")


@command(CONFIG=CONFIG)
def prepare(transport: Transport, args: argparse.Namespace) -> None:
    """Download the data of a configuration where they are missing, and prepare its cache."""
    from mpifl.comm.transport import on_server
    from mpifl.data import prepare as prepare_data
    from mpifl.experiment.loader import load_everywhere

    config = load_everywhere(transport, args.CONFIG, args.options)
    on_server(
        transport, lambda: prepare_data(config.data, config.seed.data, download=True, progress=print) and None
    )


SHEET = {"metavar": "FILE", "help": "PNG file to write (default: <name>-data.png in the current folder)"}


@command(CONFIG=CONFIG, sheet=SHEET)
def data(transport: Transport, args: argparse.Namespace) -> None:
    """Look at the clients of a configuration: print a table, write a sheet of sample images and counts."""
    from mpifl.comm.transport import on_server
    from mpifl.experiment.data_preview import look
    from mpifl.experiment.loader import load_everywhere
    from mpifl.experiment.sweep import note_on

    config = load_everywhere(transport, args.CONFIG, args.options)
    sheet = Path(args.sheet or f"{config.name}-data.png")
    text = on_server(transport, lambda: look(config, sheet, lambda line: args.quiet or print(line)))
    if transport.is_server:
        print(f"{text}{note_on(config)}\n\nsheet: {sheet}")


# -- results -------------------------------------------------------------------------------------------------


OUT = {"metavar": "FOLDER", "help": "folder to write (default: report, beside the first run)"}


@command(RUNS=RUNS, out=OUT, target=TARGET)
def report(transport: Transport, args: argparse.Namespace) -> None:
    """Write one HTML file over several runs, and its figures as SVG, PNG and PDF."""
    from mpifl.comm.transport import on_server
    from mpifl.results.report import accuracy
    from mpifl.results.report import report as write_report

    refuse_options(args)
    page = on_server(transport, lambda: write_report(args.RUNS, args.out, accuracy(args.target)))
    if transport.is_server and not args.quiet:
        print(f"report: {page}")


CSV = {"metavar": "FILE", "help": "CSV file to write"}
LATEX = {"metavar": "FILE", "help": "LaTeX file to write"}


@command(RUNS=RUNS, csv=CSV, latex=LATEX, target=TARGET)
def compare(transport: Transport, args: argparse.Namespace) -> None:
    """Print a table of the final figures of several runs."""
    from mpifl.comm.transport import on_server
    from mpifl.results.report import accuracy, as_text, warnings, write_tables
    from mpifl.results.report import compare as compare_runs

    refuse_options(args)
    rows, target = on_server(transport, lambda: compare_runs(args.RUNS, accuracy(args.target)))
    if transport.is_server:
        print(f"{as_text(rows)}\ntarget: mean accuracy {100 * target:.2f} %")
        for text in warnings(args.RUNS):
            print(f"mpifl: last bits of these runs may differ, {text}", file=sys.stderr)
        write_tables(rows, args.csv, args.latex)


SWEEPS = {"help": "folders of sweeps of papers' tables", "nargs": "+", "metavar": "SWEEP"}


@command(SWEEPS=SWEEPS)
def record(transport: Transport, args: argparse.Namespace) -> None:
    """Keep what sweeps of papers' tables gave, for `mpifl list papers` and docs/reproductions."""
    from mpifl.comm.transport import on_server
    from mpifl.experiment.papers import record as keep

    refuse_options(args)
    written = on_server(transport, lambda: keep(args.SWEEPS))
    if transport.is_server and not args.quiet:
        print("\n".join(map(str, written)))


# -- the machine ---------------------------------------------------------------------------------------------


FOLDER = {"metavar": "FOLDER", "default": "runs", "help": "folder whose disk is checked (default: runs)"}
TRAFFIC = {**FLAG, "help": "instead, compare mpifl's counts of MPI bytes with those of Open MPI's monitoring"}


@command(runs=FOLDER, check_mpi_traffic=TRAFFIC)
def doctor(transport: Transport, args: argparse.Namespace) -> int:
    """Check this job before an expensive run: MPI, cores, GPUs, versions, clocks, speed, data, disk."""
    from mpifl.tools.doctor import doctor as examine
    from mpifl.tools.mpi_traffic_check import check_mpi_traffic as check_traffic

    def say(text: str) -> None:
        print(text, flush=True)

    refuse_options(args)
    well = check_traffic(transport, say) if args.check_mpi_traffic else examine(transport, args.runs, say)
    if not well:
        transport.final_barrier()
    return 0 if well else 1


@command()
def calibrate(transport: Transport, args: argparse.Namespace) -> None:
    """Measure what messages and collectives cost over these ranks, and how well that predicts a round."""
    from mpifl.tools.collective_calibration import calibrate as measure

    refuse_options(args)
    text = measure(transport)
    if transport.is_server:
        print(text)


WORKLOADS = {
    "nargs": "*",
    "metavar": "WORKLOAD",
    "help": "W1 to W6, `population`, or `scaling` and one of W1 to W6",
}
JSON = {"metavar": "FILE", "help": "file to write the figures to"}
TURNS = {"metavar": "COUNT", "help": "turns that each job takes (default: by workload)"}
RANKS = {"metavar": "COUNT", "help": "ranks of mpirun, the server included (default: 3)"}


@command(WORKLOADS=WORKLOADS, json=JSON, turns=TURNS, ranks=RANKS)
def bench(transport: Transport, args: argparse.Namespace) -> None:
    """Measure workloads (default: W1 to W6) on this machine, each beside a plain PyTorch loop."""
    from mpifl.benchmarks.command import bench as measure

    require(transport.size == 1, "bench", transport.size, "starts mpirun itself: start it without one")
    measure(args.WORKLOADS, args.options, args.ranks, args.turns, args.json)


# -- what there is -------------------------------------------------------------------------------------------


@command(WHAT={"help": "algorithms, data, models or papers"})
def list(transport: Transport, args: argparse.Namespace) -> None:
    """List algorithms, data (sources and scenarios), models, or papers (their tables, and what they gave)."""
    from mpifl.experiment import papers, reference

    refuse_options(args)
    text = papers.listed() if args.WHAT == "papers" else reference.listed(args.WHAT)
    if transport.is_server:
        print(text)


NAME = {"help": "a section or key (run, network, local.lr), or a method, model, source, policy, ..."}


@command(NAME=NAME)
def show(transport: Transport, args: argparse.Namespace) -> None:
    """Explain a key or section of the configuration: type, default, unit, choices; or a method: its paper."""
    from mpifl.experiment.reference import shown

    refuse_options(args)
    text = shown(args.NAME)
    if transport.is_server:
        print(text)


@command()
def schema(transport: Transport, args: argparse.Namespace) -> None:
    """Print the JSON Schema of configuration files, with which editors complete and check YAML."""
    from mpifl.experiment.reference import json_schema

    refuse_options(args)
    if transport.is_server:
        print(json_schema())


@command(CONFIG=CONFIG)
def cite(transport: Transport, args: argparse.Namespace) -> None:
    """Print the BibTeX entry of the method of a configuration."""
    from mpifl.algorithms.registry import citation
    from mpifl.experiment.loader import load_everywhere

    config = load_everywhere(transport, args.CONFIG, args.options)
    if transport.is_server:
        print(citation(type(config.algorithm)))


@command(SHELL={"choices": ["bash"], "help": "bash"})
def completion(transport: Transport, args: argparse.Namespace) -> None:
    """Print a script that completes commands, options and keys: eval "$(mpifl completion bash)"."""
    from mpifl.experiment.reference import keys
    from mpifl.tools.completion import bash

    refuse_options(args)
    if transport.is_server:
        typed = {name: [option_of(word) for word in words] for name, (_, words) in COMMANDS.items()}
        print(bash(typed, keys()))


# -- the parser ----------------------------------------------------------------------------------------------


def refuse_options(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that a command does not know."""
    if args.options:
        remedy = f"{args.command} does not know it; see mpifl {args.command} --help"
        raise UserError("option", args.options[0], remedy)


def present(argv: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return a command line under the present names, and what to say of one with names of release 0.1."""
    name, *words = argv or [""]
    if name == "study":
        return ["sweep", *words], "`mpifl study` is now `mpifl sweep`"
    if name == "sweep" and all(word.startswith("-") and word not in ("-h", "--help") for word in words):
        return ["calibrate", *words], "`mpifl sweep` without a configuration is now `mpifl calibrate`"
    if name == "doctor" and "--witness" in words:
        words[words.index("--witness")] = "--check-mpi-traffic"
        return [name, *words], "`mpifl doctor --witness` is now `mpifl doctor --check-mpi-traffic`"
    return argv, ""


def option_of(argument: str) -> str:
    """Return what is typed for an argument of a command: a name in capitals stays."""
    return argument if argument.isupper() else f"--{argument.replace('_', '-')}"


class Parser(argparse.ArgumentParser):
    """A parser that raises `UserError`, which is said once for all ranks."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError`."""
        raise UserError("command line", self.prog, f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    out = Parser(
        "mpifl",
        description=(mpifl.__doc__ or "").partition("\n")[0],
        epilog="mpifl COMMAND --help explains a command.",
    )
    out.add_argument("--version", action="version", version=f"mpifl {mpifl.__version__}")
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, arguments) in COMMANDS.items():
        text = inspect.getdoc(function)
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=KEYS if "CONFIG" in arguments else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument, keywords in arguments.items():
            sub.add_argument(option_of(argument), **keywords)
        sub.add_argument("-q", "--quiet", action="store_true", help="print no progress")
    return out


def main(argv: Sequence[str]) -> int:
    """Run one command on every rank and return the exit code, see `runtime.exit_codes`."""
    keep_freed()
    argv, renamed = present(argv)
    try:
        args, args_options = parser().parse_known_args(argv)
        args.options = args_options
    except UserError as error:
        return refused(error)
    from mpifl.comm.connect import connect
    from mpifl.runtime.exit_codes import outcome

    try:
        transport = connect(monitored=getattr(args, "check_mpi_traffic", False))
    except UserError as error:
        return refused(error)
    if renamed and transport.is_server:
        print(f"mpifl: {renamed}", file=sys.stderr, flush=True)
    code = outcome(transport, lambda: COMMANDS[args.command][0](transport, args))
    transport.finalize(code)
    return code


def refused(error: UserError) -> int:
    """Say, on rank 0, why a command does not begin; return the exit code."""
    from mpifl.comm.mpi_startup import launch_info

    if launch_info(os.environ).rank:
        time.sleep(2.0)  # rank 0 speaks for all; a launcher ends it where another one leaves first
    else:
        print(f"mpifl: {error}", file=sys.stderr, flush=True)
    return 2
