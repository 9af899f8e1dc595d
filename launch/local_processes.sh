#!/usr/bin/env bash
# One training run in N processes on this machine: to try a multi-host configuration without the hosts.
# shellcheck disable=SC2016
usage='usage: local_processes.sh [--devices=K] [--grace=SECONDS] [--logs=DIR] N -- ARGUMENTS OF fbt train

  launch/local_processes.sh --devices=4 2 -- --config=configs/tiny.py --workdir=runs/two --config.mesh.fsdp=-1

  N               processes; they meet on a free port of the loopback device
  --devices=K     K pretended CPU devices in each process (default: the devices that are there)
  --grace=SECONDS how long the others may go on once one has failed (default: 90); then SIGTERM, 10 s later SIGKILL
  --logs=DIR      process_0.log, process_1.log, ... go there (default: a new folder below TMPDIR)

The log of process 0 is shown here as it grows. SIGTERM and Ctrl-C are passed on to the processes as SIGTERM: they save
a checkpoint and leave. A second one kills them. Started again with the same arguments, the run goes on.
Environment: FBT, the command to run in place of `fbt`.
Exit status: that of the first process that left with another than 0; so 143 after a stop. 2: wrong arguments.'

set -euo pipefail

wrong() {
    printf 'local_processes.sh: %s\n\n%s\n' "$1" "$usage" >&2
    exit 2
}

is_count() { [[ $1 =~ ^[1-9][0-9]{0,3}$ ]]; }

devices='' grace=90 logs='' count=''
while (($#)); do
    case $1 in
        -h | --help) printf '%s\n' "$usage"; exit 0 ;;
        --devices=*) devices=${1#*=}; is_count "$devices" || wrong "$1: must be a number of devices" ;;
        --grace=*) grace=${1#*=}; is_count "$grace" || wrong "$1: must be a number of seconds, 1 to 9999" ;;
        --logs=*) logs=${1#*=}; [[ $logs ]] || wrong "$1: must be a folder" ;;
        --) shift; break ;;
        -*) wrong "unknown option $1" ;;
        *) [[ ! $count ]] || wrong "unexpected $1; the arguments of fbt train come after --"; count=$1 ;;
    esac
    shift
done
[[ $count ]] || wrong 'the number of processes is missing'
is_count "$count" || wrong "$count: must be a number of processes"
(($#)) || wrong 'the arguments of fbt train are missing; they come after --'

read -ra command <<<"${FBT:-fbt}"
if [[ ! ${FBT:-} ]] && ! type -P fbt >/dev/null; then
    command=("$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/fbt") # where make puts it
fi
type -P "${command[0]}" >/dev/null || wrong "${command[0]}: no such command; activate the environment, or set FBT"

# A port that nobody listens on, below those that the kernel gives to outgoing connections.
while port=$((20000 + RANDOM % 10000)); (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done

if [[ $logs ]]; then mkdir -p -- "$logs"; else logs=$(mktemp -d "${TMPDIR:-/tmp}/fbt_processes.XXXXXX"); fi
echo "$count processes, logs in $logs"

export JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$port JAX_NUM_PROCESSES=$count
export PYTHONUNBUFFERED=1
if [[ $devices ]]; then
    export JAX_PLATFORMS=cpu
    export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"
fi

stops=0
trap 'stops=$((stops + 1))' TERM INT HUP

# Each process in a group of its own (set -m), so that Ctrl-C reaches it once, as the SIGTERM sent below.
left=()
set -m
for ((i = 0; i < count; i++)); do
    log=$logs/process_$i.log
    : >"$log"
    JAX_PROCESS_ID=$i "${command[@]}" train "$@" </dev/null >"$log" 2>&1 &
    left[i]=$!
done
tail -n +1 -s 0.2 -f --pid="${left[0]}" -- "$logs/process_0.log" 2>/dev/null &
tail=$!
set +m

# From here on stderr proper is closed to bash, which would add its own word on each killed job.
exec 3>&2 2>/dev/null
tell() { printf '%s\n' "$1" >&3 || true; } # even after the terminal is gone

send() {
    local i
    for i in "${!left[@]}"; do kill "-$1" "${left[i]}" || true; done
}
trap 'send TERM' EXIT # nobody is left unless this script itself fails

status=0 sent=0 deadline='' ended=''
while ((${#left[@]})); do
    sleep 0.2 || true # Ctrl-C ends it early
    if ((stops > sent)); then
        if ((sent == 0)); then
            tell 'stopping: SIGTERM to all processes'
            send TERM
        else
            send KILL
        fi
        sent=$stops
    fi
    for i in "${!left[@]}"; do
        if kill -0 "${left[i]}"; then continue; fi
        code=0
        wait "${left[i]}" || code=$?
        unset "left[$i]"
        if ((code == 0)); then continue; fi
        if ((code != 143 || !sent)); then tell "process $i left with status $code; log: $logs/process_$i.log"; fi
        if ((status == 0)); then
            status=$code
            deadline=$((SECONDS + grace))
            if ((i > 0 && code != 143)); then tail -n 5 -- "$logs/process_$i.log" >&3 || true; fi
        fi
    done
    if [[ $deadline ]] && ((${#left[@]} && SECONDS >= deadline)); then
        if [[ ! $ended ]]; then
            tell "processes ${!left[*]} still there after $grace s: SIGTERM"
            send TERM
            ended=yes
            deadline=$((SECONDS + 10))
        else
            tell "processes ${!left[*]} still there: SIGKILL"
            send KILL
            deadline=$((SECONDS + 10))
        fi
    fi
done
wait "$tail" || true # it shows the last lines and ends by itself
exit "$status"
