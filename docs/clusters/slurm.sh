#!/bin/bash
# All weights of 5B on four machines with 8 GPUs each. Set the paths, then submit it as often as the training
# may need: sbatch slurm.sh
#SBATCH --job-name=my-run --dependency=singleton
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --time=24:00:00 --signal=USR1@600 --requeue --no-kill --open-mode=append
set -eu
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 # seconds that ranks get to save
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # args.elastic needs a new store after each restart
export TRITON_CACHE_DIR="/tmp/triton-$USER" # on a disk of the machine
# For data or runs in a bucket: args.local_cache=/nvme:500GB below and, for R2 or MinIO,
# export AWS_ENDPOINT_URL=URL
srun --no-kill --kill-on-bad-exit=0 torchrun --nnodes="1:$SLURM_NNODES" --nproc_per_node=8 --max-restarts=20 \
    --rdzv_backend=c10d --rdzv_endpoint="$head:29500" --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_conf=keep_alive_interval=2,keep_alive_max_attempt=3 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --no-python cogfast train --base cogvideox_5b.yaml sft.yaml --seed 1 \
    args.elastic=shrink deepspeed.train_batch_size=32 args.experiment_name=my-run args.save=/shared/runs \
    args.load=/shared/CogVideoX-5b 'args.train_data=[/shared/clips]'
