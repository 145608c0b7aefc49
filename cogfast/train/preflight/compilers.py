"""Checks what Triton and torch.compile need of this machine and of the configuration."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from cogfast.core.values import KeyProblem
from cogfast.train.keys import TrainKeys

_FP8_CAPABILITY = (8, 9)


def check_compilers(args: TrainKeys, is_training: bool) -> None:
    """Check that this machine can build what args.kernels and args.compile need.

    Raises ValueError if not, or if training does not support them.
    """
    has_gpu = torch.cuda.is_available()
    # On a CPU args.kernels=triton compiles nothing.
    if has_gpu and args.kernels == "triton":
        _check_triton(args.key("kernels"), "triton", "torch")
    if not args.compile:
        return
    key = args.key("compile")
    if is_training and args.zero_stage == 3:
        text = (
            " does not support ZeRO-3, whose gathering of weights cannot be traced; use stage 2 or "
        )
        raise args.refusal("compile", f"{text}{key}=false")
    if has_gpu:
        _check_triton(key, "true", "false")
    else:
        # The compiler that Inductor runs
        program = "clang++" if sys.platform == "darwin" else "g++"
        _require_compiler(key, "true", "false", "CXX", (program,))


def check_fp8(args: TrainKeys) -> None:
    """Refuse args.quantize_base=fp8 on a GPU, or in a precision, without fp8 products."""
    key = args.key("quantize_base")
    if args.quantize_base != "fp8" or not torch.cuda.is_available():
        return  # a CPU computes the same roundings
    if torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        text = " needs a GPU with fp8 matrix products (RTX 4090, L40S, H100 or newer), but this one is "
        raise args.refusal("quantize_base", f"{text}{torch.cuda.get_device_name()}; set {key}=int8")
    if args.precision != "bf16":
        text = f"{key}=fp8 has products in bf16 on a GPU, but the run is in {args.precision}; set"
        raise KeyProblem(key, f"{text} deepspeed.bf16.enabled=true, or {key}=int8")
    _check_triton(key, "fp8", "int8")


def _check_triton(key: str, value: str, instead: str) -> None:
    """Check for Triton and for the C compiler that builds its kernel launchers."""
    if find_spec("triton") is None:
        text = f"{key}={value} needs Triton, which is not installed; pip install triton"
        raise KeyProblem(key, f"{text}, or use {key}={instead}")
    _require_compiler(key, value, instead, "CC", ("gcc", "clang"))


def _require_compiler(
    key: str, value: str, instead: str, variable: str, programs: tuple[str, ...]
) -> None:
    """Check that Python's headers and a compiler exist: one of `programs`, or what `variable` names."""
    # Triton and Inductor ask the same variables first, and compile extension modules.
    named = os.environ.get(variable)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not any(map(shutil.which, [named] if named else programs)):
        missing = f"{variable}={named} does not exist" if named else f"there is no {programs[0]}"
        text = f"a compiler, but {missing}; install it, set {variable} to another"
    elif not header.is_file():
        text = f"Python's headers, but {header} does not exist; install them (python3-dev)"
    else:
        return
    raise KeyProblem(key, f"{key}={value} needs {text}, or use {key}={instead}")
