"""Settings drawn at random, and the program that runs them: `python combinations.py FOLDER COUNT [SEED]`.

A combination is a configuration for six to nine clients in rounds, asynchronous, or with data that drift: any
method, with any mixture of data, task, model, policy, delays, network, availability, devices, optimiser,
payload, privacy, attack, defence and evaluation, and clients that diverge. What is refused before training is
repaired: the section that the refusal names is left out, and the rest is tried again.

Each stage is a start of this program, `combinations.py FOLDER --stage WHAT`, on one rank or three.
FOLDER/drawn.json holds the trees, FOLDER/WHAT.jsonl gets what became of each: one line when it begins, one
when it ends. A stage that dies is started again after the combination that it died of. FOLDER/files holds the
data and the code of a user, FOLDER/earlier a run from which others start and whose arrivals they repeat.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a program, not a module of pytest

from support import small_files
from support.cases import CASES
from support.runs import CONFIG, assert_same_run

Tree = dict[str, Any]
SLOW = {"flt"}  # UMAP compiles for ten seconds
METHODS = [{"name": name, **options} for name, options in CASES if name not in SLOW]
DRIFTING = ("ccfl", "fedsoft_async", "fedavg", "ditto", "fedasync", "local", "scaffold", "fedem")
FILES = "FILES"  # stands for the folder of the user's files
OWNERS = 9  # in these files
GENERATED: Tree = {"name": "generated", "train": 240, "test": 60, "features": 6, "outputs": 3, "length": 8}
SYNTHETIC: Tree = {"name": "synthetic", "train": 240, "test": 60, "classes": 4}
TABLE: Tree = {"name": "table", "path": "table.csv", "client": "who", "group": "site"}
MLP, TABLE_MLP = {"name": "mlp", "hidden": [8]}, {"name": "table_mlp", "hidden": [8], "embedding": 4}
DROPPING = {"name": "table_mlp", "hidden": [8], "dropout": 0.2}
TRAINERS: list[Tree] = [
    {"name": "torch", "lr": 0.05, "options": {"momentum": 0.9}},
    {"name": "torch", "optimizer": "AdamW", "lr": 0.01, "scheduler": "cosine", "warmup": 0.3},
    {"name": "torch", "optimizer": "RMSprop", "lr": 0.005, "accumulate": 2, "clip_norm": 1.0},
    {"name": f"{FILES}/own.py:Signs"},
]
CUSTOM = {"name": "custom", "path": f"{FILES}/own.py:Net", "head": "head"}
TEXTS = [
    {"name": "transformer", "width": 8, "layers": 1, "heads": 2},
    {"name": "lstm", "embedding": 4, "hidden": 8, "layers": 1},
]
OF_VECTORS = [MLP, TABLE_MLP, DROPPING, CUSTOM, "logistic"]
OF_IMAGES = [MLP, CUSTOM, "lenet5", "ccfl_cnn", "cfl_cnn", "leaf_cnn", "ifca_mlp", "flt_mlp", "resnet20"]
OF_IMAGES += [{"name": "emdcfl_cnn", "channels": [2, 4], "embedding": 8}, {"name": "mlp", "hidden": []}]
FOREST: Tree = {"name": "folder", "path": "pictures", "domains": True, "side": 16}
SPLITS: list[Tree] = [
    {"name": "iid"},
    {"name": "iid", "test": "own"},
    {"name": "dirichlet", "alpha": 0.3, "by": "class"},
    {"name": "shards"},
    {"name": "lognormal"},
    {"name": "powerlaw"},
    {"name": "label_quantity"},
    {"name": "quantile"},
    {"name": "quantile", "groups": 2, "strictness": 0.5},
    {"name": "feature_noise", "groups": 2},
    {"name": "relations"},
    {"name": "composed", "permutations": 2},
    {"name": "rotated", "angles": [0, 90]},
    {"name": "mixed", "groups": [{"name": "iid", "clients": 3}, {"name": "lognormal", "clients": 4}]},
    {"name": "mixed", "groups": [{"clients": 3, "noise": 0.2}, {"name": "powerlaw", "clients": 3}]},
    {
        "name": "mixed",
        "groups": [{"clients": 2}, {"name": "dirichlet", "alpha": 0.2, "clients": 5, "permute_labels": True}],
        "copies": True,
    },
]
NATURAL: list[Tree] = [
    {"name": "natural"},
    {"name": "natural", "test": "own"},
    {"name": "natural", "test": "all"},
]
DEALT: Tree = {"name": "partition", "path": f"{FILES}/split.csv"}
OF_PAPERS: list[Tree] = [  # of ten classes of images
    {"name": "ucfl_a", "points": 240},
    {"name": "ucfl_b", "points": 240, "drawn": True},
    {"name": "ucfl_c", "permutations": 2, "test_images": 20},
    {"name": "ucfl_batch", "points": 240},
    {"name": "flt1", "images": 20},
    {"name": "flt2", "images": 20},
    {"name": "flt4", "classes": 2},
    {"name": "fedcuau", "samples": 20, "test_images": 10, "alphas": [10.0, 0.1]},
    {"name": "emdcfl_mnist"},
    {"name": "emdcfl_backdoor_mnist", "clients": 6},
    {"name": "population", "samples": 20, "test_images": 10},
]
DATA: list[tuple[str, list[Tree], list[Any], list[Tree]]] = [  # task, sources, models, scenarios
    (
        "regression",
        [GENERATED, *({"name": "sklearn", "table": name} for name in ("linnerud", "diabetes"))],
        [*OF_VECTORS[:4], "linear"],
        [*SPLITS, DEALT],
    ),
    ("multi_label", [{**GENERATED, "kind": "multi_hot"}], OF_VECTORS, SPLITS),
    (
        "multi_label",
        [{**TABLE, "target": ["new", "hot"], "labels": "multi_hot"}],
        OF_VECTORS,
        [*SPLITS, *NATURAL],
    ),
    ("regression", [{**TABLE, "target": ["price"]}], [*OF_VECTORS[:4], "linear"], [*SPLITS, *NATURAL]),
    (
        "segmentation",
        [
            {"name": "shapes", "train": 96, "test": 48, "side": 16, "outline": outline}
            for outline in (False, True)
        ],
        [{"name": "fcn", "channels": [4]}, {"name": "unet", "channels": [2, 4], "norm": "batch"}],
        [
            *SPLITS,
            {"name": "rotated", "angles": [0, 45], "clients": 6},
            {"name": "composed", "permutations": 2, "clients": 6},
        ],
    ),
    ("next_token", [{**GENERATED, "kind": "tokens"}], TEXTS, [*SPLITS, {"name": "alphabets", "groups": 2}]),
    (
        "next_token",
        [{"name": "text", "path": "text.txt", "length": 8, "samples": 300}],
        TEXTS,
        [*SPLITS, *NATURAL, {"name": "alphabets", "groups": 2, "moved": 0.5}],
    ),
    (
        "classification",
        [
            {"name": "text", "path": "text.txt", "length": 8, "predict": "last", "samples": 300},
            {"name": "leaf", "path": "play"},
            {"name": "huggingface", "path": "hub", "inputs": "text", "client": "owner", "length": 8},
        ],
        TEXTS,
        [*SPLITS, *NATURAL],
    ),
    (
        "classification",
        [
            {**GENERATED, "kind": "classes"},
            *({"name": "sklearn", "table": name} for name in ("iris", "wine")),
            {"name": "npz", "path": "data.npz"},
            {"name": "dataset", "path": f"{FILES}/own.py:Own"},
        ],
        OF_VECTORS,
        [*SPLITS, DEALT],
    ),
    ("classification", [{**TABLE, "target": ["sold"]}], OF_VECTORS, [*SPLITS, *NATURAL, DEALT]),
    (
        "classification",
        [{**SYNTHETIC, "shape": [1, 16, 16]}, {**SYNTHETIC, "shape": [3, 16, 16]}],
        OF_IMAGES,
        SPLITS,
    ),
    ("classification", [{"name": "mnist"}], OF_IMAGES, [*OF_PAPERS, *SPLITS, DEALT]),
    (
        "classification",
        [{"name": "femnist"}, {"name": "tff"}, FOREST],
        OF_IMAGES,
        [*NATURAL, {"name": "emdcfl_pacs", "per_client": 20}, *SPLITS],
    ),
    ("classification", [{"name": "medmnist", "path": "breastmnist.npz"}], OF_IMAGES, SPLITS),
]
LEFT_OUT = {  # what is never drawn, and why
    "algorithm": SLOW,
    "model": {  # large, or of the size of images that no source here has
        *("flt_cnn_mnist", "flt_cnn_cifar", "resnet18_cifar", "resnet18", "resnet50", "efficientnet_b3"),
        *("vit_b_16", "convnext_base", "huggingface"),
    },
    "local.trainer": {"lightning", "sklearn"},  # of modules of one kind, which few methods train
    "task": {"masked_token", "token_classification"},  # of texts with a tokenizer, as the model huggingface
    "payload.downloads": {"int8", "qsgd", "top_k", "random_k"},  # in runs of their own (support/runs.py)
    "clock": {"wall"},  # real time
    "system.cost": {"measured"},  # real time
    "data.source": {  # downloads in formats of their own; small files of these are read in tests/data
        *("kmnist", "fashionmnist", "emnist", "qmnist", "cifar10", "cifar100", "cifar20", "svhn", "usps"),
        "photos",
    },
    "data.scenario": {"emdcfl_cifar", "emdcfl_backdoor_cifar", "flt3"},  # of cifar10 and of emnist's letters
}
EARLIER: Tree = {  # all clients use one model, and uploads come one by one
    "algorithm": "fedasync",
    "rounds": 12,
    "cohort_size": 3,
    "policy": "every_arrival",
    "delay": "exponential",
}
EARLIER_RUN = f"{FILES}/../earlier/tiny-earlier"
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
        if kind != self.drifting:
            self.changing()

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
        self.some(0.15, newcomers=[{"share": 0.3, "joins": 2}, {"share": 0.3, "joins": 3}])
        self.split()

    def drifting(self) -> None:
        """Take a scenario whose data change with each visit."""
        name = self.random.choice(DRIFTING)
        self.tree |= {"algorithm": {"name": name, **(FAST_BARS if name == "ccfl" else {})}, "rounds": 9}
        scenario = {"name": "ccfl", "clusters": 2, "clients": 8, "smallest": 20, "largest": 40}
        scenario |= {"test_images": 20, "public": 40, "exam": self.random.choice((0, 40))}
        self.tree["data"] = {"source": "digits", "scenario": scenario}
        self.tree |= {"cohort_size": self.random.choice((2, 3, 4)), "policy": self.policy()}
        if self.chance(0.3):
            self.tree["policy"] = {"name": "client_decides", "uploads": {"name": "drift", "threshold": 0.05}}

    def changing(self) -> None:
        """Let the data of some clients change at steps of the run."""
        kinds = ["concept"]
        if "data" not in self.tree:
            kinds += ["swap", "input", "label", "arrival", "split", "merge"]
        if self.chance(0.2):
            drift = {"kind": self.random.choice(kinds), "at": [2], "gradual": self.random.choice((0, 1))}
            if self.chance(0.3):
                drift |= {"at": [2, 3], "gradual": 0, "recurring": True}
            elif self.chance(0.3):
                drift = {"kind": drift["kind"], "at_s": [0.5, 2], "gradual_s": self.random.choice((0, 0.7))}
            self.tree["drift"] = drift
        self.some(0.2, recluster=[{"at": [2]}, {"at": [2, 3]}, {"every": 2}, {"visits": 1}, {"visits": 2}])

    def policy(self) -> Tree:
        """Return when an asynchronous server acts."""
        uploads = ["one_each_step", "when_done", {"name": "rates", "mean_s": 2}]
        uploads += [{"name": "rates", "file": f"{FILES}/means.csv"}]
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
        if self.chance(0.5):
            self.other_data()
        elif self.chance(0.4):
            self.tree["data"] = {"scenario": self.random.choice(scenarios)}
        elif self.chance(0.15):
            self.tree["data"] = {"scenario": {"resize": 16}}
            self.tree["model"] = {"name": "lenet5", "lora": {"rank": 2}}

    def other_data(self) -> None:
        """Take another source, with its task and a small model."""
        task, sources, models, scenarios = self.random.choice(DATA)
        scenario = {**self.random.choice(scenarios), "validation": self.random.choice((0.0, 0.2))}
        if scenario["name"] not in ("mixed", "partition", "natural", "emdcfl_pacs"):
            scenario = {"clients": self.random.choice((6, 7, 9)), **scenario}
        self.tree["data"] = {"source": self.random.choice(sources), "scenario": scenario}
        self.tree |= {"task": task, "model": self.random.choice(models)}

    def times(self) -> None:
        """Say how long clients take, and when they can be reached."""
        names = ("constant", "exponential", "tiers", "uniform", "shifted_exponential", "lognormal")
        delays = [*({"name": name} for name in names), {"name": "measured", "file": f"{FILES}/seconds.csv"}]
        link = {"name": "links", "uplink_bytes_s": 9000}
        networks = [{**link, "downlink_bytes_s": 20000, "latency_s": 0.05, "spread": 0.5}]
        networks += [{"name": name} for name in ("tiers", "wireless-slow", "wireless-fast", "wired")]
        networks += [{"name": "trace", "file": f"{FILES}/links.csv"}]
        hours = [{"on_s": 3, "off_s": 2}, {"profile": [1, 0.3], "day_s": 4, "spread_s": 2}]
        self.some(0.8, delay=delays)
        self.some(0.4, network=[*networks, {**link, "cast": "group"}, {**link, "server_bytes_s": 30000}])
        self.some(0.3, availability=hours)
        classes = {"a": {"share": 0.25, "speed": 2}, "b": {"share": 0.75, "availability": hours[0]}}
        phones = {"name": "measured", "file": f"{FILES}/phones.csv"}
        self.some(0.25, devices=[{"name": "classes", "classes": classes}, phones])
        if not self.rounds:
            self.some(0.1, clock=[{"name": "replay", "trace": f"{EARLIER_RUN}/events.csv"}])

    def training(self) -> None:
        """Say how clients train."""
        local: Tree = {}
        if self.chance(0.2):
            local |= {"keep_optimizer": True, "momentum": 0.9}
        elif self.chance(0.2):
            local |= {"optimizer": "adam", "lr": 0.01}
        local |= {"steps": self.random.choice((1, 3, 20))} if self.chance(0.2) else {}
        local |= {"lr_decay": 0.9} if self.chance(0.15) else {}
        local |= {"milestones": [1, 2], "gamma": 0.5} if self.chance(0.1) else {}
        local |= {"weight_decay": 0.01} if self.chance(0.1) else {}
        local |= {"augment": "crop_flip"} if self.chance(0.05) else {}
        local |= {"epochs": self.random.choice((0, 2))} if self.chance(0.1) else {}
        if self.chance(0.12):
            kept = ("steps", "epochs", "lr_decay", "milestones", "gamma", "augment")
            local = {name: value for name, value in local.items() if name in kept}
            local["trainer"] = self.random.choice(TRAINERS)
        self.tree["local"] = local
        self.some(0.2, per_client=[{"0-1": {"epochs": 2}, "2": {"batch_size": 8, "lr": 0.05}}])
        if self.chance(0.15):  # client 2 diverges, and is left out
            self.tree |= {"on_client_error": "drop", "per_client": {"2": {"lr": 1e30}}}
        system = {"stack": self.random.choice((2, 3))} if self.rounds and self.chance(0.25) else {}
        system |= {"collective": self.random.choice(("reduce", "gather"))} if self.chance(0.15) else {}
        system |= {"cost": "given"} if self.chance(0.05) else {}
        system |= {"placement_seed": 3} if self.chance(0.05) else {}
        if self.tree["algorithm"] in ("emdcfl", {"name": "emdcfl"}) and self.chance(0.5):
            system |= {"exchange": "local"}
        if not system.keys() & {"stack", "placement_seed"} and self.chance(0.1):
            system |= {"hosting": "groups"}
        self.some(0.1, start=[{"run": EARLIER_RUN}, {"run": EARLIER_RUN, "part": "body"}])
        self.tree["system"] = system

    def sending(self) -> None:
        """Say what becomes of what is sent: formats, noise, masks, attacks and defences."""
        kinds = [
            {"name": "top_k", "share": 0.05},
            {"name": "random_k"},
            {"name": "qsgd", "bits": 4},
            {"name": "int8"},
        ]
        small = [{"dtype": "float16", "compression": kind, "error_feedback": True} for kind in kinds]
        central = {"name": "central", "clip": 0.5, "noise_multiplier": 0.3}
        masks = {"name": "masks", "bits": 32, "dropout": 0.3, "threshold": 0.5}
        attacks = [{"name": "label_flip", "share": 0.25}, {"name": "sign_flip", "clients": [1], "factor": 2}]
        defences = ["median", "geometric_median", {"name": "krum", "f": 1}, {"name": "norm_bound"}]
        defences += [{"name": "trimmed_mean", "beta": 0.2}, {"name": "multi_krum", "f": 1}]
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
        if self.chance(0.15):
            judged["matrices"] = self.random.choice((["angles"], ["gradients"], ["parameters", "angles"]))
        if self.chance(0.1):
            judged["metrics"] = [f"{FILES}/own.py:spread"]
        if self.chance(0.15):
            judged["by"] = self.random.choice((["group"], ["cluster"], ["device"]))
        self.tree["evaluation"] = judged
        written = {"updates": self.rounds, "client_models": True}
        self.tree["output"] = {key: value for key, value in written.items() if self.chance(0.15)}
        self.tree["output"] |= {"clients": self.random.choice(("sample", "none"))} if self.chance(0.1) else {}
        self.some(0.1, checkpoint=[{"every": 1}, {"every": 2, "keep": 1}])


def whole(tree: Mapping[str, Any], folder: Path, name: str) -> Tree:
    """Return the configuration of a combination: that of the tiny run, with what was drawn.

    Args:
        tree: drawn.
        folder: of the runs.
        name: of the run's folder, after the configuration's name.
    """
    from mpifl.experiment.loader import merged

    files = folder.parent / "files"
    mine: Tree = json.loads(json.dumps(tree).replace(FILES, str(files)))
    place = {"output": {"folder": str(folder), "id": name}}
    place["data"] = {"cache": str(folder / "cache"), "root": str(files)}
    return merged(merged(yaml.safe_load(CONFIG.read_text()), mine), place)


# -- one combination -----------------------------------------------------------------------------------------

MOST_REPAIRS = 12
LONGEST_S = 120  # a combination takes a second; one that takes longer hangs
WHO = re.compile(r"client \d+, visit \d+|rank \d+, ")  # whose error comes first depends on ranks
AFTER_FAILURES = ("has 1 upload", "the trace ends")  # where clients that fail are left out
DIFFERENCES = (
    "direction",
    "update",
    "control",
    "momentum",
)  # of models: shorter, with the rounding of models
COMPARED = ("on three ranks", "stopped on three ranks and resumed on one", "without kernels and stacks")


def repaired(tree: Tree, key: str, random: Random) -> Tree:
    """Return a combination without the section that a refusal names; without some section if it names none.

    Args:
        tree: what was refused.
        key: of the refusal, dotted; or several.
        random: draws the section to leave out.
    """
    named = [re.split(r"[.:\[ ]", part.strip())[0] for part in key.split(",")]
    optional = [name for name in tree if name not in ("seed", "rounds", "algorithm")]
    without = next((name for name in reversed(named) if name in optional), None)
    if without is None and "algorithm" in named and tree["algorithm"]["name"] != "fedavg":
        return {**tree, "algorithm": {"name": "fedavg"}}
    without = without or random.choice(optional or ["seed"])
    together = ("data", "task", "model") if without in ("data", "task", "model") else (without,)
    return {name: value for name, value in tree.items() if name not in together}


def attempted(tree: Tree, folder: Path, name: str, what: str) -> dict[str, Any]:
    """Run, stop, resume or plan a combination on the ranks of this job, and return what became of it.

    Args:
        tree: the combination.
        folder: of the runs.
        name: of the run's folder, after the configuration's name.
        what: the stage.

    Returns:
        `end`: `ok`, `stopped` or the message of the error; `kind`: the error's class; `key` of a refusal;
        `begun`: whether training had begun.
    """
    from mpifl.core.errors import CodeFailed, Stopped, UserError
    from mpifl.driver.run import run
    from mpifl.experiment import loader
    from mpifl.experiment.schema import Config
    from mpifl.experiment.section_checks import check_sections
    from mpifl.forecast.plan import describe
    from mpifl.runtime.script import connected, on_all_ranks

    place = folder / f"tiny-{name}"

    def work(transport: Any) -> None:
        options: dict[str, Any] = {}
        if what == "resume":
            options["resumed"] = place
            given = yaml.safe_load((place / "config.yaml").read_text())
        else:
            given = whole(tree, folder, name)
        if what == "plain":
            given = loader.merged(given, {"system": {"kernels": False, "stack": 1}})
        if what == "stop":
            polls = iter(range(2 + int(name) % 3))
            options["asked_to_stop"] = lambda: next(polls, None) is None
        config = loader.from_tree(Config, given)
        check_sections(config)
        if what == "plan":
            describe(config, transport)
        else:
            run(config, transport, quiet=True, **options)

    end: dict[str, Any] = {"end": "ok", "kind": "", "key": ""}
    try:
        on_all_ranks(f"combination {name}", work)
    except UserError as error:
        end = {"end": str(error), "kind": type(error).__name__, "key": error.key}
    except Stopped:
        end["end"] = "stopped"
    except CodeFailed as error:
        end = {"end": error.text, "kind": type(error).__name__, "key": "", "trace": error.trace}
    except Exception as error:
        if connected().size > 1:
            raise
        end = {"end": repr(error), "kind": "traceback", "key": "", "trace": traceback.format_exc()}
    return {**end, "begun": (place / "run.json").exists()}


def stage(folder: Path, what: str) -> None:
    """Carry out one stage of all combinations that it concerns, on the ranks of this job."""
    from mpifl.runtime.script import connected

    drawn = json.loads((folder / "drawn.json").read_text())
    mine = json.loads((folder / f"{what}.todo").read_text())
    place = folder / ("stop" if what == "resume" else what)
    place.mkdir(exist_ok=True)
    out = (folder / f"{what}.jsonl").open("a") if connected().is_server else None

    def tell(number: str, end: Mapping[str, Any]) -> None:
        if out is not None:
            print(json.dumps({"number": number, **end}), file=out, flush=True)

    for number in mine:
        tree: Tree = drawn[number]
        refused: list[str] = []
        signal.alarm(LONGEST_S)  # ends this rank, and so the job
        tell(number, {"end": "not ended", "tree": tree})
        end = attempted(tree, place, number, what)
        random = Random(f"repair/{number}")
        while (
            what == "run" and end["kind"] == "UserError" and not end["begun"] and len(refused) < MOST_REPAIRS
        ):
            refused.append(end["end"])
            shutil.rmtree(place / f"tiny-{number}", ignore_errors=True)
            tree = repaired(tree, end["key"], random)
            end = attempted(tree, place, number, what)
        tell(number, {**end, "tree": tree, "refused": refused})
    signal.alarm(0)


# -- all of them ---------------------------------------------------------------------------------------------

Start = Callable[[int, Path, str], "subprocess.CompletedProcess[str]"]  # ranks, folder, stage


def start_stage(ranks: int, folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    """Start this program for a stage, on one rank or under mpirun."""
    launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, __file__, str(folder), "--stage", what]
    return subprocess.run(command, capture_output=True, text=True)


def staged(start: Start, ranks: int, folder: Path, what: str, numbers: list[str]) -> dict[str, Tree]:
    """Return what became of each combination in a stage.

    Args:
        start: starts the program.
        ranks: of the job.
        folder: of the campaign.
        what: the stage.
        numbers: combinations that it concerns.
    """
    file, ended = folder / f"{what}.jsonl", dict[str, Tree]()
    while left := [number for number in numbers if number not in ended]:
        (folder / f"{what}.todo").write_text(json.dumps(left))
        program = start(ranks, folder, what)
        lines = file.read_text().splitlines() if file.exists() else []
        ended |= {end["number"]: end for end in map(json.loads, lines)}
        open_ends = [end for end in ended.values() if end["end"] == "not ended"]
        for end in open_ends:
            kind = "hang" if program.returncode in (-signal.SIGALRM, 128 + signal.SIGALRM) else "traceback"
            said = f"{program.stdout[-500:]}\n{program.stderr[-4000:]}"
            kind = "hang" if "signal 14" in said or "Alarm clock" in said else kind
            end |= {"end": f"exit code {program.returncode}: {said}", "kind": kind, "key": "", "begun": True}
        if program.returncode and not open_ends:
            raise RuntimeError(f"{what}: exit code {program.returncode}: {program.stderr[-4000:]}")
    return ended


NORMALISED = ("resnet", "transformer")  # beginnings of models' names


def near(one: Path, other: Path, tree: Tree) -> str:
    """Return in what two runs differ that should be equal up to rounding; empty if in nothing.

    Left out are runs in which rounding decides: what is compressed or rounded, chosen by a rule, and clients
    that were put into other clusters. Adam divides small gradients by their own size, and their rounding too;
    normalised layers divide by deviations within small batches.
    """
    from safetensors.torch import load_file

    rule, local = tree.get("robust"), tree.get("local", {})
    chosen = isinstance(rule, dict) and rule["name"] in ("krum", "multi_krum")
    if "payload" in tree or chosen or tree["algorithm"]["name"] in ("fedrc", "fedfomo"):
        return ""
    model = tree.get("model", "")
    normalised = (model["name"] if isinstance(model, dict) else model).startswith(NORMALISED)
    if "on_client_error" in tree:  # a client diverges: its huge numbers reach others by their attention
        return ""
    limit = 5e-3 if normalised else 1e-3 if local.get("optimizer") == "adam" else 2e-5
    if not all((folder / "model.safetensors").exists() for folder in (one, other)):
        return "model.safetensors is missing"
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    if sorted(mine) != sorted(theirs):
        return f"tensors {sorted(mine)} and {sorted(theirs)}"
    if not mine["assign"].equal(theirs["assign"]):
        return ""
    for name, rows in mine.items():
        if rows.shape != theirs[name].shape:
            return f"{name}: shapes"
        distance = (rows.double() - theirs[name].double()).norm() / (1e-3 + rows.double().norm())
        if distance > limit * (10 if name in DIFFERENCES else 1):
            return f"{name}: relative distance {distance:.3g}"
    return ""


def unequal(one: Path, other: Path) -> str:
    """Return in what two run folders differ; empty if in nothing."""
    try:
        assert_same_run(one, other)
    except (AssertionError, OSError) as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    return ""


def campaign(
    folder: Path, seed: int, count: int, start: Start = start_stage
) -> tuple[Counter[str], dict[str, list[str]]]:
    """Run combinations on one rank, and of those that end a third each on three ranks, resumed, and plain.

    Args:
        folder: an empty folder.
        seed: of all combinations.
        count: how many.
        start: starts the program.

    Returns:
        How many of each kind there were, and faults by kind, each with its combination.
    """
    drawn = {str(number): tree for number, tree in enumerate(draw(seed, count))}
    (folder / "drawn.json").write_text(json.dumps({**drawn, "earlier": EARLIER}))
    counted, faults = Counter[str](tried=count), dict[str, list[str]]()

    def fault(kind: str, number: str, what: str, text: str) -> None:
        faults.setdefault(kind, []).append(f"{number}, {what}: {text}: {json.dumps(drawn[number])}")

    def ends(ranks: int, what: str, numbers: list[str]) -> Iterator[tuple[str, Tree]]:
        for number, end in staged(start, ranks, folder, what, numbers).items():
            drawn[number] = end["tree"]
            if end["kind"] in ("traceback", "hang", "CodeFailed"):
                kind = "hangs" if end["kind"] == "hang" else "tracebacks"
                fault(kind, number, what, end.get("trace") or end["end"])
            yield number, end

    if not (folder / "files").exists():
        small_files.write_all(folder / "files", OWNERS)
        staged(start, 1, folder, "earlier", ["earlier"])
    found = dict(ends(1, "run", [*drawn]))
    (folder / "drawn.json").write_text(json.dumps(drawn))
    ok = [number for number, end in found.items() if end["end"] == "ok"]
    counted["ended"] = len(ok)
    counted["refused before training, then repaired"] = sum(
        len(end.get("refused", ())) for end in found.values()
    )
    for number, end in found.items():
        counted[f"error {end['kind']}"] += bool(end["kind"])
        late = end["begun"] and end["kind"] in ("UserError", "MethodError")
        said = ("not finite", *(AFTER_FAILURES if "on_client_error" in end["tree"] else ()))
        if late and not any(
            text in end["end"] for text in said
        ):  # that no configuration says before training
            fault("refusals after training begins", number, "run", end["end"])
    told = [number for number, end in found.items() if end["kind"] not in ("traceback", "hang")]
    for number, end in ends(3, "three", [number for number in told if int(number) % 3 == 0]):
        counted["on three ranks"] += 1
        if WHO.sub("", end["end"]) != WHO.sub("", found[number]["end"]):
            fault("unequal", number, "three", f"{found[number]['end']!r} and {end['end']!r}")
        elif end["end"] == "ok":
            text = unequal(folder / "run" / f"tiny-{number}", folder / "three" / f"tiny-{number}")
            if text:
                fault("unequal", number, "three", text)
    stopped = {
        number
        for number, end in ends(3, "stop", [n for n in ok if int(n) % 3 == 1])
        if end["end"] == "stopped"
    }
    for number, end in ends(1, "resume", sorted(stopped)):
        counted["stopped on three ranks and resumed on one"] += 1
        text = unequal(folder / "run" / f"tiny-{number}", folder / "stop" / f"tiny-{number}")
        if end["end"] != "ok" or text:
            fault("unequal", number, "resume", text or end["end"])
    for number, end in ends(1, "plain", [n for n in ok if int(n) % 3 == 2]):
        counted["without kernels and stacks"] += 1
        one, other = (folder / what / f"tiny-{number}" for what in ("run", "plain"))
        text = near(one, other, drawn[number]) if end["end"] == "ok" else end["end"]
        if text:
            fault("unequal", number, "plain", text)
    for number, end in ends(1, "plan", [number for number in told if int(number) % 4 == 0]):
        counted["planned"] += 1
        early = found[number]["kind"] == "UserError" and not found[number]["begun"]
        if end["kind"] == "UserError" and not early:
            fault("plan differs", number, "plan", f"{found[number]['end']!r} and {end['end']!r}")
    return counted, faults


def main(arguments: list[str]) -> int:
    """Carry out a stage, or a whole campaign whose numbers and faults are printed."""
    folder = Path(arguments[0])
    if arguments[1:2] == ["--stage"]:
        stage(folder, arguments[2])
        return 0
    count, seed = (int(number) for number in (*arguments[1:], "300", "0")[:2])
    folder.mkdir(parents=True, exist_ok=True)
    counted, faults = campaign(folder, seed, count)
    for kind, texts in faults.items():
        print(f"\n## {kind}", *texts, sep="\n\n")
    print("\n", {**counted, **{kind: len(texts) for kind, texts in faults.items()}})
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
