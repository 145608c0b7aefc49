#! /bin/bash
# Fine-tunes on the GPUs of one machine. Further words go to `cogfast train`:
#   NPROC=4 scripts/finetune_multi_gpus.sh args.train_iters=500
#   BASE="configs/cogvideox_5b.yaml configs/sft.yaml" scripts/finetune_multi_gpus.sh --resume auto
# On SIGTERM (a queue that takes the machine back) torchrun gives the ranks SHUTDOWN_TIMEOUT seconds
# to save a checkpoint; SIGUSR1, which Slurm sends ahead of the end, is passed on as well. The
# variable does what torchrun's --shutdown-timeout does; a torch that lacks both stays at 30 s.
# Ranks whose run cannot go on end by themselves long before that.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "RUN on $(hostname), CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-}"
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SHUTDOWN_TIMEOUT:-600}
BASE=${BASE:-configs/cogvideox_5b_i2v.yaml configs/lora.yaml configs/sft.yaml}
# One seed for all ranks: it is drawn here, not in each. exec: signals reach torchrun, not this shell.
# shellcheck disable=SC2086  # BASE is a list of files
exec torchrun --standalone --nproc_per_node="${NPROC:-8}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    scripts/train_video.py --base $BASE --seed "${SEED:-$RANDOM}" "$@"
