"""The two sides of bench.step: cogfast's transformer and diffusers' CogVideoXTransformer3DModel.

They have the same weights and dtype and train all weights or LoRA. The model of diffusers runs as its
users run it: with its own modules, F.scaled_dot_product_attention, adapters of peft, and its own
gradient checkpointing. Both updates clip by the global norm, take a step of AdamW and keep an EMA of
the weights; for a model in half precision they keep float32 masters and copy them back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import attention as sdpa

from bench.steps.step_models import Batch, Options, Variant
from cogfast.distributed.parallelize import allocate
from cogfast.extensions.memory.host_blocks import allocate_base, hold_base
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.kernels.attention_backends import reason_unavailable
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.kernels.fused_ema_adam import FusedEmaAdam, sum_of_squares
from cogfast.model.config import TransformerConfig
from cogfast.model.embeddings import PositionTable
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import OUTPUT_NORM_EPS, assemble_transformer
from cogfast.model.weights.names import diffusers_names
from cogfast.train.activation_checkpointing import apply_policies

Policy = Literal["none", "attention_kept", "pointwise", "full"]

CLIP = 1.0
EMA_DECAY = 0.9999
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-4}
_NORM_EPS = 1e-6  # as in clip_grad_norm_


class Ours:
    """cogfast's DiffusionTransformer. policies: the checkpointing that it supports."""

    policies: Collection[Policy] = ("none", "attention_kept", "pointwise", "full")

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        # `initialize` would draw every number on the CPU first.
        options, is_lora = variant.options, variant.config.lora_rank is not None
        library = None if options.attention == "default" else "fa4"
        if library is not None:
            _check_fa4(variant)
        with torch.device("meta"):
            network = assemble_transformer(variant.config).requires_grad_(not is_lora)
        hold_base(network, MemoryKeys(quantize_base=options.quantize_base))
        allocate(network, variant.device)
        for module in network.modules():
            if isinstance(module, PositionTable):
                module.reset()
        randomize(network, seed=0)
        for parameter in network.parameters():  # as ZeRO does; a buffer keeps its dtype
            parameter.data = parameter.data.to(variant.dtype)
        self.network = network.train()
        # The kernels of a block are chosen as in training.
        self.network.use_kernels(choose_kernels("triton", library))
        if options.sparse:
            self.network.use_sparse_attention(options.sparse)
        # Parameters without gradients, which the optimizers would refuse.
        never = ("position_table.weight", *network.unused_parameter_names())
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(is_lora_parameter(name) if is_lora else name not in never)
        self.use_checkpointing("none")

    def forward(self, batch: Batch) -> Tensor:
        """Return the output [B, C, T, h, w]."""
        return self.network(batch.latents, batch.timesteps, batch.text)

    def use_checkpointing(self, policy: Policy) -> None:
        self.policy: Policy = policy
        apply_policies(self.network, [policy] * len(self.network.blocks))

    def compile_blocks(self) -> None:
        for block in self.network.blocks:
            block.compile(fullgraph=True)
        policies = [self.policy] * len(self.network.blocks)
        apply_policies(self.network, policies, is_compiled=True)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the trained parameters, by diffusers' names."""
        trained = [(n, p) for n, p in self.network.named_parameters() if p.requires_grad]
        return {theirs: part for n, p in trained for theirs, part in as_diffusers(n, p.grad)}


