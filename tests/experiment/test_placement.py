"""What is said of where ranks are, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support import toy
from support.each import for_each
from support.runs import CONFIG

from mpifl.algorithms.fedavg import FedAvg
from mpifl.comm.single import Single
from mpifl.core.errors import UserError
from mpifl.driver.run import announce
from mpifl.experiment import build as experiment
from mpifl.experiment import placement
from mpifl.experiment.build import replayed_steps
from mpifl.experiment.loader import load
from mpifl.experiment.schema import SystemConfig
from mpifl.results.identity import machine
from mpifl.training.cuda_graph import Replayed


def rank(
    node=0, cpus="0-7", threads=1, gpus=(), gpu=None, mps=False, loops="1a2b", code="c", own="", uses="AVX2"
):
    """Return a rank's place."""
    return {
        **{"host": f"host{node}", "node": node, "local_rank": 0, "device": "cpu", "visible_gpus": "0,1"},
        **{"cpus": cpus, "threads": threads, "gpus": [*gpus], "gpu": gpu, "mps": mps, "start_s": {}},
        **{"pid": 1, "own_code": own, "plugins": ""},
        "machine": {"device": "cpu", "processor": "P", "instructions": uses, "kernels": loops, "code": code},
    }


@pytest.mark.parametrize(
    ("masks", "threads"),
    [
        ([(0, "0-7")], 8),  # a process alone
        ([(0, "0-7"), (0, "0-7"), (0, "0-7")], 4),  # not bound: two workers share eight cores
        ([(0, "0"), (0, "2-5"), (0, "6-7")], 2),  # bound: the least, the same for all
        ([(0, "0-3"), (1, "0-3"), (1, "4-7")], 4),  # on two nodes
        ([(0, "0-1"), (0, "0-1"), (0, "0-1"), (0, "0-1")], 1),  # more workers than cores
    ],
)
def test_threads_are_what_every_worker_can_have_for_itself(masks, threads):
    assert placement.threads_for([(*mask, 64) for mask in masks]) == threads


def test_threads_share_the_quota_of_a_container():
    assert placement.threads_for([(0, "0-15", 4)]) == 4
    assert placement.threads_for([(0, "0-15", 5)] * 3) == 2


def test_as_many_threads_as_asked_for():
    assert placement.threads_of(Single(), 3) == 3
    assert placement.threads_of(Single(), 0) == len(placement.os.sched_getaffinity(0))


def test_workers_that_share_a_gpu_are_told_of_mps():
    shared = [rank(gpus="a", gpu="a") for _ in range(3)]
    assert "CUDA MPS" in placement.table(shared)
    assert "CUDA MPS" not in placement.table([p | {"mps": True} for p in shared])
    assert placement.hints([*shared[:2], rank(1, gpus="a", gpu="a")]) == [], "the server computes nothing"


OPTIONS_OF_GRAPHS = {
    "": True,
    "--model lenet5": True,
    "--model ifca_mlp": True,
    "--model emdcfl_cnn": False,
    "--model.lora.rank 2": False,
    "--task regression": False,
    "--system.stack 0": False,
    "--system.stack 3 --system.cuda_graphs true": True,
    "--system.cuda_graphs false": False,
    "--system.deterministic false": False,
    "--local.precision tf32": False,
    "--local.precision bfloat16": False,
}


@for_each(("options", "replayed"), OPTIONS_OF_GRAPHS.items())
def test_steps_are_replayed_on_a_gpu_where_that_changes_no_bit(options, replayed):
    config = load(str(CONFIG), options.split())
    sections = config.system, config.model, config.task, config.local
    assert (replayed_steps(*sections, "cuda:0") is not None) == replayed
    assert (replayed_steps(*sections, "cpu") is not None) == (config.system.cuda_graphs is True)


