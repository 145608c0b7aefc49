#! /bin/bash
# Profile three training steps with NVIDIA's Nsight Systems and print where the time goes. Arguments are
# passed on to `cogfast train`; the run ends after the last profiled step:
#   scripts/profile_nsys.sh --base configs/cogvideox_2b.yaml configs/sft.yaml args.load=...
#   NPROC=8 START=20 OUT=runs/5b scripts/profile_nsys.sh --base ...
# NPROC: number of GPUs. START: steps before the profile begins. OUT: name of the report without
# .nsys-rep; open it with `nsys-ui`.
set -euo pipefail
cd "$(dirname "$0")/.."

NPROC=${NPROC:-1} START=${START:-10}
OUT=${OUT:-runs/nsys-$(date +%Y-%m-%d-%H-%M-%S)}
if ! command -v nsys > /dev/null; then
    echo "$0: nsys is not on PATH; install NVIDIA Nsight Systems, or run" \
        "\`cogfast train ... args.profiling=$START\`, which writes a profile into its run folder" >&2
    exit 2
fi
if [ "$NPROC" = 1 ]; then
    launch=(python -m cogfast)
else
    launch=(torchrun --standalone --nproc_per_node="$NPROC" -m cogfast)
fi

mkdir -p "$(dirname "$OUT")"
rm -f "$OUT.nsys-rep" "$OUT.sqlite"
# The run starts and stops the capture itself (cudaProfilerStart). Without end=stop, nsys would kill the
# run at the end of the capture, while it saves its checkpoint. CPU sampling needs rights that few users
# have.
nsys profile \
    --capture-range=cudaProfilerApi \
    --capture-range-end=stop \
    --trace=cuda,nvtx,osrt,cudnn,cublas \
    --cuda-memory-usage=true \
    --sample=none \
    --cpuctxsw=none \
    --output="$OUT" \
    "${launch[@]}" train "$@" \
    args.profiling="$START" args.exit_interval=$((START + 3))

if [ ! -f "$OUT.nsys-rep" ]; then
    echo "$0: no report: the run ended before step $START, or found no GPU" >&2
    exit 1
fi
# Time by range on the host and on the GPU, then by kernel, memory copy and CUDA call.
for report in nvtx_sum nvtx_gpu_proj_sum cuda_gpu_kern_sum cuda_gpu_mem_time_sum cuda_api_sum; do
    nsys stats --report="$report" "$OUT.nsys-rep" || echo "$report: this version of nsys lacks this report" >&2
done
echo "$OUT.nsys-rep"
