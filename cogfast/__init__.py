"""Training of CogVideoX video diffusion transformers."""

import importlib
from typing import Any

__version__ = "0.1.0"

# {file, imported when a name is first used: names that docs/library.md describes}
_PUBLIC = {
    "kernels.adaptive_layernorm": "adaptive_layernorm gated_residual layernorm residual_adaptive_layernorm",
    "kernels.add_low_rank": "add_low_rank",
    "kernels.attention_backends": "flash_attention",
    "kernels.fused_ema_adam": "FusedEmaAdam",
    "kernels.gelu": "gelu",
    "kernels.qk_norm_rope3d": "Rotation qk_norm_rope3d",
    "kernels.torch_library": "compile_cpu_kernels",
    "extensions.diffusers_kernels.diffusers_kernels": "apply_to_diffusers restore",
}


def __getattr__(name: str) -> Any:
    for file, names in _PUBLIC.items():
        if name in names.split():
            return getattr(importlib.import_module(f"cogfast.{file}"), name)
    raise AttributeError(f"module 'cogfast' has no attribute {name!r}")