@pytest.mark.parametrize("replays", [True, False])
def test_what_is_replayed_is_what_the_learner_does_and_the_run_says(replays, monkeypatch):
    monkeypatch.setattr(
        experiment, "replayed_steps", lambda *sections: Replayed(sections[3]) if replays else None
    )
    context = toy.context_of(toy.config_of(FedAvg()), toy.Tiny())
    assert context.learner.replays == replays
    context.learner.device = torch.device("cuda:0")
    place = rank() | {"device": "cuda:0"}
    context = replace(context, places=(place,))
    assert context.identity["graphs"] == replays
    said: list[str] = []
    monkeypatch.setattr("mpifl.driver.run.line", lambda identity: "")
    announce(context, said.append, False)
    (hint,) = [text for text in said if text.startswith("hint: ")]
    assert ("about twice as fast" in hint, "several times as fast" in hint) == (replays, not replays)
    assert hint.endswith("--system.stack 0 --system.cuda_graphs true")
    monkeypatch.setattr("mpifl.driver.run.stackable", lambda module: False)
    said.clear()
    announce(context, said.append, False)
    hints = [text.partition(" with ")[2] for text in said if text.startswith("hint: ")]
    assert hints == ([] if replays else ["--system.cuda_graphs true"])


def test_a_gpu_without_a_worker_is_seen():
    places = [rank(gpus="ab", gpu="a"), rank(gpus="ab", gpu="b")]
    assert placement.hints(places) == ["host0: 1 GPU without a worker; start more ranks there"]
    assert placement.hints([*places, rank(gpus="ab", gpu="a")]) == []


def test_a_rank_makes_its_gpu_the_current_one_and_counts_its_peak_anew(monkeypatch):
    """Page-locked memory and MPI would open a context on the first GPU otherwise."""
    chosen, counted = [], []
    for name, answer in {"is_available": lambda: True, "device_count": lambda: 2}.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", counted.append)
    transport = Single()
    transport.device_rank = 3
    monkeypatch.setattr(experiment, "place", lambda transport, device, own, plugins: {})
    system = SystemConfig(deterministic=False)
    assert experiment.take_resources(system, "float32", ("", ""), transport).device == "cuda:1"
    assert chosen == counted == ["cuda:1"]


def on_gpus(*aware: bool) -> list[dict]:
    """Return the places of ranks on GPUs; whether the MPI of each is CUDA-aware."""
    return [rank(gpus="a", gpu="a") | {"device": "cuda:0", "mpi_cuda_aware": one} for one in aware]


def test_mpi_is_given_a_gpus_memory_only_where_it_is_asked_for_and_all_workers_can():
    aware, blind = on_gpus(True, True, True), on_gpus(True, True, False)
    cpus = [rank() | {"mpi_cuda_aware": False} for _ in range(3)]
    for places in (aware, blind, cpus, aware[:1]):
        assert placement.mpi_memory("main", places) == "main"
    assert placement.mpi_memory("device", aware) == placement.mpi_memory("auto", aware) == "device"
    assert placement.mpi_memory("device", on_gpus(False, True)) == "device", "rank 0 has no uploads"
    assert [placement.mpi_memory("auto", places) for places in (blind, cpus, aware[:1])] == ["main"] * 3


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (on_gpus(True), "one process sends nothing"),
        (on_gpus(True, True, False), "rank 2 on host0 has an MPI that is not CUDA-aware"),
        ([rank() | {"mpi_cuda_aware": False}] * 2, "rank 1 on host0 trains on the CPU"),
    ],
)
def test_a_gpus_memory_that_mpi_cannot_be_given_is_refused_with_the_reason(places, reason):
    with pytest.raises(UserError, match=rf"^system.mpi_memory = 'device': {reason}.*use main"):
        placement.mpi_memory("device", places)


def test_several_gpus_of_ones_own_are_refused_with_the_reason():
    with pytest.raises(
        UserError, match=r"rank 0 on host0 was given 2 GPUs of its own, and a rank drives one"
    ):
        placement.check_places([rank(gpus="ab", gpu="a"), rank(gpus="cd", gpu="c")])
    placement.check_places([rank(gpus="ab", gpu="a"), rank(gpus="ab", gpu="b")])  # shared in turn
    placement.check_places([rank(gpus="ab", gpu="a")])  # alone on a workstation
    placement.check_places([rank(gpus="a", gpu="a"), rank(gpus="b", gpu="b")])  # one each


def test_core_masks_are_written_and_read():
    assert placement.ranges([0, 1, 2, 3, 7]) == "0-3,7"
    assert placement.cores("0-3,7") == {0, 1, 2, 3, 7}


