#!/usr/bin/env bash
# Install the CUDA build of PyTorch and what training needs into $TEST_CUDA_VENV (about 6 GB), unless it
# is there, and build the null CUDA runtime for it. `make test-cuda` calls it.
#
#     TEST_CUDA_VENV=FOLDER tests/cuda/setup.sh {newest,oldest}
#
# newest: the PyTorch of constraints.txt. oldest: the oldest that pyproject.toml allows. Each has its own Triton.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$TEST_CUDA_VENV/bin/python

is_installed() {
    [ -x "$python" ] && "$python" - <<'END'
import importlib.metadata as installed
for name in ("torch", "nvidia-cuda-crt", "deepspeed", "diffusers", "peft", "decord", "tensorboard", "pytest"):
    installed.version(name)
END
}

if ! is_installed 2>/dev/null; then
    command -v g++ >/dev/null || { echo "test-cuda: the runtime needs g++ (Debian: apt install g++)" >&2; exit 2; }
    torch=$(sed -n 's/^torch==//p' constraints.txt)
    if [ "${1:-newest}" = oldest ]; then
        torch=$(sed -n 's/.*"torch>=\([0-9.]*\),.*/\1.0/p' pyproject.toml)
    fi
    "${PYTHON:-python3}" -m venv "$TEST_CUDA_VENV"
    constraints=$TEST_CUDA_VENV/constraints.txt
    # PyTorch names its Triton and the setuptools that it allows. Three equals signs exclude the CPU build,
    # whose version is 2.x.y+cpu.
    { cat constraints-no-torch.txt; echo "torch===$torch"; } >"$constraints"
    pip() { "$python" -m pip --disable-pip-version-check "$@" -c "$constraints" -c tests/cuda/constraints.txt; }
    pip install --quiet torch nvidia-cuda-crt setuptools wheel ninja numpy
    DS_BUILD_OPS=0 pip install --quiet --no-build-isolation deepspeed
    pip install --quiet omegaconf einops safetensors xxhash transformers diffusers peft sentencepiece av decord \
        psutil pillow tensorboard jinja2 pytest
fi
"$python" tests/cuda/build_runtime.py "build/null_cuda/$(basename "$TEST_CUDA_VENV")"
