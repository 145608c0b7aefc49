"""Peers of the fused ops: implementations of other packages with the same inputs and outputs.

A peer is built for each set of inputs and raises Unavailable or ImportError if it cannot run. Its
package is not a dependency of cogfast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._functorch.config
from torch import Tensor, nn

from bench.kernel_ops.op_cases import (
    EPS,
    Op,
    Run,
    Tensors,
    TokenShape,
    rotation_of,
    run_reference,
    trained,
)
from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels import qk_norm_rope3d as qk

Build = Callable[[Op, TokenShape, Tensors], Run]


class Unavailable(Exception):
    """Raised by a peer that cannot run on this machine."""


def need_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs a GPU")


def compile_call(call: Callable, is_tiny: bool, is_first: bool) -> Callable:
    """Compile a call for one shape; at tiny sizes without code generation, which takes seconds."""
    if is_first:
        torch.compiler.reset()  # else earlier shapes would make sizes symbolic
    # This backward pass is timed many times: it must not overwrite its buffers.
    torch._functorch.config.donated_buffer = False
    backend = "aot_eager" if is_tiny else "inductor"
    return torch.compile(call, backend=backend, dynamic=False)


def eager(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
    return run_reference(op, shape, inputs)


class _BiasWithin(torch.autograd.Function):
    """Identity of a product that includes its bias, with the bias gradient of the peers' linears.

    The backward of a peer's linear sums the bias gradient in a separate pass.
    """

    @staticmethod
    def forward(ctx, product: Tensor, bias: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        needs_product, needs_bias = ctx.needs_input_grad
        summed = gradient.sum(dim=tuple(range(gradient.dim() - 1))) if needs_bias else None
        return gradient if needs_product else None, summed


class _Biased:
    """A product [B, S, N] whose bias is added before the measurement, and the leaf of the bias."""

    def __init__(self, product: Tensor, bias: Tensor) -> None:
        self.leaf = (product + bias).detach().requires_grad_(product.requires_grad)
        self._bias = bias

    def __call__(self) -> Tensor:
        return _BiasWithin.apply(self.leaf, self._bias)


def liger_norm(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
    """Run Liger's LayerNorm, with plain PyTorch for the rest."""
    from liger_kernel.transformers import LigerLayerNorm

    need_gpu(inputs["hidden"].device)
    layer = _with_weights(LigerLayerNorm(shape.width, eps=EPS, bias=True), inputs)
    leaves = dict(trained(op, inputs))
    branch = None
    if "branch" in inputs:
        branch = _Biased(inputs["branch"], inputs["branch_bias"])
        leaves["branch"] = branch.leaf

    def call() -> Tensors:
        hidden = inputs["hidden"]
        if branch is not None:
            hidden = norm.gated_residual_reference(
                hidden, branch(), None, inputs["gate"], shape.num_text
            )
        text, video = norm._split_rows(layer(hidden), shape.num_text)
        scale_video, scale_text = (1 + inputs["scale"]).split(1, dim=1)
        shift_video, shift_text = inputs["shift"].split(1, dim=1)
        text = torch.addcmul(shift_text, text, scale_text)
        normed = torch.cat([text, torch.addcmul(shift_video, video, scale_video)], dim=1)
        return {"hidden_out": hidden, "normed": normed}

    return Run(call, leaves)


def _with_weights(layer: nn.Module, inputs: Tensors) -> nn.Module:
    """Replace the parameters of a layer by tensors, so that gradients can be taken of them by name."""
    del layer.weight, layer.bias
    layer.weight, layer.bias = inputs["weight"], inputs["bias"]
    return layer


def _two_streams(op: Op, shape: TokenShape, inputs: Tensors) -> tuple[dict, Callable]:
    """Return leaves with separate text and video tensors, as in diffusers, and the rows of the branch."""
    leaves = dict(trained(op, inputs))
    rows = norm._split_rows(inputs["hidden"].detach(), shape.num_text)
    leaves["hidden"] = tuple(x.contiguous().requires_grad_() for x in rows)
    if "branch" not in inputs:
        return leaves, lambda: None
    branch = _Biased(inputs["branch"], inputs["branch_bias"])
    leaves["branch"] = branch.leaf
    return leaves, lambda: norm._split_rows(branch(), shape.num_text)


