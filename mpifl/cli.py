"""The command line: one function per command. Heavy imports are inside the functions."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import mpifl
from mpifl.core import version
from mpifl.core.errors import UserError, nearest, require
from mpifl.core.process import keep_freed
from mpifl.supervision.streams import to_null

if TYPE_CHECKING:
    from mpifl.analysis.comparison import Choices
    from mpifl.comm.transport import Transport
    from mpifl.supervision.progress import Progress

    Command = Callable[[Transport, argparse.Namespace], int | None]

COMMANDS: dict[str, tuple[Command, dict[str, dict[str, Any]]]] = {}
SECTIONS = (  # of a configuration; listed here because --help imports nothing heavy
    *("algorithm", "attack", "availability", "checkpoint", "clock", "data", "delay", "devices", "drift"),
    *("evaluation", "leavers", "local", "model", "network", "newcomers", "output", "payload", "policy"),
    *("privacy", "recluster", "robust", "secure_aggregation", "seed", "start", "stop", "system", "task"),
)
KEYS = f"""Keys of the configuration are options, too: --key.path value, or --key.path=value; values are YAML.
`mpifl show run` has the keys in no section, `mpifl show SECTION` those of a section, `mpifl show local.lr`
one key (type, default, unit, choices, meaning), and `mpifl list keys` all of them, a line each. Sections:
{textwrap.fill(", ".join(SECTIONS), 100, initial_indent="  ", subsequent_indent="  ")}"""


def command(**arguments: dict[str, Any]) -> Callable[[Command], Command]:
    """Register a command; its docstring is its help.

    Args:
        arguments: name -> keyword arguments of `add_argument`. Names in capitals are positional arguments,
            the others options. CONFIG is a configuration, whose keys are accepted as options, too.
    """

    def register(function: Command) -> Command:
        COMMANDS[function.__name__] = (function, arguments)
        return function

    return register


CONFIG: dict[str, Any] = {"help": "a YAML file, or the name of a configuration that travels with mpifl"}
RUN: dict[str, Any] = {"help": "a run folder"}
RESUMED: dict[str, Any] = {"help": "the folder of a run, or of a sweep"}
RUNS: dict[str, Any] = {"help": "run folders, or folders of them", "nargs": "*", "metavar": "RUN"}
FLAG: dict[str, Any] = {"action": "store_true"}
# commands that only need files: they load no MPI, and PyTorch and NumPy only for users' files that do
ALONE = ("watch", "launch", "docs", "list", "show", "schema", "cite", "completion")
DEFERRED = (  # PyTorch, NumPy, and our modules that use them when they are imported; see `lazy_imports`
    *("torch", "torch.nn", "torch.nn.functional", "numpy", "numpy.lib", "numpy.lib.format"),
    *("mpifl.core.devices", "mpifl.core.torch_state", "mpifl.models.modules"),
    *("mpifl.models.huggingface_modules",),
    *("mpifl.kernels.bindings", "mpifl.aggregation.exact_sum"),
)
# commands that show progress, so that they are never silent for long
LONG = ("run", "resume", "sweep", "plan", "prepare", "data", "bench")
START_SECONDS = 4.0  # of silence before the first line; Python has already been starting for a while
BIND = {**FLAG, "help": "print host, device, CPU mask and threads of every rank"}
TARGET = {
    "metavar": "ACCURACY",
    "help": "mean accuracy in [0, 1], or value of the runs' metric, to reach (default: 95 %% of the best)",
}


# -- runs ----------------------------------------------------------------------------------------------------


@command(CONFIG=CONFIG, bind_report=BIND, resume={**FLAG, "help": "go on with the run of that output.id"})
def run(transport: Transport, args: argparse.Namespace) -> None:
    """Run a configuration."""
    from mpifl.comm.transport import on_server
    from mpifl.driver.existing import place, reused
    from mpifl.driver.resumption import refuse_changes
    from mpifl.driver.run import run as run_experiment
    from mpifl.experiment.loader import load_everywhere, to_tree
    from mpifl.experiment.schema import REFUSE
    from mpifl.results.run_folder import is_begun, is_complete, refuse_more_rounds

    config = load_everywhere(transport, args.CONFIG, args.options)
    if config.vary:
        remedy = f"`mpifl sweep {args.CONFIG}` runs all cases; --vary null runs the rest of the file once"
        raise UserError("vary", ", ".join(map(str, config.vary)), remedy)
    remedy = "--resume goes on with a run, output.existing says what else to do; leave one out"
    require(not args.resume or config.output.existing == REFUSE, "--resume", True, remedy)
    reuse, complete = on_server(transport, lambda: reused(config))
    if reuse is not None and complete:
        leave_alone(transport, reuse, lambda: None)
        return
    named = config.output.id is not None
    require(named or not args.resume, "--resume", True, "needs an output.id: which run?")
    folder = place(config)
    begun = args.resume and on_server(transport, lambda: is_begun(folder))
    if begun and on_server(transport, lambda: is_complete(folder)):

        def refuse() -> None:
            refuse_more_rounds(folder, config.rounds)
            refuse_changes(folder, to_tree(config))

        leave_alone(transport, folder, refuse)
        return
    run_experiment(config, transport, args.quiet, folder if begun else reuse, args.bind_report)


def leave_alone(transport: Transport, folder: Path, refuse: Callable[[], None]) -> None:
    """Say that a run is complete, unless its changed options are refused; every rank calls.

    Args:
        transport: Connects the ranks.
        folder: The run folder.
        refuse: Raises `UserError` if other options are asked for; called on rank 0.
    """
    from mpifl.comm.transport import on_server
    from mpifl.driver.run_callbacks import end_late

    on_server(transport, refuse)
    on_server(transport, lambda: end_late(folder), everywhere=False)
    if transport.is_server:
        print(f"{folder} is complete: {folder / 'summary.json'}")


FROM_START = {**FLAG, "help": "begin again where no checkpoint was written, and drop the results"}


ONLY = {
    "metavar": "KEY=LABEL,...",
    "action": "append",
    "help": "of a sweep, only these values of a varied key",
}
CASE = {
    "metavar": "i/N",
    "help": "of a sweep, only the i-th of N parts: processes with one output.id share a sweep",
}
JOBS = {"metavar": "COUNT", "help": "cases of a sweep that run at a time, each on a group of mpirun's ranks"}


KEEP_GOING = {**FLAG, "help": "of a sweep: a case that fails does not end it; exit code 1 at the end"}


@command(
    RUN=RESUMED,
    bind_report=BIND,
    from_start=FROM_START,
    only=ONLY,
    case=CASE,
    jobs=JOBS,
    keep_going=KEEP_GOING,
)
def resume(transport: Transport, args: argparse.Namespace) -> None:
    """Resume a run from its last checkpoint, on any number of ranks, or the unfinished cases of a sweep."""
    from mpifl.comm.transport import on_server
    from mpifl.core.conversion import untyped
    from mpifl.driver.resumption import refuse_changes, refuse_place
    from mpifl.driver.run import run as run_experiment
    from mpifl.experiment.loader import load_everywhere, merged, overrides, read
    from mpifl.results.run_folder import is_complete, refuse_more_rounds
    from mpifl.sweeps.cases import Part
    from mpifl.sweeps.results import is_sweep
    from mpifl.sweeps.tuning import resume as resume_sweep

    folder, jobs = Path(args.RUN), count("--jobs", args.jobs)
    if on_server(transport, lambda: is_sweep(folder)):
        refuse_options(args)
        require(not args.bind_report, "--bind-report", True, "is for a run, not for a sweep; leave it out")
        why = "a case of a sweep that has no checkpoint begins again without it; leave it out"
        require(not args.from_start, "--from-start", True, why)
        part = Part.of(args.only or (), args.case)
        resume_sweep(folder, transport, args.quiet, part, jobs, args.keep_going)
        return
    require(jobs == 1, "--jobs", jobs, f"{folder} is one run, which takes all ranks; leave it out")
    parts = (("--only", " ".join(args.only or ())), ("--case", args.case), ("--keep-going", args.keep_going))
    for option, value in parts:
        require(not value, option, value, f"{folder} is one run, not a sweep; leave it out")
    complete = on_server(transport, lambda: is_complete(folder))
    on_server(transport, lambda: refuse_place(folder, overrides(args.options)))
    if complete:

        def refuse() -> None:
            changes = overrides(args.options)
            refuse_more_rounds(folder, untyped(changes.get("rounds")))
            if changes:
                refuse_changes(folder, merged(read(str(folder / "config.yaml")), changes))

        leave_alone(transport, folder, refuse)
    else:
        config = load_everywhere(transport, str(folder / "config.yaml"), args.options)
        run_experiment(config, transport, args.quiet, folder, args.bind_report, args.from_start)


WATCHED = {
    "nargs": "?",
    "default": "",
    "help": "a run folder, that of a sweep, or a folder of them (default: the newest run in runs)",
}
WEB = {**FLAG, "help": "in a browser of this machine, at an address that is printed"}
PORT = {"type": int, "metavar": "PORT", "help": "of --web (default: a free one)"}
ONCE = {**FLAG, "help": "show it once"}


@command(RUN=WATCHED, web=WEB, port=PORT, once=ONCE)
def watch(transport: Transport, args: argparse.Namespace) -> int:
    """Follow a run or a sweep: rounds, accuracy, clusters, bytes, ranks, and when it will end."""
    from mpifl.analysis.watch import Watched
    from mpifl.analysis.watch import watch as follow
    from mpifl.analysis.watch_page import serve

    refuse_options(args)
    require(
        transport.size == 1, "watch", transport.size, "watches a job from outside: start it without mpirun"
    )
    require(args.web or args.port is None, "--port", args.port, "has no effect without --web")
    require(not (args.web and args.once), "--once", True, "has no effect with --web; leave one of them out")
    watched = Watched(args.RUN, titles_of_cases)
    return serve(watched.see, args.port or 0, print) if args.web else follow(watched.see, args.once)


def titles_of_cases(folder: Path) -> dict[str, str]:
    """Return name of the run folder -> title, for each case that a sweep will have."""
    from mpifl.analysis.watch import plain_titles

    plain = plain_titles(folder)
    if plain is None:  # its cases are whole configurations, or parts of them: they have to be read
        from mpifl.sweeps.results import titles

        plain = titles(folder)
    return plain


LIST = {**FLAG, "help": "list the cases, and run none"}


@command(CONFIG=CONFIG, only=ONLY, case=CASE, jobs=JOBS, keep_going=KEEP_GOING, list=LIST)
def sweep(transport: Transport, args: argparse.Namespace) -> None:
    """Run a configuration for every combination of the values under `vary`; write a table and a figure."""
    from mpifl.comm.transport import on_server
    from mpifl.sweeps.cases import Part, read
    from mpifl.sweeps.tuning import listed
    from mpifl.sweeps.tuning import sweep as run_sweep

    part, jobs = Part.of(args.only or (), args.case), count("--jobs", args.jobs)
    if args.list:
        remedy = "has no effect with --list; leave one of them out"
        require(args.jobs is None, "--jobs", jobs, remedy)
        require(not args.keep_going, "--keep-going", True, remedy)
        text = on_server(transport, lambda: listed(read(args.CONFIG, args.options), part))
        if transport.is_server:
            print(text)
    else:
        tree = partial(read, args.CONFIG, args.options)
        run_sweep(tree, transport, args.quiet, part, jobs, args.keep_going)


@command(RUN={"help": "a run folder, or that of a sweep"})
def retime(transport: Transport, args: argparse.Namespace) -> None:
    """Compute the times of finished runs under another network, without training: --network.name wired."""
    from mpifl.comm.transport import on_server
    from mpifl.sweeps.retime import retime as retime_runs

    text = on_server(transport, lambda: retime_runs(args.RUN, args.options)[1])
    if transport.is_server and not args.quiet:
        print(text)


# -- before a run --------------------------------------------------------------------------------------------


TIMES = {"choices": ("yes", "no"), "default": "yes", "help": "measure visits, forecast times (default: yes)"}
AT_RANKS = {"metavar": "P,P,...", "help": "numbers of ranks for a table of times, efficiency and memory"}
CORES = {
    "metavar": "COUNT",
    "help": "cores of a node; nodes are added until each rank has one (default: ranks share this machine's)",
}
NODES = {"metavar": "COUNT", "help": "nodes whose cores the ranks share, however many they are"}


AT_A_TIME = {
    "metavar": "COUNT",
    "help": "of a sweep: how long it takes with so many cases at a time, by some of them",
}


@command(CONFIG=CONFIG, time=TIMES, ranks=AT_RANKS, cores=CORES, nodes=NODES, jobs=AT_A_TIME)
def plan(transport: Transport, args: argparse.Namespace) -> None:
    """Forecast a run: sizes, collectives, memory, bytes, and its time, from a few measured visits."""
    from mpifl.comm.transport import on_server
    from mpifl.experiment.loader import from_tree, load_everywhere
    from mpifl.experiment.schema import Config
    from mpifl.forecast.plan import Asked, describe
    from mpifl.sweeps.cases import note_on, note_on_beginnings, read
    from mpifl.sweeps.forecast import HINT, first_case, lines

    tree, title = on_server(transport, lambda: read(args.CONFIG, args.options)), ""
    varies = bool(tree.get("vary"))
    try:
        config = load_everywhere(transport, args.CONFIG, args.options)
    except UserError:  # on every rank; the rest of the file may say too little without what it varies
        if not varies:
            raise
        title, own = on_server(transport, lambda: first_case(tree))
        config = from_tree(Config, own)
    asked, jobs = Asked.of(args.time, args.ranks, args.cores, args.nodes), count("--jobs", args.jobs)
    remedy = f"{args.CONFIG} is one run: it varies nothing; leave it out"
    require(args.jobs is None or varies, "--jobs", args.jobs, remedy)
    with _watched(transport, args):
        text = describe(config, transport, asked)
        sweep_lines = [] if args.jobs is None else on_server(transport, lambda: lines(tree, jobs))
    if transport.is_server:
        head = f"case                    {title}, the first of the sweep\n" if title else ""
        hint = f"\n{HINT}" if varies and args.jobs is None else ""
        shared = note_on_beginnings(tree)
        print("\n".join([f"{head}{text}{note_on(config)}{hint}{shared}", *sweep_lines]))


@command(CONFIG=CONFIG)
def prepare(transport: Transport, args: argparse.Namespace) -> None:
    """Download the data of a configuration if they are missing, and prepare its cache."""
    from mpifl.comm.transport import on_server
    from mpifl.data import prepare as prepare_data
    from mpifl.experiment.loader import load_everywhere

    config = load_everywhere(transport, args.CONFIG, args.options)

    def prepare_all() -> None:
        prepare_data(config.data, config.seed.data, download=True, progress=print)

    with _watched(transport, args):
        on_server(transport, prepare_all)


SHEET = {"metavar": "FILE", "help": "PNG file to write (default: <name>-data.png in the current folder)"}

PARTITION = {
    "metavar": "FILE",
    "help": "file.csv or file.parquet to write: client, part and sample in a row, for scenario `partition`",
}


@command(CONFIG=CONFIG, sheet=SHEET, export=PARTITION)
def data(transport: Transport, args: argparse.Namespace) -> None:
    """Preview the clients of a configuration: print a table, write a sheet of sample images and counts."""
    from mpifl.comm.transport import on_server
    from mpifl.data import export_partition
    from mpifl.experiment.loader import load_everywhere
    from mpifl.forecast.data_preview import look
    from mpifl.sweeps.cases import note_on

    config = load_everywhere(transport, args.CONFIG, args.options)
    sheet = Path(args.sheet or f"{config.name}-data.png")

    def answer() -> str:
        text = look(config, sheet, lambda line: args.quiet or print(line))
        said = f"{text}{note_on(config)}\n\nsheet: {sheet}"
        if args.export is None:
            return said
        rows = export_partition(config.data, config.seed.data, Path(args.export), "--export")
        return f"{said}\npartition: {args.export}, {rows:,} rows"

    with _watched(transport, args):
        text = on_server(transport, answer)
    if transport.is_server:
        print(text)


def _watched(transport: Transport, args: argparse.Namespace) -> Progress:
    """Return a progress display on stderr for a command that prints its answer on stdout."""
    from mpifl.supervision.progress import Progress

    return Progress(title=args.command, quiet=args.quiet or not transport.is_server, to_stderr=True)


# -- results -------------------------------------------------------------------------------------------------


OUT = {"metavar": "FOLDER", "help": "folder to write (default: report, beside the first run)"}
STATISTICS: dict[str, dict[str, Any]] = {
    "target": TARGET,
    "interval": {
        "choices": ["std", "t", "bootstrap", "percentile"],
        "default": "std",
        "help": "beside means: standard deviation, or an interval over seeds (default: std)",
    },
    "confidence": {"metavar": "P", "help": "of intervals; tests have the level 1 - P (default: 0.95)"},
    "test": {
        "choices": ["t", "wilcoxon", "none"],
        "help": "test over equal seeds that marks the best (default: t); if given, its table is shown, too",
    },
    "metric": {"metavar": "COLUMN", "help": "column that is tested and ranked (default: accuracy)"},
    "ranks": {**FLAG, "help": "rank methods over several problems: Friedman, Nemenyi"},
    "problem": {
        "metavar": "KEY,...",
        "help": "keys that make a problem, on which methods are compared (default: data)",
    },
    "columns": {"metavar": "COLUMN,...", "help": "columns of the table, in order (default: all)"},
}


FINISHED = {**FLAG, "help": "leave out runs that are not finished; a line says which"}


def choices_of(args: argparse.Namespace) -> Choices:
    """Return the choices that the options of `STATISTICS` make."""
    from mpifl.analysis.comparison import Choices

    given = {name: getattr(args, name) for name in STATISTICS}
    return Choices.of(**given)


WIDTH = {"type": float, "metavar": "INCHES", "help": "of the figures for papers; 3.3 fits a column"}
LABEL = {"metavar": "NAME=TEXT", "action": "append", "help": "what legends and tables call a configuration"}


@command(RUNS=RUNS, finished=FINISHED, out=OUT, width=WIDTH, label=LABEL, **STATISTICS)
def report(transport: Transport, args: argparse.Namespace) -> None:
    """Write one HTML file over several runs, and its figures as SVG, PNG and PDF."""
    from mpifl.analysis.report import report as write_report
    from mpifl.comm.transport import on_server
    from mpifl.sweeps.results import say_missing

    good = args.width is None or 1 <= args.width <= 40
    require(good, "--width", args.width, "use inches from 1 to 40: 3.3 is a column, 7 a page")
    for text in args.label or ():
        require("=" in text.strip("="), "--label", text, "use NAME=TEXT, NAME as legends have it")
    labels = dict(text.rsplit("=", 1) for text in args.label or ())

    def answer() -> Path:
        page = write_report(args.RUNS, args.out, choices_of(args), args.width, labels, args.finished)
        say_missing(args.RUNS)
        return page

    page = on_server(transport, answer)
    if transport.is_server and not args.quiet:
        print(f"report: {page}")


CSV = {"metavar": "FILE", "help": "CSV file to write: numbers, a row a configuration"}
LATEX = {"metavar": "FILE", "help": "LaTeX file to write, which fits a paper's column"}
MARKDOWN = {"metavar": "FILE", "help": "Markdown file to write"}
FIGURES = {"metavar": "FOLDER", "help": "folder for figures over seeds and problems: SVG, PNG, PDF"}


@command(RUNS=RUNS, finished=FINISHED, **STATISTICS, csv=CSV, latex=LATEX, markdown=MARKDOWN, figures=FIGURES)
def compare(transport: Transport, args: argparse.Namespace) -> None:
    """Print a table of the final figures of several runs, with tests over seeds and ranks over problems."""
    from mpifl.analysis.comparison import compare as compare_runs
    from mpifl.analysis.report import text_of, warnings, write_files
    from mpifl.comm.transport import on_server
    from mpifl.sweeps.results import say_missing

    def answer() -> tuple[str, Sequence[str], Sequence[str]]:
        found = compare_runs(args.RUNS, choices_of(args), args.finished)
        say_missing(args.RUNS)
        text = text_of(found, sys.stdout.isatty())
        return text, warnings(found), write_files(found, args.csv, args.latex, args.markdown, args.figures)

    text, differing, said = on_server(transport, answer)
    if transport.is_server:
        print("\n".join([text, *said]))
        for line in differing:
            print(f"mpifl: {line}", file=sys.stderr)


TABLE = {
    "choices": ["metrics", "final", "clients"],
    "default": "metrics",
    "help": "a row a run and evaluation; a row a run; a row a run and client (default: metrics)",
}
EXPORT = {"metavar": "FILE", "help": "file.csv or file.parquet (default: CSV on the terminal)"}


@command(RUNS=RUNS, finished=FINISHED, table=TABLE, target=TARGET, out=EXPORT)
def export(transport: Transport, args: argparse.Namespace) -> None:
    """Write all figures of several runs as one tidy table, CSV or Parquet: a column a varied key."""
    from mpifl.analysis.comparison import target_of
    from mpifl.analysis.export import export as write_table
    from mpifl.comm.transport import on_server
    from mpifl.sweeps.results import say_missing

    def answer() -> str:
        text = write_table(args.RUNS, args.table, args.out, target_of(args.target), args.finished)
        say_missing(args.RUNS)
        return text

    text = on_server(transport, answer)
    if transport.is_server and not (args.quiet and args.out):
        print(text, end="")


# -- the machine ---------------------------------------------------------------------------------------------


FOLDER = {"metavar": "FOLDER", "help": "folder whose disk is checked (default: that of CONFIG, or runs)"}
TO_RUN = {
    **CONFIG,
    "nargs": "?",
    "help": "the run that is to follow: its data are opened, its model is built, and the clients that each "
    "worker hosts are shown",
}


@command(CONFIG=TO_RUN, runs=FOLDER)
def doctor(transport: Transport, args: argparse.Namespace) -> int:
    """Check this job before an expensive run: MPI, cores, GPUs, versions, clocks, speed, data, disk."""
    from mpifl.experiment.loader import load_everywhere
    from mpifl.tools.doctor import doctor as examine

    config = None if args.CONFIG is None else load_everywhere(transport, args.CONFIG, args.options)
    runs = args.runs or ("runs" if config is None else config.output.folder)
    well = examine(transport, runs, lambda text: print(text, flush=True), config)
    if not well:
        transport.final_barrier()
    return 0 if well else 1


@command()
def calibrate(transport: Transport, args: argparse.Namespace) -> None:
    """Measure the cost of messages and collectives over these ranks, and how well it predicts a round."""
    from mpifl.tools.collective_calibration import calibrate as measure

    text = measure(transport)
    if transport.is_server:
        print(text)


WORKLOADS = {
    "nargs": "*",
    "metavar": "WORKLOAD",
    "help": "W1 to W6, or `server`: what rank 0 computes in a round",
}
JSON = {"metavar": "FILE", "help": "file to write the figures to"}
TURNS = {"metavar": "COUNT", "help": "turns that each job takes (default: by workload)"}
RANKS = {"metavar": "COUNT", "help": "ranks of mpirun, the server included (default: 3)"}
SECONDS = {"metavar": "S", "help": "least length of a turn; 0: one round (default: 3)"}


@command(WORKLOADS=WORKLOADS, json=JSON, turns=TURNS, ranks=RANKS, seconds=SECONDS)
def bench(transport: Transport, args: argparse.Namespace) -> None:
    """Measure workloads (default: W1 to W6) on this machine, each beside a plain PyTorch loop."""
    from mpifl.benchmarks.command import bench as measure

    require(transport.size == 1, "bench", transport.size, "starts mpirun itself: start it without one")
    measure(args.WORKLOADS, args.options, args.ranks, args.turns, args.json, args.seconds)


# -- your own code -------------------------------------------------------------------------------------------


@command(
    KIND={"help": "method, model, data, scenario, sweep or plugin"},
    NAME={"nargs": "?", "default": "", "help": "of the class, such as MyMethod; the file is my_method.py"},
)
def init(transport: Transport, args: argparse.Namespace) -> None:
    """Write a starter file, which runs at once: a method, model, data set, scenario, sweep; or a plug-in."""
    from mpifl.comm.transport import on_server
    from mpifl.tools import starter_files

    text = on_server(transport, lambda: starter_files.init(args.KIND, args.NAME, Path()), everywhere=False)
    if transport.is_server:
        print(text)


@command(SCHEDULER={"help": "slurm, pbs or lsf"})
def launch(transport: Transport, args: argparse.Namespace) -> None:
    """Print a job script: mpifl launch slurm > job.sh; sbatch --ntasks 9 job.sh quickstart."""
    from mpifl.tools.starter_files import job_script

    text = job_script(args.SCHEDULER)
    if transport.is_server:
        print(text, end="")


@command(
    METHOD={"help": "a method, trainer or compression: its name, file.py:Class or package.module:Class"},
    ranks={"type": int, "default": 3, "metavar": "P", "help": "ranks of the trial under MPI (default: 3)"},
)
def check(transport: Transport, args: argparse.Namespace) -> int:
    """Test your own method, trainer or codec in small runs: does it repeat, over ranks, with known bytes?"""
    from mpifl.tools import method_check

    require(transport.size == 1, "check", transport.size, "starts mpirun itself: start it without one")
    require(args.ranks >= 1, "--ranks", args.ranks, "use 1 or more")
    return 0 if method_check.check(args.METHOD, args.options, args.ranks, print) else 1


# -- reference -----------------------------------------------------------------------------------------------


WHAT = {"nargs": "?", "default": "", "help": "what to list; without it, what can be listed"}
WORDS = {"nargs": "*", "help": "of algorithms: which, as in `hard buffer`; all of these words must apply"}
TRAINER = {"metavar": "TRAINER", "help": "of algorithms: those that a trainer can train (local.trainer)"}


@command(WHAT=WHAT, WORDS=WORDS, trainer=TRAINER)
def list(transport: Transport, args: argparse.Namespace) -> None:
    """List what mpifl has: keys, columns, algorithms, data, models, policies, configurations, papers."""
    faults: Sequence[UserError] = ()
    if args.WHAT == "papers":
        from mpifl.sweeps import papers

        require(not args.WORDS, "list papers", " ".join(args.WORDS), "takes no words; leave them out")
        text = papers.listed()
    else:
        from mpifl.experiment import reference

        text = reference.listed(args.WHAT, args.WORDS, args.trainer)
        faults = reference.faults(args.WHAT)
    if transport.is_server:
        print(text)
        for fault in faults[1:]:
            print(f"mpifl: {fault}", file=sys.stderr)
    if faults:
        raise faults[0]


NAME = {
    "help": "a section or key (run, network, local.lr), a method, model, source, ..., a column or file of a "
    "run folder (accuracy_worst, ledger.csv), or file.py:Class"
}


@command(NAME=NAME)
def show(transport: Transport, args: argparse.Namespace) -> None:
    """Explain a key or section of the configuration, a method with its paper, or a column of a run folder."""
    from mpifl.experiment.reference import shown

    text = shown(args.NAME)
    if transport.is_server:
        print(text)


@command()
def schema(transport: Transport, args: argparse.Namespace) -> None:
    """Print the JSON Schema of configuration files, with which editors complete and check YAML."""
    from mpifl.experiment.reference import json_schema

    if transport.is_server:
        print(json_schema())


CITED = {"help": "a YAML file, the name of a configuration, or the folder of a run or a sweep"}


@command(CONFIG=CITED)
def cite(transport: Transport, args: argparse.Namespace) -> None:
    """Print the BibTeX entries of the method, policy, model, data and others that a configuration uses."""
    from mpifl.experiment.citations import cited
    from mpifl.sweeps.cases import configurations_of

    text = cited(configurations_of(args.CONFIG, args.options))
    if transport.is_server:
        print(text)


@command(SHELL={"choices": ["bash", "zsh"], "help": "bash or zsh"})
def completion(transport: Transport, args: argparse.Namespace) -> None:
    """Print a script that completes commands, options, keys and names: source it, or write it to a file."""
    from mpifl.tools.completion import script

    if transport.is_server:
        typed = {name: [option_of(word) for word in words] for name, (_, words) in COMMANDS.items()}
        print(script(args.SHELL, typed))


PAGE = {
    "nargs": "?",
    "default": "",
    "help": "how-to, tutorial/first-run, ..., or a word to find in them; without it, the list of pages",
}
PATH = {**FLAG, "help": "print where its file is; without a page, where all of them are"}


@command(PAGE=PAGE, path=PATH)
def docs(transport: Transport, args: argparse.Namespace) -> None:
    """Read the documentation: mpifl docs how-to."""
    from mpifl.tools import documentation

    places: Sequence[str] = ()
    try:
        file = documentation.find(args.PAGE) if args.PAGE else None
    except UserError:
        places = () if args.path else documentation.containing(args.PAGE)
        if not places:
            raise
    if not transport.is_server:
        return
    if places:
        print("\n".join(places))
    elif args.path:
        print(file or documentation.FOLDER)
    elif file is None:
        print(documentation.listed())
    else:
        documentation.show(file)


# -- the parser ----------------------------------------------------------------------------------------------


def count(option: str, text: str | None) -> int:
    """Return the value of an option as a positive integer; 1 if the option is left out.

    Raises:
        UserError: it is not an integer from 1 to 999,999.
    """
    good = text is None or (text.isdecimal() and 0 < int(text) < 1_000_000)
    require(good, option, text, "use a number, 1 or more")
    return int(text or 1)


KEYED = {"CONFIG", "RUN", "METHOD", "WORKLOADS"}  # commands with one of these take keys of a configuration


def refuse_options(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that a command does not know."""
    if args.options:
        raise UserError("option", args.options[0], _no_option(args, args.options[0]))


