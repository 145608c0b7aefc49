"""The kernels at the shapes that count, and the limits that their machine code must keep on sm_90.

bench.kernel_ops.compile_report compiles them without a GPU. Registers per thread and shared memory decide how
many programs a multiprocessor holds; the notes at the top of each file in cogfast/kernels/gpu say
how many it should hold. A limit is the figure that was reached when the kernel was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl

from cogfast.extensions.memory import fp8_linear as fp8
from cogfast.extensions.sparse import choose_blocks as blocks
from cogfast.extensions.sparse.attention import BLOCK
from cogfast.kernels.fused_ema_adam import MOMENT_BLOCK
from cogfast.kernels.gpu import adaptive_layernorm as norm
from cogfast.kernels.gpu import add_low_rank as lora
from cogfast.kernels.gpu import fused_ema_adam as adam
from cogfast.kernels.gpu import gelu
from cogfast.kernels.gpu import qk_norm_rope3d as qk
from cogfast.kernels.gpu.launch import next_power_of_2


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """A kernel with the types of its arguments, its constants and its limits on sm_90.

    arguments: Triton type of each argument by name ("*bf16", "*fp32", "i64", "fp32").
    constants: values of the tl.constexpr arguments. constants_on: {architecture: those that differ}.
    divisible: integer arguments that are multiples of 16 at this shape; pointers always are.
    spilled_bytes: {architecture: bytes of registers that may be spilled}; elsewhere none may be.
    least_arch: the oldest architecture that has the kernel's instructions.
    """

    name: str
    kernel: Any  # a triton.JITFunction
    arguments: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int = 2
    divisible: Sequence[str] = field(default=())
    max_registers: int  # per thread
    max_shared_bytes: int = 0  # static and dynamic, of one program
    # Global accesses of less than 16 bytes per thread; None: no limit.
    narrow_loads: int | None = None
    narrow_stores: int | None = None
    spilled_bytes: Mapping[int, int] = field(default_factory=dict)
    constants_on: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    least_arch: int = 80


_FLOATS = {"eps", "scaling", "lr", "log2_beta1", "log2_beta2", "weight_decay", "least_ema_weight"}
_FLOATS |= {"one_minus_beta1", "beta2", "one_minus_beta2"}
_FLOAT_POINTERS = {"mean_ptr", "rstd_ptr", "partial_ptr", "partials_ptr", "factors_ptr"}
_FLOAT_POINTERS |= {"scale_ptr", "found_inf_ptr", "columns_ptr"}


def _case(
    name: str,
    kernel: Any,
    constants: Mapping[str, object],
    dtype: str = "bf16",
    types: Mapping[str, str] | None = None,
    absent: Sequence[str] = (),
    **limits: Any,
) -> CompileCase:
    """Return a case whose tensors have `dtype`, and whose other arguments the types above or i32.

    types: those of arguments that differ. absent: pointers that are None.
    """
    names = kernel.arg_names
    constants = {n: None for n in absent if n in names} | dict(constants)
    arguments = {}
    for n in names:
        if n not in constants:
            usual = f"*{dtype}" if n.endswith("_ptr") else "fp32" if n in _FLOATS else "i32"
            usual = "*fp32" if n in _FLOAT_POINTERS else usual
            arguments[n] = (types or {}).get(n, usual)
    return CompileCase(name=name, kernel=kernel, arguments=arguments, constants=constants, **limits)


# At most 64 registers let 8 programs share a multiprocessor.
_NORM_FORWARD_REGISTERS = {
    1920: {"whole": 53, "first": 53, "last": 40, "fp32": 64},
    3072: {"whole": 64, "first": 64, "last": 53, "fp32": 96},
}
# Registers and shared bytes of a program; 16 warps on a multiprocessor leave 128 registers.
_NORM_BACKWARD_LIMITS = {
    1920: {
        "whole": (114, 65_664),
        "frozen": (106, 32),
        "first": (114, 49_280),
        "last": (64, 32_768),
        "alone": (64, 32_832),
        "fp32": (128, 65_664),
    },
    3072: {
        "whole": (128, 131_200),
        "frozen": (128, 32),
        "first": (114, 98_432),
        "last": (64, 65_536),
        "alone": (97, 65_664),
        "fp32": (128, 131_200),
    },
}
_NORM_STRIDES = ("stride_batch", "stride_segment")


def adaptive_layernorm_cases() -> list[CompileCase]:
    """Forward and backward: every variant in bf16, the whole op in fp32; the second-stage sums."""
    cases = []
    for width, registers in _NORM_FORWARD_REGISTERS.items():
        cases += [_norm_forward(width, variant, most) for variant, most in registers.items()]
    for width, limits in _NORM_BACKWARD_LIMITS.items():
        cases += [_norm_backward(width, variant, *most) for variant, most in limits.items()]
    flags = dict.fromkeys(("HAS_NORM_SUMS", "HAS_GATE_SUM", "HAS_BRANCH_SUM"), True)
    return cases + [
        _case(
            f"sums {width}",
            norm.adaptive_layernorm_sum_kernel,
            {"M": width, "ROWS": norm.SUM_ROWS, "COLUMNS": norm.SUM_COLUMNS, **flags},
            types={"scale_ptr": "*bf16"},
            num_warps=norm.SUM_WARPS,
            divisible=_NORM_STRIDES,
            max_registers=128,
            max_shared_bytes=4096,
        )
        for width in _NORM_BACKWARD_LIMITS
    ]


def _norm_forward(width: int, variant: str, max_registers: int) -> CompileCase:
    variant, dtype = ("whole", "fp32") if variant == "fp32" else (variant, "bf16")
    residual = ("branch_ptr", "branch_bias_ptr", "gate_ptr")
    affine = ("weight_ptr", "bias_ptr", "shift_ptr", "scale_ptr")
    return _case(
        f"forward {variant} {width} {dtype}",
        norm.adaptive_layernorm_fwd_kernel,
        {"M": width, "BLOCK": next_power_of_2(width)},
        dtype,
        types={"scale_ptr": f"*{dtype}"},
        absent={"whole": (), "first": residual, "last": affine}[variant],
        num_warps=norm.choose_num_warps(width),
        divisible=_NORM_STRIDES,
        max_registers=max_registers,
        max_shared_bytes=32,  # the warps of a row exchange their sums
        narrow_loads=0,
        narrow_stores=0 if variant == "last" else 2,  # mean and rstd
    )


def _norm_backward(
    width: int, variant: str, max_registers: int, max_shared_bytes: int
) -> CompileCase:
    variant, dtype = ("whole", "fp32") if variant == "fp32" else (variant, "bf16")
    # alone: the norms after the blocks, of which only n is used.
    has_residual, has_norm = variant not in ("first", "alone"), variant != "last"
    has_branch_sums = variant in ("whole", "last")
    absent = [] if variant != "alone" else ["dout_ptr"]
    absent += [] if has_branch_sums else ["branch_ptr"]
    absent += [] if has_residual else ["gate_ptr"]
    if not has_norm:
        absent += ["dn_ptr", "out_ptr", "mean_ptr", "rstd_ptr", "weight_ptr", "scale_ptr"]
    size = (width, 4 if dtype == "fp32" else 2, variant != "frozen")
    launch = norm.choose_launch(*size)
    # sm_89 and sm_120 have 99 KB of shared memory, in which fewer rows wait.
    few = {"NUM_STAGES": norm.choose_launch(*size, shared_bytes=99 * 1024).num_stages}
    return _case(
        f"backward {variant} {width} {dtype}",
        norm.adaptive_layernorm_bwd_kernel,
        {
            "M": width,
            "BLOCK": next_power_of_2(width),
            "HAS_NORM_SUMS": variant in ("whole", "first", "alone"),
            "HAS_BRANCH_SUM": has_branch_sums,
            "NUM_STAGES": launch.num_stages,
        },
        dtype,
        types={"scale_ptr": f"*{dtype}"},
        absent=absent,
        num_warps=launch.num_warps,
        divisible=_NORM_STRIDES,
        max_registers=max_registers,
        max_shared_bytes=max_shared_bytes,
        narrow_loads=4 if has_norm else 0,  # mean and rstd of the first row and of each next one
        narrow_stores=0,
        # ptxas gives up 2 registers, so that a second program fits on a multiprocessor.
        spilled_bytes={100: 8} if (variant, width) == ("alone", 3072) else {},
        constants_on={89: few, 120: few},
    )


def fused_ema_adam_cases() -> list[CompileCase]:
    """The update at the dtypes of ZeRO and with its options, and the kernel of the factors."""
    types = {"table_ptr": "*i64", "tensor_of_block_ptr": "*i32"}
    cases = []
    for name, p, g, copy, adam_w_mode, has_scalars, is_coded in (
        ("bf16 g and copy", tl.float32, tl.bfloat16, tl.bfloat16, True, True, False),
        ("fp16 g and copy", tl.float32, tl.float16, tl.float16, True, True, False),
        ("fp32 g", tl.float32, tl.float32, None, True, False, False),
        ("fp32 g, Adam", tl.float32, tl.float32, None, False, True, False),
        ("bf16 p and g", tl.bfloat16, tl.bfloat16, None, True, True, False),
        ("8-bit m and v", tl.float32, tl.bfloat16, tl.bfloat16, True, True, True),
    ):
        constants = {"P_TYPE": p, "G_TYPE": g, "COPY_TYPE": copy, "ADAM_W_MODE": adam_w_mode}
        constants |= {"HAS_SHADOW": not is_coded, "CODED": MOMENT_BLOCK if is_coded else 0}
        cases.append(
            _case(
                f"update {name}",
                adam.ema_adam_kernel,
                constants | {"BLOCK": adam.BLOCK},
                types=types,
                absent=() if has_scalars else ("scale_ptr", "found_inf_ptr"),
                num_warps=adam.NUM_WARPS,
                # 5 programs of 256 threads, 90 KB of loads in flight; 3 with 8-bit moments
                max_registers=72 if is_coded else 48,
                max_shared_bytes=64 if is_coded else 0,  # the warps of a block of codes
                # The branch of unaligned tensors and last elements, the table and the factors; in
                # the other branch the half precision streams, of which a thread holds 8 bytes.
                narrow_loads=32 if is_coded else 26,
                narrow_stores=11 if is_coded else 6,
            )
        )
    factors = _case(
        "factors",
        adam.ema_adam_factors_kernel,
        {"lr_ptr": None, "USE_NUM_UPDATES": True, "BLOCK_TENSORS": adam.STEP_BLOCK},
        types=types,
        num_warps=4,
        max_registers=40,
    )
    return [*cases, factors]


def gelu_cases() -> list[CompileCase]:
    """Both directions at the widths of 2B and 5B; the variants and other dtypes at 5B's width."""
    cases = []
    for name, n, dtype, absent in (
        ("2B", 7680, "bf16", ()),
        ("5B", 12288, "bf16", ()),
        ("5B fp16", 12288, "fp16", ()),
        ("5B fp32", 12288, "fp32", ()),
        ("5B, frozen bias", 12288, "bf16", ("partial_ptr",)),
        ("5B, no bias", 12288, "bf16", ("bias_ptr", "partial_ptr")),
    ):
        # 18 programs per multiprocessor forward; 12 backward, 10 in fp32.
        backward_registers = 96 if dtype == "fp32" else 80
        for direction, kernel, max_registers in (
            ("forward", gelu.gelu_fwd_kernel, 56),
            ("backward", gelu.gelu_bwd_kernel, backward_registers),
        ):
            cases.append(
                _case(
                    f"{direction} {name}",
                    kernel,
                    {"N": n, "BLOCK_ROWS": gelu.ROWS, "BLOCK_COLUMNS": gelu.COLUMNS},
                    dtype,
                    absent=absent,
                    num_warps=gelu.NUM_WARPS,
                    max_registers=max_registers,
                    max_shared_bytes=gelu.COLUMNS * 4,  # threads exchange the sums once
                    narrow_loads=0,
                    narrow_stores=0,
                )
            )
    dbias = _case(
        "dbias 5B",
        gelu.gelu_dbias_kernel,
        {"N": 12288, "BLOCK_PARTIALS": 32, "BLOCK_COLUMNS": 64},
        num_warps=4,
        max_registers=48,
        max_shared_bytes=1024,
        narrow_loads=0,
    )
    return [*cases, dbias]