class Theirs:
    """diffusers' model with the initial weights of `Ours(variant)`; its rotary table is made once."""

    policies: Collection[Policy] = ("none", "full")

    def __init__(self, variant: Variant, dtype: torch.dtype | None = None) -> None:
        """Build the model, in `dtype` if given; its weights are always rounded to the variant's dtype.

        ImportError if diffusers, or peft for LoRA, is not installed.
        """
        from diffusers import CogVideoXTransformer3DModel
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        config, grid = variant.config, variant.grid
        self.variant = variant
        is_rotary, patch = config.position == "rotary", config.patch_size
        # No memory and no initialization: all weights are copied from cogfast.
        with torch.device("meta"):
            network = CogVideoXTransformer3DModel(
                num_attention_heads=config.num_attention_heads,
                attention_head_dim=config.head_width,
                in_channels=config.in_channels,
                out_channels=config.out_channels,
                time_embed_dim=config.time_embed_dim,
                text_embed_dim=config.text_hidden_size,
                num_layers=config.num_layers,
                sample_width=config.latent_width,
                sample_height=config.latent_height,
                sample_frames=config.num_frames,
                patch_size=patch.h,
                patch_size_t=patch.t if patch.joins_frames else None,
                patch_bias=not patch.joins_frames,
                ofs_embed_dim=config.ofs_embed_dim,
                max_text_seq_length=config.text_length,
                spatial_interpolation_scale=config.height_interpolation,
                use_rotary_positional_embeddings=is_rotary,
            )
        # The `to` of torch: that of diffusers warns of modules that this model does not have.
        network = nn.Module.to(network, dtype or variant.dtype).to_empty(device=variant.device)
        network.norm_out.norm.eps = OUTPUT_NORM_EPS  # else the outputs differ by 2e-5
        network.requires_grad_(config.lora_rank is None)
        if config.lora_rank is not None:
            self._add_lora(network, config)
        _copy_weights(Ours(replace(variant, options=Options())).network, network)
        self.network = network.train()
        self.use_checkpointing("none")
        self.has_fa4 = variant.options.attention == "fa4 on both sides"
        if self.has_fa4:
            _check_fa4(variant)
            sdpa.activate_flash_attention_impl("FA4")
        elif sdpa.current_flash_attention_impl() is not None:
            sdpa.restore_flash_attention_impl()
        self.rotary = None
        if is_rotary:
            crops = ((0, 0), (grid.h, grid.w))
            self.rotary = get_3d_rotary_pos_embed(
                config.head_width, crops, (grid.h, grid.w), grid.t, device=variant.device
            )

    @staticmethod
    def _add_lora(network: nn.Module, config: TransformerConfig) -> None:
        from peft import LoraConfig

        network.add_adapter(
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                target_modules=["to_q", "to_k", "to_v", "to_out.0"],
                init_lora_weights=False,
            )
        )
        nn.Module.to(network, network.proj_out.weight.dtype)  # peft makes adapters in float32

    def forward(self, batch: Batch) -> Tensor:
        # diffusers has frames before channels: [B, T, C, h, w].
        config, latents = self.variant.config, batch.latents.transpose(1, 2)
        ofs = None
        if config.ofs_embed_dim is not None:
            ofs = latents.new_full((1,), config.default_ofs)
        # Otherwise PyTorch prefers cuDNN to what was activated.
        with sdpa.sdpa_kernel(sdpa.SDPBackend.FLASH_ATTENTION) if self.has_fa4 else nullcontext():
            output = self.network(
                latents,
                batch.text,
                batch.timesteps,
                ofs=ofs,
                image_rotary_emb=self.rotary,
                return_dict=False,
            )
        return output[0].transpose(1, 2)

    def use_checkpointing(self, policy: Policy) -> None:
        if policy == "full":
            self.network.enable_gradient_checkpointing()
        else:
            self.network.disable_gradient_checkpointing()

    def compile_blocks(self) -> None:
        for block in self.network.transformer_blocks:
            block.compile(fullgraph=True)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.network.named_parameters() if p.requires_grad}


Side = Ours | Theirs
SIDES: dict[str, Callable[[Variant], Side]] = {"ours": Ours, "diffusers": Theirs}


class Masters:
    """Float32 copies of the trained parameters, or the parameters themselves if they are float32."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.are_copies = self.parameters[0].dtype != torch.float32
        self.tensors = self.parameters
        if self.are_copies:
            self.tensors = [nn.Parameter(p.detach().float()) for p in self.parameters]

    def drop_gradients(self) -> None:
        for p in (*self.tensors, *self.parameters):
            p.grad = None


class OurUpdate:
    """The update of cogfast: FusedEmaAdam."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.masters = Masters(parameters)
        # No warm-up of the decay, since the EMA of the peer has none.
        self.adam = FusedEmaAdam(
            self.masters.tensors, **ADAM, ema_decay=EMA_DECAY, use_num_updates=False
        )
        if self.masters.are_copies:
            for master, p in zip(self.masters.tensors, self.masters.parameters, strict=True):
                master.grad_dtype = p.dtype
                self.adam.low_precision_copies[master] = p.detach()

    def step(self) -> None:
        gradients = [p.grad for p in self.masters.parameters]
        norm = sum_of_squares(gradients).sqrt().float()
        self.adam.gradient_scale = (CLIP / (norm + _NORM_EPS)).clamp(max=1.0)
        for master, gradient in zip(self.masters.tensors, gradients, strict=True):
            master.grad = gradient
        self.adam.step()
        self.masters.drop_gradients()


