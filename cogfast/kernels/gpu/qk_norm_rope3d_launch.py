"""Tiles, programs and launches of the kernels of qk_norm_rope3d, and what they must compile to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cogfast.kernels.argument_checks import CompileCase, num_multiprocessors, triton
from cogfast.kernels.gpu.qk_norm_rope3d import (
    qk_norm_rope3d_bwd_kernel,
    qk_norm_rope3d_fwd_kernel,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class QkLaunch:
    """A tile at D = 64 (other widths take as many entries), the warps on it, and how many programs
    a multiprocessor holds. heads = 4 num_warps gives a thread the 16 bytes of one bf16 head."""

    tokens: int
    heads: int
    num_warps: int
    programs: int

    def fit(self, num_heads: int, width: int) -> tuple[dict[str, int], int, int]:
        """For [.., num_heads, width]: the kernel's tile, warps and programs per multiprocessor."""
        d_block = triton.next_power_of_2(width)
        heads, num_warps = max(1, self.heads * 64 // d_block), self.num_warps
        padded = lambda tile: triton.cdiv(num_heads, tile) * tile
        # fewer at a time where fewer lanes are then idle: 3 x 8 for 24 heads, not 2 x 16
        while num_warps > 1 and heads > 1 and padded(heads // 2) < padded(heads):
            heads, num_warps = heads // 2, num_warps // 2
        tile = {"D_BLOCK": d_block, "TOKENS": self.tokens, "HEADS": heads}
        return tile, num_warps, self.programs * self.num_warps // num_warps

    def grid(self, shape: torch.Size, device: torch.device) -> tuple[int, int]:
        """Programs for a [B, S, .., H, D] of this shape: (head tiles x walks over tokens, B)."""
        num_samples, num_tokens = shape[:2]
        tile, _, programs = self.fit(*shape[-2:])
        head_tiles = triton.cdiv(shape[-2], tile["HEADS"])
        walks = num_multiprocessors(device) * programs // (head_tiles * num_samples)
        walks = max(1, min(walks, triton.cdiv(num_tokens, self.tokens)))
        return head_tiles * walks, num_samples


# Registers leave room for that many programs of four warps: 96 per thread, or 72 with one token
# (forward); 168, or 128 (backward). Loads in flight per multiprocessor are 40 and 28 KB (forward), 60
# and 40 KB (backward); HBM's latency asks for about 25.
FORWARD_LAUNCH = QkLaunch(tokens=2, heads=16, num_warps=4, programs=5)
FORWARD_ONE_TOKEN = QkLaunch(tokens=1, heads=16, num_warps=4, programs=7)
BACKWARD_LAUNCH = QkLaunch(tokens=2, heads=16, num_warps=4, programs=3)
BACKWARD_ONE_TOKEN = QkLaunch(tokens=1, heads=16, num_warps=4, programs=4)
# Worth timing on a GPU.
FORWARD_CANDIDATES = (
    FORWARD_LAUNCH,
    FORWARD_ONE_TOKEN,
    QkLaunch(tokens=2, heads=16, num_warps=4, programs=1 << 20),  # a program per tile
    QkLaunch(tokens=2, heads=32, num_warps=8, programs=2),
)
BACKWARD_CANDIDATES = (
    BACKWARD_LAUNCH,
    BACKWARD_ONE_TOKEN,
    QkLaunch(tokens=1, heads=32, num_warps=8, programs=2),
    QkLaunch(tokens=1, heads=8, num_warps=2, programs=8),
)


def _choose(
    qkv: Tensor, has_norm: bool, launch: QkLaunch | None, usual: QkLaunch, one_token: QkLaunch
) -> QkLaunch:
    """launch where it is given. One token at a time where two would take too many registers
    (float32), or have cos and sin go through shared memory: Triton loads them where they are used
    only if there are fewer of them than threads. Rotation alone needs no more either."""
    if launch is not None:
        return launch
    tile, num_warps, _ = usual.fit(*qkv.shape[-2:])
    is_direct = usual.tokens * tile["D_BLOCK"] // 2 < 32 * num_warps
    return usual if has_norm and is_direct and qkv.element_size() < 4 else one_token


def launch_forward(
    qkv: Tensor,
    q_weight: Tensor | None,
    q_bias: Tensor | None,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    table: Tensor | None,
    num_text: int,
    t: int,
    h: int,
    w: int,
    has_norm: bool,
    eps: float,
    launch: QkLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """qkv [B, S, 3, H, D], affine parameters [D], table of Rotation -> q, k [B, S, H, D]."""
    num_samples, num_tokens, _, num_heads, width = qkv.shape
    q = qkv.new_empty(num_samples, num_tokens, num_heads, width)
    k = torch.empty_like(q)
    launch = _choose(qkv, has_norm, launch, FORWARD_LAUNCH, FORWARD_ONE_TOKEN)
    tile, num_warps, _ = launch.fit(num_heads, width)
    qk_norm_rope3d_fwd_kernel[launch.grid(qkv.shape, qkv.device)](
        q,
        k,
        qkv,
        q_weight,
        q_bias,
        k_weight,
        k_bias,
        table,
        0 if table is None else table.shape[1],
        num_tokens,
        num_text,
        t,
        *qkv.stride()[:4],
        eps,
        H=num_heads,
        D=width,
        GRID_H=h,
        GRID_W=w,
        HAS_NORM=has_norm,
        **tile,
        num_warps=num_warps,
    )
    return q, k


def launch_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    table: Tensor | None,
    num_text: int,
    t: int,
    h: int,
    w: int,
    has_norm: bool,
    eps: float,
    needs_sums: bool,
    launch: QkLaunch | None = None,
) -> tuple[Tensor, Tensor]:
    """dq, dk, dv [B, S, H, D] of any strides -> dqkv [B, S, 3, H, D], dense, and the gradients of
    query weight, query bias, key weight, key bias [4, D] float32; [0, D] where not needed."""
    num_samples, num_tokens, _, num_heads, width = qkv.shape
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    launch = _choose(qkv, has_norm, launch, BACKWARD_LAUNCH, BACKWARD_ONE_TOKEN)
    tile, num_warps, _ = launch.fit(num_heads, width)
    grid = launch.grid(qkv.shape, qkv.device)
    partials = None
    if needs_sums:
        shape = (grid[0] * grid[1], 4, width)
        partials = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    qk_norm_rope3d_bwd_kernel[grid](
        dqkv,
        partials,
        dq,
        dk,
        dv,
        qkv,
        q_weight,
        k_weight,
        table,
        0 if table is None else table.shape[1],
        num_tokens,
        num_text,
        t,
        *qkv.stride()[:4],
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        eps,
        H=num_heads,
        D=width,
        GRID_H=h,
        GRID_W=w,
        HAS_NORM=has_norm,
        **tile,
        num_warps=num_warps,
    )
    if partials is None:
        return dqkv, qkv.new_empty(0, width, dtype=torch.float32)
    return dqkv, partials.sum(0)


def compile_cases() -> list[CompileCase]:
    """Both directions at the heads and grids of 2B (norm only) and 5B, and the variants."""
    affine = ("q_weight_ptr", "q_bias_ptr", "k_weight_ptr", "k_bias_ptr")
    data = (*affine, "q_ptr", "k_ptr", "qkv_ptr", "dqkv_ptr", "dq_ptr", "dk_ptr", "dv_ptr")
    sides = (
        (qk_norm_rope3d_fwd_kernel, FORWARD_LAUNCH, FORWARD_ONE_TOKEN, (96, 72)),
        (qk_norm_rope3d_bwd_kernel, BACKWARD_LAUNCH, BACKWARD_ONE_TOKEN, (168, 128)),
    )
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
    ):
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        qkv = torch.empty(1, 1, 3, *shape, dtype=kind, device="meta")
        for kernel, usual, one_token, most in sides:
            launch = _choose(qkv, has_norm, None, usual, one_token)
            tile, num_warps, _ = launch.fit(*shape)
            constants = {"H": shape[0], "D": shape[1], "GRID_H": 30, "GRID_W": 45}
            constants |= {"HAS_NORM": has_norm, **tile}
            constants |= {n: None for n in absent if n in kernel.arg_names}
            arguments = {n: "i32" for n in kernel.arg_names if n not in constants}
            arguments |= {n: f"*{dtype}" for n in data if n in arguments}
            arguments |= {n: "*fp32" for n in ("table_ptr", "partials_ptr") if n in arguments}
            has_sums = "partials_ptr" in arguments
            # as many entries as threads: affine parameters change threads, once per program
            is_tight = 32 * num_warps <= tile["D_BLOCK"]
            cases.append(
                CompileCase(
                    name=f"{kernel.__name__} {name}",
                    kernel=kernel,
                    arguments=arguments | {"eps": "fp32"},
                    constants=constants,
                    num_warps=num_warps,
                    divisible=[n for n in arguments if "_stride_" in n],
                    max_registers=most[launch is one_token],
                    # the four sums of backward change threads too, once per program
                    max_shared_bytes=(16 if has_sums else 4 * is_tight) * tile["D_BLOCK"],
                    # cos and sin: a thread's 4 float32 entries turn by 2 of each, 8 bytes
                    narrow_loads=2 * (dtype == "fp32") + 4 * is_tight,
                    narrow_stores=4 if has_sums else 0,
                )
            )
    return cases
