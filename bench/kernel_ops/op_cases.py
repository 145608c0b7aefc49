"""The fused ops of a block at the shapes of the models: inputs, op, reference and bytes moved.

A perfect kernel reads and writes, in units of a tensor [B, S, M] (vectors, below 1%, are ignored):

    op                                    forward              backward
    adaptive_layernorm               2    h -> n               4    dn, dh', h -> dh
    residual_adaptive_layernorm      4    h, y -> h', n        6    dn, dh', h', y -> dh, dy
      modulation and norm frozen     4                         5    y is not read
    gated_residual                   3    h, y -> h'           3    dh', y -> dy; dh is dh' itself
    qk_norm_rope3d                   4    q, k -> q, k         8    dq, dk, dv, q, k -> dq, dk, dv
    gelu, 4 M wide                   8    x -> y              12    x, dy -> dx
    add_low_rank, q, k and v         6    x -> y               3    dy; dx is dy itself
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels import add_low_rank as lora
from cogfast.kernels import gelu as activation
from cogfast.kernels import qk_norm_rope3d as qk

EPS = 1e-5  # of the norms in a block
RANK = 128  # of configs/lora.yaml
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TokenShape:
    """The shape of a token sequence: num_text rows of text, then t x h x w rows of video."""

    model: str
    num_text: int
    grid: tuple[int, int, int]
    num_heads: int
    is_rotary: bool
    batch: int = 1
    head_width: int = 64

    @property
    def num_tokens(self) -> int:
        t, h, w = self.grid
        return self.num_text + t * h * w

    @property
    def width(self) -> int:
        return self.num_heads * self.head_width

    def __str__(self) -> str:
        return f"{self.model} {self.batch}x{self.num_tokens}x{self.num_heads}x{self.head_width}"


# 49 frames of 480 x 720; 81 of 768 x 1360 with one latent frame of padding
SHAPES = (
    TokenShape("2B", 226, (13, 30, 45), 30, is_rotary=False),
    TokenShape("5B", 226, (13, 30, 45), 48, is_rotary=True),
    TokenShape("1.5-5B", 224, (11, 48, 85), 48, is_rotary=True),
)
# bench.steps.cpu_peers has models of these shapes
CPU_SHAPES = (
    TokenShape("quickstart", 32, (3, 4, 4), 4, is_rotary=True, batch=16),
    TokenShape("tiny", 40, (4, 12, 20), 4, is_rotary=True),
    TokenShape("wide", 64, (4, 20, 20), 12, is_rotary=True),
)
TINY_SHAPES = (
    TokenShape("2B", 3, (2, 3, 4), 2, is_rotary=False),
    TokenShape("5B", 3, (2, 3, 5), 3, is_rotary=True),
)


def small(shape: TokenShape) -> TokenShape:
    """Return a shape with few tokens, a prime number of text rows and two samples, for float32 checks."""
    return replace(shape, num_text=min(shape.num_text, 67), grid=(2, 5, 9), batch=2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # compared and hashed by identity
class Op:
    """A fused op, with inputs by the argument names of its function.

    frozen: inputs without a gradient in this variant. exact: a reference for float32 and float64, for
    an op whose `reference` computes in float32; it has no complex numbers, which torch.compile does not
    fuse, and is the one that is compiled. apex: the same by NVIDIA's apex, where that has a fused kernel.
    """

    name: str
    variant: str  # empty if there is only one
    outputs: Sequence[str]
    draw: Callable[[TokenShape, Callable[..., Tensor]], Tensors]
    run: Callable[[TokenShape, Tensors], Sequence[Tensor]]
    reference: Callable[[TokenShape, Tensors], Sequence[Tensor]]
    exact: Callable[[TokenShape, Tensors], Sequence[Tensor]] | None = None
    apex: Callable[[TokenShape, Tensors], Sequence[Tensor]] | None = None
    frozen: Sequence[str] = ()
    # bytes / (B S M * itemsize)
    units: Mapping[str, int]  # by way; see the table at the top
    goals: Mapping[str, float]  # percent of the copy rate

    def __str__(self) -> str:
        return f"{self.name} {self.variant}".strip()


def _draw_norm(shape: TokenShape, draw: Callable[..., Tensor]) -> Tensors:
    return {
        "hidden": draw(shape.batch, shape.num_tokens, shape.width),
        "weight": 1 + draw(shape.width, scale=0.1),
        "bias": draw(shape.width, scale=0.1),
        **_draw_modulation(shape, draw, ("shift", "scale")),
    }


def _draw_residual(shape: TokenShape, draw: Callable[..., Tensor]) -> Tensors:
    return {
        "hidden": draw(shape.batch, shape.num_tokens, shape.width),
        "branch": draw(shape.batch, shape.num_tokens, shape.width),
        "branch_bias": draw(shape.width, scale=0.1),
        **_draw_modulation(shape, draw, ("gate",)),
    }


def _draw_residual_norm(shape: TokenShape, draw: Callable[..., Tensor]) -> Tensors:
    modulation = _draw_modulation(shape, draw, ("gate", "shift", "scale"))
    return {**_draw_residual(shape, draw), **_draw_norm(shape, draw), **modulation}


def _draw_modulation(
    shape: TokenShape, draw: Callable[..., Tensor], names: Sequence[str]
) -> Tensors:
    """Draw views [B, 2, M] of one [B, 2, 6, M], the layout of the modulation layer."""
    # Strided views, as the kernels get them in the model.
    whole = draw(shape.batch, 2, 6, shape.width, scale=0.5)
    return {name: whole[:, :, i] for i, name in enumerate(names)}


def _draw_qkv(shape: TokenShape, draw: Callable[..., Tensor]) -> Tensors:
    t, h, w = shape.grid
    # Angles per position: 2 units for the frame, 3 for the row and 3 for the column.
    unit = shape.head_width // 16
    angles = draw(unit * (2 * t + 3 * h + 3 * w), dtype=torch.float32)
    return {
        "qkv": draw(shape.batch, shape.num_tokens, 3, shape.num_heads, shape.head_width),
        "query_weight": 1 + draw(shape.head_width, scale=0.1),
        "query_bias": draw(shape.head_width, scale=0.1),
        "key_weight": 1 + draw(shape.head_width, scale=0.1),
        "key_bias": draw(shape.head_width, scale=0.1),
        "rotation_table": torch.stack([angles.cos(), angles.sin()]),
    }


def _draw_mlp(shape: TokenShape, draw: Callable[..., Tensor]) -> Tensors:
    width = 4 * shape.width
    return {
        "x": draw(shape.batch, shape.num_tokens, width),
        "bias": draw(width, scale=0.1),
    }


def _draw_adapted(shape: TokenShape, draw: Callable[..., Tensor]) -> Tensors:
    return {
        "x": draw(shape.batch, shape.num_tokens, 3 * shape.width),
        "low": draw(shape.batch, shape.num_tokens, 3 * RANK),
        **{f"matrix_{part}": draw(shape.width, RANK, scale=0.1) for part in range(3)},
    }


def _split_adapted(inputs: Tensors) -> tuple[Tensor, Tensor, list[Tensor], list[int], int, float]:
    matrices = [inputs[f"matrix_{part}"] for part in range(3)]
    return inputs["x"], inputs["low"], matrices, [0, 1, 2], 3, 0.5


def rotation_of(shape: TokenShape, inputs: Tensors) -> qk.Rotation | None:
    return qk.Rotation(inputs["rotation_table"], *shape.grid) if shape.is_rotary else None


def _split_qkv(shape: TokenShape, inputs: Tensors) -> tuple:
    query = (inputs["query_weight"], inputs["query_bias"])
    key = (inputs["key_weight"], inputs["key_bias"])
    return inputs["qkv"], query, key, rotation_of(shape, inputs), shape.num_text


def _qk_exact(shape: TokenShape, inputs: Tensors) -> Sequence[Tensor]:
    """Rotate pairs of real numbers, in float32 or the dtype of the inputs if that has more bits."""
    q, k, v = inputs["qkv"].unbind(2)
    turned = []
    for x, name in ((q, "query"), (k, "key")):
        weight, bias = inputs[f"{name}_weight"], inputs[f"{name}_bias"]
        x = F.layer_norm(x, x.shape[-1:], weight, bias, qk.EPS)
        if shape.is_rotary:
            wide = torch.promote_types(x.dtype, torch.float32)
            first, second = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
            angles = rotation_of(shape, inputs).per_row(shape.num_text)
            cos, sin = angles.real[:, None].to(wide), angles.imag[:, None].to(wide)
            pairs = (first * cos - second * sin, second * cos + first * sin)
            x = torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype)
        turned.append(x)
    return turned[0], turned[1], v


def _apex_norm(shape: TokenShape, inputs: Tensors) -> Sequence[Tensor]:
    """Apex's fused LayerNorm, then the modulation of text and of video."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    hidden, weight, bias = (inputs[name] for name in ("hidden", "weight", "bias"))
    normed = fused_layer_norm_affine(hidden, weight, bias, hidden.shape[-1:], EPS)
    scale, shift = 1 + inputs["scale"], inputs["shift"]  # of video, then of text
    rows = (normed[:, : shape.num_text], normed[:, shape.num_text :])
    parts = zip(rows, (1, 0), strict=True)
    return hidden, torch.cat(
        [torch.addcmul(shift[:, i, None], x, scale[:, i, None]) for x, i in parts], 1
    )


