"""Model FLOPs of training: the products of the blocks, counted on the meta device, which computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, flop_registry, shape_wrapper

from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.kernels.torch_library import FLOPS
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer, freeze

_META = torch.device("meta")


def flop_formulas() -> dict[Any, Callable[..., float]]:
    """Return {op: FLOPs of its arguments, and of out_val}, as PyTorch's counter knows them, and our own."""
    own = {op: shape_wrapper(formula) for op, formula in FLOPS.items()}
    # LoRA adds to the input's gradient in place.
    return {**flop_registry, **own, torch.ops.aten.addmm_: addmm_flop}


def block_inputs(
    transformer: DiffusionTransformer, batch: int, num_rows: int, num_tokens: int
) -> tuple[Tensor, Tensor, int, Rotation | None]:
    """Return what a block gets on the meta device: hidden [B, num_rows, M], conditioning, number of text
    rows, rotation. num_tokens: S of the whole sample."""
    config, rotation = transformer.config, None
    if transformer.rotary is not None:
        # One row of tokens: only the number of tokens counts here.
        num_video = max(0, num_tokens - config.text_length)
        width = config.head_width // 16 * (2 * num_video + 3 + 3)
        rotation = Rotation(torch.empty(2, width, device=_META), num_video, 1, 1)
    empty = partial(torch.empty, dtype=transformer.dtype, device=_META)
    is_trained = any(p.requires_grad for p in transformer.time_embedding.parameters())
    conditioning = empty(batch, config.time_embed_dim, requires_grad=is_trained)
    num_text = min(config.text_length, num_rows)
    return empty(batch, num_rows, config.hidden_size), conditioning, num_text, rotation


@cache
def train_flops(
    config: TransformerConfig, num_tokens: int, sparse_share: float | None = None
) -> float:
    """Return the model FLOPs of training on one sample: those of its blocks, without recomputation.

    With LoRA the adapters alone are trained. sparse_share: of blocks that attention leaves out.
    """
    # All blocks behind the first are alike, unless some have no adapters.
    built = 2 if config.num_layers > 2 and config.lora_layers is None else config.num_layers
    with _META:
        transformer = assemble_transformer(replace(config, num_layers=built)).to(torch.bfloat16)
    freeze(transformer, () if config.lora_rank is None else ["all"], is_lora_only=False)
    transformer.use_sparse_attention(sparse_share)
    inputs = block_inputs(transformer, 1, num_tokens, num_tokens)
    has_gradient = transformer.patch_embedding.weight.requires_grad
    total, of_kind = 0.0, dict[tuple[bool, bool], float]()
    for number in range(config.num_layers):
        block = transformer.blocks[min(number, built - 1)]
        kind = any(p.requires_grad for p in block.parameters()), has_gradient
        if kind not in of_kind:
            inputs[0].requires_grad_(has_gradient)
            with FlopCounterMode(display=False) as counter:
                counter.flop_registry = flop_formulas()
                out = block(*inputs)
                if out.requires_grad:
                    out.backward(torch.empty_like(out))
            # One of attention's five products backward is a recomputation.
            of_kind[kind] = sum(
                flops * (0.8 if str(op).endswith("attention_backward") else 1)
                for op, flops in counter.get_flop_counts()["Global"].items()
            )
        total += of_kind[kind]
        has_gradient |= kind[0]
    return total
