"""Verifies a converted model: compares one float32 forward pass of it with one of its source."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

from cogfast.core.shapes import TokenGrid
from cogfast.model.config import TransformerConfig
from cogfast.model.embeddings import PositionTable
from cogfast.model.transformer import OUTPUT_NORM_EPS, assemble_transformer
from cogfast.model.weights.formats.peft import linear_parts
from cogfast.model.weights.identify import plain_shapes
from cogfast.model.weights.load import load_source
from cogfast.model.weights.lora.adapters import adapters_of, model_width
from cogfast.model.weights.lora.strength import lora_alpha_of
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource
from cogfast.schema.values import counted

if TYPE_CHECKING:
    from diffusers import CogVideoXTransformer3DModel

_EXACT = 1e-5  # relative to the largest output: two implementations of one float32 model
_MOST_GRID = (2, 4, 6)  # tokens along time, rows and columns, if the model takes so few
_TIMESTEP = 500
_MEMORY_FACTOR = 1.25  # of the weights' bytes: adds activations and a tensor that is being read


def check_memory(source: WeightSource) -> None:
    """Raise ValueError if one model in float32 does not fit into the free memory."""
    needed = int(
        _MEMORY_FACTOR * 4 * sum(math.prod(s) for s in plain_shapes(source.shapes).values())
    )
    free = psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"--verify runs the model in float32, which needs {needed / 2**30:.1f} GiB, but only "
            f"{free / 2**30:.1f} are free; leave it out, or convert on a larger machine"
        )


def verify(source: WeightSource, config: TransformerConfig, target: Path, to: str) -> str:
    """Load the target, with diffusers if `to` is diffusers, and compare one forward pass with the
    source's. Returns the result in one line; ValueError if the two are not the same model.

    source: the weights as they were written, in the target's dtypes.
    """
    given = _inputs(config)
    # diffusers computes 2B's fixed table, so the source's table is not compared.
    if to == "diffusers" and config.position == "sincos":
        weights = {n: s for n, s in source.shapes.items() if n != "position_table.weight"}
        source = replace(source, shapes=weights)
    expected = _ours(source, config, given)
    gc.collect()  # sync: none, no training here; the second model needs the first one's memory
    stock = ""
    if to == "diffusers":
        found, plain = _diffusers(target, config, given)
        stock = (
            f" with norm_out's epsilon at {OUTPUT_NORM_EPS:g}, as trained; with diffusers' own "
            f"epsilon {(plain - expected).abs().max():.1e}"
        )
    else:
        found = _ours(open_source(target), config, given)
    difference, scale = (found - expected).abs().max(), expected.abs().max()
    line = f"largest difference {difference:.1e} of outputs up to {scale:.2g}{stock}"
    # A NaN exceeds no bound, so it is tested for.
    if not torch.isfinite(found).all() or difference > _EXACT * scale:
        raise ValueError(f"{target}: computes other outputs than the source: {line}; delete it")
    return line


def _inputs(config: TransformerConfig) -> dict[str, Tensor]:
    """Return arguments of forward: a short video with the trained rows and columns or those of the
    position table; a small one if neither is known."""
    generator = torch.Generator().manual_seed(0)
    grid, patch = config.grid, config.patch_size
    t, h, w = (min(n, most) for n, most in zip((grid.t, grid.h, grid.w), _MOST_GRID, strict=True))
    has_table = config.position == "sincos" or config.learnable_position
    # A table holds for one frame size, which is large; one frame keeps the pass short.
    if has_table:
        t, h, w = 1, grid.h, grid.w
    elif config.trained_size is not None:
        h, w = config.trained_size[1] // patch.h, config.trained_size[2] // patch.w
    size = (t * patch.t, h * patch.h, w * patch.w)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    text_length = config.text_length if has_table else min(config.text_length, 16)
    given = {
        "latents": draw(1, config.out_channels, *size),
        "timesteps": torch.tensor([_TIMESTEP]),
        "text": draw(1, text_length, config.text_hidden_size),
    }
    if config.in_channels > config.out_channels:
        given["image_latents"] = draw(1, config.in_channels - config.out_channels, *size)
    return given


@torch.no_grad()
def _ours(source: WeightSource, config: TransformerConfig, given: dict[str, Tensor]) -> Tensor:
    with torch.device("meta"):  # no initial values are drawn for what is loaded
        transformer = assemble_transformer(config)
    transformer.to_empty(device="cpu").eval()
    if isinstance(transformer.position_table, PositionTable) and config.position == "sincos":
        # 2B's table is computed: `source` may come without it (see `verify`).
        transformer.position_table.reset()
    load_source(transformer, source, source.description)
    return transformer(**given)


@torch.no_grad()
def _diffusers(
    folder: Path, config: TransformerConfig, given: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output with the epsilon of training, and with diffusers' own."""
    try:
        from diffusers import CogVideoXTransformer3DModel
    except ImportError:
        raise ValueError(
            "--verify --to diffusers loads the target with diffusers; pip install diffusers"
        ) from None
    # Any: with output_loading_info it returns a pair, which its annotation does not know.
    loaded: Any = CogVideoXTransformer3DModel.from_pretrained(
        str(folder), torch_dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    model, report = loaded
    for what in ("missing_keys", "unexpected_keys"):
        if report[what]:
            names = ", ".join(sorted(report[what])[:5])
            raise ValueError(f"{folder}: diffusers finds {len(report[what])} {what}: {names}")
    model.eval()
    patch_embed = model.patch_embed
    if config.learnable_position:
        # For any other number of frames diffusers replaces the learned table by a sincos table.
        frames = given["latents"].shape[2]
        tokens = TokenGrid.from_latents(given["latents"], config.patch_size).num_tokens
        patch_embed.sample_frames = (frames - 1) * config.time_compressed_rate + 1
        patch_embed.pos_embedding = patch_embed.pos_embedding[:, : config.text_length + tokens]
    plain = run_diffusers(model, config, given)
    model.norm_out.norm.eps = OUTPUT_NORM_EPS
    return run_diffusers(model, config, given), plain


def run_diffusers(
    model: CogVideoXTransformer3DModel, config: TransformerConfig, given: dict[str, Tensor]
) -> Tensor:
    """Run diffusers' CogVideoXTransformer3DModel with cogfast's arguments: [B, C, T, h, w]."""
    latents = given["latents"]
    rotary = None
    if config.position == "rotary":
        rotary = _pipeline_rotation(model, config, latents)
    if "image_latents" in given:
        latents = torch.cat([latents, given["image_latents"]], dim=1)
    ofs = None if config.ofs_embed_dim is None else torch.full((1,), config.default_ofs)
    output = model(
        latents.transpose(1, 2),
        given["text"],
        given["timesteps"],
        ofs=ofs,
        image_rotary_emb=rotary,
        return_dict=False,
    )[0]
    return output.transpose(1, 2)


def _pipeline_rotation(
    model: CogVideoXTransformer3DModel, config: TransformerConfig, latents: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos and sin as diffusers' pipelines compute them for these latents from config.json.

    If the trained size is unknown, the latents are treated as if they had it.
    """
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    grid, patch = TokenGrid.from_latents(latents, config.patch_size), model.config["patch_size"]
    base = (model.config["sample_height"] // patch, model.config["sample_width"] // patch)
    size = (grid.h, grid.w)
    if config.patch_size.joins_frames:
        options: dict[str, Any] = {"crops_coords": None, "grid_type": "slice", "max_size": base}
    else:
        if config.trained_size is None and not config.has_rescaled_positions:
            base = size
        options = {"crops_coords": get_resize_crop_region_for_grid(size, base[1], base[0])}
    rotation = get_3d_rotary_pos_embed(
        config.head_width, grid_size=size, temporal_size=grid.t, **options
    )
    assert isinstance(rotation, tuple), "use_real=True returns cos and sin"
    return rotation


_HEAD_WIDTH = 64  # arbitrary divisor of the width
_EXACT_PRODUCT = 1e-5  # relative to the largest element: float32 products in another order
# float16 rounds the smallest elements again where the file's matrices contain the strength.
_HALF_PRODUCT = torch.finfo(torch.float16).eps


@torch.no_grad()
def verify_peft(source: WeightSource, file: Path) -> str:
    """Load `file` into diffusers' transformer as `pipe.load_lora_weights` does, and compare the change
    of each linear, (alpha / r) B A, with the source's. Returns the result in one line; ValueError if
    they differ. source: the adapters as they were written, in the file's dtypes."""
    try:
        from diffusers import CogVideoXTransformer3DModel
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise ValueError(
            "--verify --to peft loads the target with diffusers and peft; pip install diffusers peft"
        ) from None
    alpha = lora_alpha_of(source)
    found = adapters_of(source)
    assert found is not None, f"{source.description}: no adapters"
    width = model_width(source.shapes)
    assert width is not None, f"{source.description}: no adapters of a block's linears"
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(
            num_attention_heads=width // _HEAD_WIDTH,
            attention_head_dim=_HEAD_WIDTH,
            num_layers=found.layers[-1] + 1,
            use_rotary_positional_embeddings=True,  # otherwise a position table is computed
        )
    # Adapters are moved to the device of their base weights, which therefore must not be meta.
    # Expanded scalars take no memory.
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            nothing = torch.zeros(()).expand(weight.shape)
            setattr(module, name, nn.Parameter(nothing, requires_grad=False))
    # diffusers reads the header, which stores alpha, only with use_safetensors.
    model.load_lora_adapter(str(file), low_cpu_mem_usage=True, use_safetensors=True)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    largest = scale = 0.0
    for name in [n for n in source.shapes if ".matrix_A." in n]:
        module, _, part = name.rsplit(".", 2)
        layer = layers.pop(linear_parts(module)[int(part)])
        a, b = (source.read(name.replace("_A.", f"_{s}."), None).float() for s in "AB")
        # PEFT keeps adapters by name; the file has one.
        (adapter,) = layer.scaling
        theirs = (
            matrices[adapter].get_parameter("weight") for matrices in (layer.lora_A, layer.lora_B)
        )
        their_a, their_b = (weight.float() for weight in theirs)
        given = their_b @ their_a
        expected = b @ a * (alpha / a.shape[0])
        off = (given * layer.scaling[adapter] - expected).abs().max()
        off = off.item()  # sync: none, conversion is on the CPU
        largest = largest if off <= largest else off  # max() would hide NaN
        scale = max(scale, expected.abs().max().item())  # sync: none, as above
    line = f"largest difference {largest:.1e} of changes of weights up to {scale:.2g} in diffusers"
    is_half = torch.float16 in source.dtypes.values()
    most = (_HALF_PRODUCT if is_half else _EXACT_PRODUCT) * scale
    if layers or largest != largest or largest > most:
        number = counted(len(layers), "linear")
        more = f"; adapters of {number} are not in the source" if layers else ""
        raise ValueError(f"{file}: differs from the source: {line}{more}; delete it")
    return line
