"""Keys that save memory."""

from __future__ import annotations

from typing import Annotated, Literal

from cogfast.core.keys import After, Keys, Range


class MemoryKeys(Keys):
    """Memory of activations, encoders, the frozen base and the optimizer's state."""

    offload_activations: Annotated[bool, After("fit")] = False
    """keep the activations that activation_checkpointing keeps in pinned host memory, from a
    block's forward to its backward pass; the GPU holds those of two blocks. auto: attention_kept,
    or full"""
    offload_encoders: bool = False
    """keep VAE and text encoder in pinned host memory; each is on the GPU only while it encodes or
    decodes. On a CPU this changes nothing"""
    quantize_base: Annotated[Literal["none", "int8", "fp8"], After("checkpoint_activations")] = (
        "none"
    )
    """LoRA: weights of the frozen linears in the blocks, in 8 bits and a scale for each row. int8:
    the smaller error. fp8: products run on fp8 tensor cores (H100, RTX 4090 or newer, bf16).
    Training and its evaluations use the rounded weights, sampling and exports those of args.load"""
    offload_blocks: Annotated[int, Range(0, 10**4)] = 0
    """LoRA: number of last blocks whose frozen linears wait in pinned host memory, a copy for each
    rank, from where the GPU fetches them one block ahead"""
    optimizer_moments: Annotated[Literal["fp32", "8bit"], After("zero_stage")] = "fp32"
    """the moments of FusedEmaAdam. 8bit: blockwise, 2 bytes per trained parameter in place of 8,
    divided by the data-parallel ranks. A run may resume with the other value"""
    ema_device: Literal["device", "cpu"] = "device"
    """memory of the averaged (EMA) weights of FusedEmaAdam, 4 bytes per trained parameter, divided
    by the data-parallel ranks. cpu: in host memory, updated over PCIe while the next step computes,
    with the same numbers"""