def refuse_mistyped(args: argparse.Namespace) -> None:
    """Raise `UserError` for an option that cannot be a configuration key: it has a hyphen, or no value."""
    for option, value in zip_longest(args.options, args.options[1:], fillvalue="--"):
        if option.startswith("--") and "=" not in option:
            if "-" in option[2:].partition(".")[0]:  # no key of a configuration has one
                raise UserError("option", option, _no_option(args, option))
            if value.startswith("--"):
                raise UserError("option", option, _no_option(args, option, "needs a value"))


def _no_option(args: argparse.Namespace, option: str, why: str = "") -> str:
    """Return why a command rejects an option, and which of its options is most similar."""
    known = [option_of(word) for word in COMMANDS[args.command][1]]
    near = get_close_matches(option, [*known, "--quiet", "--help"], n=1, cutoff=0.7)
    meant = f"did you mean {near[0]}?" if near else f"see mpifl {args.command} --help"
    return f"{why or f'{args.command} does not know it'}; {meant}"


def option_of(argument: str) -> str:
    """Return how an argument of a command is typed: --name, or the name itself if it is in capitals."""
    return argument if argument.isupper() else f"--{argument.replace('_', '-')}"


RETIMED = """Name what changes: keys of network, delay, availability and devices, as in
--network.name wired, --delay.value_s 2 or --network.uplink_bytes_s 1Mbit/s; `mpifl show network` prints
those of a section. output.folder, output.id and output.label say where the copy stands and what tables
call it."""
GOES_ON = """Of a run that is not complete, keys of its configuration are options, too: rounds, stop, those of
system, checkpoint and output (but for its folder), data.root and data.cache may change, as in
--rounds 200; others decide its numbers, and are refused. A sweep takes none."""
EPILOGS = {"retime": RETIMED, "resume": GOES_ON}  # of commands that take only some keys of a configuration


