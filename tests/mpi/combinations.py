"""Settings drawn at random, and the program that runs them: `mpirun -n P python combinations.py FOLDER WHAT`.

A combination is a configuration for eight or nine clients of the digits, in rounds, asynchronous, or with
data that drift: any method, with any mixture of policy, delays, network, availability, devices, optimiser,
payload, privacy, attack, defence and evaluation, and clients that diverge. Many are refused, which is to be
told in one line.

FOLDER/drawn.json holds a list of them. WHAT is `run`, `stop` (each ends after a few steps, its state written)
or `resume`. FOLDER/WHAT.json gets what became of each: `ok`, `stopped`, or the message of a refusal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import yaml

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support.cases import CASES
from support.runs import CONFIG

Tree = dict[str, Any]
SLOW = {"flt"}  # UMAP compiles for ten seconds
METHODS = [{"name": name, **options} for name, options in CASES if name not in SLOW]
DRIFTING = ("ccfl", "fedsoft_async", "fedavg", "ditto", "fedasync", "local", "scaffold", "fedem")
FAST_BARS = {"bar_loss": -1.0, "bar_gap": -1.0, "bar_distance": -1.0, "pretrain_epochs": 1}


def draw(seed: int, count: int) -> list[Tree]:
    """Return combinations; those of a seed are the same, however many there are.

    Args:
        seed: of all.
        count: how many.
    """
    return [Drawn(Random(f"{seed}/{number}")).tree for number in range(count)]


class Drawn:
    """One combination.

    Args:
        random: draws it.

    Attributes:
        rounds: whether the server works in rounds.
        tree: the configuration, without what is the same in all.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        kind = random.choice((self.in_rounds, self.in_rounds, self.asynchronous, self.drifting))
        self.tree: Tree = {"seed": random.randrange(5)}
        self.rounds = kind == self.in_rounds
        kind()
        if self.chance(0.5) and self.tree["policy"]["name"] != "drawn_staleness":
            self.times()
        self.training()
        self.sending()
        self.judging()

    def chance(self, share: float) -> bool:
        """Return True in a share of the cases."""
        return self.random.random() < share

    def some(self, share: float, **settings: list[Any]) -> None:
        """Give each of some settings one of its values, in a share of the cases."""
        for key, values in settings.items():
            if self.chance(share):
                self.tree[key] = self.random.choice(values)

    def in_rounds(self) -> None:
        """Take rounds, of all clients or some."""
        policies = [
            *({"name": "rounds"},) * 3,
            {"name": "over_selection", "extra": 0.5, "late": "sent", "deadline_s": 1.5},
            {"name": "over_selection", "extra": 0.5, "late": "stopped"},
            {"name": "partial_work", "deadline_s": 0.4, "stragglers": 0.5, "unit": "steps"},
            {"name": "partial_work", "stragglers": 0.6, "unit": "epochs"},
        ]
        self.tree |= {"algorithm": self.random.choice(METHODS), "rounds": self.random.choice((3, 4, 5))}
        self.tree["policy"] = self.random.choice(policies)
        self.some(0.6, cohort_size=[1, 2, 3, 4, 5])
        self.some(0.15, newcomers=[{"share": 0.3, "joins": 2}, {"share": 0.3, "joins": 3}])
        self.split()

    def asynchronous(self) -> None:
        """Let the server act on uploads as they come."""
        self.tree |= {"algorithm": self.random.choice(METHODS), "rounds": self.random.choice((6, 9))}
        self.tree["cohort_size"] = self.random.choice((2, 3, 4))
        self.tree["policy"] = self.policy()
        self.split()

    def drifting(self) -> None:
        """Take a scenario whose data change with each visit."""
        name = self.random.choice(DRIFTING)
        self.tree |= {"algorithm": {"name": name, **(FAST_BARS if name == "ccfl" else {})}, "rounds": 9}
        scenario = {"name": "ccfl", "clusters": 2, "clients": 8, "smallest": 20, "largest": 40}
        scenario |= {"test_images": 20, "public": 40, "exam": self.random.choice((0, 40))}
        self.tree["data"] = {"source": "digits", "scenario": scenario}
        self.tree |= {"cohort_size": self.random.choice((2, 3, 4)), "policy": self.policy()}

    def policy(self) -> Tree:
        """Return when an asynchronous server acts."""
        uploads = ["one_each_step", "when_done", {"name": "rates", "mean_s": 2}]
        policies = [
            {"name": "barrier"},
            {"name": "every_arrival"},
            {"name": "buffer", "size": 2},
            {"name": "waves", "size": 2},
            {"name": "waves", "every_s": 0.7},
            {"name": "drawn_staleness", "most": 3},
            {"name": "client_decides", "uploads": self.random.choice(uploads)},
        ]
        policy: Tree = self.random.choice(policies)
        if self.chance(0.3) and policy["name"] not in ("barrier", "drawn_staleness"):
            policy["max_staleness"] = self.random.choice((0, 1, 4))
        return policy

    def split(self) -> None:
        """Deal the digits otherwise than by rotation, now and then."""
        scenarios = [
            {"name": "dirichlet", "clients": 9, "alpha": 0.05},  # clients with next to nothing
            {"name": "dirichlet", "clients": 9, "alpha": 0.5, "validation": 0.2},
            {"name": "powerlaw", "clients": 9, "exponent": 2.0, "validation": 0.2},
        ]
        if self.chance(0.4):
            self.tree["data"] = {"scenario": self.random.choice(scenarios)}
        elif self.chance(0.15):
            self.tree["data"] = {"scenario": {"resize": 16}}
            self.tree["model"] = {"name": "lenet5", "lora": {"rank": 2}}

    def times(self) -> None:
        """Say how long clients take, and when they can be reached."""
        delays = [{"name": name} for name in ("constant", "exponential", "tiers", "uniform")]
        link = {"name": "links", "uplink_bytes_s": 9000}
        networks = [{**link, "downlink_bytes_s": 20000, "latency_s": 0.05, "spread": 0.5}, {"name": "tiers"}]
        hours = [{"on_s": 3, "off_s": 2}, {"profile": [1, 0.3], "day_s": 4, "spread_s": 2}]
        self.some(0.8, delay=delays)
        self.some(0.4, network=[*networks, {**link, "cast": "group"}, {**link, "server_bytes_s": 30000}])
        self.some(0.3, availability=hours)
        classes = {"a": {"share": 0.25, "speed": 2}, "b": {"share": 0.75, "availability": hours[0]}}
        self.some(0.25, devices=[{"name": "classes", "classes": classes}])

    def training(self) -> None:
        """Say how clients train."""
        local: Tree = {}
        if self.chance(0.2):
            local |= {"keep_optimizer": True, "momentum": 0.9}
        elif self.chance(0.2):
            local |= {"optimizer": "adam", "lr": 0.01}
        local |= {"steps": self.random.choice((1, 3, 20))} if self.chance(0.2) else {}
        local |= {"lr_decay": 0.9} if self.chance(0.15) else {}
        self.tree["local"] = local
        self.some(0.2, per_client=[{"0-1": {"epochs": 2}, "2": {"batch_size": 8, "lr": 0.05}}])
        if self.chance(0.15):  # client 2 diverges, and is left out
            self.tree |= {"on_client_error": "drop", "per_client": {"2": {"lr": 1e30}}}
        system = {"stack": self.random.choice((2, 3))} if self.rounds and self.chance(0.25) else {}
        system |= {"collective": self.random.choice(("reduce", "gather"))} if self.chance(0.15) else {}
        self.tree["system"] = system

    def sending(self) -> None:
        """Say what becomes of what is sent: formats, noise, masks, attacks and defences."""
        kinds = [{"name": "top_k", "share": 0.05}, {"name": "random_k"}, {"name": "qsgd", "bits": 4}]
        small = [{"dtype": "float16", "compression": kind, "error_feedback": True} for kind in kinds]
        central = {"name": "central", "clip": 0.5, "noise_multiplier": 0.3}
        masks = {"name": "masks", "bits": 32, "dropout": 0.3, "threshold": 0.5}
        attacks = [{"name": "label_flip", "share": 0.25}, {"name": "sign_flip", "clients": [1], "factor": 2}]
        defences = ["median", "geometric_median", {"name": "krum", "f": 1}, {"name": "norm_bound"}]
        self.some(0.2, payload=[*small, {"dtype": "bfloat16", "header_bytes": 7}])
        noise = [central, {**central, "sampling": "poisson"}] if self.rounds else []
        self.some(0.15, privacy=[*noise, {"name": "local", "clip": 0.5}])
        self.some(0.1, secure_aggregation=[masks, {**masks, "bits": 64, "neighbours": 2}])
        self.some(
            0.15, attack=[*attacks, {"name": "scale", "clients": [2]}, {"name": "noise", "clients": [0]}]
        )
        self.some(0.15, robust=defences)

    def judging(self) -> None:
        """Say when and how models are evaluated, and what is written."""
        judged = {"every": self.random.choice((0, 1, 2)), "at_start": self.chance(0.3)}
        choices = {"clients": 3, "train": True, "finetune_epochs": 1, "distances": self.rounds}
        judged |= {key: value for key, value in choices.items() if self.chance(0.1)}
        self.tree["evaluation"] = judged
        written = {"updates": self.rounds, "client_models": True}
        self.tree["output"] = {key: value for key, value in written.items() if self.chance(0.15)}