def _add_branch(leaves: dict, branch: tuple[Tensor, Tensor], gate: Tensor) -> tuple:
    (text, video), (branch_text, branch_video) = leaves["hidden"], branch
    return text + gate[:, 1:] * branch_text, video + gate[:, :1] * branch_video


def diffusers_norm(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
    """Run CogVideoXLayerNormZero without its modulation linear.

    Included are the residual before it and the concatenation with which attention and MLP begin.
    """
    from diffusers.models.normalization import CogVideoXLayerNormZero

    module = CogVideoXLayerNormZero(1, shape.width, eps=EPS)
    module.silu = module.linear = nn.Identity()
    _with_weights(module.norm, inputs)
    leaves, rows_of_branch = _two_streams(op, shape, inputs)
    shift, scale = inputs["shift"], inputs["scale"]
    gate = inputs.get("gate", scale)  # the first norm of a block returns the gate for later

    def call() -> dict:
        branch = rows_of_branch()
        hidden = leaves["hidden"] if branch is None else _add_branch(leaves, branch, gate)
        vectors = [x[:, i] for i in range(2) for x in (shift, scale, gate)]
        video, text, *_ = module(hidden[1], hidden[0], torch.cat(vectors, dim=1))
        return {"hidden_out": tuple(hidden), "normed": torch.cat([text, video], dim=1)}

    return Run(call, leaves)


def diffusers_residual(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
    leaves, rows_of_branch = _two_streams(op, shape, inputs)
    call = lambda: {"hidden_out": _add_branch(leaves, rows_of_branch(), inputs["gate"])}
    return Run(call, leaves)


def diffusers_qk(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
    """Run the part of its attention processor between the three linears and the attention."""
    from diffusers.models.embeddings import apply_rotary_emb

    leaves = {name: x for name, x in trained(op, inputs).items() if name != "qkv"}
    parts = (x.detach().contiguous().requires_grad_() for x in inputs["qkv"].unbind(2)[:2])
    leaves |= dict(zip(("q", "k"), parts, strict=True))  # separate linears; v is unchanged
    angles = None
    if shape.is_rotary:
        table = rotation_of(shape, inputs).per_row(shape.num_text)[shape.num_text :]
        # [V, D]: diffusers repeats each angle for the two entries of a pair
        angles = [x.repeat_interleave(2, dim=1) for x in (table.real, table.imag)]

    def turn(x: Tensor, name: str) -> Tensor:
        layer = layers[name]
        x = layer(x.transpose(1, 2))  # [B, H, S, D]
        if angles is not None:
            x[:, :, shape.num_text :] = apply_rotary_emb(x[:, :, shape.num_text :], angles)
        return x.transpose(1, 2)

    layers = {}
    for name in ("query", "key"):
        weights = {kind: inputs[f"{name}_{kind}"] for kind in ("weight", "bias")}
        layers[name] = _with_weights(nn.LayerNorm(shape.head_width, eps=qk.EPS), weights)
    return Run(lambda: {"q": turn(leaves["q"], "query"), "k": turn(leaves["k"], "key")}, leaves)


def diffusers_gelu(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
    """Run its GELU module without its linear, which adds the bias."""
    from diffusers.models.activations import GELU

    module = GELU(1, 1, approximate="tanh")
    module.proj = nn.Identity()
    product = _Biased(inputs["x"], inputs["bias"])
    return Run(lambda: {"y": module(product())}, {**trained(op, inputs), "x": product.leaf})


_NORMS = {"Liger LayerNorm": liger_norm, "diffusers": diffusers_norm}
# Peers by op and name. A name that ends in "compiled" is compiled: torch.compile does not fuse the
# complex numbers by which the reference rotates, so the peer without them is compiled too.
PEERS: dict[str, dict[str, Build]] = {
    "adaptive_layernorm": _NORMS,
    "residual_adaptive_layernorm": _NORMS,
    "gated_residual": {"diffusers": diffusers_residual},
    "qk_norm_rope3d": {"diffusers": diffusers_qk, "diffusers compiled": diffusers_qk},
    "gelu": {"diffusers": diffusers_gelu},
    "add_low_rank": {},  # PEFT's are the reference's products and sums
}
REFERENCES: dict[str, Build] = {"torch eager": eager, "torch.compile": eager}


def peers_of(op: Op) -> dict[str, Build]:
    return {**REFERENCES, **PEERS[op.name]}


def is_compiled(peer: str) -> bool:
    return peer.endswith("compile") or peer.endswith("compiled")
