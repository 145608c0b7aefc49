"""The ops of a block on their Triton launchers for CPU tensors.

Triton's interpreter computes real numbers. With a stand-in driver (python -m tests.support.kernels.triton_on_cpu)
every launch is specialised and compiled for sm_90 as on a GPU, and not run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from triton.runtime.interpreter import GridExecutor

from cogfast.kernels import torch_library
from cogfast.kernels.adaptive_layernorm import Backward
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.kernels.gpu import adaptive_layernorm, gelu, qk_norm_rope3d
from cogfast.kernels.qk_norm_rope3d import Rotation

# Names of the ops with their implementations for CUDA tensors.
LAUNCHES = {
    "adaptive_layernorm": adaptive_layernorm.launch_forward,
    "adaptive_layernorm_backward": lambda *inputs: adaptive_layernorm.launch_backward(
        Backward(*inputs)
    ),
    "gelu": gelu.launch_forward,
    "gelu_backward": gelu.launch_backward,
    "qk_norm_rope3d": qk_norm_rope3d.launch_forward,
    "qk_norm_rope3d_backward": qk_norm_rope3d.launch_backward,
}


@contextmanager
def launchers_on_cpu(runs_kernels: bool = True) -> Iterator[None]:
    """Send CPU tensors of any dtype to the implementation for CUDA tensors.

    runs_kernels: False where only the tensors matter, and not the numbers in them.
    """
    before = torch_library.CPU_DTYPES, torch_library.HAS_CPU_KERNELS
    library = torch.library.Library("cogfast", "IMPL")
    for name, launch in LAUNCHES.items():
        library.impl(name, launch, "CPU", allow_override=True)
    torch_library.CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    torch_library.HAS_CPU_KERNELS = True
    execute = GridExecutor.__call__ if runs_kernels else lambda *args, **kwargs: None
    try:
        with patch.object(GridExecutor, "__call__", execute):
            yield
    finally:
        torch_library.CPU_DTYPES, torch_library.HAS_CPU_KERNELS = before
        library._destroy()  # the implementations of before are in force again


def block_like(
    dtype: torch.dtype,
    heads: int,
    width: int,
    num_samples: int,
    num_text: int,
    grid: tuple[int, int, int] | None,
    has_norm: bool = True,
    has_weights: bool = True,
    is_frozen: bool = False,
) -> None:
    """Run the ops of a block in order, forward and backward; `width` is that of a head."""
    kernels = choose_kernels()
    m, rows = heads * width, num_text + (7 if grid is None else grid[0] * grid[1] * grid[2])

    def draw(*shape: int, is_parameter: bool = True) -> torch.Tensor:
        needs_grad = not (is_parameter and is_frozen)
        return torch.zeros(shape, dtype=dtype).requires_grad_(needs_grad)

    hidden, branch = (draw(num_samples, rows, m, is_parameter=False) for _ in range(2))
    vectors = draw(num_samples, 12 * m).unflatten(-1, (2, 6, -1)).unbind(2)
    weight, bias = (draw(m), draw(m)) if has_weights else (None, None)
    norm = lambda: (draw(width), draw(width)) if has_weights else (None, None)
    rotation = None
    if grid is not None:
        t, h, w = grid
        table = torch.zeros(2, width // 16 * (2 * t + 3 * (h + w)))
        rotation = Rotation(table, *grid)

    hidden, x = kernels.adaptive_layernorm(
        hidden * 1, weight, bias, vectors[0], vectors[1], num_text, 1e-5
    )
    qkv = torch.stack([x, x, x], 2).unflatten(-1, (heads, width))
    norms = (norm(), norm()) if has_norm else (None, None)
    q, k, v = kernels.qk_norm_rope3d(qkv, *norms, rotation, num_text)
    branch = (q + k + v).flatten(2) + branch
    residual = (hidden, branch, draw(m), vectors[2])
    hidden, x = kernels.residual_adaptive_layernorm(
        *residual, weight, bias, vectors[3], vectors[4], num_text, 1e-5
    )
    x = kernels.gelu(x, draw(m))
    kernels.gated_residual(hidden, x, draw(m), vectors[5], num_text).sum().backward()


def launch_all() -> None:
    """Launch with all that changes a kernel's specialisation, each pair of values that matters.

    Dtypes, widths and flags do, and numbers that are 1 or multiples of 16, which Triton turns into
    constants or hints.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    block_like(bf16, 48, 64, 1, 226, (2, 3, 4), is_frozen=True)
    block_like(fp32, 3, 128, 1, 0, (1, 1, 1), has_weights=False)
    block_like(fp16, 3, 48, 2, 5, None)
    block_like(bf16, 4, 80, 16, 16, (16, 1, 1))
    block_like(fp32, 4, 16, 2, 1, (1, 4, 4), has_norm=False)
    update_like(fp32, bf16, has_copies=True, adam_w_mode=False, use_num_updates=False)
    update_like(fp16, fp16, has_copies=False)


def update_like(
    p_dtype: torch.dtype, g_dtype: torch.dtype, has_copies: bool, **options: bool
) -> None:
    """Run a step of the optimizer."""
    params = [torch.zeros(n, dtype=p_dtype, requires_grad=True) for n in (1, 16, 3000)]
    for p in params:
        # torch requires by default a gradient of the parameter's dtype.
        p.grad_dtype, p.grad = None, torch.zeros(p.shape, dtype=g_dtype)
    optimizer = FusedEmaAdam(params, **options)
    if has_copies:
        optimizer.low_precision_copies = {p: p.detach().bfloat16() for p in params}
        optimizer.gradient_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    optimizer._update_with_triton(params, optimizer.param_groups[0])


def main() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    launched: set[str] = set()

    class Utilities:
        def load_binary(self, name: str, *_: object) -> tuple[int, ...]:
            launched.add(name)
            return 1, 1, 0, 0, 1024  # module, function, registers, spills, most threads

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448}  # H100, a program's

    class Driver:
        utils = Utilities()
        launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: None)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    driver.set_active(Driver())
    with launchers_on_cpu():
        launch_all()
    print(" ".join(sorted(launched)))


if __name__ == "__main__":
    main()