class PeerUpdate:
    """The update of the peer: torch's fused AdamW and a foreach EMA."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.masters = Masters(parameters)
        self.adam = torch.optim.AdamW(self.masters.tensors, **ADAM, fused=True)
        self.shadows: list[Tensor] = [p.detach().clone() for p in self.masters.tensors]

    def step(self) -> None:
        masters = self.masters
        if masters.are_copies:
            for master, p in zip(masters.tensors, masters.parameters, strict=True):
                master.grad, p.grad = p.grad.float(), None  # one by one: not all fit in both dtypes
        nn.utils.clip_grad_norm_(masters.tensors, CLIP, foreach=True)
        self.adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.shadows, masters.tensors, 1 - EMA_DECAY)
            if masters.are_copies:
                torch._foreach_copy_(masters.parameters, masters.tensors)
        masters.drop_gradients()


UPDATES = {"ours": OurUpdate, "diffusers": PeerUpdate}


def _check_fa4(variant: Variant) -> None:
    """Raise ImportError, a row's "not installed", where flash-attn 4 cannot run."""
    width = variant.config.head_width
    if reason := reason_unavailable("fa4", variant.device, variant.dtype, width):
        raise ImportError(f"flash-attn 4: {reason}")


@torch.no_grad()
def randomize(network: Any, seed: int) -> None:
    """Draw every parameter from a normal distribution, with a scale that keeps activations in range.

    Initial weights contain zeros, which hide mistakes and draw less power.
    """
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, p in network.named_parameters():
        if name == "position_table.weight":
            continue
        fan_in = p[0].numel() if p.dim() > 1 else 25
        p.normal_(std=fan_in**-0.5, generator=generator)
        if "norm" in name and name.endswith("weight") and p.dim() == 1:
            p.add_(1.0)
    for base in allocate_base(network, device).values():
        values = torch.empty(base.shape, device=device).normal_(generator=generator)
        base.copy_(values / values[0].numel() ** 0.5)


def as_diffusers(our_name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of cogfast, or its gradient, in the parts that diffusers and peft name."""
    module, _, kind = our_name.rpartition(".matrix_")
    if module:  # an adapter: A.0, A.1, A.2 are of q, k, v
        letter, part = kind.split(".")
        parts = diffusers_names(module)
        yield f"{parts[int(part)]}.lora_{letter}.default.weight", tensor
        return
    has_adapters = ".original." in our_name
    names = diffusers_names(our_name.replace(".original.", "."))
    for name, part in zip(names, _split(our_name, tensor, len(names)), strict=True):
        owner, _, kind = name.rpartition(".")
        yield (f"{owner}.base_layer.{kind}" if has_adapters else name), part


def _split(our_name: str, tensor: Tensor, num_parts: int) -> Sequence[Tensor]:
    """The inverse of cogfast.model.weights.diffusers.from_diffusers."""
    if num_parts == 0:  # SAT's unused table
        return ()
    if ".modulation." in our_name:
        # cogfast: both halves of video, then of text; diffusers: video and text of each half
        video_1, video_2, text_1, text_2 = tensor.chunk(4)
        return torch.cat([video_1, text_1]), torch.cat([video_2, text_2])
    return tensor.chunk(num_parts)


@torch.no_grad()
def _copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    targets = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    for our_name, tensor in ours.named_parameters():
        for name, part in as_diffusers(our_name, tensor):
            target = targets.pop(name)
            target.copy_(part.reshape(target.shape))
    assert not targets, f"parameters of diffusers without a weight of cogfast: {sorted(targets)}"


def free_memory(device: torch.device) -> None:
    """Free unreferenced memory, also on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
