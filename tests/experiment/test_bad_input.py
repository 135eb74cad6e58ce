"""Bad input: one line on stderr that names key, value and remedy; exit code 2; no traceback; soon; from all
ranks once."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from support import toy

from mpifl.algorithms.registry import CATALOGUE
from mpifl.cli import main
from mpifl.comm.single import Single
from mpifl.data import SOURCES
from mpifl.simulation.policies import Buffer, EveryArrival
from mpifl.supervision.logging import warn_once
from mpifl.training.config import LocalConfig

CONFIG = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SOON = 10.0  # seconds of the processor; meant are 5


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Return a function argv -> the one line that refuses it."""
    monkeypatch.delenv("MPIFL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Single, "abort", lambda self, code: None
    )  # a traceback shall fail one test, not end all

    def refuse(*argv: str) -> str:
        start = time.process_time()
        code = main(argv)
        spent = time.process_time() - start
        err = capsys.readouterr().err
        assert code == 2, err
        assert re.fullmatch(r"mpifl: .*\n", err), err
        assert spent < SOON
        assert not list(tmp_path.glob("runs/*/*")), "nothing was begun"
        return err

    return refuse


ROTATED = "{name: rotated, clients: %d, angles: [0, 90, 180, 270]}"
FLT = [
    *("--algorithm", "{name: flt, pretrain_epochs: 1, finetune_epochs: 1, centroids: 2, code: 4}"),
    *("--data.public", "digits"),
]
OPTIONS = {
    "unknown key": (["--round", "3"], ["round = 3", "did you mean 'rounds'"]),
    "key without its section": (
        ["--lr", "0.1"],
        ["lr = 0.1: unknown key; did you mean local.lr or algorithm.lr or local.trainer.lr?\n"],
    ),
    "key of several sections": (["--epochs", "3"], ["did you mean local.epochs or "]),
    "unknown key of a section": (["--local.epoch", "3"], ["local.epoch = 3", "did you mean 'epochs'"]),
    "unknown key of a method": (["--algorithm", "{name: fedprox, nu: 1}"], ["algorithm.nu = 1", "mu"]),
    "a key of a method without options": (
        ["--algorithm", "{name: fedavg, foo: 1}"],
        ["algorithm.foo = 1: unknown key; fedavg has no options: leave it out\n"],
    ),
    "a key of a policy without options": (
        ["--policy.size", "3"],
        ["policy.size = 3: unknown key; rounds has no options: leave it out", "has it: buffer, waves\n"],
    ),
    "unknown section": (["--training.lr", "1"], ["training", "did you mean"]),
    "unknown key deep down": (
        ["--data.scenario.angle", "[0]"],
        ["data.scenario.angle", "did you mean 'angles'"],
    ),
    "a word for a number": (["--rounds", "many"], ["rounds = 'many'", "int"]),
    "half a round": (["--rounds", "2.5"], ["rounds = 2.5", "int"]),
    "a truth for a number": (["--rounds", "true"], ["rounds = true", "int"]),
    "nothing for a number": (["--rounds", "null"], ["rounds = None", "int"]),
    "a word for a rate": (["--local.lr", "fast"], ["local.lr = 'fast'", "float"]),
    "a number for a truth": (["--output.model", "3"], ["output.model = 3", "bool"]),
    "a number for a section": (["--local", "5"], ["local = 5", "section"]),
    "a number for a list": (["--local.milestones", "3"], ["local.milestones = 3", "list"]),
    "too long a list": (["--model", "{name: emdcfl_cnn, channels: [1, 2, 3]}"], ["model.channels", "2"]),
    "updates without rounds": (
        ["--policy", "every_arrival", "--output.updates", "true"],
        ["output.updates = True", "rounds"],
    ),
    "means over something else": (["--evaluation.by", "[label]"], ["evaluation.by", "group"]),
    "means over groups that are not known": (
        ["--evaluation.by", "[group]", "--data.scenario", "{name: iid, clients: 8}"],
        ["evaluation.by", "true groups"],
    ),
    "no rounds": (["--rounds", "0"], ["rounds = 0", "must be 1 or more"]),
    "a negative rate": (["--local.lr", "-1"], ["local.lr = -1", "must be above 0"]),
    "momentum of one": (["--local.momentum", "1"], ["local.momentum = 1", "[0, 1)"]),
    "nobody takes part": (["--participation", "0"], ["participation = 0"]),
    "more take part than there are": (["--cohort_size", "9"], ["cohort_size = 9", "8 clients"]),
    "a cohort of nobody": (["--cohort_size", "0"], ["cohort_size = 0"]),
    "half a client": (["--cohort_size", "2.5"], ["cohort_size = 2.5", "int"]),
    "a negative weight": (["--algorithm", "{name: fedprox, mu: -1}"], ["algorithm.mu = -1", "0 or more"]),
    "unknown method": (["--algorithm", "fedavgg"], ["algorithm.name = 'fedavgg'", "did you mean 'fedavg'"]),
    "no method": (["--algorithm", "null"], ["algorithm = None", "name one of"]),
    "unknown source": (["--data.source", "mnits"], ["data.source.name = 'mnits'", "did you mean 'mnist'"]),
    "unknown scenario": (
        ["--data.scenario.name", "rotate"],
        ["data.scenario.name", "did you mean 'rotated'"],
    ),
    "unknown model": (["--model", "mlpp"], ["model.name = 'mlpp'", "did you mean 'mlp'"]),
    "K larger than N": (
        ["--algorithm", "{name: ifca, num_clusters: 9}"],
        ["algorithm.num_clusters = 9", "8 clients"],
    ),
    "more streams than N": (
        ["--algorithm", "{name: ucfl, streams: 9}"],
        ["algorithm.streams = 9", "8 clients"],
    ),
    "more groups than clients": (["--data.scenario", ROTATED % 2], ["data.scenario.clients = 2", "4 groups"]),
    "groups of unequal size": (["--data.scenario", ROTATED % 6], ["data.scenario.clients = 6", "4 groups"]),
    "more clients than samples": (["--data.scenario", ROTATED % 40000], ["data.scenario.clients", "samples"]),
    "more clients than memory": (
        ["--data.scenario", "{name: population, clients: 1000000000000000}"],
        ["data.scenario.clients = 1000000000000000", "bytes"],
    ),
    "more clients than samples, of whom each group has copies": (
        ["--data.scenario", "{name: rotated, clients: 100000, angles: [0, 90, 180, 270]}"],
        ["data.scenario.clients = 100000: 25000 samples are needed, and there are 1"],
    ),
    "more samples of each client than there are": (
        ["--data.scenario", "{name: iid, clients: 8, min_samples: 1000}"],
        ["data.scenario.clients = 8: 8000 samples are needed"],
    ),
    "more groups of clients than memory": (
        ["--data.scenario", ROTATED % (4 * 10**11)],
        ["data.scenario.clients = 400000000000", "bytes"],
    ),
    "more units than memory": (["--model.hidden", "[10000000000]"], ["model = {'name': 'mlp'", "memory"]),
    "more units than 64 bits": (["--model.hidden", f"[{2**62}]"], ["model = {'name': 'mlp'", "memory"]),
    "more adapters than memory": (["--model.lora.rank", "1000000000000000"], ["model = ", "memory"]),
    "more samples than memory": (
        ["--data.source", "{name: synthetic, train: 1000000000000000}"],
        ["data.source.train + test = 1000000000001000", "bytes"],
    ),
    "more centroids than anybody has": (
        ["--algorithm", "{name: pca_km_hc, centroids: 1000000000000000}"],
        ["algorithm.centroids = 1000000000000000", "1000"],
    ),
    "more classes than memory": (
        ["--data.source", "{name: synthetic, classes: 1000000000000000}"],
        ["data.source = {'name': 'synthetic'", "memory"],
    ),
    "a side of 2^31 pixels": (
        ["--data.scenario", "{name: rotated, clients: 8, resize: 2147483648}"],
        ["data.scenario.resize = 2147483648", "10000"],
    ),
    "2^31 ranks": (["--system.ranks", "2147483648"], ["system.ranks = 2147483648", "[1, 1000000]"]),
    "a million layers": (
        [
            *("--data.source", "{name: generated, kind: tokens}", "--data.scenario", "{name: iid}"),
            *("--model", "{name: lstm, layers: 1000000}"),
        ],
        ["model.layers = 1000000", "must be in [1, 1000]"],
    ),
    "no groups to know": (
        ["--algorithm", "oracle", "--data.scenario", "iid"],
        ["algorithm.name = 'oracle'", "groups"],
    ),
    "no validation data for FedSoft's": (
        ["--algorithm", "{name: fedsoft, variant: emdcfl}", "--data.scenario.validation", "0"],
        ["data.scenario.validation = 0", "validation data"],
    ),
    "no validation data": (
        ["--algorithm", "emdcfl", "--data.scenario.validation", "0"],
        ["data.scenario.validation = 0", "validation data"],
    ),
    "too few validation data": (
        [
            "--algorithm",
            "emdcfl",
            "--data.scenario",
            "{name: lognormal, clients: 30, sigma: 3.0, validation: 0.2}",
        ],
        [
            "data.scenario.validation = 0.2: ",
            "two samples or more of each client, and client 1 has 1",
            "larger",
        ],
    ),
    "no training data": (
        ["--algorithm", "fedavg", "--data.scenario", "{name: rotated, clients: 400}"],
        ["data.scenario.clients = 400: client 0 has no training data", "fewer clients"],
    ),
    "no test data": (
        ["--algorithm", "fedavg", "--data.scenario", "{name: emdcfl_mnist}"],
        ["data.scenario.clients = 40: no client has test data", "fewer clients", "evaluation.train"],
    ),
    "test images of nobody": (
        ["--algorithm", "fedavg", "--data.scenario", "{name: ucfl_c, clients: 8, test_images: 0}"],
        ["data.scenario.test_images = 0: no client has test data; use some"],
    ),
    "another optimiser than it may be": (
        ["--algorithm", "scaffold", "--local.optimizer", "adam"],
        ["local.optimizer = 'adam': this method needs SGD; use sgd"],
    ),
    "momentum where it may not be": (
        ["--algorithm", "apfl", "--local.momentum", "0.9"],
        ["local.momentum = 0.9"],
    ),
    "images too small": (["--model", "lenet5"], ["model.name = 'lenet5'", "pixels"]),
    "no data root": (["--data.source", "mnist"], ["data.root = None", "mpifl prepare"]),
    "a folder of pictures that is not there": (
        ["--data.source", "{name: folder, path: nope}", "--data.root", "."],
        ["data.source.path = 'nope': nope/<class>/*.jpg is not there; give a path", "data.root (.)"],
    ),
    "a folder of pictures below nothing": (
        ["--data.source", "{name: folder, path: nope}"],
        ["data.root = None: source folder needs files: folder cannot be downloaded", "--data.root"],
    ),
    "classes for a regression": (
        [
            *("--data.source", "{name: table, path: FILE.csv}", "--data.scenario", "{name: iid, clients: 2}"),
            *("--algorithm", "fedavg", "--model", "mlp", "--task", "regression"),
        ],
        ["task.name = 'regression': labels of this source are classes", "data.source.labels numbers reads"],
    ),
    "steps under a delay of the base": (
        ["--policy", "drawn_staleness", "--algorithm", "fedasync", "--delay", "tiers"],
        ["delay = 'tiers'", "has no effect", "; --delay constant leaves it out\n"],
    ),
    "steps under another constant": (
        ["--policy", "client_decides", "--algorithm", "fedasync", "--delay.value_s", "3"],
        ["delay = {'name': 'constant', 'value_s': 3.0}", "; --delay.value_s 1.0 leaves it out\n"],
    ),
    "steps under links": (
        [
            *("--policy", "client_decides", "--algorithm", "fedasync"),
            *("--network", "{uplink_bytes_s: 5, latency_s: 1}"),
        ],
        [
            "network = {'name': 'links'",
            "; --network.uplink_bytes_s null --network.latency_s 0.0 leaves it out\n",
        ],
    ),
    "an empty data root": (["--data.source", "mnist", "--data.root", "."], ["data.root", "is not there"]),
    "output under a file": (["--output.folder", "/dev/null/runs"], ["output.folder", "cannot be written"]),
    "output where nobody may": (["--output.folder", "/proc/runs"], ["output.folder", "cannot be written"]),
    "more ranks than there are": (["--system.ranks", "2"], ["system.ranks = 2", "mpirun -n 2"]),
    "unknown device": (["--system.device", "tpu"], ["system.device = 'tpu'"]),
    "unknown memory": (["--system.mpi_memory", "host"], ["system.mpi_memory = 'host'", "auto"]),
    "batches of one sample for batch norm": (
        ["--model", "{name: resnet20}", "--local.batch_size", "1"],
        ["local.batch_size = 1", "batch norm", "use 2 or more"],
    ),
    "a client's batches of one sample for batch norm": (
        ["--model", "{name: resnet20}", "--per_client", "{3: {batch_size: 1}}"],
        ["local.batch_size = 1", "batch norm", "use 2 or more"],
    ),
    "device memory without a device": (
        ["--system.device", "cpu", "--system.mpi_memory", "device"],
        ["system.mpi_memory = 'device'", "use main"],
    ),
    "device memory for fast sums": (
        ["--system.mpi_memory", "device", "--system.sums", "fast"],
        ["system.mpi_memory = 'device'", "exact"],
    ),
    "CUDA graphs on the CPU": (
        ["--system.device", "cpu", "--system.cuda_graphs", "true"],
        ["system.cuda_graphs = True", "need a GPU"],
    ),
    "newcomers of a method that looks at its clients once": (
        ["--algorithm", "ucfl", "--newcomers", "{share: 0.4, joins: 3}"],
        ["newcomers = 0.4", "accepts none later"],
    ),
    "newcomers of one that chooses its initial models": (
        ["--algorithm", "{name: ifca, num_clusters: 2, restarts: 2}", "--newcomers", "{groups: [1]}"],
        ["newcomers = [1]", "accepts none later"],
    ),
    "newcomers at a step of a clock of seconds": (
        [*("--algorithm", "fedasync", "--policy", "every_arrival"), "--newcomers", "{share: 0.4, joins: 3}"],
        ["newcomers.joins = 3", "give newcomers.joins_s"],
    ),
    "newcomers at a time of a clock of steps": (
        [
            *("--algorithm", "fedasync", "--policy", "client_decides"),
            *("--newcomers", "{share: 0.4, joins_s: 3}"),
        ],
        ["newcomers.joins_s = 3", "use newcomers.joins"],
    ),
    "newcomers at a time in rounds": (
        ["--newcomers", "{share: 0.4, joins_s: 3}"],
        ["newcomers.joins_s = 3", "use newcomers.joins"],
    ),
    "newcomers by step and by time": (
        ["--newcomers", "{share: 0.4, joins: 3, joins_s: 3}"],
        ["newcomers.joins = 3", "leave one of them out"],
    ),
    "seconds between newcomers that join at a step": (
        ["--newcomers", "{share: 0.4, spread_s: 3}"],
        ["newcomers.spread_s = 3", "use spread"],
    ),
    "newcomers on a clock that holds nobody back": (
        [
            *("--algorithm", "fedasync", "--policy", "every_arrival", "--clock", "wall"),
            *("--newcomers", "{share: 0.4, joins_s: 3}"),
        ],
        ["newcomers.joins_s = 3", "give a scale"],
    ),
    "clients that leave at a step of a clock of seconds": (
        [*("--algorithm", "fedasync", "--policy", "every_arrival"), "--leavers", "{share: 0.4, leaves: 3}"],
        ["leavers.leaves = 3", "give leavers.leaves_s"],
    ),
    "clients that leave at a time in rounds": (
        ["--leavers", "{share: 0.4, leaves_s: 3}"],
        ["leavers.leaves_s = 3", "use leavers.leaves"],
    ),
    "so few leavers that nobody leaves": (
        ["--leavers", "{share: 0.01}"],
        ["leavers.share = 0.01", "larger share"],
    ),
    "a group that leaves and is not there": (
        ["--leavers", "{groups: [1]}", "--newcomers", "{groups: [1]}"],
        ["leavers.groups = [1]", "there at first"],
    ),
    "data that change at a time of a clock of steps": (
        [*("--algorithm", "fedasync", "--policy", "client_decides"), *("--drift", "{kind: swap, at_s: [2]}")],
        ["drift.at_s = [2.0]", "use drift.at"],
    ),
    "data that change at steps and at times": (
        ["--drift", "{kind: swap, at: [2], at_s: [2]}"],
        ["drift.at_s = [2.0]", "leave at or at_s out"],
    ),
    "data that change over steps from a time on": (
        ["--drift", "{kind: swap, at_s: [2], gradual: 2}"],
        ["drift.gradual = 2", "use gradual_s"],
    ),
    "data that change over seconds from a step on": (
        ["--drift", "{kind: swap, at: [2], gradual_s: 2}"],
        ["drift.gradual_s = 2", "use gradual"],
    ),
    "a change that begins before another is over": (
        ["--drift", "{kind: swap, at_s: [2, 4], gradual_s: 2}"],
        ["drift.at_s = [2.0, 4.0]", "more than gradual_s = 2"],
    ),
    "statistics again after seconds of a clock of steps": (
        [
            *("--algorithm", "{name: flexcfl, num_groups: 2}", "--policy", "client_decides"),
            *("--recluster", "{seconds: 2}"),
        ],
        ["recluster.seconds = 2", "use recluster.every"],
    ),
    "stacks of clients that several workers host": (
        ["--system.hosting", "groups", "--system.stack", "4"],
        ["system.stack = 4", "hosting any"],
    ),
    "a random placement of clients that are hosted": (
        ["--system.hosting", "groups", "--system.placement_seed", "3"],
        ["system.placement_seed = 3", "leave it out"],
    ),
    "two points for the plane of FLT": (
        [*FLT, "--algorithm.centroids", "1", "--data.scenario.clients", "2"],
        ["algorithm.centroids = 1", "no plane through 2 points", "use more centroids"],
    ),
    "public samples that are no images": (
        [*FLT, "--data.public", "generated"],
        ["data.public = 'generated'", "are features, not images"],
    ),
    "public text": ([*FLT, "--data.public", "text"], ["data.public = 'text'", "are tokens, not images"]),
    "probabilities of standardised pixels": (
        [*FLT, "--algorithm.loss", "bce", "--data.source.normalise", "standard"],
        ["algorithm.loss = 'bce'", "needs pixels in [0, 1]", "use mse"],
    ),
    "probabilities of an autoencoder that gives none": (
        [*FLT, "--algorithm.loss", "bce", "--algorithm.autoencoder", "flt_ae_cifar"],
        ["algorithm.loss = 'bce'", "flt_ae_cifar", "use mse"],
    ),
    "newcomers that are nobody": (
        ["--newcomers", "{share: 0.05, joins: 3}"],
        ["newcomers.share = 0.05", "makes none of 8 clients newcomers"],
    ),
    "too few for a step while newcomers are absent": (
        ["--algorithm", "fedsoft", "--newcomers", "{share: 0.9, joins: 3}"],
        [
            "cohort_size, policy = 1",
            "a step may have 1 upload while newcomers are absent, and FedSoft needs 2",
        ],
    ),
    "a rule that leaves nobody out while newcomers are absent": (
        ["--robust", "{name: trimmed_mean, beta: 0.2}", "--newcomers", "{share: 0.75, joins: 2}"],
        ["robust.beta = 0.2", "leaves none of 2 uploads out"],
    ),
    "the same where absent clients count with their last uploads": (
        [
            *("--robust", "{name: krum, f: 2}", "--newcomers", "{share: 0.75, joins: 3}"),
            *("--algorithm", "fedavg_memory"),
        ],
        ["robust.f = 2", "a step has 2"],
    ),
    "a robust rule whose whole cohort is too small for it": (
        ["--robust", "median", "--cohort_size", "2"],
        ["robust.name = 'median': needs 3 uploads, and a step has 2; use a larger cohort or buffer"],
    ),
    "a robust rule whose buffer is too small for it": (
        ["--robust", "geometric_median", "--policy", "{name: buffer, size: 2}"],
        ["robust.name = 'geometric_median': needs 3 uploads, and a step has 2"],
    ),
    "an attack on the uploads of a method that has none": (
        ["--algorithm", "local", "--attack", "{name: scale, clients: [1]}"],
        ["attack.name = 'scale': has no effect: clients of Local send nothing; use label_flip, or leave it"],
    ),
    "compression without uploads": (
        ["--algorithm", "local", "--payload", "{compression: int8, error_feedback: true}"],
        ["payload.compression = 'int8': has no effect: clients of Local send nothing; leave it out"],
    ),
    "small numbers in no messages": (
        ["--algorithm", "local", "--payload.dtype", "float16"],
        ["payload.dtype = 'float16': has no effect: clients of Local send nothing; use float32"],
    ),
    "infinite participation": (["--participation", ".inf"], ["participation = '.inf'", "float"]),
    "one and a half clients": (["--participation", "1.5"], ["participation = 1.5", "cohort_size"]),
    "an infinite rate": (["--local.lr", "inf"], ["local.lr = 'inf'", "finite"]),
    "an angle that is no number": (
        ["--data.scenario.angles", "[0, .nan]"],
        ["data.scenario.angles = '.nan'", "float"],
    ),
    "dropout that is no number": (
        ["--model", "{name: flt_cnn_mnist, dropout: nan}"],
        ["model.dropout", "finite"],
    ),
    "a truth for seeds": (["--seed", "true"], ["seed = true", "int"]),
    "an integer of 400 digits": (["--rounds", "9" * 400], ["rounds = 999", "too large"]),
    "a number of 400 digits": (["--local.lr", "9" * 400], ["local.lr = 999", "finite"]),
    "an integer of 5000 digits": (["--rounds", "9" * 5000], ["rounds = 999", "int"]),
    "leading zeros": (["--rounds", "010"], ["rounds = 010", "int"]),
    "minutes for a number": (["--rounds", "12:30"], ["rounds = '12:30'", "int"]),
    "an output id above its folder": (["--output.id", "../../x"], ["output.id = '../../x'", "slashes"]),
    "a name above its folder": (["--name", "../x"], ["name = '../x'", "slashes"]),
    "a name of 300 characters": (["--name", "n" * 300], ["name = 'nnn", "100 bytes"]),
    "a name with NUL": (["--output.folder", '"a\\0b"'], ["output.folder = 'a\\x00b'", "leave them out"]),
    "bytes that are not UTF-8": (["--output.folder", "a\udcffb"], ["output.folder", "cannot be printed"]),
    "bytes that are not UTF-8 for YAML": (["--rounds", "[a\udcffb]"], ["--rounds", "not YAML"]),
    "an option of 1000 parts": (["--" + "a." * 1000, "1"], ["option", "parts"]),
    "a list nested 1000 times": (["--vary", "[" * 1000], ["--vary", "deeper"]),
    "a list as a name": (["--model", "{name: [mlp]}"], ["model.name = ['mlp']", "name one of"]),
    "a key twice in an option": (["--local", "{lr: 1, lr: 2}"], ["--local", "'lr'", "twice"]),
    "a line break in an option": (["--a\nb", "1"], ["a b", "unknown key"]),
    "more threads than any machine has": (
        ["--system.threads", "100000"],
        ["system.threads = 100000", "cores"],
    ),
    "absences without end": (
        ["--availability", "{on_s: 1.0e-12, off_s: 1}"],
        ["availability.on_s = 1e-12", "0.001"],
    ),
    "a visit of a million absences": (
        ["--availability", "{on_s: 0.01, off_s: 1}", "--delay", "{name: constant, value_s: 10000}"],
        ["availability.on_s = 0.01", "come and go"],
    ),
    "a visit without end": (
        ["--delay", "{name: constant, value_s: 1.0e+308}", "--network", "{name: links, latency_s: 1.0e+308}"],
        ["delay = inf", "never end"],
    ),
    "a delay beside a network's own": (
        ["--network", "wired", "--delay", "{name: tiers}"],
        ["delay = 'tiers'", "has no effect"],
    ),
    "presence without absence": (["--availability.on_s", "5"], ["availability.on_s = 5.0", "has no effect"]),
    "a clock for rounds": (["--clock", "wall"], ["clock = 'wall'", "has no effect"]),
    "a spread of no links": (
        ["--network", "{name: links, spread: 1}"],
        ["network.spread = 1.0", "no effect"],
    ),
    "scratch that cannot be written": (
        ["--system.scratch", "/proc/x"],
        ["system.scratch = '/proc/x'", "cannot be written"],
    ),
    "a home of nobody": (["--algorithm.name", "~nobody/a.py:Mine"], ["algorithm.name", "there is no file"]),
    "a module without a name": (["--algorithm.name", ":Mine"], ["algorithm.name", "cannot be imported"]),
    "an option without value": (["--rounds"], ["--rounds", "needs a value"]),
    "a value without option": (["rounds", "3"], ["rounds", "--key.path"]),
    "a value that is not YAML": (["--model", "{name: mlp"], ["--model", "YAML"]),
    "a file that is not there": (
        ["--algorithm.name", "mine.py:Mine"],
        ["algorithm.name", "there is no file mine.py"],
    ),
    "a module that is not there": (
        ["--algorithm.name", "no.such:Mine"],
        ["algorithm.name", "No module named"],
    ),
    "a class that is no method": (["--algorithm.name", "fractions:Fraction"], ["algorithm.name", "Fraction"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_refused_in_one_line(case, refused):
    options, words = OPTIONS[case]
    Path("FILE.csv").write_text("a,target\n" + "0.5,3\n0.25,1\n" * 20)
    line = refused("run", str(CONFIG), "-q", *options)
    assert all(word in line for word in words), line


WITHOUT_DATA = {
    "updates": ("--policy every_arrival --output.updates true", "output.updates = True"),
    "stack": ("--policy every_arrival --system.stack 2", "system.stack = 2"),
    "momentum": ("--algorithm apfl --local.momentum 0.9", "local.momentum = 0.9"),
    "newcomers": ("--algorithm ucfl --newcomers.share 0.4", "newcomers = 0.4"),
    "clients": ("--output.clients none --evaluation.matrices [parameters]", "output.clients = 'none'"),
}


@pytest.mark.parametrize(("options", "words"), WITHOUT_DATA.values(), ids=WITHOUT_DATA)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_configuration_that_rules_itself_out_is_refused_before_data_are_looked_for(
    command, options, words, refused
):
    missing = ["--data.source", "mnist", "--data.root", "."]
    assert words in refused(command, str(CONFIG), *missing, *options.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_refused_where_there_is_none(refused):
    assert "system.device = 'cuda'" in refused("run", str(CONFIG), "--system.device", "cuda")


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
FILES = {
    "not YAML": ("rounds: [1,\nname: x", ["is not YAML"]),
    "tabs": ("local:\n\tlr: 1\n", ["is not YAML"]),
    "a list": ("- 1\n- 2\n", ["mapping"]),
    "binary": ("\udcff\udcfe\x00", ["is not text"]),
    "a key twice": ("rounds: 1\nlocal:\n  lr: 1\nrounds: 2\n", ["line 4", "'rounds'", "twice"]),
    "aliases that multiply": (BOMB, ["is not YAML", "values"]),
    "an alias of itself": ("vary: &a [*a]\n", ["is not YAML", "contains itself"]),
    "a nested list": ("vary: " + "[" * 100_000, ["is not YAML", "deeper"]),
    "a date that is none": ("rounds: 2024-99-99\n", ["rounds = 2024-99-99", "int"]),
    "a tag": ("name: !!python/object:os.getcwd {}\n", ["is not YAML", "tags"]),
    "a date by its tag": ("name: !!timestamp x\n", ["is not YAML", "tags"]),
    "nothing chosen": ("rounds: 3\n", ["algorithm", "is missing", "fedavg"]),
    "a base that is not there": (
        "base: nowhere.yaml\n",
        ["mpifl: wrong.yaml: base = 'nowhere.yaml': no such file; "],
    ),
    "a base that is nearly there": (
        "base: quickstar\n",
        ["wrong.yaml: base = 'quickstar'", "quickstart.yaml?"],
    ),
    "a base that is itself": ("base: wrong.yaml\n", ["wrong.yaml", "base"]),
    "a base that is a number": ("base: 5\n", ["5", "no such file"]),
    "a cohort twice": (
        "algorithm: fedavg\nmodel: mlp\nparticipation: 0.5\ncohort_size: 3\n",
        ["cohort_size = 3", "participation = 0.5", "leave one of them out"],
    ),
    "a wrong key": ("algorithm: fedavg\nmodel: mlp\nlocal: {epoch: 1}\n", ["local.epoch", "epochs"]),
}


@pytest.mark.parametrize("case", FILES)
def test_files_are_refused_in_one_line(case, refused, tmp_path):
    text, words = FILES[case]
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    line = refused("run", str(path))
    assert all(word in line for word in words), line


def test_a_file_that_is_not_there_is_refused_and_what_is_there_named(refused):
    assert "quickstart.yaml" in refused("run", "quickstartt")
    assert "quickstart.yaml" in refused("plan", "nothing")


def test_what_is_no_file_is_refused_as_a_configuration(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.yaml").write_text("# " + "x" * (2 << 20))
    assert "is not a file" in refused("run", str(tmp_path / "pipe"))
    assert "is not a file" in refused("run", str(tmp_path))
    assert "no such file" in refused("run", "x" * 300)
    assert "no such file" in refused("run", "a\0b")
    assert "bytes, more than" in refused("run", str(tmp_path / "large.yaml"))


def test_a_chain_of_bases_has_an_end(refused, tmp_path):
    for i in range(1500):
        (tmp_path / f"{i}.yaml").write_text(f"base: {i + 1}.yaml\n")
    assert "base" in refused("run", str(tmp_path / "0.yaml"))


def test_a_wrong_command_line_is_one_line_too(refused):
    assert "'runn'" in refused("runn")
    assert "CONFIG" in refused("run")
    assert "expected one argument" in refused("compare", "--csv")


def test_unknown_names_are_refused(refused):
    assert "did you mean 'algorithms'" in refused("list", "algorithm")
    assert "did you mean 'emdcfl'" in refused("show", "emdcf")
    assert "did you mean 'rounds'" in refused("plan", str(CONFIG), "--round", "1")
    assert "did you mean 'rounds'" in refused("cite", str(CONFIG), "--round", "1")


def test_a_run_is_never_overwritten(refused, tmp_path):
    (tmp_path / "out" / "tiny-one").mkdir(parents=True)
    line = refused("run", str(CONFIG), "--output.folder", "out", "--output.id", "one")
    assert "output.id = 'one'" in line
    assert "never overwritten" in line
    assert list((tmp_path / "out" / "tiny-one").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no images at all", bytes(2000)], ids=["empty", "text", "zeros"])
def test_a_corrupt_data_file_is_named(content, refused, tmp_path):
    for path in SOURCES["mnist"]().files(tmp_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    line = refused("run", str(CONFIG), "--data.source", "mnist", "--data.root", str(tmp_path))
    assert str(tmp_path / "MNIST") in line


@pytest.mark.parametrize("text", ["class Mine\n", "import nothing_like_this\n", "1 / 0\n"])
def test_a_method_that_cannot_be_imported_is_refused(text, refused, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    assert "cannot be imported" in refused("run", str(CONFIG), "--algorithm.name", f"{tmp_path}/mine.py:Mine")


OWN = """
from dataclasses import dataclass
import numpy as np
from mpifl.algorithms.fedavg import FedAvg
from mpifl.core.algorithm import Algorithm
from mpifl.core.plan import Plan

number = 3

@dataclass(frozen=True)
class Median(Algorithm):
    pass

@dataclass(frozen=True)
class Kept:
    pass

def mean(): pass
"""


def test_a_wrong_name_in_a_file_is_answered_with_its_classes_of_that_kind(refused, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    line = refused("run", str(CONFIG), "--algorithm", "mine.py:Xyzzyx")
    assert line.endswith("mine.py has no 'Xyzzyx'; known: FedAvg, Median\n")
    line = refused("run", str(CONFIG), "--model", "mine.py:Xyzzyx")
    assert line.endswith("known: Kept, Median, mean\n"), "a model need not be derived from one of ours"
    (tmp_path / "empty.py").write_text("import numpy as np\n")
    line = refused("run", str(CONFIG), "--algorithm", "empty.py:Xyzzyx")
    assert line.endswith("empty.py has no 'Xyzzyx'; it defines nothing that could be meant\n")


PAIR = """
from dataclasses import dataclass
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.fc(x.flatten(1)), x

@dataclass(frozen=True)
class Own:
    def build(self, shape, num_classes):
        return Net(shape, num_classes)
"""


@pytest.mark.parametrize("model", ["{name: custom, path: 'net.py:Net', head: fc}", "net.py:Own"])
def test_a_network_that_returns_a_tuple_is_refused(model, refused, tmp_path):
    (tmp_path / "net.py").write_text(PAIR)
    line = refused("run", str(CONFIG), "--model", model)
    assert "its forward returns a tuple; return one tensor of outputs, [n, classes]" in line


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("algorithm", "mpifl.Algorithm, and has no `acts_with`, `aggregate`"),
        ("model", "mpifl.models.base.ModelOptions, and has no `build`"),
        ("task", "mpifl.core.task.Task, and has no `"),
        ("policy", "mpifl.simulation.policies.Policy, and has no `"),
        ("delay", "mpifl.simulation.delays.Delay, and has no `"),
        ("data.source", "mpifl.data.sources.base.Source, and has no `"),
        ("data.scenario", "mpifl.data.scenario.Scenario, and has no `by_class`, `changes`, `compose`, ..."),
    ],
)
def test_a_class_of_another_kind_is_refused(section, says, refused, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Mine:\n    a: int = 0\n"
    )
    line = refused("run", str(CONFIG), f"--{section}.name", "mine.py:Mine")
    assert f"{section}.name = 'mine.py:Mine': is not a subclass of {says}" in line


POLICY = """
from dataclasses import dataclass
from mpifl.simulation.policies import Policy


@dataclass(frozen=True)
class Mine(Policy):
    def check(self, algorithm): pass

    def check_clock(self, clock): pass

    def open_clock(self, given): pass
"""


def test_a_policy_of_neither_engine_is_refused(refused, tmp_path):
    (tmp_path / "mine.py").write_text(POLICY)
    line = refused("run", str(CONFIG), "--policy.name", "mine.py:Mine")
    assert "policy.name" in line
    assert "RoundsPolicy or AsynchronousPolicy" in line


WRONG = """
import torch
from dataclasses import dataclass
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, wrong):
        super().__init__()
        self.fc = nn.Linear(64, num_classes - (wrong == "few"))
        self.wrong = wrong
        if wrong == "lazy":
            self.more = nn.LazyLinear(3)

    def forward(self, x):
        if self.wrong == "writes":
            x.clamp_(min=0)
        if self.wrong == "fails" and self.training:
            raise RuntimeError("of mine")
        out = self.fc(x.flatten(1)[:, 1:] if self.wrong == "shape" else x.flatten(1))
        if self.wrong == "tuple" and self.training:
            return out, out
        return out[:, None] if self.wrong == "axis" and self.training else out

@dataclass(frozen=True)
class Own:
    wrong: str = ""

    def build(self, shape, num_classes):
        if self.wrong == "raises":
            raise RuntimeError("of mine")
        net = Net(num_classes, self.wrong)
        return net.double() if self.wrong == "double" else None if self.wrong == "none" else net
"""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("few", "returns [2, 9] for 2 samples; return [2, 10], one number for each class"),
        ("lazy", "more.weight belongs to a lazy layer that no samples have reached"),
        ("writes", "its forward writes into the samples that it is given"),
        ("fails", "its forward fails in training (RuntimeError: of mine)"),
        ("shape", "does not take samples of shape [1, 8, 8] (RuntimeError: mat1 and mat2"),
        ("tuple", "in training its forward returns a tuple; return one tensor"),
        ("axis", "its forward returns [2, 1, 10] in training and [2, 10] in evaluation"),
        ("raises", "cannot be built for samples of shape [1, 8, 8] and 10 outputs (RuntimeError: of mine)"),
        ("double", "fc.weight is float64, and models are trained in float32"),
        ("none", "builds a NoneType; return a torch.nn.Module"),
    ],
)
def test_a_network_of_ones_own_is_tried_on_samples_before_a_run(wrong, says, refused, tmp_path):
    """Clamped samples were those that later evaluations read; the others ended in a traceback."""
    (tmp_path / "net.py").write_text(WRONG)
    line = refused("run", str(CONFIG), "--model", f"{{name: 'net.py:Own', wrong: {wrong}}}")
    assert f"model.name = 'net.py:Own': {says}" in line


LONELY = """
from dataclasses import dataclass
import numpy as np
from mpifl.data.partition.csr import from_lists
from mpifl.data.scenario import Scenario, ScenarioSpec

@dataclass(frozen=True)
class Lonely(Scenario):
    first: int = 1

    def compose(self, pool, key):
        rows = {"train": [range(self.first), range(1, 40)], "val": [[], []], "test": [[1500], [1501]]}
        held = {name: from_lists([np.array([*r], int) for r in some]) for name, some in rows.items()}
        return ScenarioSpec(lambda: held)
"""
NORMED = PAIR.replace("self.fc = ", "self.norm = nn.BatchNorm1d(64)\n        self.fc = ").replace(
    "return self.fc(x.flatten(1)), x", "return self.fc(self.norm(x.flatten(1)))"
)


def test_a_first_client_of_one_sample_does_not_end_a_run_with_batch_norm(
    refused, tmp_path, monkeypatch, capsys
):
    """The trial of the network in training took that sample alone, of which there are no statistics."""
    (tmp_path / "lonely.py").write_text(LONELY)
    (tmp_path / "net.py").write_text(NORMED)
    monkeypatch.chdir(tmp_path)
    options = ["--model", "net.py:Own", "--rounds", "1"]
    lonely = ["--data.scenario", "lonely.py:Lonely", "--output.folder", str(tmp_path)]
    assert main(["run", str(CONFIG), *options, *lonely]) == 0
    assert "1 of 2 clients take no step (0)" in "".join(capsys.readouterr())
    none = refused("run", str(CONFIG), *options, "--data.scenario", "{name: 'lonely.py:Lonely', first: 0}")
    assert "client 0 has no training data" in none


@pytest.mark.parametrize(("name", "idle"), [("fedavg", True), ("pfedme", False)])
def test_only_clients_that_take_no_step_are_idle(name, idle, capsys):
    """pFedMe has steps of its own and ignores `local.epochs`."""
    local = LocalConfig(epochs=0, weight_decay=1e-3 * idle)  # lines are said once
    toy.context_of(toy.config_of(CATALOGUE[name](), local=local), toy.Tiny(5 + idle))
    assert ("clients take no step" in capsys.readouterr().err) == idle


@pytest.mark.parametrize(
    ("name", "policy", "told"),
    [
        ("fedbuff", EveryArrival(), "policy buffer; it runs under every_arrival"),
        ("fedasync", Buffer(2), "drawn_staleness or client_decides; it runs under buffer"),
        ("fedbuff", Buffer(2), None),
        ("fedasync", EveryArrival(), None),
        ("ifca", Buffer(2), None),
    ],
)
def test_a_method_under_another_policy_than_its_papers_says_so(name, policy, told, capsys):
    warn_once.cache_clear()
    toy.context_of(toy.config_of(CATALOGUE[name](), policy=policy), toy.Tiny(5))
    err = capsys.readouterr().err
    assert (told in err) if told else ("was published with" not in err)


def test_a_network_may_have_more_outputs_than_there_are_classes(tmp_path, monkeypatch):
    """As one does whose last layer is that of other data; the rest are classes that no sample has."""
    (tmp_path / "net.py").write_text(NORMED.replace("nn.Linear(64, num_classes", "nn.Linear(64, 100"))
    monkeypatch.chdir(tmp_path)
    options = ["--model", "net.py:Own", "--rounds", "1"]
    assert main(["run", str(CONFIG), *options, "--output.folder", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("policy", "steps", "taken"),
    [
        ("every_arrival", 7, 7),
        ("client_decides", 7, 7),
        ("drawn_staleness", 7, 7),
        ("{name: buffer, size: 2}", 4, 8),
    ],
)
def test_a_trace_that_is_too_short_is_refused_before_training(policy, steps, taken, refused, tmp_path):
    rows = [f"{1 + i},{i},0,0,0" for i in range(6)]
    (tmp_path / "short.csv").write_text("\n".join(["time,client,visit,start,read_version", *rows]) + "\n")
    options = ["--algorithm", "fedbuff" if "buffer" in policy else "fedasync", "--policy", policy]
    options += ["--clock", "{name: replay, trace: short.csv}", "--rounds", str(steps)]
    line = refused("run", str(CONFIG), *options)
    assert "clock.trace = 'short.csv': the trace ends before the run: it has 6 arrivals" in line
    assert f"{steps} rounds take {taken}; use {6 * steps // taken} rounds at most" in line


# -- from all ranks ------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["run"], ["sweep", "--vary", "{seed: [0]}"]], ids=["run", "sweep"])
def test_a_launcher_of_one_rank_gets_lines_and_no_bar(words, mpirun, tmp_path):
    """Open MPI gives each rank a terminal of its own, whatever `mpirun` itself writes to."""
    options = (*words[1:], "--output.folder", str(tmp_path), "--rounds", "1")
    done = mpirun(1, "-m", "mpifl", words[0], CONFIG, *options, env=toy.PYTHONPATH, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round 1/1" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.nightly
def test_a_launcher_sees_exit_code_2_and_one_line(mpirun, tmp_path):
    options = ["--algorithm", "{name: ifca, num_clusters: 9}"]
    done = mpirun(2, "-m", "mpifl", "run", CONFIG, *options, env=toy.PYTHONPATH, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("mpifl:"))
    assert "algorithm.num_clusters = 9" in line
    assert "Traceback" not in done.stderr


SOME = [name for number, name in enumerate(OPTIONS) if number % 6 == 0]  # of these, usually


@pytest.fixture(scope="module")
def two_ranks(request, mpirun, tmp_path_factory) -> list[dict[str, tuple[int, str]]]:
    """Rank -> case -> (exit code, what was said); more ranks are asked for than there are."""
    folder = tmp_path_factory.mktemp("two")
    cases = {name: OPTIONS[name][0] for name in request.param}
    cases["more ranks than there are"] = ["--system.ranks", "3"]
    program = (Path(__file__).parents[1] / "support" / "refusals.py", CONFIG, folder, json.dumps(cases))
    done = mpirun(2, *program, env=toy.PYTHONPATH | {"MPIFL_DATA": ""}, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    "two_ranks", [SOME, pytest.param(OPTIONS, marks=pytest.mark.nightly)], ids=["some", "all"], indirect=True
)
def test_two_ranks_refuse_together_and_speak_once(two_ranks):
    for case in two_ranks[0]:
        (code, said), (other, silence) = (rank[case] for rank in two_ranks)
        assert (code, other) == (2, 2), f"{case}: {said}{silence}"
        assert re.fullmatch(r"mpifl: .*\n", said), case
        assert silence == "", case


TROUBLE = """
import dataclasses
from mpifl.algorithms.fedavg import FedAvg

@dataclasses.dataclass(frozen=True)
class Mine(FedAvg):
    where: str = "client"

    def local_update(self, message, state, client, key):
        if self.where == "client" and client.id == 3 and message.step == 2:
            raise ArithmeticError("the client's own trouble")
        return super().local_update(message, state, client, key)

    def aggregate(self, server, notes):
        if self.where == "server":
            raise ArithmeticError("the server's own trouble")
        return super().aggregate(server, notes)

    def check(self, world):
        pass
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("client", [r"rank 1, client 3, round 2, visit 1: ArithmeticError: the client's own trouble"]),
        pytest.param(
            "server",
            [r"Mine.aggregate: step 1: ArithmeticError: the server's own trouble"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_exception_ends_all_ranks_and_says_where(where, words, mpirun, tmp_path):
    (tmp_path / "mine.py").write_text(TROUBLE)
    options = ["--algorithm", f"{{name: mine.py:Mine, where: {where}}}"]
    done = mpirun(2, "-m", "mpifl", "run", CONFIG, *options, env=toy.PYTHONPATH, cwd=tmp_path)
    assert done.returncode not in (0, 2)
    assert done.stderr.count("Traceback (most recent call last)") >= 1
    for word in words:
        assert re.search(word, done.stderr), done.stderr


ONLY_ONE_RANK = """
from dataclasses import dataclass
from mpifl.core.errors import UserError
from mpifl.models.mlp import MLP
import os

@dataclass(frozen=True)
class Mine(MLP):
    def build(self, shape, num_classes):
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            raise UserError("model.name", "mine", "this rank cannot build it")
        return super().build(shape, num_classes)
"""


def test_what_only_one_rank_refuses_does_not_leave_the_others_waiting(mpirun, tmp_path):
    """A file that only one node lacks, say: whoever finds out says so and ends the job."""
    (tmp_path / "mine.py").write_text(ONLY_ONE_RANK)
    options = ["--model.name", "mine.py:Mine"]
    done = mpirun(2, "-m", "mpifl", "run", CONFIG, *options, env=toy.PYTHONPATH, cwd=tmp_path)
    assert done.returncode == 2
    assert "mpifl: model.name = 'mine': this rank cannot build it" in done.stderr


PACFL = "{name: pacfl, variant: emdcfl}"
UNKNOWN = "{name: cflgp, num_clusters: 0, max_clusters: 3}"
WAVES = ("--algorithm", "ucfl", "--policy.name", "waves", "--policy.size", "2", "--cohort_size", "3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", PACFL, "--data.scenario.validation", "0"], "data.scenario.validation = 0"),
        (["--algorithm", UNKNOWN, "--payload.dtype", "bfloat16"], "payload.dtype = 'bfloat16'"),
        (["--algorithm", UNKNOWN, "--payload.compression", "qsgd"], "payload.compression = 'qsgd'"),
        (
            ["--algorithm", UNKNOWN, "--attack", "{name: sign_flip, clients: [1]}"],
            "attack.name = 'sign_flip'",
        ),
        (["--algorithm", "fedbabu", "--model", "logistic"], "model.name = 'logistic'"),
        (["--algorithm", "fedrep", "--model", "{name: mlp, hidden: []}"], "model.name = 'mlp'"),
        (
            ["--algorithm", "ucfl", "--policy", "{name: waves, size: 2}", "--cohort_size", "3"],
            "cohort_size, policy = 3: a step may have 1 upload",
        ),
        (
            [*WAVES, "--delay", "exponential", "--policy.max_staleness", "0"],
            "cohort_size, policy = 3: a step may have 1 upload",
        ),
        (
            [*WAVES, "--delay", "exponential", "--availability.off_s", "2"],
            "cohort_size, policy = 3: a step may have 1 upload",
        ),
    ],
)
def test_what_the_configuration_rules_out_is_refused_before_the_first_visit(options, message, refused):
    assert message in refused("run", str(CONFIG), "--rounds", "2", *options)


def test_uploads_of_visits_that_end_at_different_times_fill_every_wave(tmp_path):
    """The third visit of the first cohort is joined by two others before the second wave ends."""
    options = ["--algorithm", "ucfl", "--policy", "{name: waves, size: 2}", "--cohort_size", "3"]
    drawn = ["--delay", "exponential", "--rounds", "2", "--output.folder", str(tmp_path), "-q"]
    assert main(["run", str(CONFIG), *options, *drawn]) == 0


WHOLE = """
from dataclasses import dataclass
from torch.nn import functional
from mpifl.training.tasks import Classification

@dataclass(frozen=True)
class Whole(Classification):
    def loss(self, output, labels):
        return functional.cross_entropy(output, labels) ** 2
"""


@pytest.mark.parametrize("method", ["fedem", "fedrc"])
def test_a_loss_that_is_no_mean_over_samples_is_refused_before_methods_weigh_them(method, tmp_path, refused):
    (tmp_path / "own.py").write_text(WHOLE)
    said = refused("run", str(CONFIG), "--algorithm", method, "--task.name", f"{tmp_path / 'own.py'}:Whole")
    assert "task.name = 'Whole': " in said
    assert not [*tmp_path.glob("**/run.json")]