@pytest.mark.nightly
def test_a_run_reports_its_binding_and_keeps_it(mpirun, tmp_path):
    output = ["--output.folder", tmp_path, "--output.id", "a", "--system.threads", "0"]
    program = ("-m", "mpifl", "run", CONFIG, "--quiet", "--bind-report", *output)
    done = mpirun(2, *program, env=toy.PYTHONPATH, timeout=300)
    assert done.returncode == 0, done.stderr
    heads, *lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("hint")]
    assert heads == ["rank", "host", "node", "local", "device", "cpus", "threads", "start", "s"]
    environment = json.loads((tmp_path / "tiny-a" / "environment.json").read_text())
    places = environment["processes"]
    assert environment["mpi_cuda_aware"] in (True, False)
    assert [line[0] for line in lines] == ["0", "1"]
    for line, there in zip(lines, places, strict=True):
        assert line[4:7] == [there["device"], there["cpus"], str(there["threads"])]
        stages = there["start_s"]
        assert 0 < stages["imports"] <= stages["mpi"] <= stages["ready"] == float(line[7])
        assert stages["cpu"] > 0
    masks = [(there["node"], there["cpus"], 64) for there in places]
    assert {there["threads"] for there in places} == {placement.threads_for(masks)}


def test_kernels_on_some_nodes_only_are_refused():
    for loops in ("none", "3c4d"):
        mixed = [rank(), rank(node=1), rank(node=2, loops=loops)]
        with pytest.raises(UserError, match=f"host1 .*has 1a2b.*host2 .*has {loops}"):
            placement.check_places(mixed)
        placement.check_places(mixed, compiled=False)
        placement.check_places([rank(loops=loops), rank(), rank()])  # the server trains nothing


def test_ranks_that_run_other_code_are_refused():
    """Whichever they are: rank 0 trains nothing, but averages and evaluates."""
    mine = [rank(), rank(node=1), rank(node=2)]
    placement.check_places(mine)
    for i, other in ((0, 1), (1, 1), (2, 2)):
        places = [*mine]
        places[i] = rank(node=i, code="d")
        with pytest.raises(UserError, match=rf"mpifl = '[cd] on host0': host{other} .* other files.*mpifl"):
            placement.check_places(places)
    with pytest.raises(UserError, match=r"CONFIG = 'x on host0': host1 .* other files.* your own"):
        placement.check_places([rank(own="x"), rank(node=1, own="y")])


def test_ranks_that_alone_keep_to_a_limit_are_refused():
    limited, wide = rank(uses="AVX2 (MPIFL_INSTRUCTIONS)"), rank(node=1, uses="AVX512")
    placement.check_places([limited, limited])
    for places in ([limited, wide, limited], [wide, wide, limited]):
        with pytest.raises(UserError, match=r"MPIFL_INSTRUCTIONS.*host1 .* no such.*host0 .* has: .*-x"):
            placement.check_places(places)


def test_ranks_with_different_processors_are_told_of():
    """Rank 0, too: it computes weights and clusters."""
    two, four = rank(), rank(node=1, uses="AVX512")
    assert placement.unlike([two, two]) == ""
    for places in ([two, four], [four, two, two]):
        assert "computed (P (AVX2), P (AVX512))" in placement.unlike(places)
        assert placement.unlike(places).endswith("of one kind, or set MPIFL_INSTRUCTIONS=avx2 for all ranks")
    limited = [rank(uses="AVX2 (MPIFL_INSTRUCTIONS)") for _ in range(2)]
    assert placement.unlike(limited) == ""
    limited[0]["machine"]["processor"] = "Q"
    assert placement.unlike(limited).endswith("(MPIFL_INSTRUCTIONS))): use nodes of one kind")


def test_the_server_s_processor_is_in_the_identity_and_a_run_says_where_they_differ(capsys):
    context = toy.context_of(toy.config_of(FedAvg()), toy.Tiny())

    def of(*uses: str) -> dict[str, str]:
        places = [{**rank(uses=one), "machine": {**machine(), "instructions": one}} for one in uses]
        found = replace(context, places=places)
        announce(found, print, bind_report=False)
        return found.identity

    alike = of("AVX2", "AVX2")
    assert "different processors" not in capsys.readouterr().err
    assert alike == of("AVX2"), "neither does the number of ranks matter"
    assert of("AVX512", "AVX2", "AVX2")["instructions"] == "AVX2 | AVX512"
    assert "different processors" in capsys.readouterr().err
    server = {**rank(), "machine": {**machine(), "device": "cpu"}}
    worker = {**rank(), "machine": {**machine(), "device": "H100"}}
    assert replace(context, places=[server, worker]).identity["device"] == "H100"
