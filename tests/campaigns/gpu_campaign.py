"""The first hour on a GPU: all that was only rehearsed, in about ten minutes, as a JSON file and a page.

    launch/gpu-campaign FOLDER                  on a machine with a GPU
    launch/gpu-campaign FOLDER --rehearse       the same steps on the CPU, with tiny work

If a step fails, or too little time is left for it, the results say so and the next step begins. Both files
are written after every step, so that a campaign that is cut short keeps its results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

import torch

from mpifl import __version__
from mpifl.benchmarks.compare import ratios, take_turns
from mpifl.benchmarks.turns import ONE_MACHINE, Job
from mpifl.benchmarks.workloads import WORKLOADS
from mpifl.comm.mpi_startup import cuda_aware, mpirun
from mpifl.core.errors import UserError, require
from mpifl.data import prepare
from mpifl.experiment.loader import load

Figures = dict[str, Any]
SECONDS = 570.0  # of the whole campaign
REHEARSAL_S = 1800.0  # of a rehearsal, on cores that also do other work
LEAST_S = 5.0  # minimum for a step
LONGEST = 400  # characters of an error message that are kept
TESTS = (
    "tests/training/test_devices.py",
    "tests/training/test_cuda_graph.py",
    "tests/aggregation/test_exact_sum.py",
    "tests/mpi/test_gpu.py",
)
WAYS = {  # way of training on a GPU -> options
    "default": [],
    "one by one": ["--system.stack", "1", "--system.cuda_graphs", "false"],
    "graphs": ["--system.stack", "1", "--system.cuda_graphs", "true"],
    "stacked": ["--system.stack", "0"],
    "stacked graphs": ["--system.stack", "0", "--system.cuda_graphs", "true"],
    "stacked, free": ["--system.stack", "0", "--system.deterministic", "false"],
    "tf32 graphs": ["--system.stack", "1", "--system.cuda_graphs", "true", "--local.precision", "tf32"],
    "bfloat16": ["--system.stack", "1", "--local.precision", "bfloat16"],
}
SMALL = ("W1", "W2", "W3")  # workloads whose networks can be stacked
WAYS_OF_SMALL = ("default", "one by one", "graphs", "stacked", "stacked graphs", "stacked, free", "bfloat16")
WAYS_OF_LARGE = ("one by one", "graphs", "tf32 graphs", "bfloat16")
NOT_COUNTED = ("bfloat16",)  # for the goals: the loop uses PyTorch's defaults, float32 and TF32
TINY = ["--rounds", "2", "--evaluation.every", "1"]
REHEARSED = ["--data.source.train", "400", "--data.source.test", "40", "--data.scenario.clients", "20"]
REHEARSED += ["--cohort_size", "5"]


@dataclass
class Campaign:
    """The settings and results that the steps share.

    Attributes:
        folder: folder for results and logs.
        device: `cuda`, or `cpu` in a rehearsal.
        seconds: time limit of the whole campaign.
        results: step -> its figures.
        began: start of the campaign on the clock of `perf_counter`.
    """

    folder: Path
    device: str = "cuda"
    seconds: float = SECONDS
    results: dict[str, Figures] = field(default_factory=dict)
    began: float = field(default_factory=perf_counter)

    @property
    def rehearsed(self) -> bool:
        """Whether this is a rehearsal, without a GPU."""
        return self.device == "cpu"

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self.seconds - (perf_counter() - self.began)

    @property
    def options(self) -> list[str]:
        """Options of every run: the device, and less work in a rehearsal."""
        return ["--system.device", self.device, *(REHEARSED if self.rehearsed else [])]

    def mpifl(self, ranks: int, name: str, *words: str, share: float = 0.5) -> Figures:
        """Run `mpifl run CONFIG` on some ranks; return its summary and environment.

        Args:
            ranks: P.
            name: id of the run.
            words: configuration and options.
            share: share of the remaining time that the run may take.

        Raises:
            UserError: the run ended with an exit code other than 0; the message says why.
        """
        place = ["--output.folder", str(self.folder / "runs"), "--output.id", name]
        command = [*mpirun(ranks), "mpifl", "run", *words, *self.options, *place]
        code, said = self.told(command, name, self.left * share)
        if code:
            raise UserError(name, f"exit code {code}", _reason(said))
        (run,) = (self.folder / "runs").glob(f"*-{name}")
        read = [json.loads((run / file).read_text()) for file in ("summary.json", "environment.json")]
        return {"summary": read[0], "environment": read[1]}

    def told(self, command: Sequence[str], name: str, limit: float) -> tuple[int, list[str]]:
        """Run a command with a log; return its exit code (124: it took too long) and its lines of output.

        Args:
            command: the program and its options.
            name: name of its log.
            limit: time limit in seconds.
        """
        log = self.folder / f"{name}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(),
                start_new_session=True,
            )
            try:
                code = process.wait(max(1.0, limit))
            except subprocess.TimeoutExpired:
                code = 124
                os.killpg(process.pid, signal.SIGTERM)  # mpirun ends its ranks; they would outlive a SIGKILL
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, log.read_text(errors="replace").strip().splitlines()


def _reason(said: Sequence[str]) -> str:
    """Return why a program ended: the last line from mpifl, not from mpirun; without one, the last line."""
    return ([line for line in said if line.startswith("mpifl: ")] or [*said] or ["no word"])[-1]


def _environment() -> dict[str, str]:
    return {**ONE_MACHINE, "OMP_NUM_THREADS": "1", **os.environ}


# -- steps ---------------------------------------------------------------------------------------------------


def machine(campaign: Campaign) -> Figures:
    """Describe the machine."""
    found: Figures = {
        "mpifl": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "mpi_cuda_aware": cuda_aware(),
        "mps": shutil.which("nvidia-cuda-mps-control") is not None,
        "gpus": [],
    }
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found["gpus"].append({"name": about.name, "bytes": about.total_memory})
    return found


def tests(campaign: Campaign) -> Figures:
    """Run the tests that are skipped without a GPU."""
    root = Path(__file__).parents[2]
    report = campaign.folder / "tests.xml"
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--junitxml", str(report)]
    files = [str(root / file) for file in (TESTS[:1] if campaign.rehearsed else TESTS)]
    if campaign.rehearsed:
        words += ["-k", "main_memory or no_tensor"]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(root), *words, *files]
    code, said = campaign.told(command, "tests", campaign.left * 0.4)
    if not report.is_file():
        raise UserError("tests", f"exit code {code}", _reason(said))
    cases = [*ElementTree.parse(report).iter("testcase")]
    kinds = {kind: [c.get("name") for c in cases if c.find(kind) is not None] for kind in _NOT_PASSED}
    failed = sorted(str(name) for kind in ("failure", "error") for name in kinds[kind])
    passed = len(cases) - sum(map(len, kinds.values()))
    return {"passed": passed, "failed_tests": failed, "skipped": len(kinds["skipped"]), "exit_code": code}


_NOT_PASSED = ("failure", "error", "skipped")


def digests(campaign: Campaign) -> Figures:
    """Compare the digests of 1, 2 and 3 ranks; check that ranks take GPUs in turn, workers first."""
    found, gpus = {}, torch.cuda.device_count()
    for ranks in (1, 2, 3):
        read = campaign.mpifl(ranks, f"digest-{ranks}", "bench/w1", *TINY, share=0.3)
        found[str(ranks)] = read["summary"]["digest"]
        places = [place["device"] for place in read["environment"]["processes"]]
    in_turn = ["cpu"] * 3 if campaign.rehearsed else [f"cuda:{i % gpus}" for i in (2, 0, 1)]
    equal = len(set(found.values())) == 1
    return {"digests": found, "equal": equal, "devices": places, "in_turn": places == in_turn}


def memory_of_mpi(campaign: Campaign) -> Figures:
    """Let MPI read sums from the GPU's memory; the digest should be the same as with copies in main memory.

    If MPI is not CUDA-aware, `device` is refused and `auto` uses main memory.
    """
    found: Figures = {}
    for kind in ("main", "auto", "device"):
        options = [*TINY, "--system.mpi_memory", kind]
        try:
            read = campaign.mpifl(3, f"memory-{kind}", "bench/w1", *options, share=0.4)
        except UserError as error:
            if kind != "device" or found["auto"]["used"] == "device":
                raise
            found[kind] = {"refused": str(error)[:LONGEST]}
            continue
        found[kind] = {
            "digest": read["summary"]["digest"],
            "used": read["environment"]["mpi_memory"],
            "wall_seconds": read["summary"]["wall_seconds"],
        }
    digests = {one["digest"] for one in found.values() if "digest" in one}
    return {**found, "equal": len(digests) == 1}


def speed(name: str) -> Callable[[Campaign], Figures]:
    """Return the step that measures a workload and the loop of one client at a time on the same GPU."""

    def step(campaign: Campaign) -> Figures:
        workload = WORKLOADS[name]
        known = WAYS_OF_SMALL if name in SMALL else WAYS_OF_LARGE
        ways = [way for way in known if not (campaign.rehearsed and "graphs" in way)]
        folder, limit = campaign.folder / name, max(LEAST_S, campaign.left * 0.4)
        folder.mkdir()
        loop = ["-m", "mpifl.benchmarks.plain_loop", "SOCKET", "1", workload.config, campaign.device]
        less = REHEARSED if campaign.rehearsed else []
        config = load(workload.config, less)
        prepare(config.data, config.seed.data, download=False)  # the loop only reads prepared data
        commands = {"loop": [sys.executable, *loop, *less]}
        for way in ways:
            words = ["mpifl.benchmarks.job", "SOCKET", workload.config, *campaign.options, *WAYS[way]]
            commands[way] = [*mpirun(2), *words]
        jobs: dict[str, Job] = {}

        def start(name: str) -> None:
            jobs[name] = Job(name, commands[name], {}, folder, limit)
            jobs[name].stop()  # until its first turn

        try:
            with ThreadPoolExecutor(len(commands)) as pool:  # a start takes seconds of imports
                starts = {name: pool.submit(start, name) for name in commands}
            failed = {name: str(s.exception())[:LONGEST] for name, s in starts.items() if s.exception()}
            starts["loop"].result()  # raises: without it there is nothing to compare with
            jobs = {name: jobs[name] for name in commands if name in jobs}
            for way in [way for way in jobs if way != "loop"]:
                try:
                    jobs[way].turn(1)  # if one way fails on this GPU, the others are still measured
                except UserError as error:
                    failed[way] = str(error)[:LONGEST]
                    jobs.pop(way).end()
            turns = 1 if campaign.rehearsed else 3
            taken = take_turns(jobs, 0.0 if campaign.rehearsed else 1.0, turns)
        finally:
            for job in jobs.values():
                job.end()
        seconds = {way: median(map(_per_round, taken[way])) for way in jobs}
        ratio = {
            way: ratios(taken["loop"], taken[way], _per_round)["median"] for way in jobs if way != "loop"
        }
        return {"seconds_per_round": seconds, "times_the_loop": ratio, "ways_that_failed": failed}

    step.__doc__ = f"Rounds of {name} beside the loop on the same GPU."
    return step


def _per_round(turn: Figures) -> float:
    return float(turn["seconds"]) / float(turn["rounds"])


def sharing(campaign: Campaign) -> Figures:
    """Measure 1, 2 and 4 workers that share the GPU, without and with MPS."""
    found: Figures = {}
    with _mps(campaign) as started:
        for mps in (False, True):
            if mps and started is None:
                found["with MPS"] = "nvidia-cuda-mps-control is not here, or did not start"
                continue
            variables = started if mps and started else {}
            found["with MPS" if mps else "without MPS"] = {
                str(workers): _round_seconds(campaign, workers, variables, mps)
                for workers in ((1, 2) if campaign.rehearsed else (1, 2, 4))
            }
    return found


def _round_seconds(campaign: Campaign, workers: int, variables: dict[str, str], mps: bool) -> float:
    """Return seconds per round of W1 with some workers."""
    folder = campaign.folder / f"sharing-{workers}-{'mps' if mps else 'plain'}"
    folder.mkdir()
    options = [*campaign.options, *WAYS["one by one"]]
    words = ["mpifl.benchmarks.job", "SOCKET", WORKLOADS["W1"].config, *options]
    limit = max(LEAST_S, campaign.left * 0.3)
    job = Job("job", [*mpirun(workers + 1), *words], variables, folder, limit)
    try:
        job.turn(1)
        rounds = 2 if campaign.rehearsed else 10
        return float(job.turn(rounds)["seconds"]) / rounds
    finally:
        job.end()


@contextmanager
def _mps(campaign: Campaign) -> Iterator[dict[str, str] | None]:
    """Start a CUDA MPS daemon of our own and stop it; yield the environment of its clients, or None."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None or campaign.rehearsed:
        yield None
        return
    with tempfile.TemporaryDirectory() as place:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{place}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{place}/log"}
        for folder in variables.values():
            Path(folder).mkdir()
        around = {**os.environ, **variables}
        end = subprocess.run([program, "-d"], env=around, capture_output=True, timeout=30)
        try:
            yield variables if end.returncode == 0 else None
        finally:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([program], input=b"quit\n", env=around, capture_output=True, timeout=30)


