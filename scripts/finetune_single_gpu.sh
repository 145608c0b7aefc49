#! /bin/bash
# Fine-tune on one GPU. Arguments are passed on to `cogfast train`:
#   scripts/finetune_single_gpu.sh args.train_iters=500
#   BASE="configs/cogvideox_5b.yaml configs/sft.yaml" scripts/finetune_single_gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."

echo "RUN on $(hostname), CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-}"
export WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
BASE=${BASE:-configs/cogvideox_2b.yaml configs/lora.yaml configs/sft.yaml}
# exec makes the run, not this shell, get signals, so that it saves a checkpoint before it exits.
# shellcheck disable=SC2086  # BASE is a list of files
exec python scripts/train_video.py --base $BASE --seed "${SEED:-$RANDOM}" "$@"
