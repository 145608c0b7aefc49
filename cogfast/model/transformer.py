"""The transformer of the CogVideoX family: 2B, 5B, 5B-I2V, 1.5-5B and 1.5-5B-I2V."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.config.components import import_target
from cogfast.config.sat_network import transformer_arguments
from cogfast.config.sat_unused import NETWORK, NETWORKS
from cogfast.core.shapes import PatchSize, TokenGrid
from cogfast.core.slot_random import random_bits
from cogfast.core.values import KeyProblem, nearest
from cogfast.extensions.table import hook
from cogfast.kernels.block_kernels import BlockKernels, choose_kernels
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.block import NORM_EPS, Block
from cogfast.model.config import TransformerConfig
from cogfast.model.embeddings import (
    PositionTable,
    RotaryPositions,
    SinusoidEmbedding,
    patchify,
    unpatchify,
)
from cogfast.model.initialization import initialize
from cogfast.model.keys import DEFAULT_FROZEN_PREFIXES, ModelKeys
from cogfast.model.lora import LoraLinear, add_lora, is_lora_parameter
from cogfast.model.weights.names import sat_name
from cogfast.model.weights.source import Target

BlockCall = Callable[..., Tensor]  # as Block.forward, with the block_arguments of a subclass behind


class RowSplit(Protocol):
    """Splits the rows of the blocks' input between ranks (distributed/context_parallel.py)."""

    def split(
        self, hidden: Tensor, conditioning: Tensor, num_text: int
    ) -> tuple[Tensor, Tensor, int]:
        """Return this rank's rows of hidden [B, S, M], the conditioning, and how many rows are text."""
        ...

    def join(self, hidden: Tensor) -> Tensor:
        """Return all rows [B, S, M] of this rank's rows."""
        ...

    def attention_kernels(self, kernels: BlockKernels) -> BlockKernels:
        """Return the kernels for attention, which needs all rows."""
        ...


class BlockSource(Protocol):
    """Brings the weights of blocks to the device (extensions/memory/host_blocks.py)."""

    def around(self, calls: Iterable[BlockCall]) -> Iterable[BlockCall]:
        """Return the calls of all blocks, each with its weights fetched before it."""
        ...


@dataclass(slots=True)
class BlockRuntime:
    """How the blocks of a model run, and where their weights are: set after it is built."""

    training_calls: Sequence[BlockCall] | None = None  # such as checkpointed versions of the blocks
    row_split: RowSplit | None = None
    source: BlockSource | None = None
    # Weights that are no parameters, by name (extensions/memory), and what takes their values.
    held: Mapping[str, Target] = field(default_factory=dict)
    sparse: Any = None  # attention in blocks, which use_sparse_attention takes


OUTPUT_NORM_EPS = 1e-6  # as SAT; diffusers has 1e-5 here, which changes outputs by 2e-5


