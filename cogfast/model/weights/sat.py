"""Exports a transformer's tensors with SAT's names and shapes."""

from __future__ import annotations

from torch import Tensor

from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.formats.sat_names import PREFIX, ROTARY_BUFFERS, sat_name


def to_sat_state_dict(transformer: DiffusionTransformer) -> dict[str, Tensor]:
    """Return {SAT key: tensor} with SAT's shapes; tensors share memory with the parameters.

    For CogVideoX 1.0 (one latent frame per patch) the patch embedding is a convolution weight
    [M, C, 2, 2] and, with rotary positions, the flattened tables [V, D] are included.
    """
    config = transformer.config
    patch = config.patch_size
    state = {sat_name(n): p.detach() for n, p in transformer.named_parameters()}
    if not patch.joins_frames:
        key = sat_name("patch_embedding.weight")
        state[key] = state[key].view(config.hidden_size, config.in_channels, patch.h, patch.w)
        if config.position == "rotary":
            turns = transformer.rotary(config.grid).per_row(num_text=0)  # [V, D/2] complex
            # Sine before cosine, as in ROTARY_BUFFERS, each for both entries that it rotates.
            for name, table in zip(ROTARY_BUFFERS, (turns.imag, turns.real), strict=True):
                state[PREFIX + name] = table.repeat_interleave(2, dim=-1)
    return state
