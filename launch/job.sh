# What the scripts of jobs share (slurm, pbs, lsf, gridengine, hosts, workstation): a run is started, stopped in time, and judged by what
# rank 0 says at its end. mpirun also ends with 0 if a node dies, a host is cut off or a scheduler ends its daemons.
# They set `launcher` and `program`, the words of the two commands.
me=${me:-${0##*/}}
unfinished=70  # exit code of a run that did not come to its end, where the launcher ended with 0 (EX_SOFTWARE of sysexits.h)
asked_to_stop=0 job="" calm=()

# from_all_signals: at SIGTERM and SIGINT mpirun and its daemons on other nodes would end the ranks at once, without their state.
# A scheduler signals all processes of a job: keep these signals from them (by env of coreutils 8.31 or later; in `calm`, and as
# Open MPI's launch agent). The ranks hear them, and finish their step. SIGUSR1 and SIGUSR2, which mpirun hands on, end its daemons.
from_all_signals() {
    calm=(env --block-signal=TERM,INT,HUP)
    if "${calm[@]}" true 2> /dev/null; then
        export PRTE_MCA_prte_launch_agent=${PRTE_MCA_prte_launch_agent:-${calm[*]},USR1,USR2 prted}
    else
        calm=()
    fi
}

send() { kill "-$1" ${job:-} 2> /dev/null || true; }

# stops SIGNAL...: SIGUSR2 follows for the run, which writes its state and ends with 75: mpirun and srun hand it on to all ranks.
stops() { trap 'asked_to_stop=1; send USR2' "$@"; }

# gently: as `stops` with Ctrl-C, SIGTERM and a closed terminal; a second one is SIGTERM for mpirun, which ends all ranks at once.
gently() {
    stop_by=(USR2 TERM)
    set -m  # a process group of its own: Ctrl-C is for this script
    trap 'send "${stop_by[asked_to_stop > 0]}"; asked_to_stop=1' TERM INT HUP
    saves USR1
}

# saves SIGNAL: SIGUSR1 follows for the run, which writes its state and goes on.
saves() { trap 'send USR1' "$@"; }

# part TASK FIRST LAST STEP: of a sweep's cases, a task of an array takes one part of as many as the array has tasks.
part() { program+=(--case "$((($1 - $2) / $4 + 1))/$((($3 - $2) / $4 + 1))"); }

# run_job: run "${launcher[@]}" "${program[@]}" to its end. Sets `told`, what rank 0 left: nothing, `began` or its exit code; and
# `code`: that exit code, else the launcher's, but `unfinished` instead of 0. Rank 0 must see this folder, as it must see runs/.
run_job() {
    local file
    file=$(mktemp "$PWD/.mpifl-XXXXXX" 2> /dev/null || mktemp)
    "${calm[@]}" "${launcher[@]}" env "MPIFL_EXIT_FILE=$file" "${program[@]}" < /dev/null &
    job=$!
    ((!asked_to_stop)) || send USR2
    while kill -0 $job 2> /dev/null; do wait $job || true; done  # a signal ends `wait`, not the job
    code=0
    wait $job || code=$?
    job=""
    told=$(cat "$file" 2> /dev/null || true)
    rm -f "$file"
    if [[ $told =~ ^[0-9]+$ ]]; then
        code=$told
    elif ((code == 0)); then
        code=$unfinished
        echo "$me: ${launcher[0]##*/} ended with 0, but rank 0 did not say that the run has ended: it is not complete" >&2
    fi
}

# was_killed: whether a rank or a node died: the run began, and ended without a word of rank 0, or its start was broken off (0).
was_killed() { [[ $told == began && $code != 75 || $code == "$unfinished" ]]; }

# run_again N: run_job, and up to N times more if a rank or a host died.
run_again() {
    local left=$1
    run_job
    while was_killed && ((left-- > 0 && !asked_to_stop)); do
        echo "$me: ended with $code; going on from the last checkpoint ($left restarts left)" >&2
        run_job
    done
}