class DiffusionTransformer(nn.Module):
    """Diffusion transformer of the CogVideoX family.

    Weights are on the meta device: cogfast.model.initialization.initialize or a checkpoint sets them
    once they are allocated. Subclasses may add modules, to their blocks by a `block_class`, and override
    `block_arguments` (docs/extending.md).
    """

    block_class: ClassVar[type[Block]] = Block

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        width, patch = config.hidden_size, config.patch_size
        patch_numel = patch.t * patch.h * patch.w
        self.kernels = kernels = choose_kernels()
        make_norm = partial(nn.LayerNorm, width, elementwise_affine=config.elementwise_affine)

        # Only these: modules that a subclass adds keep the values of their constructor (reset_added).
        with torch.device("meta"):
            self.patch_embedding = nn.Linear(config.in_channels * patch_numel, width)
            self.text_embedding = nn.Linear(config.text_hidden_size, width)
            self.position_table = self.rotary = None
            size = (config.grid, config.text_length, width)
            if config.position == "sincos":
                of_sides = config.height_interpolation, config.width_interpolation
                self.position_table = PositionTable(*size, (config.time_interpolation, *of_sides))
            # Rotary and table exclude each other, except in 5B-I2V, which adds a learned table.
            elif config.learnable_position:
                self.position_table = PositionTable(*size, interpolation=None)
            if config.position == "rotary":
                is_rescaled, theta = config.has_rescaled_positions, config.rope_theta
                self.rotary = RotaryPositions(config.grid, config.head_width, theta, is_rescaled)
            self.time_embedding = SinusoidEmbedding(width, config.time_embed_dim)
            self.ofs_embedding = None
            if config.ofs_embed_dim is not None:
                self.ofs_embedding = SinusoidEmbedding(config.ofs_embed_dim, config.ofs_embed_dim)
        # One block is one unit of sharding, activation checkpointing and torch.compile.
        self.blocks = nn.ModuleList(
            self.block_class(
                width,
                config.num_attention_heads,
                config.time_embed_dim,
                has_qk_norm=config.qk_norm,
                has_affine_norms=config.elementwise_affine,
                kernels=kernels,
                device="meta",
            )
            for _ in range(config.num_layers)
        )
        self.runtime = BlockRuntime()
        self.sparse_share: float | None = None
        self.unused_position_embeddings = None
        with torch.device("meta"):
            self.final_norm = make_norm(eps=NORM_EPS)
            self.output_norm = make_norm(eps=OUTPUT_NORM_EPS)
            self.output_modulation = nn.Linear(config.time_embed_dim, 2 * width)
            self.output = nn.Linear(width, config.out_channels * patch_numel)
            if config.position == "rotary":
                # Every rotary checkpoint of SAT has this tensor; kept so that names and counts agree.
                unused = torch.empty(config.max_sequence_length, width)
                self.unused_position_embeddings = nn.Parameter(unused)
        self.added: frozenset[str] = frozenset()  # parameters and buffers of a subclass

    @property
    def uses_dropout(self) -> bool:
        """Whether training draws from torch's generators, as a subclass may."""
        return self.config.lora_dropout > 0 or type(self) is not DiffusionTransformer

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.weight.dtype

    @property
    def patch_size(self) -> PatchSize:
        return self.config.patch_size

    def use_kernels(self, kernels: BlockKernels) -> None:
        """Use `kernels` in the blocks and in the norms after them."""
        if self.runtime.sparse is not None:
            attend = partial(self.runtime.sparse.attend, backend=kernels.attention_backend)
            kernels = replace(kernels, sparse_attention=attend)
        self.kernels = kernels
        split = self.runtime.row_split
        for block in self.blocks:
            assert isinstance(block, Block), f"{type(block).__name__} among the blocks"
            block.kernels = kernels
            block.attention.kernels = kernels if split is None else split.attention_kernels(kernels)
            for module in block.modules():
                if isinstance(module, LoraLinear):
                    module.kernels = kernels

    def use_sparse_attention(self, share: float | None) -> None:
        """Leave a share of attention's blocks out; None: dense attention."""
        if share is not None and self.runtime.sparse is None:
            # attend: of q, k, v, num_text, share and backend; returns the attention, and the share of its mass
            # that is kept. order: of grid, num_text and device; puts rows [B, S, M] in another order.
            self.runtime.sparse = hook("sparse_attention")()
            self.use_kernels(self.kernels)
        self.sparse_share = share
        for block in self.blocks:
            assert isinstance(block, Block), f"{type(block).__name__} among the blocks"
            block.attention.sparse_share = share

    def use_calls(self, calls: Sequence[BlockCall] | None) -> None:
        """Run these in place of the blocks in training mode, one for each; None: the blocks themselves."""
        self.runtime.training_calls = calls

    def unused_parameter_names(self) -> list[str]:
        """Return the names of parameters that never get a gradient."""
        return [] if self.unused_position_embeddings is None else ["unused_position_embeddings"]

    @torch.no_grad()
    def reset_added(self, seed: int, names: Iterable[str] | None = None) -> None:
        """Give parameters and buffers of a subclass, those in `names` or all, its constructor's values."""
        names = self.added if names is None else self.added & {*names}
        if not names:
            return
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(random_bits(seed, "added modules"))
            made = _named(type(self)(self.config))
        for name in names:
            _named(self)[name].copy_(made[name])

    def kept_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers of a subclass, such as running means, by name: checkpoints have them."""
        names = self.added & self.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.named_buffers() if name in names}

    def block_arguments(
        self, tensors: Mapping[str, Tensor], grid: TokenGrid
    ) -> Sequence[Sequence[Tensor]]:
        """Return what each block's forward gets behind `rotation`; for subclasses.

        tensors: those of data.params.tensors, [B, ...] float32, by name. It is called only if there are
        any: `cogfast plan` has none. grid: of the latents' tokens.
        """
        return [()] * len(self.blocks)

    def forward(
        self,
        latents: Tensor,
        timesteps: Tensor,
        text: Tensor,
        condition_latents: Tensor | None = None,
        ofs: Tensor | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the network's prediction, [B, C_out, T, h, w] in the model's dtype.

        latents [B, C, T, h, w]; timesteps [B], 0..999; text [B, L, E]; condition_latents
        [B, C', T, h, w], the channels of the conditions (model.conditions), appended to those of the
        latents; ofs [B] or [1] (1.5-I2V); tensors: for block_arguments.
        """
        grid = TokenGrid.from_latents(latents, self.patch_size)
        num_text = text.shape[1]

        order = None  # row-major
        if self.sparse_share is not None:
            order = self.runtime.sparse.order(grid, num_text, latents.device)
        hidden = self.embed(latents, text, condition_latents, grid)  # [B, S, M]
        conditioning = self.condition(timesteps, ofs)  # [B, time_embed_dim]
        rotation = None if self.rotary is None else self.rotary(grid)
        if order is not None:
            hidden = order.apply(hidden)
            rotation = None if rotation is None else replace(rotation, order=order.video)
        more = self.block_arguments(tensors, grid) if tensors else None
        hidden = self.run_blocks(hidden, conditioning, num_text, rotation, more)
        if order is not None:
            hidden = order.undo(hidden)
        # Text rows only condition the video; the network predicts nothing for them.
        return self.unembed(hidden[:, num_text:], conditioning, grid)

    def embed(
        self, latents: Tensor, text: Tensor, condition_latents: Tensor | None, grid: TokenGrid
    ) -> Tensor:
        """Return tokens [B, S, M] of text [B, L, E] and of latents with the channels of their conditions."""
        latents = latents.to(self.dtype)
        if condition_latents is not None:
            # The order of the published weights: noised latents, then conditions.
            latents = torch.cat([latents, condition_latents.to(self.dtype)], dim=1)
        if latents.shape[1] != self.config.in_channels:
            raise ValueError(
                f"latents and conditions have {latents.shape[1]} channels together, but the model has "
                f"in_channels={self.config.in_channels}; the first stage needs out_channels="
                f"{self.config.out_channels} channels, an I2V model image latents "
                "(model.noised_image_input: true), a control model those of the control "
                "(model.conditions: [control]), a T2V model takes none"
            )
        text = self.text_embedding(text.to(self.dtype))
        video = self.patch_embedding(patchify(latents, self.patch_size))
        hidden, table = torch.cat([text, video], dim=1), self.position_table
        return hidden if table is None else table(hidden, text.shape[1], grid)

    def condition(self, timesteps: Tensor, ofs: Tensor | None) -> Tensor:
        """Return the vector that modulates all blocks, [B, time_embed_dim].

        It is computed once and includes the SiLU that SAT applies before each modulation layer.
        """
        embedding = self.time_embedding(timesteps)
        if self.ofs_embedding is not None:
            if ofs is None:
                # [1] and not [B]: one embedding is broadcast over the batch.
                ofs = torch.full((1,), self.config.default_ofs, device=timesteps.device)
            embedding = embedding + self.ofs_embedding(ofs)
        return F.silu(embedding)

    def run_blocks(
        self,
        hidden: Tensor,
        conditioning: Tensor,
        num_text: int,
        rotation: Rotation | None,
        more: Sequence[Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """hidden [B, S, M] -> [B, S, M]. more: further arguments of each block."""
        calls = self.runtime.training_calls if self.training else None
        split, source = self.runtime.row_split, self.runtime.source
        if split is not None:
            hidden, conditioning, num_text = split.split(hidden, conditioning, num_text)
        every: Iterable[BlockCall] = self.blocks if calls is None else calls
        if source is not None:
            every = source.around(every)
        for number, call in enumerate(every):
            others = () if more is None else more[number]
            hidden = call(hidden, conditioning, num_text, rotation, *others)
        return hidden if split is None else split.join(hidden)

    def unembed(self, hidden: Tensor, conditioning: Tensor, grid: TokenGrid) -> Tensor:
        """Video rows [B, V, M] -> [B, C_out, T, h, w]."""
        kernels, norm1, norm2 = self.kernels, self.final_norm, self.output_norm
        modulation = self.output_modulation(conditioning).unflatten(-1, (2, 1, -1))
        # [B, 2, M] as in a block, where entry 1 is for text rows; there are none here.
        shift, scale = modulation.expand(-1, -1, 2, -1).unbind(1)
        hidden = kernels.layernorm(hidden, norm1.weight, norm1.bias, norm1.eps)
        _, hidden = kernels.adaptive_layernorm(
            hidden, norm2.weight, norm2.bias, shift, scale, 0, norm2.eps
        )
        return unpatchify(self.output(hidden), grid, self.patch_size)


@dataclass(frozen=True, slots=True)
class Network:
    """A network as model.network_config describes it."""

    kind: type[DiffusionTransformer]
    config: TransformerConfig
    target: str  # the name that the configuration has for `kind`
    model: ModelKeys  # what of it is trained

    @property
    def is_own(self) -> bool:
        return self.kind is not DiffusionTransformer

    def build(self, seed: int = 0) -> DiffusionTransformer:
        transformer, keys = assemble_transformer(self.config, seed, self.kind), self.model
        freeze(transformer, keys.not_trainable_prefixes, keys.lora_train, keys.trainable_modules)
        return transformer


def build_transformer(
    model_section: Mapping[str, Any], seed: int = 0, allow_import: Sequence[str] = ()
) -> DiffusionTransformer:
    """Build and initialize the transformer of a config's `model` section, with LoRA, and set
    requires_grad by `not_trainable_prefixes`, `trainable_modules` and `lora_train`. Under
    `torch.device("meta")` no memory is allocated. allow_import: packages whose classes it may name."""
    node = model_section["network_config"]
    target = node.get("target", NETWORKS[0])
    kind = network_class(target, allow_import)
    config = TransformerConfig(**transformer_arguments(node["params"]))
    names = ("not_trainable_prefixes", "lora_train", "trainable_modules")
    keys = ModelKeys().changed(**{n: model_section[n] for n in names if n in model_section})
    return Network(kind, config, target, keys).build(seed)


def network_class(path: str, allow_import: Sequence[str]) -> type[DiffusionTransformer]:
    """Return the class that model.network_config.target names; ValueError if it is no subclass of ours."""
    if path in NETWORKS:
        return DiffusionTransformer
    key = f"{NETWORK}.target"
    found = import_target(path, key, allow_import, "network")
    if not (isinstance(found, type) and issubclass(found, DiffusionTransformer)):
        raise KeyProblem(
            key, f"{key}={path} is not a subclass of {NETWORKS[1]}; derive it from that"
        )
    return found


def assemble_transformer(
    config: TransformerConfig,
    seed: int = 0,
    kind: type[DiffusionTransformer] = DiffusionTransformer,
) -> DiffusionTransformer:
    """Build and initialize the transformer of `config`, with LoRA if the config has a rank."""
    device = torch.get_default_device()
    with torch.device("meta"):  # skips PyTorch's default initialization
        transformer = kind(config)
        if kind is not DiffusionTransformer:
            added = _named(transformer).keys() - _named(DiffusionTransformer(config)).keys()
            transformer.added = frozenset(added)
            if found := [n for n, x in _named(transformer).items() if x.is_complex()]:
                text = f"{kind.__name__}: {found[0]} is complex, and training would drop its imaginary part; "
                raise ValueError(f"{text}register torch.view_as_real of it")
        if config.lora_rank is not None:
            rank, layers = config.lora_rank, config.lora_layers
            others = (config.lora_alpha, config.lora_dropout, config.lora_targets)
            for i in range(config.num_layers) if layers is None else layers:
                add_lora(transformer.blocks[i], rank, *others, kernels=transformer.kernels)
    # On meta the caller allocates the weights, for example after it has split them.
    if device.type != "meta":
        transformer.to_empty(device=device)
        initialize(transformer, seed)
        transformer.reset_added(seed)
    return transformer


def _named(transformer: nn.Module) -> dict[str, Tensor]:
    return {**dict(transformer.named_parameters()), **dict(transformer.named_buffers())}


def freeze(
    transformer: DiffusionTransformer,
    not_trainable_prefixes: Iterable[str],
    is_lora_only: bool,
    trainable_modules: Sequence[str] | None = None,
) -> None:
    """Set requires_grad as upstream's disable_untrainable_params (sat/diffusion_video.py).

    Parameters whose SAT name starts with a prefix are frozen ("all": every parameter), except
    adapters. is_lora_only (`lora_train: true`): freeze all but the adapters. (Upstream looks for
    another kind of adapter there, `lora_layer`, and also freezes those of lora2.) trainable_modules:
    freeze all but the adapters and the parameters of modules with these names, anywhere in the model.
    """
    prefixes = tuple(not_trainable_prefixes)
    # SAT has no names for what a subclass adds.
    name_of = lambda name: name if name in transformer.added else sat_name(name)
    names = [name_of(name) for name, _ in transformer.named_parameters()]
    for prefix in prefixes:
        # SAT's configs also list prefixes of the VAE and the text encoder.
        is_elsewhere = prefix == "all" or prefix.startswith(DEFAULT_FROZEN_PREFIXES)
        if not is_elsewhere and not any(name.startswith(prefix) for name in names):
            text = f"model.not_trainable_prefixes: no parameter's name starts with {prefix!r}"
            raise ValueError(f"{text}; use all, or a name such as {names[0]}")
    # A model arrives with all parameters trainable, so nothing has to be set to True.
    freezes_all = is_lora_only or "all" in prefixes
    chosen = _of_modules(transformer, trainable_modules or ())
    for name, parameter in transformer.named_parameters():
        if is_lora_parameter(name):
            continue
        is_frozen = name_of(name).startswith(prefixes)
        if name in chosen and (is_frozen or is_lora_only):
            key = "lora_train" if is_lora_only else "not_trainable_prefixes"
            text = f"model.trainable_modules trains {name}, which model.{key} freezes"
            raise ValueError(f"{text}; remove one of the two keys, or the name")
        if name not in chosen and (freezes_all or is_frozen or trainable_modules is not None):
            parameter.requires_grad_(False)


def _of_modules(transformer: nn.Module, modules: Sequence[str]) -> set[str]:
    """Return the names of the parameters in modules with these names; ValueError if one has none."""
    paths = {name: name.split(".")[:-1] for name, _ in transformer.named_parameters()}
    known = {part for path in paths.values() for part in path if not part.isdigit()}
    for module in modules:
        if module not in known:
            hint = nearest(module, known) or f"; use one or more of {', '.join(sorted(known))}"
            key = ModelKeys.key("trainable_modules")
            raise ValueError(f"{key}={list(modules)}: no module is called {module!r}{hint}")
    return {name for name, path in paths.items() if not set(path).isdisjoint(modules)}
