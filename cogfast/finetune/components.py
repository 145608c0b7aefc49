"""Gives methods of upstream's trainer what they read: self.components and self.accelerator."""

from __future__ import annotations

import copy
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cogfast.core.json_files import read_json
from cogfast.core.shapes import TokenGrid
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.finetune.schemas import Components
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.autoencoder import VideoAutoencoder
from cogfast.model.text_encoder import T5TextEncoder
from cogfast.model.weights.tensor_files import SafetensorsFiles

# Parts with weights, which cogfast loads from --model_path, and the class of each in upstream's trainer
_LOADED = {
    "transformer": "CogVideoXTransformer3DModel",
    "vae": "AutoencoderKLCogVideoX",
    "text_encoder": "T5EncoderModel",
}
_COMPARED = 4096  # first numbers of a tensor
_MOST_DIFFERENCE = 1e-2  # of rotary tables, which a trainer may have rounded to bf16


class Accelerator:
    """This process and its device, under accelerate's names."""

    def __init__(self) -> None:
        rank, local = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        self.device = torch.device(f"cuda:{local}" if torch.cuda.is_available() else "cpu")
        self.num_processes = int(os.environ.get("WORLD_SIZE", 1))
        self.process_index, self.is_main_process = rank, rank == 0
        self.unwrap_model = lambda model: model  # no part of self.components is wrapped


