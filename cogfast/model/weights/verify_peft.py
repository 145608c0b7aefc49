"""Whether diffusers takes a LoRA file that we wrote, and gives the adapters their strength."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from cogfast.model.lora import SAT_ALPHA
from cogfast.model.weights.formats.peft import linear_parts
from cogfast.model.weights.lora.adapters import adapters_of
from cogfast.model.weights.source import WeightSource

_HEAD_WIDTH = 64  # any that divides the width
_EXACT = 1e-5  # of the largest number: two ways of multiplying in float32


@torch.no_grad()
def verify_peft(source: WeightSource, file: Path) -> str:
    """Load `file` into diffusers' transformer, without a base, as `pipe.load_lora_weights` does, and
    compare what each linear gets, (alpha / r) B A, with the source's. Returns what was found in one
    line; ValueError where they differ. source: as it was written, in the file's dtypes."""
    try:
        from diffusers import CogVideoXTransformer3DModel
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise ValueError(
            "--verify --to peft loads the target with diffusers and peft; pip install diffusers peft"
        ) from None
    alpha = SAT_ALPHA if source.lora_alpha is None else source.lora_alpha
    num_layers = adapters_of(source).layers[-1] + 1
    width = source.shapes[next(n for n in source.shapes if ".qkv.matrix_A." in n or ".out." in n)][
        1
    ]
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(
            num_attention_heads=width // _HEAD_WIDTH,
            attention_head_dim=_HEAD_WIDTH,
            num_layers=num_layers,
            use_rotary_positional_embeddings=True,  # else it computes a table
        )
    # Adapters go to the device of the weights that they adapt, so these are no meta tensors.
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            nothing = torch.zeros(()).expand(weight.shape)
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))
    # Without use_safetensors diffusers does not read the header, where alpha is.
    model.load_lora_adapter(str(file), low_cpu_mem_usage=True, use_safetensors=True)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    largest = scale = 0.0
    for name in [n for n in source.shapes if ".matrix_A." in n]:
        module, _, part = name.rsplit(".", 2)
        layer = layers.pop(linear_parts(module)[int(part)])
        a, b = (source.read(name.replace("_A.", f"_{s}."), None).float() for s in "AB")
        (adapter,) = layer.scaling
        given = layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float()
        expected = b @ a * (alpha / a.shape[0])
        off = (given * layer.scaling[adapter] - expected).abs().max()
        off = off.item()  # sync: none, conversion is on the CPU
        largest = largest if off <= largest else off  # max() would hide NaN
        scale = max(scale, expected.abs().max().item())  # sync: none, as above
    line = f"largest difference {largest:.1e} of changes of weights up to {scale:.2g} in diffusers"
    if layers or largest != largest or largest > _EXACT * scale:
        more = f"; {len(layers)} linears have adapters that are not in the source" if layers else ""
        raise ValueError(f"{file}: it does not give what the source does: {line}{more}; delete it")
    return line