def whole(tree: Mapping[str, Any], folder: Path, name: str) -> Tree:
    """Return the configuration of a combination: that of the tiny run, with what was drawn.

    Args:
        tree: drawn.
        folder: of the runs.
        name: of the run's folder, after the configuration's name.
    """
    from mpifl.experiment.loader import merged

    output = {"output": {"folder": str(folder), "id": name}, "data": {"cache": str(folder / "cache")}}
    return merged(merged(yaml.safe_load(CONFIG.read_text()), tree), output)


def main(folder: Path, what: str) -> None:
    """Run, stop or resume all combinations on the ranks of this job."""
    from mpifl.core.errors import Stopped, UserError
    from mpifl.experiment import loader
    from mpifl.experiment.run import run
    from mpifl.experiment.schema import Config, check_sections
    from mpifl.runtime.hook_errors import ClientError
    from mpifl.runtime.script import connected, on_all_ranks

    ended: dict[str, str] = {}
    drawn = json.loads((folder / "drawn.json").read_text())
    before = json.loads((folder / "stop.json").read_text()) if what == "resume" else {}

    def work(transport: Any, number: int) -> None:
        options: dict[str, Any] = {}
        if what == "resume":
            options["resumed"] = folder / f"tiny-{number}"
            tree = yaml.safe_load((options["resumed"] / "config.yaml").read_text())
        else:
            tree = whole(drawn[number], folder, str(number))
        if what == "stop":
            polls = iter(range(2 + number % 3))
            options["asked_to_stop"] = lambda: next(polls, None) is None
        config = loader.from_tree(Config, tree)
        check_sections(config)
        run(config, transport, quiet=True, **options)

    for number in range(len(drawn)):
        if before.get(str(number), "stopped") != "stopped":
            continue
        if connected().is_server:
            print(f"combination {number}: {json.dumps(drawn[number])}", flush=True)
        try:
            on_all_ranks(f"combination {number}", partial(work, number=number))
            end = "ok"
        except (UserError, ClientError) as error:  # the latter: every client fails
            end = str(error)
        except Stopped:
            end = "stopped"
        ended[str(number)] = end
    if connected().is_server:
        (folder / f"{what}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
