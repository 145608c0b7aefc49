"""What users have today for each fused op of a block: the same inputs, outputs and gradients.

A peer is built per set of inputs. It raises Unavailable, or ImportError, where it cannot run; the
packages are none of this project's dependencies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

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
    """Why a peer cannot run here."""


def need_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs a GPU")


def nvidia_apex(module: str) -> object:
    """A module of NVIDIA's apex; the `apex` of PyPI is another project."""
    try:
        return importlib.import_module(f"apex.{module}")
    except ImportError as error:
        try:
            importlib.import_module("apex")
        except ImportError:
            raise Unavailable("apex is not installed (PyPI's apex is another project)") from error
        except Exception:  # PyPI's needs a web framework that may be missing or broken
            pass
        said = f"the apex here is not NVIDIA's, or is built without its kernels: {error}"
        raise Unavailable(said) from error


def compile_call(call: Callable, is_tiny: bool, is_first: bool) -> Callable:
    """torch.compile for one shape; at tiny sizes without code generation, which takes seconds."""
    if is_first:
        torch.compiler.reset()  # or the shapes before this one would make sizes symbolic
    # a backward that is timed again and again must leave its buffers alone
    torch._functorch.config.donated_buffer = False
    backend = "aot_eager" if is_tiny else "inductor"
    return torch.compile(call, backend=backend, dynamic=False)


def eager(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
    return run_reference(op, shape, inputs)


class _BiasWithin(torch.autograd.Function):
    """A product that has its bias already, as the linears of the peers give it: their backward sums
    the bias gradient in a pass of its own."""

    @staticmethod
    def forward(ctx, product: Tensor, bias: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        needs_product, needs_bias = ctx.needs_input_grad
        summed = gradient.sum(dim=tuple(range(gradient.dim() - 1))) if needs_bias else None
        return gradient if needs_product else None, summed


class _Biased:
    """[B, S, N] with its bias added ahead of the measurement, and its bias leaf."""

    def __init__(self, product: Tensor, bias: Tensor) -> None:
        self.leaf = (product + bias).detach().requires_grad_(product.requires_grad)
        self._bias = bias

    def __call__(self) -> Tensor:
        return _BiasWithin.apply(self.leaf, self._bias)


def _other_norm(load: Callable[[], type]) -> Build:
    """Another package's LayerNorm in the place of the norm, plain PyTorch around it."""

    def build(op: Op, shape: TokenShape, inputs: Tensors) -> Run:
        need_gpu(inputs["hidden"].device)
        layer = _with_weights(load()(shape.width, eps=EPS), inputs)
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

    return build


def _with_weights(layer: nn.Module, inputs: Tensors) -> nn.Module:
    """The layer on tensors that are not parameters: gradients are asked of them by name."""
    del layer.weight, layer.bias
    layer.weight, layer.bias = inputs["weight"], inputs["bias"]
    return layer


def _liger_norm() -> type:
    from liger_kernel.transformers import LigerLayerNorm

    return lambda width, eps: LigerLayerNorm(width, eps=eps, bias=True)


def _apex_norm() -> type:
    return nvidia_apex("normalization").FusedLayerNorm


def _two_streams(op: Op, shape: TokenShape, inputs: Tensors) -> tuple[dict, Callable]:
    """diffusers keeps text and video apart: leaves by name, and what gives the rows of a branch."""
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
    """CogVideoXLayerNormZero behind its modulation linear, the block's residual before it, and the
    cat that the attention and the MLP begin with."""
    from diffusers.models.normalization import CogVideoXLayerNormZero

    module = CogVideoXLayerNormZero(1, shape.width, eps=EPS)
    module.silu = module.linear = nn.Identity()
    _with_weights(module.norm, inputs)
    leaves, rows_of_branch = _two_streams(op, shape, inputs)
    shift, scale = inputs["shift"], inputs["scale"]
    gate = inputs.get("gate", scale)  # the first norm of a block returns it for later

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
    """Of its attention processor what lies between the three linears and the attention."""
    from diffusers.models.embeddings import apply_rotary_emb

    leaves = {name: x for name, x in trained(op, inputs).items() if name != "qkv"}
    parts = (x.detach().contiguous().requires_grad_() for x in inputs["qkv"].unbind(2)[:2])
    leaves |= dict(zip(("q", "k"), parts, strict=True))  # linears of their own; v is not touched
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
    """Its GELU module behind its linear, which adds the bias."""
    from diffusers.models.activations import GELU

    module = GELU(1, 1, approximate="tanh")
    module.proj = nn.Identity()
    product = _Biased(inputs["x"], inputs["bias"])
    return Run(lambda: {"y": module(product())}, {**trained(op, inputs), "x": product.leaf})


_NORMS = {
    "Liger LayerNorm": _other_norm(_liger_norm),
    "apex FusedLayerNorm": _other_norm(_apex_norm),
    "diffusers": diffusers_norm,
}
# By op and name of the peer. torch eager and torch.compile of the op's reference come first, and
# what is named "... compiled" is compiled too: the reference rotates by complex numbers, which
# torch.compile leaves as they are.
PEERS: dict[str, dict[str, Build]] = {
    "adaptive_layernorm": _NORMS,
    "residual_adaptive_layernorm": _NORMS,
    "gated_residual": {"diffusers": diffusers_residual},
    "qk_norm_rope3d": {"diffusers": diffusers_qk, "diffusers compiled": diffusers_qk},
    "gelu": {"diffusers": diffusers_gelu},
}
REFERENCES: dict[str, Build] = {"torch eager": eager, "torch.compile": eager}


def peers_of(op: Op) -> dict[str, Build]:
    return {**REFERENCES, **PEERS[op.name]}


def is_compiled(peer: str) -> bool:
    return peer.endswith("compile") or peer.endswith("compiled")


def names_of_peers(ops: Sequence[Op]) -> list[str]:
    return list(dict.fromkeys(name for op in ops for name in peers_of(op)))
