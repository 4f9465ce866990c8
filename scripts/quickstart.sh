#!/usr/bin/env bash
# Train the quick start on the embedded base: about five minutes on two cores.  Arguments are passed on (key=value).
set -eu
. "$(dirname "$0")/environment.sh"

flowrl plan scripts/configs/quickstart.yaml "$@" >/dev/null # wrong settings end here, in one line

for setting in "$@"; do
    case $setting in output=*) [ ! -e "${setting#output=}" ] || fail "${setting%%=*} = '${setting#output=}' exists. Give another, or remove it first." ;; esac
done
output=runs/quickstart number=1
while [ -e "$output" ]; do number=$((number + 1)) output=runs/quickstart-$number; done

echo "for flowrl's other commands: . .venv/bin/activate"
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    exec flowrl train scripts/configs/quickstart.yaml "output=$output" "$@"
fi
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
processes=$((cores < 2 ? 1 : cores < 4 ? 2 : 4))
[ "$processes" -gt 1 ] || exec flowrl train scripts/configs/quickstart.yaml "output=$output" "$@"
# --multi_gpu makes accelerate start several processes; with --cpu it starts one, whatever --num_processes says.
exec accelerate launch --multi_gpu --num_processes "$processes" --num_machines 1 --main_process_port 0 \
    --mixed_precision no --dynamo_backend no scripts/train.py scripts/configs/quickstart.yaml "output=$output" "$@"
