"""On a GPU: where ranks are bound, and the same digest for any number of them. Skipped without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import toy
from support.runs import CONFIG, HALF, SCRIPT, Runs
from support.runs import RUNS as EVERY

from mpifl.training.precision import has_bfloat16

DEVICE = "cuda"
EIGHT = ["--data.scenario", "{name: iid, clients: 8, validation: 0.2}"]
SAMPLED = ["--cohort_size", "4", "--rounds", "3", *EIGHT, "--evaluation.clients", "4"]
LENET = ["--model", "lenet5", "--data.source", "{name: synthetic, train: 400, test: 100}", *HALF]
RUNS = {
    "fedavg": HALF,
    "scaffold": ["--algorithm", "scaffold", *HALF],
    "ucfl": ["--algorithm", "ucfl", *HALF],
    "graphs": ["--system.cuda_graphs", "true", *HALF],
    "lenet": LENET,
    "fedavg-ordinary": [*HALF, "--system.cuda_graphs", "false"],
    "lenet-ordinary": [*LENET, "--system.cuda_graphs", "false"],
    "fedavg-auto": [*HALF, "--system.mpi_memory", "auto"],
    "ucfl-auto": ["--algorithm", "ucfl", *HALF, "--system.mpi_memory", "auto"],
    "captured": [*HALF, "--system.stack", "3", "--system.cuda_graphs", "true"],
    "few": [*SAMPLED, "--data.source", "{name: synthetic, train: 400, test: 100}"],
    "many": [
        *(*SAMPLED, "--data.source", "{name: synthetic, train: 40000, test: 100}"),
        *("--data.scenario", "{name: iid, clients: 800, validation: 0.2}"),
    ],
    "fedbuff": [*("--algorithm", "fedbuff", "--policy", "{name: buffer, size: 2}"), *HALF],
}
if torch.cuda.is_available() and has_bfloat16(torch.device("cuda")):
    RUNS["bfloat16"] = [*HALF, "--local.precision", "bfloat16"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def folders(mpirun, tmp_path_factory) -> dict[int, Path]:
    """Return the folder of all runs for each number of ranks."""
    found, cache = {}, tmp_path_factory.mktemp("cache")
    for ranks in (1, 2, 4):
        found[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        options = ["--system.device", DEVICE, "--data.cache", cache]
        end = mpirun(
            ranks,
            SCRIPT,
            CONFIG,
            found[ranks],
            json.dumps(RUNS),
            *options,
            timeout=600,
            env=toy.PYTHONPATH,
            fresh=True,
        )
        assert end.returncode == 0, end.stderr
    return found


def places(folder: Path, name: str) -> list[dict]:
    """Return where the ranks of a run were."""
    return json.loads((folder / f"tiny-{name}" / "environment.json").read_text())["processes"]


@pytest.mark.parametrize("name", RUNS)
def test_the_digest_is_the_same_for_any_number_of_ranks(folders, name):
    digests = {ranks: Runs(folder).summary(name)["digest"] for ranks, folder in folders.items()}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["fedavg", "ucfl"])
def test_mpi_that_is_given_gpu_memory_leads_to_the_digest_of_staged_copies(folders, name, ranks):
    runs = Runs(folders[ranks])
    used = json.loads((folders[ranks] / f"tiny-{name}-auto" / "environment.json").read_text())
    assert used["mpi_memory"] == ("device" if used["mpi_cuda_aware"] else "main")
    if used["mpi_memory"] == "main":
        pytest.skip("this MPI is not CUDA-aware")
    assert runs.summary(name)["digest"] == runs.summary(f"{name}-auto")["digest"]


@pytest.mark.parametrize("name", ["fedavg", "lenet"])
def test_steps_are_replayed_by_default_and_have_the_bits_of_ordinary_ones(folders, name):
    runs = Runs(folders[2])
    one, other = (runs.summary(n) for n in (name, f"{name}-ordinary"))
    assert (one["identity"]["graphs"], other["identity"]["graphs"]) == (True, False)
    assert one["digest"] == other["digest"]


@pytest.mark.nightly
def test_every_kind_of_run_has_one_digest(mpirun, tmp_path):
    """What `test_digests` compares on CPUs, on GPUs."""
    runs, found = json.dumps(EVERY), {}
    for ranks in (1, 3):
        options = ["--system.device", DEVICE, "--data.cache", tmp_path / "cache"]
        folder = tmp_path / str(ranks)
        end = mpirun(
            ranks, SCRIPT, CONFIG, folder, runs, *options, timeout=900, env=toy.PYTHONPATH, fresh=True
        )
        assert end.returncode == 0, end.stderr
        found[ranks] = {name: Runs(folder).summary(name)["digest"] for name in EVERY}
    assert found[1] == found[3]


def test_four_ranks_share_the_gpus_in_turn_workers_first(folders):
    found = [place["device"] for place in places(folders[4], "fedavg")]
    assert found == [f"cuda:{number % torch.cuda.device_count()}" for number in (3, 0, 1, 2)]


def test_idle_clients_hold_no_gpu_memory(folders):
    """The peak is that of the clients that train one after the other: a hundred times as many are no more."""
    few, many = (places(folders[2], name)[1]["gpu_peak_bytes"] for name in ("few", "many"))
    assert few > 0
    assert abs(many - few) < 4 << 20, "all samples of the 800 clients take 125 MB"