def rotary_tables(rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [V, D] float32 as diffusers lays them out, each angle twice."""
    angles = rotation.per_row(0).repeat_interleave(2, dim=1)
    return angles.real, angles.imag


class RunNetwork:
    """The run's transformer under its engine, with the call of diffusers' CogVideoXTransformer3DModel."""

    def __init__(self, engine: ZeroEngine, config: dict[str, Any]) -> None:
        self.engine, self.config = engine, config  # the latter of transformer/config.json
        self._checked: set[TokenGrid] = set()  # grids whose rotary tables were compared

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.transformer.dtype

    @property
    def device(self) -> torch.device:
        return self.engine.transformer.patch_embedding.weight.device

    def cache_context(self, name: str) -> AbstractContextManager:
        """Return an empty context; diffusers' pipelines call their network in one."""
        return nullcontext()

    def __call__(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        *,
        ofs: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        return_dict: bool = True,
        **unused: Any,
    ) -> Any:
        """Predict [B, F, C_out, h, w] from hidden_states [B, F, C, h, w] with all channels of the model,
        encoder_hidden_states [B, L, E] and timestep [B]."""
        for name, value in unused.items():
            if value is not None:
                raise ValueError(f"self.components.transformer does not take {name}; leave it out")
        latents = hidden_states.transpose(1, 2)
        grid = TokenGrid.from_latents(latents, self.engine.transformer.patch_size)
        self._check_rotary(image_rotary_emb, grid)
        found = self.engine(latents, timestep, encoder_hidden_states, ofs=ofs).transpose(1, 2)
        if not return_dict:
            return (found,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=found)

    def _check_rotary(self, given: tuple[Tensor, Tensor] | None, grid: TokenGrid) -> None:
        """Raise ValueError if the tables differ from the network's own, with which it computes."""
        rotary = self.engine.transformer.rotary
        rotation = rotary and rotary(grid)
        if (given is None) != (rotation is None):
            fix = "no rotary positions; pass None"
            if rotation is not None:
                fix = "rotary positions; pass self.prepare_rotary_positional_embeddings(...)"
            raise ValueError(f"image_rotary_emb: this model has {fix}")
        if given is None or rotation is None or grid in self._checked:
            return
        for own, other in zip(rotary_tables(rotation), given, strict=True):
            # sync: once for each size
            if own.shape != other.shape or (own - other.to(own)).abs().max() > _MOST_DIFFERENCE:
                raise ValueError(
                    f"image_rotary_emb for {grid.t}x{grid.h}x{grid.w} tokens differs from the network's "
                    "positions, which it computes itself; pass self.prepare_rotary_positional_embeddings"
                    "(...), or train with those of diffusers' pipelines: "
                    "model.network_config.params.modules.pos_embed_config.params.positions=pipeline"
                )
        self._checked.add(grid)


class RunComponents:
    """The parts of a run, each built when it is first read.

    A subclass may set scheduler, tokenizer, pipeline_cls and attributes of its own. trainer: that of
    cogfast.finetune.trainer, whose module imports this one. folder: of the pipeline.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder
        self._network: RunNetwork | None = None
        # Weak, since encoders that are not used any more must free their memory.
        self._vaes: WeakKeyDictionary[VideoAutoencoder, Any] = WeakKeyDictionary()

    def take(self, found: Any, what: str) -> None:
        """Take what a load_components returned, or refuse it."""
        if found is self:
            return
        if not isinstance(found, Components):
            text = f"{what} returned a {type(found).__name__}; return what super().load_components() does"
            raise ValueError(f"{text}, or a Components of cogfast.finetune.schemas")
        for name, value in found:
            if name in _LOADED and value is not None:
                _check_weights(value, name, self._folder / name, what)
            elif value is not None:
                setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LOADED:
            text = f"self.components.{name} is the one that the run loads from --model_path"
            text += "; set what differs by options and key=value"
            raise ValueError(f"{text}, or change a network by model.network_config.target")
        super().__setattr__(name, value)

    @property
    def transformer(self) -> RunNetwork:
        run = self._trainer._prepare()
        if run.groups.model_size > 1:
            raise ValueError(f"self.components.transformer {SHARED_MODEL}")
        if self._network is None:
            self._network = RunNetwork(run.engine, self._trainer.state.transformer_config)
        return self._network

    @property
    def vae(self) -> Any:
        """diffusers' AutoencoderKLCogVideoX with the run's weights, which encodes 8 frames at a time."""
        stage = self._module("first_stage", VideoAutoencoder)
        if stage not in self._vaes:
            # The weights are shared. The switches are its own: those of the run's change with each call.
            vae = self._vaes[stage] = copy.copy(stage.inner)
            vae.use_slicing, vae.use_tiling = self._trainer.args.enable_slicing, False
            vae.num_sample_frames_batch_size = 8
        return self._vaes[stage]

    @property
    def text_encoder(self) -> nn.Module:
        return self._module("text_encoder", T5TextEncoder).transformer

    @cached_property
    def tokenizer(self) -> Any:
        return self._module("text_encoder", T5TextEncoder).tokenizer

    @cached_property
    def scheduler(self) -> Any:
        from diffusers import CogVideoXDPMScheduler  # upstream's for all models

        settings = read_json(self._folder / "scheduler" / "scheduler_config.json")
        return CogVideoXDPMScheduler.from_config(settings)

    @cached_property
    def pipeline_cls(self) -> Any:
        from diffusers import CogVideoXImageToVideoPipeline, CogVideoXPipeline

        is_i2v = self._trainer.args.model_type == "i2v"
        return CogVideoXImageToVideoPipeline if is_i2v else CogVideoXPipeline

    def _module(self, name: Literal["first_stage", "text_encoder"], kind: type[Any]) -> Any:
        """Return a frozen encoder with its weights on the device. ValueError if the run cannot give it."""
        if self._trainer.is_in_step():
            args = self._trainer._prepare().args
            if args.offload_encoders:
                text = "self.components: args.offload_encoders=true takes the encoders off the device after each "
                text += "use, but gradients need them until the end of a step; set it to false"
                raise ValueError(text)
            if name == "text_encoder" and args.latent_cache is not None:
                text = "self.components.text_encoder: captions are encoded before training, and it is not loaded"
                text += "; use prompt_embedding of the batch, or --latent_cache none"
                raise ValueError(text)
        found = getattr(self._trainer._encoder()[0], name)
        if not isinstance(found, kind):
            text = f"self.components needs a {kind.__name__}, but the configuration has a {type(found).__name__}"
            raise ValueError(f"{text}; leave its target as --model_path has it")
        return found


SHARED_MODEL = (
    "cannot be used where ranks share a model, since each would draw and add up its own numbers; set "
    "args.model_parallel_size and args.context_parallel_size to 1"
)


def _check_weights(module: nn.Module, name: str, folder: Path, what: str) -> None:
    """Raise ValueError for a module other than the one that cogfast loads from `folder`."""
    kind, differing = type(module).__name__, None
    if kind == _LOADED[name]:
        files = SafetensorsFiles(folder)
        names = set(files.names())
        start = lambda tensor: tensor.detach().flatten()[:_COMPARED].cpu()
        for key, tensor in module.named_parameters():
            if key in names:
                is_same = torch.equal(start(files.read(key)).to(tensor.dtype), start(tensor))
            else:
                is_same = name == "text_encoder"  # files have one of the two names of T5's table
            differing = differing or (None if is_same else key)
        if differing is None:
            return
    found = f"{kind}, which is no {_LOADED[name]}" if differing is None else f"other {differing}"
    text = f"{what}: components.{name} has {found} than {folder}"
    text += "; cogfast trains and encodes with what --model_path has: give that folder such a part"
    raise ValueError(f"{text}, or leave this one out")
