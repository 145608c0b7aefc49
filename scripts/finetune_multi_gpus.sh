#! /bin/bash
# Fine-tune on all GPUs of one machine. Arguments are passed on to `cogfast train`:
#   NPROC=4 scripts/finetune_multi_gpus.sh args.train_iters=500
#   BASE="configs/cogvideox_5b.yaml configs/sft.yaml" scripts/finetune_multi_gpus.sh --resume auto
# On SIGTERM (preemption by the queue) torchrun gives the ranks SHUTDOWN_TIMEOUT seconds to save a
# checkpoint; SIGUSR1, which Slurm sends before its time limit, is passed on too. SHUTDOWN_TIMEOUT has
# the effect of torchrun's --shutdown-timeout; a torch without that option waits 30 s. Ranks that cannot
# continue exit by themselves long before the timeout.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "RUN on $(hostname), CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SHUTDOWN_TIMEOUT:-600}
BASE=${BASE:-configs/cogvideox_5b_i2v.yaml configs/lora.yaml configs/sft.yaml}
# The seed is drawn here so that all ranks share it. exec makes torchrun, not this shell, get signals.
# shellcheck disable=SC2086  # BASE is a list of files
exec torchrun --standalone --nproc_per_node="${NPROC:-8}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    scripts/train_video.py --base $BASE --seed "${SEED:-$RANDOM}" "$@"
