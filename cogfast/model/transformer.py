"""The denoising network of the CogVideoX family: 2B, 5B, 5B-I2V, 1.5-5B and 1.5-5B-I2V."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.kernels.block_kernels import BlockKernels, choose_kernels
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.block import NORM_EPS, Block
from cogfast.model.embeddings import SinusoidEmbedding, patchify, unpatchify
from cogfast.model.initialization import initialize
from cogfast.model.lora import SAT_ALPHA, TARGETS, add_lora
from cogfast.model.positions import (
    NoPositionTable,
    NoRotation,
    PositionTable,
    RotaryPositions,
)
from cogfast.model.weights.sat import DEFAULT_FROZEN_PREFIXES, freeze
from cogfast.schema.json_files import brief
from cogfast.shapes import PatchSize, TokenGrid

OUTPUT_NORM_EPS = 1e-6  # SAT's; diffusers has 1e-5 here, which shifts outputs by 2e-5
# The largest sizes that are built, far beyond the published models.
_MOST = {
    "num_layers": 2**10,
    "hidden_size": 2**16,
    "num_attention_heads": 2**10,
    "in_channels": 2**12,
    "out_channels": 2**12,
    "text_hidden_size": 2**16,
    "text_length": 2**14,
    "time_embed_dim": 2**16,
    "num_frames": 2**14,
    "time_compressed_rate": 2**6,
    "latent_height": 2**14,
    "latent_width": 2**14,
    "max_sequence_length": 2**20,
}
_MOST_TOKENS = 2**22  # 1.5's tables of 300x300 latent pixels and 81 frames have 472,500
_MOST_PRODUCT = 10**10  # num_layers * hidden_size**2; 5B's is 4e8
_MOST_TABLE = 2**27  # 2B's has 34 million


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """A member of the family. Lengths in tokens, sizes in latent rows, columns and pixel frames."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    in_channels: int  # image latents included
    out_channels: int
    patch_size: PatchSize
    text_hidden_size: int
    text_length: int
    time_embed_dim: int
    ofs_embed_dim: int | None = None  # 1.5-I2V only
    default_ofs: float = 2.0  # what 1.5-I2V was trained and is sampled with
    num_frames: int
    time_compressed_rate: int = 4
    latent_height: int
    latent_width: int
    position: Literal["sincos", "rotary"]
    learnable_position: bool = False
    height_interpolation: float = 1.0
    width_interpolation: float = 1.0
    time_interpolation: float = 1.0
    rope_theta: float = 10000.0
    # pipeline: a video of another size than latent_height and latent_width has the positions that
    # diffusers' pipelines give it. They differ for CogVideoX 1.0 only.
    rotary_positions: Literal["integer", "pipeline"] = "integer"
    # frames in pixels, rows and columns in latents of what the weights were trained on, if known
    trained_size: tuple[int, int, int] | None = None
    qk_norm: bool = True
    elementwise_affine: bool = True
    max_sequence_length: int = 64  # rows of a table that SAT's rotary models carry and never read
    lora_rank: int | None = None
    lora_alpha: float = SAT_ALPHA
    lora_dropout: float = 0.0
    lora_layers: tuple[int, ...] | None = None  # None: all
    lora_targets: tuple[str, ...] = tuple(TARGETS)

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must divide "
                f"hidden_size={self.hidden_size}"
            )
        if self.position == "rotary" and self.head_width % 16:
            raise ValueError(
                f"hidden_size/num_attention_heads={self.head_width}: a rotary head needs a multiple "
                "of 16 entries (a quarter for time, 3/8 each for rows and columns); use 64"
            )
        if self.position == "sincos" and self.hidden_size % 16:
            raise ValueError(f"hidden_size={self.hidden_size}: must be a multiple of 16")
        layers = self.lora_layers or ()
        if not all(0 <= i < self.num_layers for i in layers) or len(set(layers)) < len(layers):
            raise ValueError(
                f"lora_config layer_range={list(layers)} must name layers from 0 to "
                f"{self.num_layers - 1}, each once"
            )
        if self.ofs_embed_dim not in (None, self.time_embed_dim):
            raise ValueError(
                f"ofs_embed_dim={self.ofs_embed_dim} must equal time_embed_dim="
                f"{self.time_embed_dim}: the two embeddings are added"
            )

    def _check_sizes(self) -> None:
        """Refuse what no model has before anything of that size is built."""
        patch = self.patch_size
        sizes = {name: getattr(self, name) for name in _MOST}
        sizes |= {"lora_rank": self.lora_rank or 1, "ofs_embed_dim": self.ofs_embed_dim or 1}
        sizes |= {"patch_size": min(patch.t, patch.h, patch.w)}
        for name, size in sizes.items():
            most = _MOST.get(name, 2**16)
            if not 1 <= size <= most:
                raise ValueError(f"{name}={brief(str(size))} must be from 1 to {most}; correct it")
        if self.num_layers * self.hidden_size**2 > _MOST_PRODUCT:
            raise ValueError(
                f"num_layers={self.num_layers} and hidden_size={self.hidden_size} are a network of "
                f"{12 * self.num_layers * self.hidden_size**2:.0e} weights or more; use up to 1e+11"
            )
        grid, table = self.grid, 0
        if self.position == "sincos" or self.learnable_position:
            table = (grid.num_tokens + self.text_length) * self.hidden_size
        if grid.num_tokens < 1 or grid.num_tokens > _MOST_TOKENS or table > _MOST_TABLE:
            raise ValueError(
                f"num_frames={self.num_frames}, latent_height={self.latent_height} and latent_width="
                f"{self.latent_width} with patches of {patch.t}x{patch.h}x{patch.w} give positions "
                f"for {grid.num_tokens} tokens; use from 1 to {_MOST_TOKENS} tokens, and tables of "
                f"at most {_MOST_TABLE} numbers"
            )

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_rescaled_positions(self) -> bool:
        """Whether a video's size decides where its rows and columns are."""
        return self.rotary_positions == "pipeline" and self.patch_size.t == 1

    @property
    def grid(self) -> TokenGrid:
        """The tokens of the largest video that the position tables hold."""
        patch = self.patch_size
        latent_frames = (self.num_frames - 1) // self.time_compressed_rate + 1
        # SAT's tables have an entry per latent frame, also where a token covers two (1.5)
        return TokenGrid(latent_frames, self.latent_height // patch.h, self.latent_width // patch.w)


class DiffusionTransformer(nn.Module):
    """Predicts from noised latents; see forward. Weights are PyTorch's defaults until
    cogfast.model.initialization.initialize or a checkpoint sets them."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        width, patch = config.hidden_size, config.patch_size
        patch_numel = patch.t * patch.h * patch.w
        self.kernels = kernels = choose_kernels()
        make_norm = partial(nn.LayerNorm, width, elementwise_affine=config.elementwise_affine)

        self.patch_embedding = nn.Linear(config.in_channels * patch_numel, width)
        self.text_embedding = nn.Linear(config.text_hidden_size, width)
        self.position_table, self.rotary = _make_positions(config)
        self.time_embedding = SinusoidEmbedding(width, config.time_embed_dim)
        self.ofs_embedding = None
        if config.ofs_embed_dim is not None:
            self.ofs_embedding = SinusoidEmbedding(config.ofs_embed_dim, config.ofs_embed_dim)
        self.blocks = nn.ModuleList(
            Block(
                width,
                config.num_attention_heads,
                config.time_embed_dim,
                has_qk_norm=config.qk_norm,
                has_affine_norms=config.elementwise_affine,
                kernels=kernels,
            )
            for _ in range(config.num_layers)
        )
        # What runs in each block's place while the model trains, such as a function that keeps less
        # for the backward pass; None: the blocks.
        self.training_calls: Sequence[Callable[..., Tensor]] | None = None
        self.final_norm = make_norm(eps=NORM_EPS)
        self.output_norm = make_norm(eps=OUTPUT_NORM_EPS)
        self.output_modulation = nn.Linear(config.time_embed_dim, 2 * width)
        self.output = nn.Linear(width, config.out_channels * patch_numel)
        self.unused_position_embeddings = None
        if config.position == "rotary":
            # SAT carries it in every rotary checkpoint; kept so that names and counts agree
            unused = torch.empty(config.max_sequence_length, width)
            self.unused_position_embeddings = nn.Parameter(unused)

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.weight.dtype

    @property
    def patch_size(self) -> PatchSize:
        return self.config.patch_size

    def use_kernels(self, kernels: BlockKernels) -> None:
        """Run the blocks and the norms behind them on `kernels` from now on."""
        self.kernels = kernels
        for block in self.blocks:
            block.kernels = block.attention.kernels = kernels

    def unused_parameter_names(self) -> list[str]:
        """Parameters that never get a gradient."""
        return [] if self.unused_position_embeddings is None else ["unused_position_embeddings"]

    def forward(
        self,
        latents: Tensor,
        timesteps: Tensor,
        text: Tensor,
        image_latents: Tensor | None = None,
        ofs: Tensor | None = None,
    ) -> Tensor:
        """The network's prediction, [B, C_out, T, h, w] in the model's dtype.

        latents [B, C, T, h, w]; timesteps [B], 0..999; text [B, L, E]; image_latents
        [B, C', T, h, w], stacked behind the latents' channels (I2V); ofs [B] or [1] (1.5-I2V).
        """
        grid = TokenGrid.from_latents(latents, self.patch_size)
        num_text = text.shape[1]

        hidden = self.embed(latents, text, image_latents, grid)  # [B, S, M]
        conditioning = self.condition(timesteps, ofs)  # [B, time_embed_dim]
        rotation = self.rotary(grid)
        hidden = self.run_blocks(hidden, conditioning, num_text, rotation)
        return self.unembed(hidden[:, num_text:], conditioning, grid)

    def embed(
        self, latents: Tensor, text: Tensor, image_latents: Tensor | None, grid: TokenGrid
    ) -> Tensor:
        """Tokens [B, S, M] of text [B, L, E] and of latents with their image latents."""
        latents = latents.to(self.dtype)
        if image_latents is not None:
            latents = torch.cat([latents, image_latents.to(self.dtype)], dim=1)
        if latents.shape[1] != self.config.in_channels:
            raise ValueError(
                f"latents and image latents have {latents.shape[1]} channels together, the model "
                f"takes in_channels={self.config.in_channels}; an I2V model needs image latents "
                "(model.noised_image_input: true), a T2V model takes none"
            )
        text = self.text_embedding(text.to(self.dtype))
        video = self.patch_embedding(patchify(latents, self.patch_size))
        return self.position_table(torch.cat([text, video], dim=1), text.shape[1], grid)

    def condition(self, timesteps: Tensor, ofs: Tensor | None) -> Tensor:
        """The vector that modulates all blocks, [B, time_embed_dim], after the SiLU that SAT has in
        front of each modulation layer."""
        embedding = self.time_embedding(timesteps)
        if self.ofs_embedding is not None:
            if ofs is None:
                ofs = torch.full((1,), self.config.default_ofs, device=timesteps.device)
            embedding = embedding + self.ofs_embedding(ofs)
        return F.silu(embedding)

    def run_blocks(
        self, hidden: Tensor, conditioning: Tensor, num_text: int, rotation: Rotation | None
    ) -> Tensor:
        """hidden [B, S, M] -> [B, S, M]."""
        calls = self.training_calls if self.training else None
        for call in self.blocks if calls is None else calls:
            hidden = call(hidden, conditioning, num_text, rotation)
        return hidden

    def unembed(self, hidden: Tensor, conditioning: Tensor, grid: TokenGrid) -> Tensor:
        """Video rows [B, V, M] -> [B, C_out, T, h, w]."""
        kernels, norm1, norm2 = self.kernels, self.final_norm, self.output_norm
        modulation = self.output_modulation(conditioning).unflatten(-1, (2, 1, -1))
        # [B, 2, M] as in a block, whose second entry is for text: there are no such rows here
        shift, scale = modulation.expand(-1, -1, 2, -1).unbind(1)
        hidden = kernels.layernorm(hidden, norm1.weight, norm1.bias, norm1.eps)
        _, hidden = kernels.adaptive_layernorm(
            hidden, norm2.weight, norm2.bias, shift, scale, 0, norm2.eps
        )
        return unpatchify(self.output(hidden), grid, self.patch_size)


def _make_positions(config: TransformerConfig) -> tuple[nn.Module, nn.Module]:
    """The module that adds a position to tokens, and the one that gives the angles of heads."""
    table: nn.Module = NoPositionTable()
    rotary: nn.Module = NoRotation()
    if config.position == "rotary":
        rotary = RotaryPositions(
            config.grid, config.head_width, config.rope_theta, config.has_rescaled_positions
        )
    size = (config.grid, config.text_length, config.hidden_size)
    if config.position == "sincos":
        scales = (
            config.time_interpolation,
            config.height_interpolation,
            config.width_interpolation,
        )
        table = PositionTable(*size, interpolation=scales)
    elif config.learnable_position:
        table = PositionTable(*size, interpolation=None)
    return table, rotary


def build_transformer(model_section: Mapping[str, Any], seed: int = 0) -> DiffusionTransformer:
    """The transformer of a config's `model` section, freshly initialised, with LoRA, and with
    requires_grad as `not_trainable_prefixes` and `lora_train` ask. Under `torch.device("meta")` it
    is built without memory."""
    # imported here: the table is the factory's, and a transformer can be built without it
    from cogfast.schema.sat_classes import transformer_arguments

    arguments = transformer_arguments(model_section["network_config"]["params"])
    transformer = assemble_transformer(TransformerConfig(**arguments), seed)
    prefixes = model_section.get("not_trainable_prefixes", DEFAULT_FROZEN_PREFIXES)
    freeze(transformer, prefixes, is_lora_only=bool(model_section.get("lora_train", False)))
    return transformer


def assemble_transformer(config: TransformerConfig, seed: int = 0) -> DiffusionTransformer:
    """The freshly initialised transformer of `config`, with LoRA where the config has a rank."""
    device = torch.get_default_device()
    with torch.device("meta"):  # PyTorch's own initial values would be drawn for nothing
        transformer = DiffusionTransformer(config)
        if config.lora_rank is not None:
            everywhere = tuple(range(config.num_layers))
            for i in everywhere if config.lora_layers is None else config.lora_layers:
                add_lora(
                    transformer.blocks[i].attention,
                    config.lora_rank,
                    config.lora_alpha,
                    config.lora_dropout,
                    config.lora_targets,
                )
    if device.type != "meta":
        transformer.to_empty(device=device)
        initialize(transformer, seed)
    return transformer
