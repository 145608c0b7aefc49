"""Checks what Triton and torch.compile need of this machine and of the configuration."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from cogfast.config import Config
from cogfast.config.arguments import TrainArguments
from cogfast.config.merged_config import refuse

logger = logging.getLogger(__name__)

_FP8_CAPABILITY = (8, 9)


def check_compilers(config: Config, args: TrainArguments, is_training: bool) -> None:
    """Check that this machine can build what args.kernels and args.compile need.

    Raises ValueError if not, or if training does not support them.
    """
    has_gpu = torch.cuda.is_available()
    # On a CPU args.kernels=triton compiles nothing.
    if has_gpu and args.kernels == "triton":
        _check_triton(config, "args.kernels", "args.kernels=triton", "args.kernels=torch")
    if not args.compile:
        return
    key, what, instead = "args.compile", "args.compile=true", "args.compile=false"
    if is_training and args.zero_stage == 3:
        text = f"{what} does not support ZeRO-3, whose gathering of weights cannot be traced; use stage 2 or {instead}"
        refuse(config, key, text)
    if has_gpu:
        _check_triton(config, key, what, instead)
    else:
        program = (
            "clang++" if sys.platform == "darwin" else "g++"
        )  # the compiler that Inductor runs
        _require_program(config, key, f"{what} on a CPU", "CXX", (program,), instead)
        _require_headers(config, key, what, instead)


def check_fp8(config: Config, args: TrainArguments) -> None:
    """Refuse args.quantize_base=fp8 on a GPU, or in a precision, without fp8 products."""
    key = "args.quantize_base"
    if args.quantize_base != "fp8" or not torch.cuda.is_available():
        return  # a CPU computes the same roundings
    capability = torch.cuda.get_device_capability()
    if capability < _FP8_CAPABILITY:
        text = (
            f"{key}=fp8 needs a GPU with fp8 matrix products (RTX 4090, L40S, H100 or newer), but this "
            f"one is {torch.cuda.get_device_name()}; set {key}=int8"
        )
        refuse(config, key, text)
    if args.precision != "bf16":
        text = f"{key}=fp8 has products in bf16 on a GPU, but the run is in {args.precision}; set"
        refuse(config, key, f"{text} deepspeed.bf16.enabled=true, or {key}=int8")
    _check_triton(config, key, f"{key}=fp8", f"{key}=int8")


def _check_triton(config: Config, key: str, what: str, instead: str) -> None:
    """Check for Triton and for the C compiler that builds its kernel launchers."""
    from cogfast.kernels.gpu import launch  # here, since it imports Triton

    if not launch.HAS_TRITON:
        text = f"{what} needs Triton, which is not installed; pip install triton, or use {instead}"
        refuse(config, key, text)
    _require_program(config, key, what, "CC", ("gcc", "clang"), instead)
    _require_headers(config, key, what, instead)


def _require_program(
    config: Config, key: str, what: str, variable: str, programs: tuple[str, ...], instead: str
) -> None:
    """Check that one of `programs` exists, or the one that the environment variable names."""
    # Triton and Inductor ask the same variables first.
    named = os.environ.get(variable)
    if any(map(shutil.which, [named] if named else programs)):
        return
    missing = f"{variable}={named} does not exist" if named else f"there is no {programs[0]}"
    text = f"{what} needs a compiler, but {missing}; install it, set {variable} to another"
    refuse(config, key, f"{text}, or use {instead}")


def _require_headers(config: Config, key: str, what: str, instead: str) -> None:
    # Triton and Inductor compile extension modules; distributions package the headers separately.
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        text = f"{what} needs Python's headers, but {header} does not exist; install them"
        refuse(config, key, f"{text} (python3-dev), or use {instead}")