class Parser(argparse.ArgumentParser):
    """A parser that raises `UserError`, which is printed once for all ranks."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError`."""
        raise UserError("command line", self.prog, f"{message}; see {self.prog} --help")


class Version(argparse.Action):
    """Prints the version, which takes a call of Git in a checkout."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print it and end."""
        print(f"mpifl {version.in_use()}")
        parser.exit()


@cache  # ten milliseconds, and scripts and tests call `main` many times
def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    out = Parser(
        "mpifl",
        description=(mpifl.__doc__ or "").partition("\n")[0],
        epilog="mpifl COMMAND --help explains a command, mpifl show KEY a key, mpifl list what there is. "
        "`mpifl docs how-to` has the commands for your images, your model, two GPUs, stopping and going on, "
        "networks, attacks, containers; `mpifl docs` lists the other pages.",
    )
    out.add_argument("--version", action=Version, nargs=0, help="show program's version number and exit")
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, arguments) in COMMANDS.items():
        text = inspect.getdoc(function)
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=KEYS if "CONFIG" in arguments else EPILOGS.get(name),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument, keywords in arguments.items():
            sub.add_argument(option_of(argument), **keywords)
        sub.add_argument("-q", "--quiet", action="store_true", help="print no progress")
    return out


def main(argv: Sequence[str]) -> int:
    """Run one command on every rank and return the exit code, see `supervision.exit_codes`."""
    keep_freed()
    escape_output()
    try:
        known = [*COMMANDS]
        argv = argv or ["--help"]
        if not argv[0].startswith("-") and argv[0] not in known:
            raise UserError("command", argv[0], f"{nearest(argv[0], known)}; see mpifl --help")
        args, args_options = parser().parse_known_args(argv)
        args.options = args_options
        if KEYED.isdisjoint(COMMANDS[args.command][1]) or getattr(args, "CONFIG", "") is None:
            refuse_options(args)  # before imports that take seconds
        refuse_mistyped(args)
    except UserError as error:
        return refused(error)
    from mpifl.comm.mpi_startup import launch_info

    if args.command in ALONE and launch_info(os.environ).size == 1:
        return alone(args)
    from mpifl.supervision.progress import Progress

    quiet = args.quiet or bool(launch_info(os.environ).rank)
    with Progress(title="starting", quiet=quiet, bar=False, to_stderr=True, silence=START_SECONDS) as shown:
        try:
            from mpifl.comm.connect import connect
            from mpifl.supervision.exit_codes import outcome

            transport = connect()
        except UserError as error:
            return refused(error)
        shown.title, shown.quiet = args.command, quiet or args.command not in LONG
        code = outcome(transport, lambda: COMMANDS[args.command][0](transport, args))
    transport.finalize(code)
    return code


def escape_output() -> None:
    """Make stdout escape characters that its encoding lacks, as stderr does, instead of raising.

    An example is a folder whose name is not UTF-8. In the C locale Python prints its bytes as they are.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


class Alone:
    """The attributes of a transport that commands of `ALONE` use; there is only one process."""

    size, rank, is_server = 1, 0, True


def alone(args: argparse.Namespace) -> int:
    """Run a command that needs no transport; return the exit code."""
    try:
        code = COMMANDS[args.command][0](cast("Transport", Alone()), args) or 0
        sys.stdout.flush()
    except UserError as error:
        return refused(error)
    except BrokenPipeError:  # the reader closed the pipe: mpifl launch slurm | head
        to_null(sys.stdout.fileno())
        return 0
    return code


def refused(error: UserError) -> int:
    """Print on rank 0 why a command cannot start; return the exit code."""
    from mpifl.comm.mpi_startup import launch_info

    if launch_info(os.environ).rank:
        time.sleep(2.0)  # a launcher ends rank 0, which prints for all, if another rank exits first
    else:
        print(f"mpifl: {error}", file=sys.stderr, flush=True)
    return 2
