#!/usr/bin/env bash
# sbatch --nodes N scripts/slurm.sh RUN_DIR RUN.yaml [KEY=VALUE]...   from the checkout, which all nodes share
#
# N nodes of eight GPUs.  Where RUN_DIR has checkpoints, the run goes on from the newest, as it was first described: after
# a requeue, by Slurm or at the time limit, nothing needs to be changed.
#SBATCH --job-name=flowrl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -u
[ $# -ge 2 ] || { echo "flowrl: sbatch scripts/slurm.sh RUN_DIR RUN.yaml [KEY=VALUE]..." >&2; exit 2; }
[ ! -f .venv/bin/activate ] || . .venv/bin/activate
directory=$1
shift

if compgen -G "$directory/checkpoints/[0-9]*" >/dev/null; then
    set -- --resume "$directory"
else
    set -- "$@" "output=$directory"
fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# At a signal torch would kill after 30 s what waits for a reward; 240 s lie within the 300 s that Slurm gives.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
stopping=
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch \
    --multi_gpu --num_machines "$SLURM_JOB_NUM_NODES" --num_processes $((8 * SLURM_JOB_NUM_NODES)) \
    --main_process_ip "$first" --main_process_port "$port" --mixed_precision no --dynamo_backend no \
    scripts/train.py "$@" &
step=$!
trap 'stopping=yes; kill -TERM "$step"' TERM # srun passes it on; the run keeps its last complete update
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # the trap has ended `wait`, not the run
    wait "$step"
    code=$?
done
[ -z "$stopping" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
