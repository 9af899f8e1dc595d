#!/usr/bin/env bash
# A training run on a TPU slice of several hosts, by gcloud's queued resources, from creation to deletion.
# shellcheck disable=SC2016  # what stands in single quotes is for the hosts' shells
usage='usage: tpu_pod.sh [--dry-run] create | install | start -- ARGUMENTS | watch | stop | resume -- ARGUMENTS | delete

  export NAME=fbt ZONE=us-west4-a
  launch/tpu_pod.sh create                  # asks for the slice, waits until it is there
  launch/tpu_pod.sh install                 # this checkout (HEAD) and its packages, on all hosts
  launch/tpu_pod.sh start -- --config=configs/fbt_1b.py --workdir=/mnt/bucket/runs/1b --config.mesh.fsdp=-1
  launch/tpu_pod.sh watch                   # the log of host 0; ends with the run, with its exit status
  launch/tpu_pod.sh stop                    # SIGTERM: saves a checkpoint and leaves with 143
  launch/tpu_pod.sh resume -- ...           # the arguments of start; creates the slice anew if it was preempted
  launch/tpu_pod.sh delete                  # only this ends the costs

ARGUMENTS are those of fbt train. --dry-run prints the commands instead. From the environment:
  NAME ZONE      of the queued resource; needed
  PROJECT        default: that of gcloud
  TYPE           default: v5litepod-16, that is 16 chips of v5e on 4 hosts
  RUNTIME        default: v2-alpha-tpuv5-lite
  SLICES         slices of that type, default 1 (then --config.mesh.slices=N too)
  SPOT           yes: cheaper, may be preempted at any time
  BUCKET         install mounts this bucket at /mnt/bucket on all hosts (gcsfuse); fbt itself takes no gs:// paths yet
  CREATE_ARGS    more for gcloud: --reserved, --service-account=..., --network=...

Exit status: watch: that of the run (1 if a host has none to tell); otherwise that of the command that failed. 2: wrong
arguments.'

set -euo pipefail

wrong() {
    printf 'tpu_pod.sh: %s\n\n%s\n' "$1" "$usage" >&2
    exit 2
}

dry=''
if [[ ${1:-} == --dry-run ]]; then dry=yes && shift; fi
if [[ ${1:-} == -h || ${1:-} == --help ]]; then printf '%s\n' "$usage" && exit 0; fi
verb=${1:-}
case $verb in
    create | install | watch | stop | delete) (($# == 1)) || wrong "$verb takes no arguments" ;;
    start | resume)
        [[ ${2:-} == -- && ${3:-} ]] || wrong "$verb needs -- and the arguments of fbt train"
        shift 2
        ;;
    '') wrong 'what to do?' ;;
    *) wrong "unknown: $verb" ;;
esac
[[ ${NAME:-} ]] || wrong 'NAME is not set'
[[ ${ZONE:-} ]] || wrong 'ZONE is not set'
: "${PROJECT:=}" "${TYPE:=v5litepod-16}" "${RUNTIME:=v2-alpha-tpuv5-lite}" "${SLICES:=1}" "${SPOT:=}" "${CREATE_ARGS:=}" "${BUCKET:=}"
[[ $SLICES =~ ^[1-9][0-9]*$ ]] || wrong "SLICES=$SLICES: must be a number"
[[ $dry ]] || type -P gcloud >/dev/null || wrong 'gcloud is not installed'

run() {
    if [[ $dry ]]; then printf '%q ' "$@" && echo; else "$@"; fi
}

qr() { # VERB ARGUMENTS...: of gcloud's queued resources
    local where=("--zone=$ZONE")
    if [[ $PROJECT ]]; then where+=("--project=$PROJECT"); fi
    run gcloud compute tpus queued-resources "$@" "${where[@]}"
}

on_all() { qr ssh "$NAME" --node=all --worker=all --command="$1"; }
on_first() { qr ssh "$NAME" --node=0 --worker=0 --command="$1"; }

state() { qr describe "$NAME" --format='value(state.state)'; }

