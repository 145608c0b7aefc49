#!/usr/bin/env bash
# The quickstart: make clips, train configs/quickstart.yaml on them, sample all captions, score them.
#   SEED=1 scripts/quickstart.sh [key=value ...]     arguments are passed on to `cogfast train`
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
SEED=${SEED:-1234}
data=quickstart/data

[ -f $data/wavelet.safetensors ] || python scripts/quickstart.py prepare $data
layout=$(python scripts/quickstart.py machine)
read -r processes threads bf16 <<<"$layout"
cores=$(nproc)
export OMP_NUM_THREADS=$threads

torchrun --nproc_per_node="$processes" --master_port="${MASTER_PORT:-29500}" -m cogfast train \
    --base configs/quickstart.yaml --seed "$SEED" \
    "deepspeed.bf16.enabled=$bf16" \
    "deepspeed.train_micro_batch_size_per_gpu=$((16 / processes))" "$@"
run=$(ls -td quickstart/runs/quickstart-* | head -1)

export OMP_NUM_THREADS=$cores
cogfast sample "$run" --prompt-file $data/captions.txt --ema --out "$run/videos"
# For comparison: one of five captions, from random weights.
awk 'NR % 5 == 1' $data/captions.txt >"$run/some_captions.txt"
cogfast sample --base configs/quickstart.yaml --prompt-file "$run/some_captions.txt" \
    --out "$run/untrained" args.force_inference=true
python scripts/quickstart.py look "$run/untrained" "$run/videos"
python scripts/quickstart.py animate "$run/videos" "$run/videos.webp"
echo "videos        $run/videos/contact_sheet.png, moving: $run/videos.webp"
echo "page          $run/index.html, with the curves of the loss"
echo "next          source .venv/bin/activate && cogfast sample $run --prompt TEXT --out DIR"
