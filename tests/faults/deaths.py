"""Runs in which ranks die, and what they must come to."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import toy

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "tiny.yaml"
VICTIM = HERE / "victim.py"
FEW = ["--cohort_size", "5", "--rounds", "16", "--delay", "{name: exponential, mean_s: 2}"]
JOINS = ["--rounds", "5", "--newcomers", "{share: 0.4, joins: 3}"]
HALF = ["--participation", "0.5", "--rounds", "8"]
CCFL = (
    "{name: ccfl, clusters: 2, clients: 8, smallest: 20, largest: 40, test_images: 20, public: 40, exam: 40}"
)
BARS = "bar_loss: -1, bar_gap: -1, bar_distance: -1, pretrain_epochs: 1"
CODED = "{dtype: bfloat16, compression: {name: top_k, share: 0.1}, error_feedback: true}"
RUNS: dict[str, list[str]] = {
    "fedavg": HALF,
    "scaffold": ["--algorithm", "scaffold", *HALF, "--payload", CODED],
    "cfl": ["--algorithm", "{name: cfl, warmup: 1, eps1: 100, eps2: 0}", *HALF],
    "ucfl": ["--algorithm", "ucfl", *HALF],
    "emdcfl": ["--algorithm", "{name: emdcfl, sample_cap: 16}", *HALF],
    "newcomers": ["--algorithm", "{name: pca_km_hc, components: 16}", *JOINS],
    "fedbuff": ["--algorithm", "fedbuff", "--policy", "{name: buffer, size: 3}", *FEW],
    "scaffold-events": ["--algorithm", "scaffold", "--policy", "{name: buffer, size: 2}", *FEW],
    "look-events": [
        *("--algorithm", "{name: emdcfl, sample_cap: 16}", "--policy", "every_arrival", *FEW),
        *("--network.uplink_bytes_s", "9kB/s", "--costs", "all"),
    ],
    "again-events": [
        *("--algorithm", "{name: fedclust, num_clusters: 2}", "--policy", "{name: buffer, size: 2}", *FEW),
        *("--recluster", "{visits: 2, loss_rise: 0.3}", "--drift", "{kind: swap, at_s: [4], share: 0.5}"),
    ],
    "again": [
        *("--algorithm", "{name: flexcfl, num_groups: 2}", *HALF, "--recluster", "{seconds: 3}"),
        *("--drift", "{kind: swap, at_s: [2, 4], share: 0.5}", "--leavers", "{share: 0.2, leaves: 5}"),
    ],
    "split-events": [
        *("--algorithm", "{name: cfl, warmup: 4, eps1: 100, eps2: 0, max_age: null}", *FEW),
        *("--policy", "every_arrival"),
    ],
    "ccfl": [
        *("--algorithm", f"{{name: ccfl, {BARS}}}", "--policy", "client_decides", "--rounds", "24"),
        *("--data.scenario", CCFL),
    ],
}
RUNS |= {
    "hosted": [*RUNS["scaffold"], "--system.hosting", "groups"],
    "hosted-rows": [*RUNS["ucfl"], "--system.hosting", "groups"],
    "hosted-events": [*RUNS["scaffold-events"], "--system.hosting", "groups"],
}
HOSTED = ("hosted", "hosted-rows")
SYNCHRONOUS = (*HOSTED, "fedavg", "scaffold", "cfl", "ucfl", "emdcfl", "newcomers", "again")
ROUNDS_CALLS = ("scatter", "gather", "barrier", "Bcast", "Reduce", "train")
EVENTS_CALLS = ("poll", "isend", "train", "gather")
ULFM = ("--with-ft", "ulfm")

Plan = Sequence[dict[str, Any]]
Run = Callable[..., subprocess.CompletedProcess[str]]


def plan_of(rng: random.Random, name: str, ranks: int, victims: int) -> list[dict[str, Any]]:
    """Return who dies, and in which call: after the start, before the end."""
    calls, plan = ROUNDS_CALLS if name in SYNCHRONOUS else EVENTS_CALLS, []
    for rank in rng.sample(range(1, ranks), victims):
        call = rng.choice(calls)
        lowest = {"scatter": 14, "gather": 8, "Bcast": 1, "poll": 4}.get(call, 1)
        most = {"scatter": 10, "gather": 6, "poll": 400, "isend": 6, "Bcast": 5}.get(call, 6)
        nth, number = lowest + rng.randrange(most), rng.choice((9, 9, 19))  # killed or stopped
        plan.append({"rank": rank, "call": call, "nth": nth, "signal": number})
    return plan


def arguments(folder: Path, run_id: str, name: str, cache: Path) -> list[str]:
    """Return the command line of a run."""
    place = ["--output.folder", str(folder), "--output.id", run_id, "--data.cache", str(cache)]
    return ["run", str(CONFIG), "--quiet", *place, *RUNS[name]]


def digest(folder: Path, run_id: str) -> str:
    """Return the digest of a complete run."""
    return str(json.loads((folder / f"tiny-{run_id}" / "summary.json").read_text())["digest"])


def lost(folder: Path, run_id: str) -> list[str]:
    """Return the ranks that a complete run has lost."""
    return json.loads((folder / f"tiny-{run_id}" / "summary.json").read_text()).get("ranks_lost", [])


def launch(
    mpirun: Run, ranks: int | None, plan: Plan, *rest: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run mpifl with victims among its ranks; if some stop, they are ended after two seconds."""
    return launch_all(mpirun, ranks, [(plan, rest)], **options)


def launch_all(
    mpirun: Run, ranks: int | None, jobs: Sequence[tuple[Plan, Sequence[str]]], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run several configurations in one job, each with victims of its own."""
    stopped = ["--system.stopped_timeout_s", "2"]
    asked = [
        [plan, [*words, *(stopped if any(p.get("signal") == signal.SIGSTOP for p in plan) else ())]]
        for plan, words in jobs
    ]
    env = toy.PYTHONPATH | options.pop("env", {})
    return mpirun(ranks, VICTIM, json.dumps(asked), env=env, timeout=300, **{"fresh": True} | options)