create() {
    local nodes=("--node-id=$NAME") more=() now
    if ((SLICES > 1)); then nodes=("--node-count=$SLICES" "--node-prefix=$NAME"); fi
    if [[ $SPOT == yes ]]; then more=(--spot); fi
    read -ra given <<<"$CREATE_ARGS"
    qr create "$NAME" "${nodes[@]}" --accelerator-type="$TYPE" --runtime-version="$RUNTIME" "${more[@]}" "${given[@]}"
    if [[ $dry ]]; then state && return; fi
    while now=$(state) && [[ $now != ACTIVE ]]; do
        echo "$(date +%T) $NAME: $now"
        case $now in FAILED | SUSPEND*) return 1 ;; esac
        sleep "${POLL_SECONDS:-30}"
    done
    echo "$NAME: $now"
    [[ $now == ACTIVE ]]
}

install() {
    local archive root
    root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    archive=$(mktemp "${TMPDIR:-/tmp}/fbt.XXXXXX")
    run git -C "$root" archive --format=tar.gz --output="$archive" HEAD
    qr scp "$archive" "$NAME:fbt.tar.gz" --node=all --worker=all
    rm -f "$archive"
    # Python by uv, since the image's own is older than 3.11.
    on_all 'set -e
rm -rf fbt; mkdir fbt; tar xzf fbt.tar.gz -C fbt
python3 -m pip install --quiet --user uv; uv=$HOME/.local/bin/uv
$uv venv --quiet --python 3.11 fbt/.venv
$uv pip install --quiet --python fbt/.venv/bin/python "./fbt[tpu]"'
    if [[ $BUCKET ]]; then
        on_all "set -e
if ! mountpoint -q /mnt/bucket; then
  type gcsfuse >/dev/null || { echo 'gcsfuse is not on this image: install it, or use a shared disk' >&2; exit 1; }
  sudo mkdir -p /mnt/bucket && sudo chown \$USER /mnt/bucket && gcsfuse --implicit-dirs $(printf %q "$BUCKET") /mnt/bucket
fi"
    fi
}

start() {
    local command
    command=$(printf '%q ' "$@")
    # On each host: fbt.log, fbt.pid (of fbt itself) and, once it has left, fbt.status. jax finds the others by itself.
    on_all "if kill -0 \$(cat fbt.pid) 2>/dev/null; then echo 'fbt runs here already' >&2; exit 1; fi
rm -f fbt.status fbt.pid; cd fbt; export PYTHONUNBUFFERED=1
setsid nohup bash -c '.venv/bin/fbt train \"\$@\" & echo \$! >../fbt.pid
wait \$!; echo \$? >../fbt.status' fbt $command>>../fbt.log 2>&1 </dev/null &
until [ -s ../fbt.pid ]; do sleep 0.1; done"
}

watch() {
    local told host status=0 count=0
    on_first 'tail -n 200 -F --pid=$(cat fbt.pid) fbt.log' ||
        echo 'tpu_pod.sh: lost host 0; asking how the run ended' >&2
    local ask='for i in $(seq 90); do [ -s fbt.status ] && break; sleep 1; done; echo "fbt_status=$(cat fbt.status)"'
    if [[ $dry ]]; then on_all "$ask" && return; fi
    told=$(on_all "$ask") || {
        echo 'tpu_pod.sh: not all hosts can be reached; tpu_pod.sh resume -- ... goes on' >&2
        return 1
    }
    while read -r host; do
        count=$((count + 1))
        case $host in
            0) ;;
            143) if ((status == 0)); then status=143; fi ;;
            *[!0-9]* | '') status=1 ;; # still running, or never started
            *) if ((status == 0 || status == 143)); then status=$host; fi ;;
        esac
    done < <(sed -n 's/.*fbt_status=//p' <<<"$told")
    if ((count == 0)); then status=1; fi
    echo "$count hosts, the run left with status $status"
    return "$status"
}

stop() { on_first 'kill -TERM $(cat fbt.pid)'; }

delete() { qr delete "$NAME" --force --quiet; }

resume() {
    local now
    if [[ $dry ]]; then
        echo '# if it is not ACTIVE any more:' && state && delete && create && install
        echo '# in any case:' && start "$@"
        return
    fi
    now=$(state) || now='not there'
    if [[ $now != ACTIVE ]]; then
        echo "$NAME is $now: creating it anew"
        if [[ $now != 'not there' ]]; then delete; fi
        create
        install
    fi
    start "$@"
}

"$verb" "$@"