# The lambdas look functions up when they are called, so that tests can replace them by wrong ones.
NORM = Op(
    name="adaptive_layernorm",
    variant="",
    outputs=("hidden_out", "normed"),
    draw=_draw_norm,
    run=lambda shape, i: norm.adaptive_layernorm(**i, num_text=shape.num_text, eps=EPS),
    reference=lambda shape, i: norm.adaptive_layernorm_reference(
        **i, num_text=shape.num_text, eps=EPS
    ),
    apex=_apex_norm,
    units={"forward": 2, "backward": 4},
    goals={"forward": 88, "backward": 80},
)
RESIDUAL_NORM = Op(
    name="residual_adaptive_layernorm",
    variant="SFT",
    outputs=("hidden_out", "normed"),
    draw=_draw_residual_norm,
    run=lambda shape, i: norm.residual_adaptive_layernorm(**i, num_text=shape.num_text, eps=EPS),
    reference=lambda shape, i: norm.residual_adaptive_layernorm_reference(
        **i, num_text=shape.num_text, eps=EPS
    ),
    units={"forward": 4, "backward": 6},
    goals={"forward": 88, "backward": 80},
)
RESIDUAL_NORM_FROZEN = replace(
    RESIDUAL_NORM,
    variant="LoRA",
    frozen=("branch_bias", "gate", "weight", "bias", "shift", "scale"),
    units={"forward": 4, "backward": 5},
    goals={"forward": 88, "backward": 85},
)
RESIDUAL = Op(
    name="gated_residual",
    variant="",
    outputs=("hidden_out",),
    draw=_draw_residual,
    run=lambda shape, i: (norm.gated_residual(**i, num_text=shape.num_text),),
    reference=lambda shape, i: (norm.gated_residual_reference(**i, num_text=shape.num_text),),
    units={"forward": 3, "backward": 3},
    goals={"forward": 88, "backward": 80},
)
QK = Op(
    name="qk_norm_rope3d",
    variant="",
    outputs=("q", "k", "v"),
    draw=_draw_qkv,
    run=lambda shape, i: qk.qk_norm_rope3d(*_split_qkv(shape, i)),
    reference=lambda shape, i: qk.qk_norm_rope3d_reference(*_split_qkv(shape, i)),
    exact=_qk_exact,
    frozen=("rotation_table",),
    units={"forward": 4, "backward": 8},
    goals={"forward": 85, "backward": 75},
)
GELU = Op(
    name="gelu",
    variant="",
    outputs=("y",),
    draw=_draw_mlp,
    run=lambda shape, i: (activation.gelu(**i),),
    reference=lambda shape, i: (activation.gelu_reference(**i),),
    units={"forward": 8, "backward": 12},
    goals={"forward": 88, "backward": 85},
)
LORA = Op(
    name="add_low_rank",
    variant="",
    outputs=("y",),
    draw=_draw_adapted,
    run=lambda shape, i: (lora.add_low_rank(*_split_adapted(i)),),
    reference=lambda shape, i: (lora.add_low_rank_reference(*_split_adapted(i)),),
    units={"forward": 6, "backward": 3},
    # Backward's products are the library's, and each of two reads dy.
    goals={"forward": 80, "backward": 40},
)
OPS = (NORM, RESIDUAL_NORM, RESIDUAL_NORM_FROZEN, RESIDUAL, QK, GELU, LORA)
WAYS = ("forward", "backward")


def bytes_of(op: Op, way: str, shape: TokenShape, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes that a perfect kernel reads and writes."""
    return op.units[way] * shape.batch * shape.num_tokens * shape.width * dtype.itemsize


def draw_inputs(op: Op, shape: TokenShape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw the inputs as leaves; those that are not frozen require a gradient."""

    def draw(*size: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return scale * torch.randn(size, dtype=dtype, device=device)

    return as_leaves(op, op.draw(shape, draw))


def as_leaves(op: Op, inputs: Tensors) -> Tensors:
    """Return the inputs as leaves with the same strides."""
    return {k: x.detach().requires_grad_(k not in op.frozen) for k, x in inputs.items()}
