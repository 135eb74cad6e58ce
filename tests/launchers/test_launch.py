"""The launch scripts hand over what they should; schedulers are stubs that print how they were called."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(
    p
    for p in [*LAUNCH.iterdir(), ROOT / ".ci" / "run"]
    if p.is_file() and b"bash" in p.read_bytes().split(b"\n")[0]
)


RUN = "mpifl run a.yaml --resume --output.id 17 --rounds 3\n"
LAUNCHER = """#!/bin/bash
all=" $* "
file=${all#* MPIFL_EXIT_FILE=}; file=${file%% *}
all=${all/ env MPIFL_EXIT_FILE=$file/}
echo "${0##*/} threads=$OMP_NUM_THREADS${all% }"
echo 0 > "$file"
"""


@pytest.fixture
def stubs(tmp_path):
    """Return an environment in which mpirun and srun print their name, threads and arguments.

    As rank 0 does, they write an exit code to the file that the script names in an `env` before the program.
    """
    for name in ("mpirun", "srun"):
        (tmp_path / name).write_text(LAUNCHER)
    (tmp_path / "mpifl").write_text(f'#!/bin/sh\n[ "$1" = launch ] && cat {LAUNCH}/"$2"\n')
    for name in ("mpirun", "srun", "mpifl"):
        (tmp_path / name).chmod(0o755)
    outside = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return outside | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def launch(script: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a launch script to its end."""
    command = ["bash", str(LAUNCH / script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, **options
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_stop_at_the_first_error(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if script.suffix != ".sh":  # read by the others
        assert "\nset -euo pipefail\n" in script.read_text()
        assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    ("launcher", "called"),
    [
        ({}, f"mpirun threads=2 -n 8 {RUN}"),
        ({"LAUNCHER": "srun"}, f"srun threads=2 --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=2 {RUN}"),
    ],
    ids=["mpirun", "srun"],
)
def test_slurm_takes_ranks_and_threads_from_the_allocation(stubs, launcher, called):
    slurm = {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "17"}
    done = launch("slurm", "a.yaml", "--rounds", "3", env=stubs | slurm | launcher)
    assert (done.returncode, done.stdout) == (0, called)


def test_slurm_without_a_configuration_says_how_it_is_called(stubs):
    done = launch("slurm", env=stubs)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


def test_pbs_counts_the_lines_of_its_node_file(stubs, tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    pbs = {
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_O_WORKDIR": str(tmp_path),
        "CONFIG": "a.yaml",
        "PBS_JOBID": "9.server",
    }
    done = launch("pbs", env=stubs | pbs | {"OPTIONS": "--rounds 3 --seed 1"})
    assert (done.returncode, done.stdout) == (
        0,
        "mpirun threads=1 -n 4 mpifl run a.yaml --resume --output.id 9.server --rounds 3 --seed 1\n",
    )


def test_lsf_takes_ranks_from_the_allocation(stubs):
    lsf = {"LSB_DJOB_NUMPROC": "4", "LSB_JOBID": "17"}
    done = launch("lsf", "a.yaml", "--rounds", "3", env=stubs | lsf)
    assert (done.returncode, done.stdout) == (0, f"mpirun threads=1 -n 4 {RUN}"), done.stderr


GRID_ENGINE = {"JOB_ID": "17", "NSLOTS": "4", "SGE_TASK_ID": "undefined", "RESTARTED": "0"}


def test_grid_engine_names_its_hosts_to_open_mpi(stubs, tmp_path):
    (tmp_path / "mpirun").write_text(LAUNCHER + 'cat "$PRTE_MCA_prte_default_hostfile"\n')
    (tmp_path / "pe").write_text("a.b 3 main@a.b UNDEFINED\nc.d 1 main@c.d <NULL>\n")
    grid = GRID_ENGINE | {"PE_HOSTFILE": str(tmp_path / "pe")}
    done = launch("gridengine", "a.yaml", "--rounds", "3", env=stubs | grid, cwd=tmp_path)
    assert done.stdout == f"mpirun threads=1 -n 4 {RUN}a.b slots=3\nc.d slots=1\n", done.stderr


@pytest.mark.parametrize(
    ("words", "array", "told"),
    [
        ((), {}, "run a.yaml --resume --output.id 17-3 --seed 3"),
        ((), {"RUN_ID": "b"}, "run a.yaml --resume --output.id b-3 --seed 3"),
        (("sweep",), {}, "sweep a.yaml --output.id 17 --case 2/3"),
        (("sweep",), {"PARTS": "24"}, "sweep a.yaml --output.id 17 --case 3/24"),
    ],
)
def test_grid_engine_gives_each_task_of_an_array_its_part(words, array, told, stubs, tmp_path):
    tasks = {"SGE_TASK_ID": "3", "SGE_TASK_FIRST": "1", "SGE_TASK_LAST": "6", "SGE_TASK_STEPSIZE": "2"}
    done = launch("gridengine", *words, "a.yaml", env=stubs | GRID_ENGINE | tasks | array, cwd=tmp_path)
    assert done.stdout == f"mpirun threads=1 -n 4 mpifl {told}\n", done.stderr


def test_slurm_gives_each_task_of_an_array_its_seed_and_folder(stubs):
    array = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "18",
        "SLURM_ARRAY_JOB_ID": "17",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    done = launch("slurm", "a.yaml", env=stubs | array)
    assert "mpifl run a.yaml --resume --output.id 17-3 --seed 3" in done.stdout


@pytest.mark.parametrize(
    ("array", "part"),
    [
        ({"MIN": "1", "MAX": "24", "COUNT": "24", "STEP": "1", "ID": "3"}, " --case 3/24"),
        ({"MIN": "0", "MAX": "23", "COUNT": "24", "STEP": "1", "ID": "0"}, " --case 1/24"),
        ({"MIN": "100", "MAX": "108", "COUNT": "5", "STEP": "2", "ID": "104"}, " --case 3/5"),
        ({"MIN": "7", "MAX": "7", "COUNT": "1", "STEP": "1", "ID": "7"}, " --case 1/1"),
        ({}, ""),
    ],
)
def test_slurm_shares_a_sweep_among_the_tasks_of_an_array(array, part, stubs):
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "19", **({"SLURM_ARRAY_JOB_ID": "17"} if array else {})}
    slurm |= {f"SLURM_ARRAY_TASK_{key}": value for key, value in array.items()}
    done = launch("slurm", "sweep", "a.yaml", "--rounds", "3", env=stubs | slurm)
    name = "17" if array else "19"
    told = f"mpirun threads=1 -n 2 mpifl sweep a.yaml --output.id {name}{part} --rounds 3\n"
    assert (done.returncode, done.stdout) == (0, told), done.stderr


def test_some_tasks_of_an_array_need_to_know_of_how_many(stubs):
    """--array=3,7: neither the first number nor the last one says how many parts there are."""
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17"}
    array = {"MIN": "3", "MAX": "7", "COUNT": "2", "STEP": "1", "ID": "7"}
    slurm |= {f"SLURM_ARRAY_TASK_{key}": value for key, value in array.items()}
    done = launch("slurm", "sweep", "a.yaml", env=stubs | slurm)
    assert (done.returncode, "PARTS=24 sbatch --array=3,7" in done.stderr) == (2, True)
    done = launch("slurm", "sweep", "a.yaml", env=stubs | slurm | {"PARTS": "24"})
    assert "mpifl sweep a.yaml --output.id 17 --case 7/24" in done.stdout


@pytest.mark.parametrize(
    ("submitted", "more", "part"),
    [("0-23", {}, "5/24"), ("4-24:2", {}, "1/11"), ("1-24%4", {}, "4/24"), ("", {"PARTS": "6"}, "4/6")],
)
def test_pbs_asks_for_the_range_of_an_array(submitted, more, part, stubs, tmp_path):
    """A stub of qstat: only in its full output is the range that was submitted."""
    text = f"Job Id: 9[].server\n    Job_Name = mpifl\n    array_indices_submitted = {submitted}\n"
    (tmp_path / "qstat").write_text(f"#!/bin/sh\n[ \"$*\" = '-f 9[].server' ] && cat <<'END'\n{text}END\n")
    (tmp_path / "qstat").chmod(0o755)
    (tmp_path / "nodes").write_text("a\na\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path), "CONFIG": "a.yaml"}
    pbs |= {"COMMAND": "sweep", "PBS_JOBID": "9[4].server", "PBS_ARRAY_ID": "9[].server"}
    done = launch("pbs", env=stubs | pbs | more | {"PBS_ARRAY_INDEX": "4", "OPTIONS": "--rounds 3"})
    told = f"mpirun threads=1 -n 2 mpifl sweep a.yaml --output.id 9.server --case {part} --rounds 3\n"
    assert (done.returncode, done.stdout) == (0, told), done.stderr


def test_pbs_runs_a_sweep_without_an_array_and_refuses_another_command(stubs, tmp_path):
    (tmp_path / "nodes").write_text("a\na\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path), "CONFIG": "a.yaml"}
    done = launch("pbs", env=stubs | pbs | {"COMMAND": "sweep", "PBS_JOBID": "9.server"})
    assert done.stdout == "mpirun threads=1 -n 2 mpifl sweep a.yaml --output.id 9.server\n"
    done = launch("pbs", env=stubs | pbs | {"COMMAND": "swep"})
    assert (done.returncode, "COMMAND=swep: run or sweep" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("index", "part"), [({"LSB_JOBINDEX": "3", "LSB_JOBINDEX_END": "24"}, " --case 3/24"), ({}, "")]
)
def test_lsf_runs_a_sweep(index, part, stubs):
    done = launch("lsf", "sweep", "a.yaml", env=stubs | {"LSB_DJOB_NUMPROC": "4", "LSB_JOBID": "17"} | index)
    assert done.stdout == f"mpirun threads=1 -n 4 mpifl sweep a.yaml --output.id 17{part}\n", done.stderr


MPIRUN = """
import os, signal, sys, time
words = sys.argv[1:]
at = words.index("env")
_, code_file = words[at + 1].split("=")  # MPIFL_EXIT_FILE
def stop(*_):
    time.sleep(0.3)  # it writes its state first
    with open(code_file, "w") as file:
        file.write("75")
    os._exit(1)
signal.signal(signal.SIGUSR2, stop)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: os._exit(1))
with open("args", "w") as file:
    file.write(" ".join(words[:at] + words[at + 2 :]))
os.rename("args", "started")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("pbs", {"CONFIG": "a.yaml", "PBS_NODEFILE": "nodes", "PBS_JOBID": "9"}),
        ("lsf", {"LSB_DJOB_NUMPROC": "2", "LSB_JOBID": "9"}),
        ("gridengine", {"NSLOTS": "2", "JOB_ID": "9"}),
    ],
    ids=["pbs", "lsf", "gridengine"],
)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2], ids=["TERM", "INT", "USR2"]
)
def test_what_a_scheduler_sends_to_all_processes_stops_the_run_in_good_order(
    script, given, number, stubs, tmp_path
):
    """A stub of mpirun that ends its ranks at SIGTERM or SIGINT, and with 75 once it may hand SIGUSR2 on."""
    (tmp_path / "mpirun").write_text(f"#!{sys.executable} -S\n{MPIRUN}")
    (tmp_path / "nodes").write_text("a\na\n")
    command = ["bash", str(LAUNCH / script), *([] if script == "pbs" else ["a.yaml"])]
    options = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "start_new_session": True}
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in the background
    with subprocess.Popen(command, env=stubs | given, **options) as job:
        while not (tmp_path / "started").exists():
            assert job.poll() is None
            time.sleep(0.02)
        os.killpg(job.pid, number)
        assert job.wait(300) == 75
    assert (tmp_path / "started").read_text() == "-n 2 mpifl run a.yaml --resume --output.id 9"


@pytest.mark.parametrize(
    ("starts", "code", "num"),
    [
        ("began:1 began:137 0:0", 0, 3),  # two deaths, then the end
        ("began:1 began:1 began:1 0:0", 1, 3),  # more deaths than restarts
        ("began:0 0:0", 0, 2),  # mpirun ends with 0 although a host has died
        (":0 0:0", 0, 2),  # mpirun ends with 0 although nothing has begun
        (":213", 213, 1),  # nothing could be started
        ("75:1 0:0", 75, 1),
        ("2:2 0:0", 2, 1),
        ("1:1 0:0", 1, 1),  # an error of the run itself: it would come again
        ("0:1", 0, 1),  # mpirun was ended by force after the end of the run
    ],
)
def test_what_rank_0_leaves_decides_how_a_job_has_ended(starts, code, num, tmp_path):
    """A start of the stub leaves a word in the file that it is given, and ends with a code: word:code."""
    (tmp_path / "stub").write_text(f"""#!/bin/bash
starts=({starts}); n=$(cat n 2> /dev/null || echo 0); echo $((n + 1)) > n; now=${{starts[$n]}}
echo "${{now%:*}}" > "${{2#MPIFL_EXIT_FILE=}}"; exit "${{now#*:}}"
""")
    (tmp_path / "stub").chmod(0o755)
    program = f"""set -euo pipefail; source {LAUNCH}/job.sh
    launcher=(./stub) program=(mpifl); run_again 2; exit "$code" """
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, int((tmp_path / "n").read_text())) == (code, num), done.stderr
    assert {f.name for f in tmp_path.iterdir()} == {"stub", "n"}


@pytest.fixture
def workstation(tmp_path) -> Path:
    """Return `launch/workstation` of a checkout whose installed mpirun prints how it was called."""
    place = tmp_path / "a checkout"
    kernels = ROOT / "mpifl" / "kernels"
    sources = [f.relative_to(ROOT) for f in (*kernels.glob("*.[ch]"), *kernels.glob("*.inc"))]
    sources += [Path(name) for name in ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt")]
    for file in [*sources, *(Path("launch", name) for name in ("common.sh", "job.sh", "workstation"))]:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes((ROOT / file).read_bytes())
    for name in ("mpirun", "mpifl"):
        (place / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (place / ".venv" / "bin" / name).write_text(LAUNCHER)
        (place / ".venv" / "bin" / name).chmod(0o755)
    stamp = 'echo "$(stamp) openmpi,report,vision" > .venv/installed'
    program = f"source '{place}/launch/common.sh'; cd '{place}'; {stamp}"
    subprocess.run(["bash", "-c", program], check=True)
    return place / "launch" / "workstation"


@pytest.mark.parametrize("threads", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_THREAD_LIMIT": "1"}])
def test_a_workstation_has_a_worker_for_each_core(threads, workstation):
    """The script sets OMP_NUM_THREADS=1, which `nproc` takes for the number of cores."""
    outside = {k: v for k, v in os.environ.items() if k not in ("RANKS", "OMP_NUM_THREADS")} | threads
    done = launch(str(workstation), "a b.yaml", env=outside)
    mpifl = workstation.parents[1] / ".venv" / "bin" / "mpifl"
    clean = {k: v for k, v in outside.items() if not k.startswith("OMP_")}
    cores = int(subprocess.run("nproc", env=clean, capture_output=True, text=True, check=True).stdout)
    assert done.stdout == f"mpirun threads=1 -n {cores + 1} {mpifl} run a b.yaml\n", done.stderr


@pytest.mark.parametrize("times", ["", "quickstart", "configs/quickstart.yaml", "2.5", "-1", "08"])
def test_a_workstation_needs_a_number_of_restarts(times, workstation):
    done = launch(str(workstation), "--restart", times, "a.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    said = f"workstation: --restart {times}: give the most restarts, as in --restart 3\n"
    assert done.stderr == said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "a.yaml"], "not inside a Slurm job: sbatch"),
        (["lsf", "a.yaml"], "not inside an LSF job: bsub"),
        (["gridengine", "a.yaml"], "not inside a Grid Engine job: qsub"),
        (["gridengine"], "usage: qsub [options] launch/gridengine"),
        (["pbs"], "usage: qsub -v CONFIG="),
        (["docs", "sevre"], "docs: launch/docs [build|serve]"),
    ],
)
def test_a_script_that_is_called_in_another_way_says_how(words, message, stubs):
    """Before anything is installed."""
    jobs = ("SLURM_NTASKS", "LSB_DJOB_NUMPROC", "NSLOTS", "CONFIG")
    done = launch(*words, env={k: v for k, v in stubs.items() if k not in jobs})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


@pytest.mark.nightly
def test_throughput_refuses_bad_input_as_a_command_does():
    words = [sys.executable, LAUNCH / "throughput", "--rouns", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("mpifl: rouns = 3: unknown key; did you mean")


def test_an_installation_is_made_anew_when_any_of_its_sources_changes(tmp_path):
    """A pull that changes a file in C must not leave the old library in use."""
    kernels = ROOT / "mpifl" / "kernels"
    sources = [f.relative_to(ROOT) for f in (*kernels.glob("*.[ch]"), *kernels.glob("*.inc"))]
    sources += [Path(name) for name in ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt")]
    for file in [*sources, Path("launch/common.sh")]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())

    def stamp() -> str:
        program = f"set -euo pipefail; source {tmp_path}/launch/common.sh; cd {tmp_path}; stamp"
        return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout

    found = [stamp(), stamp()]
    assert found[0] == found[1] != ""
    for file in sources:
        (tmp_path / file).write_bytes((ROOT / file).read_bytes() + b"\n")
        found.append(stamp())
    assert {file.name for file in sources} >= {"common.h", "reductions.c", "training.c", "training_simd.inc"}
    assert len(set(found)) == len(sources) + 1


def test_what_wheels_carry_for_nobody_is_taken_out(tmp_path):
    """A stub of Python says where packages lie; PyTorch's tests go, its programs and its libraries stay."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f"#!/bin/sh\necho {tmp_path}/packages\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    kept = {"torch/bin/torch_shm_manager", "torch/lib/libtorch.so", "torch/testing/__init__.py"}
    for name in (*kept, "torch/test/a_test", "torch/bin/test_api"):
        (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name).touch()
    program = f"set -euo pipefail; source {LAUNCH}/common.sh; environment={tmp_path}; slim"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = {
        str(p.relative_to(tmp_path / "packages")) for p in (tmp_path / "packages").rglob("*") if p.is_file()
    }
    assert left == kept


@pytest.mark.parametrize("terminal", [False, True])
def test_an_installation_is_not_silent_while_pip_is(terminal, tmp_path):
    """The stub of pip unpacks until the script, whose ten seconds are short here, has said so twice."""
    pip = f"""import pathlib, sys, time
folder = pathlib.Path({str(tmp_path)!r}, "packages")
folder.mkdir()
end = time.monotonic() + 60
while pathlib.Path({str(tmp_path)!r}, "said").read_text().count(" s so far, ") < 2 and time.monotonic() < end:
    (folder / str(time.monotonic())).write_bytes(b"x" * 2_000_000)
    time.sleep(0.05)
sys.exit(3)
"""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f"#!{sys.executable}\n{pip}")
    (tmp_path / "bin" / "python").chmod(0o755)
    program = f"""set -euo pipefail; source {LAUNCH}/common.sh; environment={tmp_path}
sleep() {{ command sleep 0.2; }}
pip_install torch || echo "pip ended with $?"
"""
    (tmp_path / "program").write_text(program)
    command = ["bash", str(tmp_path / "program")]
    if terminal:
        command = [sys.executable, "-c", f"import pty; pty.spawn({command})"]
    with (tmp_path / "said").open("w") as said:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, timeout=120)
    assert done.returncode == 0
    lines = (tmp_path / "said").read_text().split("\n")
    assert re.fullmatch(rf"  \d+ s so far, \d+ MB in {tmp_path.name}", lines[0].strip("\r"))
    assert "pip ended with 3" in lines[-2]


def test_a_log_has_what_pip_says_as_it_says_it(tmp_path):
    """The stub of pip waits until its first line is in the log; its next one is long."""
    stub = f"""import pathlib, time
print("  Downloading numpy.whl (9 MB)", flush=True)
end = time.monotonic() + 30
while "numpy.whl" not in pathlib.Path({str(tmp_path)!r}, "said").read_text() and time.monotonic() < end:
    time.sleep(0.05)
print("Installing collected packages: " + 100 * "torch, ", flush=True)
print("Building in time" if time.monotonic() < end else "Building late", flush=True)
"""
    (tmp_path / "stub").write_text(f"#!{sys.executable}\n{stub}")
    (tmp_path / "stub").chmod(0o755)
    program = f"set -euo pipefail; source {LAUNCH}/common.sh; in_lines {tmp_path}/stub"
    with (tmp_path / "said").open("w") as said:
        done = subprocess.run(["bash", "-c", program], stdin=subprocess.DEVNULL, stdout=said, timeout=120)
    assert done.returncode == 0
    first, second, third = (tmp_path / "said").read_text().splitlines()
    assert (first, third) == ("  Downloading numpy.whl (9 MB)", "  Building in time")
    assert len(second) < 110


def test_the_making_of_an_environment_is_not_silent(tmp_path):
    """Python takes long to put pip into it: 13 s where two cores are shared."""
    stub = f"""import pathlib, sys, time
end = time.monotonic() + 60
while " s so far, " not in pathlib.Path({str(tmp_path)!r}, "said").read_text() and time.monotonic() < end:
    time.sleep(0.05)
"""
    (tmp_path / "stub").write_text(f"#!{sys.executable}\n{stub}")
    (tmp_path / "stub").chmod(0o755)
    program = f"""set -euo pipefail; source {LAUNCH}/common.sh; environment={tmp_path}; unset TORCH
sleep() {{ command sleep 0.2; }}
find_python() {{ echo {tmp_path}/stub; }}
install_torch() {{ echo "then PyTorch"; }}
pip_install() {{ :; }}
install
"""
    with (tmp_path / "said").open("w") as said:
        done = subprocess.run(["bash", "-c", program], stdin=subprocess.DEVNULL, stdout=said, timeout=120)
    assert done.returncode == 0
    lines = (tmp_path / "said").read_text().splitlines()
    assert re.fullmatch(rf"  \d+ s so far, \d+ MB in {tmp_path.name}", lines[1])
    assert "then PyTorch" in lines[-2]