def compiled(campaign: Campaign) -> Figures:
    """Time the stacked step of ten LeNet-5 models, with and without `torch.compile`."""
    from mpifl.models import MODELS
    from mpifl.training.batched import stacked_gradients

    count, batch = (2, 4) if campaign.rehearsed else (10, 32)
    device = torch.device(campaign.device)
    torch.manual_seed(0)
    module = MODELS["lenet5"]().build((1, 28, 28), 10).to(device)
    weights = {k: v.detach().expand(count, *v.shape).clone() for k, v in module.named_parameters()}
    x = torch.randn(count, batch, 1, 28, 28, device=device)
    y = torch.randint(0, 10, (count, batch), device=device)

    share = torch.full((count, batch), 1.0 / batch, device=device)
    gradients = stacked_gradients(module, partial(torch.nn.functional.cross_entropy, reduction="none"))

    def step(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        grads, _ = gradients(own, {}, x, y, share)
        return {name: own[name] - 0.01 * grads[name] for name in own}

    began = perf_counter()
    faster = torch.compile(step, backend="eager" if campaign.rehearsed else "inductor")
    plain, other = step(weights), faster(weights)
    _wait(device)
    compiling = perf_counter() - began
    apart = max(float((plain[name] - other[name]).abs().max()) for name in plain)
    times = {"plain": [], "compiled": []}  # type: dict[str, list[float]]
    for _ in range(3):
        for name, take in (("plain", step), ("compiled", faster)):
            steps, own = 2 if campaign.rehearsed else 50, weights
            start = perf_counter()
            for _ in range(steps):
                own = take(own)
            _wait(device)
            times[name].append((perf_counter() - start) / steps)
    each = {name: median(seconds) for name, seconds in times.items()}
    return {
        "seconds_per_step": each,
        "faster": each["plain"] / each["compiled"],
        "seconds_to_compile": compiling,
        "largest_difference": apart,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Step:
    """A part of the campaign.

    Attributes:
        what: description in a few words.
        goal: expected outcome; empty for none.
        run: takes the measurement and returns its figures.
        met: whether figures meet the goal; None without a goal.
    """

    what: str
    goal: str
    run: Callable[[Campaign], Figures]
    met: Callable[[Figures], bool] | None = None


def _best(figures: Figures) -> float:
    counted = [times for way, times in figures["times_the_loop"].items() if way not in NOT_COUNTED]
    return float(max(counted, default=0.0))


def _same_in_turn(figures: Figures) -> bool:
    return bool(figures["equal"] and figures["in_turn"])


STEPS = {
    "machine": Step("the machine", "", machine),
    "tests": Step("tests that skip without a GPU", "none fails", tests, lambda f: not f["failed_tests"]),
    "digests": Step("1, 2 and 3 ranks", "equal digests, a GPU each in turn", digests, _same_in_turn),
    "W1": Step("W1 beside the loop", "10 times as fast", speed("W1"), lambda f: _best(f) >= 10),
    "W3": Step("W3 beside the loop", "10 times as fast", speed("W3"), lambda f: _best(f) >= 10),
    "W2": Step("W2 beside the loop", "10 times as fast", speed("W2"), lambda f: _best(f) >= 10),
    "W5": Step("W5 beside the loop", "0.8 of its throughput", speed("W5"), lambda f: _best(f) >= 0.8),
    "memory": Step("MPI reads the GPU's memory", "equal digests", memory_of_mpi, lambda f: bool(f["equal"])),
    "sharing": Step("workers that share the GPU", "", sharing),
    "compiled": Step("torch.compile of the stacked step", "", compiled),
}
SLOW_TO_REHEARSE = ("W2", "W5")


# -- the whole campaign --------------------------------------------------------------------------------------


class Utilisation(threading.Thread):
    """Reads the GPU's utilisation and memory once a second, until `done`."""

    QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.percent: list[float] = []
        self.mebibytes: list[float] = []

    def run(self) -> None:
        """Read until `done` is set."""
        while shutil.which("nvidia-smi") and not self.done.wait(1.0):
            with suppress(OSError, ValueError, subprocess.TimeoutExpired):
                said = subprocess.run(self.QUERY, capture_output=True, text=True, timeout=5).stdout
                percent, mebibytes = said.splitlines()[0].split(",")
                self.percent.append(float(percent))
                self.mebibytes.append(float(mebibytes))

    def figures(self) -> Figures:
        """Return mean utilisation in percent and peak memory in bytes; empty if nothing was read."""
        if not self.percent:
            return {}
        mean = sum(self.percent) / len(self.percent)
        return {"gpu_percent": mean, "gpu_bytes": int(max(self.mebibytes) * 2**20)}


def run_campaign(campaign: Campaign, names: Sequence[str], say: Callable[[str], None] = print) -> Figures:
    """Run steps of a campaign, write its results after each, and return them.

    Args:
        campaign: the campaign, which receives the results.
        names: names of the steps.
        say: reports progress.
    """
    campaign.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        step, began, watch = STEPS[name], perf_counter(), Utilisation()
        say(f"{name}: {step.what}; {campaign.left:.0f} s are left")
        if campaign.left < LEAST_S:
            campaign.results[name] = {"not_run": "no time was left"}
        else:
            watch.start()
            try:
                found = step.run(campaign)
                met = None if step.met is None or campaign.rehearsed else step.met(found)
                campaign.results[name] = {**found, "goal": step.goal, "met": met}
            except (UserError, RuntimeError, OSError, ValueError, KeyError) as error:
                said = f"{type(error).__name__}: {error}".replace("\0", "").splitlines()[0]
                campaign.results[name] = {"failed": said[:LONGEST]}
            watch.done.set()
            campaign.results[name] |= {"seconds": round(perf_counter() - began, 2), **watch.figures()}
        _write(campaign)
    return campaign.results


def _write(campaign: Campaign) -> None:
    about = {"rehearsal": campaign.rehearsed, "steps": campaign.results}
    (campaign.folder / "gpu-campaign.json").write_text(json.dumps(about, indent=1) + "\n")
    (campaign.folder / "gpu-campaign.md").write_text(page(campaign))


def page(campaign: Campaign) -> str:
    """Return the results as a page of Markdown."""
    title = "rehearsal on the CPU: no figure of it is a GPU's" if campaign.rehearsed else "results"
    out = [f"# GPU campaign: {title}", "", "| step | goal | outcome | seconds | GPU busy | GPU memory |"]
    out.append("|---|---|---|---|---|---|")
    for name, found in campaign.results.items():
        step = STEPS[name]
        busy = f"{found['gpu_percent']:.0f} %" if "gpu_percent" in found else ""
        memory = f"{found['gpu_bytes'] / 1e9:.1f} GB" if "gpu_bytes" in found else ""
        cells = (step.what, step.goal, _outcome(found), str(found.get("seconds", "")), busy, memory)
        out.append(f"| {' | '.join(cells)} |")
    for name, found in campaign.results.items():
        out += ["", f"## {STEPS[name].what}", "", "```json", json.dumps(found, indent=1), "```"]
    return "\n".join(out) + "\n"


def _outcome(found: Figures) -> str:
    for key in ("failed", "not_run"):
        if key in found:
            return f"{key.replace('_', ' ')}: {found[key]}".replace("|", "/")
    return {True: "met", False: "**not met**", None: "measured"}[found.get("met")]


def main(words: Sequence[str]) -> int:
    """Run the campaign that a command line asks for; return the exit code."""
    parser = argparse.ArgumentParser("gpu-campaign", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="a new folder for the results")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny work")
    most = f"in all (default: {SECONDS:.0f}, in a rehearsal {REHEARSAL_S:.0f})"
    parser.add_argument("--seconds", type=float, help=most)
    parser.add_argument("--steps", default="", help=f"some of {', '.join(STEPS)}; commas between them")
    args = parser.parse_args(words)
    names = args.steps.split(",") if args.steps else [*STEPS]
    try:
        unknown = [name for name in names if name not in STEPS]
        require(not unknown, "--steps", ", ".join(unknown), f"use some of {', '.join(STEPS)}")
        folder = Path(args.folder)
        require(not folder.exists(), "FOLDER", args.folder, "is there already; name a new one")
        there = torch.cuda.is_available()
        require(there or args.rehearse, "device", "cuda", "there is no GPU: --rehearse takes the CPU")
    except UserError as error:
        print(f"gpu-campaign: {error}", file=sys.stderr)
        return 2
    if args.rehearse and not args.steps:
        names = [name for name in names if name not in SLOW_TO_REHEARSE]
    seconds = args.seconds or (REHEARSAL_S if args.rehearse else SECONDS)
    campaign = Campaign(folder.resolve(), "cpu" if args.rehearse else "cuda", seconds)
    results = run_campaign(campaign, names, lambda line: print(line, flush=True))
    print(f"results: {campaign.folder / 'gpu-campaign.md'}")
    return int(any("failed" in found or found.get("met") is False for found in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
