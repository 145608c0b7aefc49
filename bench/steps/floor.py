"""The matrix products and the attention of a transformer alone: no step can take less time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.steps.step_models import Batch, Variant
from cogfast.model.block import MLP_RATIO


class Floor(nn.Module):
    """Linears and scaled dot product attention in the shapes of `variant`, forward and backward.

    There are no norms, rotations, activations, residuals or biases, and no optimizer.
    """

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.config, self.grid = variant.config, variant.grid
        config, width = variant.config, variant.config.hidden_size
        patch = config.patch_size
        self.patch_numel = patch.t * patch.h * patch.w * config.in_channels
        make = lambda m, n: nn.Linear(m, n, bias=False)
        self.embed_video = make(self.patch_numel, width)
        self.embed_text = make(config.text_hidden_size, width)
        self.unembed = make(width, self.patch_numel)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "modulation": make(config.time_embed_dim, 12 * width),
                    "qkv": make(width, 3 * width),
                    "out": make(width, width),
                    "fc1": make(width, MLP_RATIO * width),
                    "fc2": make(MLP_RATIO * width, width),
                }
            )
            for _ in range(config.num_layers)
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            # Activations keep their size from layer to layer, so that none becomes denormal.
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
        self.to(variant.dtype)

    def forward(self, batch: Batch) -> Tensor:
        """Return a scalar that depends on every product."""
        b = batch.latents.shape[0]
        video = batch.latents.reshape(b, -1, self.patch_numel)
        x = torch.cat([self.embed_text(batch.text), self.embed_video(video)], dim=1)
        conditioning = x[:, 0, :1].expand(-1, self.config.time_embed_dim)
        total = x.new_zeros(())
        for block in self.blocks:
            total = total + block["modulation"](conditioning).sum()
            qkv = block["qkv"](x).unflatten(-1, (3, self.config.num_attention_heads, -1))
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            x = block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = block["fc2"](block["fc1"](x))
        return total + self.unembed(x[:, batch.text.shape[1] :]).sum()
