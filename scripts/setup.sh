#!/usr/bin/env bash
# Create .venv with Python 3.11 or later: the CUDA build of torch on a machine with an NVIDIA GPU, the
# CPU build elsewhere, then all packages at the versions of constraints.txt. `make setup` calls it. With TORCH
# set to a version, that PyTorch instead of the one in constraints.txt. With VERSIONS=newest, the newest of
# all packages that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $PYTHON is $("$PYTHON" --version 2>&1); Python 3.11 or later is needed: make setup PYTHON=python3.11" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
constraints=constraints${TORCH:+-no-torch}.txt
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" -c $constraints; }

torch=${TORCH:+torch==$TORCH}
torch=${torch:-$(grep '^torch==' constraints.txt)}
if [ "${VERSIONS:-}" = newest ]; then
    constraints=/dev/null
    torch=$(sed -n 's/^ *"\(torch[<>=.,0-9]*\)".*/\1/p' pyproject.toml)
fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        pip install "$torch"
    elif pip install --dry-run "$torch" | grep -qi nvidia; then
        # The default build installs several GB of CUDA; CPU builds have an index of their own.
        pip install "$torch" --index-url https://download.pytorch.org/whl/cpu
    else
        pip install "$torch"
    fi
fi
pip install --quiet setuptools wheel ninja numpy xxhash
# The CPU kernels compile while pip installs the rest.
.venv/bin/python -c 'from cogfast.kernels.cpu.library import compile_library; compile_library()' &
# DeepSpeed is built from source against the installed torch, without its compiled ops.
DS_BUILD_OPS=0 pip install --quiet --no-build-isolation deepspeed
wait
pip install --quiet --no-build-isolation --editable '.[test]'
.venv/bin/python -c 'import sys; from cogfast.kernels.torch_library import compile_cpu_kernels; sys.exit(compile_cpu_kernels() or None)' || {
    echo "setup: the CPU kernels are not compiled, so that training on a CPU runs PyTorch's ops instead, which"
    echo "setup: take longer. They need g++ (Debian: apt install build-essential) on an x86-64 with AVX2."
} >&2
echo "setup: .venv is ready; put cogfast on the path: source .venv/bin/activate"