def add_low_rank_cases() -> list[CompileCase]:
    """q, k and v of 2B and 5B at rank 128; one part, some parts, other ranks and dtypes at 5B's."""
    cases = []
    for name, n, rank, dtype, num_parts, matrices in (
        ("2B", 1920, 128, "bf16", 3, (0, 1, 2)),
        ("5B", 3072, 128, "bf16", 3, (0, 1, 2)),
        ("5B, out", 3072, 128, "bf16", 1, (0, -1, -1)),
        ("5B, q and v", 3072, 128, "bf16", 3, (0, -1, 1)),
        ("5B, rank 8", 3072, 8, "bf16", 3, (0, 1, 2)),
        ("5B fp16", 3072, 128, "fp16", 3, (0, 1, 2)),
        ("5B fp32", 3072, 128, "fp32", 3, (0, 1, 2)),
    ):
        side = lora.SIDE_FP32 if dtype == "fp32" else lora.SIDE
        parts = ("MATRIX_OF_FIRST", "MATRIX_OF_SECOND", "MATRIX_OF_THIRD")
        constants = {
            "N": n,
            "RANK": rank,
            "NUM_PARTS": num_parts,
            "NUM_MATRICES": sum(number >= 0 for number in matrices),
            **dict(zip(parts, matrices, strict=True)),
            "BLOCK_ROWS": side,
            "BLOCK_COLUMNS": side,
            "BLOCK_RANK": max(16, min(rank, lora.RANK_BYTES // (4 if dtype == "fp32" else 2))),
        }
        cases.append(
            _case(
                f"forward {name}",
                lora.add_low_rank_kernel,
                constants,
                dtype,
                num_warps=lora.NUM_WARPS,
                num_stages=lora.NUM_STAGES,
                max_registers=128,
                max_shared_bytes=65_536,
                narrow_loads=0,
                narrow_stores=0,
                spilled_bytes={80: 16, 89: 16} if num_parts == 1 else {},
            )
        )
    return cases


def fp8_linear_cases() -> list[CompileCase]:
    """Inputs of the linears of 2B and 5B, and gradients, which are multiplied by the weight's scales."""
    return [
        _case(
            f"round rows {name}",
            fp8.round_rows_kernel,
            {"N": n, "BLOCK": next_power_of_2(n)},
            types={"q_ptr": "*fp8e4nv"},
            absent=absent,
            num_warps=fp8.num_warps_of(next_power_of_2(n)),
            max_registers=64,
            max_shared_bytes=128,
            narrow_loads=0,
            least_arch=89,
        )
        for name, n, absent in (
            ("2B", 1920, ("columns_ptr",)),
            ("5B", 3072, ("columns_ptr",)),
            ("5B, 4 M wide", 12288, ("columns_ptr",)),
            ("5B, gradient, 4 M wide", 12288, ()),
        )
    ]


def qk_norm_rope3d_cases() -> list[CompileCase]:
    """Both directions at the heads and grids of 2B (norm only) and 5B, and the variants."""
    affine = ("q_weight_ptr", "q_bias_ptr", "k_weight_ptr", "k_bias_ptr")
    # Kernel, launches with two tokens per tile and with one, their registers.
    directions = {
        "forward": (qk.qk_norm_rope3d_fwd_kernel, qk.FORWARD_LAUNCH, qk.FORWARD_ONE_TOKEN, 96, 72),
        "backward": (
            qk.qk_norm_rope3d_bwd_kernel,
            qk.BACKWARD_LAUNCH,
            qk.BACKWARD_ONE_TOKEN,
            168,
            128,
        ),
    }
    cases = []
    for name, shape, dtype, absent, has_norm in (
        ("2B", (30, 64), "bf16", ("table_ptr",), True),
        ("2B with rotation", (30, 64), "bf16", (), True),
        ("5B", (48, 64), "bf16", (), True),
        ("5B fp16", (48, 64), "fp16", (), True),
        ("5B fp32", (48, 64), "fp32", (), True),
        ("5B, half of the heads", (24, 64), "bf16", (), True),
        ("5B, frozen norms", (48, 64), "bf16", ("partials_ptr",), True),
        ("5B, no affine", (48, 64), "bf16", (*affine, "partials_ptr"), True),
        ("5B, no norm", (48, 64), "bf16", (*affine, "partials_ptr"), False),
        ("heads of 128", (24, 128), "bf16", (), True),
        ("5B, blocks of sparse attention", (48, 64), "bf16", (), True),
    ):
        if "blocks" not in name:
            absent = (*absent, "order_ptr")
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        qkv = torch.empty(1, 1, 3, *shape, dtype=kind, device="meta")
        for direction, (kernel, usual, one_token, *registers) in directions.items():
            launch = qk.choose_launch(qkv, has_norm, usual, one_token)
            tile, num_warps, _ = launch.fit(*shape)
            has_sums = "partials_ptr" in kernel.arg_names and "partials_ptr" not in absent
            # With as many entries as threads, threads exchange affine parameters, once per program.
            is_tight = 32 * num_warps <= tile["D_BLOCK"]
            cases.append(
                _case(
                    f"{direction} {name}",
                    kernel,
                    {"H": shape[0], "D": shape[1], "GRID_H": 30, "GRID_W": 45}
                    | {"HAS_NORM": has_norm, **tile},
                    dtype,
                    types={"table_ptr": "*fp32", "order_ptr": "*i32"},
                    absent=absent,
                    num_warps=num_warps,
                    divisible=[n for n in kernel.arg_names if "_stride_" in n],
                    max_registers=registers[launch is one_token],
                    # Threads exchange the four sums of backward as well, once per program.
                    max_shared_bytes=(16 if has_sums else 4 * is_tight) * tile["D_BLOCK"],
                    # A thread's 4 float32 entries take 2 cosines and 2 sines, 8 bytes each.
                    # Rotation.order takes 4 bytes for a token.
                    narrow_loads=2 * (dtype == "fp32") + 4 * is_tight + 2 * ("blocks" in name),
                    narrow_stores=4 if has_sums else 0,
                )
            )
    return cases


def choose_blocks_cases() -> list[CompileCase]:
    """The choice of blocks for sparse attention, at 139 blocks (5B) and at 353 (1.5-5B)."""
    lists = ("kv_counts_ptr", "kv_indices_ptr", "q_counts_ptr", "q_indices_ptr", "nothing_ptr")
    types = dict.fromkeys(lists, "*i32") | {"chosen_ptr": "*i8", "scale": "fp32"}
    types |= dict.fromkeys(("means_ptr", "mass_ptr"), "*fp32")
    means = {"H": 48, "D": 64, "D_BLOCK": 64, "BLOCK": BLOCK}
    kernel = blocks.block_means_kernel
    strides = [name for name in kernel.arg_names if "_stride_" in name]
    limits = {"num_warps": 4, "max_registers": 128, "max_shared_bytes": 1024, "divisible": strides}
    cases = [_case("means", kernel, means, types=types, **limits)]
    for name, n in (("5B", 256), ("1.5-5B", 512)):
        warps, choice = blocks.num_warps(n), {"D": 64, "BLOCK": BLOCK, "N_BLOCK": n}
        for what, kernel, constants in (
            ("choice", blocks.choose_blocks_kernel, choice),
            ("blocks of keys", blocks.blocks_of_keys_kernel, {"N_BLOCK": n}),
        ):
            cases.append(
                _case(
                    f"{what} {name}",
                    kernel,
                    constants,
                    types=types,
                    num_warps=warps,
                    max_registers=64,
                    max_shared_bytes=1024,
                )
            )
    return cases


# Cases by op; flash_attention has no kernel of its own.
CASES: dict[str, Callable[[], list[CompileCase]]] = {
    "adaptive_layernorm": adaptive_layernorm_cases,
    "choose_blocks": choose_blocks_cases,
    "add_low_rank": add_low_rank_cases,
    "fp8_linear": fp8_linear_cases,
    "fused_ema_adam": fused_ema_adam_cases,
    "gelu": gelu_cases,
    "qk_norm_rope3d": qk_norm_rope3d_cases,
}
