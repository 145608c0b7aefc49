# cogfast on NVIDIA GPUs. Readers of videos pass data through shared memory, so a run needs more than Docker's 64 MiB:
#   docker build -t cogfast .
#   docker run --rm --gpus all --shm-size=16g -v "$PWD":/data cogfast train --base cogvideox_5b.yaml sft.yaml ...

# "base" has the CUDA runtime alone: PyTorch's wheels bring cuBLAS, cuDNN and NCCL.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS python
# Triton compiles the code that launches its kernels, with gcc and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv
RUN python3 -m venv /opt/cogfast
ENV PATH=/opt/cogfast/bin:$PATH
WORKDIR /source
# PyTorch is 3 GB and changes rarely, so that it has a layer of its own.
COPY constraints.txt constraints-no-torch.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml LICENSE ./
COPY docs/pypi.md docs/
COPY cogfast cogfast
RUN pip install --no-cache-dir -c constraints.txt '.[stores]'

FROM python
COPY --from=build /opt/cogfast /opt/cogfast
ENV PATH=/opt/cogfast/bin:$PATH
# docker run --user "$(id -u)" writes the runs as another user, who needs a folder for caches, too.
RUN useradd --create-home --uid 10001 cogfast \
    && mkdir /data \
    && chmod 1777 /data
ENV TRITON_CACHE_DIR=/tmp/triton HF_HOME=/data/.cache/huggingface
USER cogfast
WORKDIR /data
ENTRYPOINT ["cogfast"]
CMD ["--help"]
