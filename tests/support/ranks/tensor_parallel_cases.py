"""The models that tensor-parallel processes and one process both run."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cogfast.distributed.parallelize import allocate, find_shards
from cogfast.extensions.memory.host_blocks import allocate_base
from cogfast.extensions.memory.quantized_base import base_linears
from cogfast.extensions.memory.quantized_linear import dequantize_rows, quantize_rows
from cogfast.model.config import TransformerConfig
from cogfast.model.initialization import initialize
from cogfast.model.lora import DEFAULT_TARGETS
from cogfast.model.transformer import DiffusionTransformer, freeze
from cogfast.model.weights.source import Target
from cogfast.train.activation_checkpointing import Policy
from tests.support.tiny_transformers import FAMILY, inputs


@dataclass(frozen=True)
class Case:
    """A member of the family with four heads of 32."""

    family: str
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = DEFAULT_TARGETS
    trains_lora_only: bool = False
    has_affine_norms: bool = True
    dtype: torch.dtype = torch.float32
    is_compiled: bool = False
    splits_rows: bool = False
    text_length: int = 10
    policy: Policy | None = None  # of activation checkpointing, in the group
    quantization: Literal["none", "int8"] = "none"  # of the frozen base, in the group
    num_offloaded: int = 0  # blocks whose base is in host memory, in the group

    @property
    def config(self) -> TransformerConfig:
        return replace(
            FAMILY[self.family],
            num_attention_heads=4,
            lora_rank=self.lora_rank,
            lora_targets=self.lora_targets,
            lora_alpha=2.0,
            elementwise_affine=self.has_affine_norms,
            text_length=self.text_length,
        )

    def freeze(self, transformer: DiffusionTransformer) -> None:
        freeze(transformer, ["all"] if self.trains_lora_only else [], is_lora_only=False)


_FROZEN = partial(Case, "5b", 4, trains_lora_only=True)
CASES = {
    **{family: Case(family) for family in FAMILY},
    "lora": Case("5b", lora_rank=4),  # everything trains: the adapters' input has a gradient
    "frozen": _FROZEN(),
    "two targets": _FROZEN(("to_q", "to_v")),
    "one target": Case("5b", 4, ("to_out.0",)),
    "mlp": Case("5b", 4, ("to_v", "ff.net.0.proj", "ff.net.2")),  # everything trains
    "frozen mlp": _FROZEN(("ff.net.0.proj", "ff.net.2")),
    "norms without weights": Case("5b", has_affine_norms=False),
    "bf16": Case("5b", lora_rank=4, dtype=torch.bfloat16),
    "compiled": Case("5b", is_compiled=True),
    "pointwise": Case("5b", lora_rank=4, policy="pointwise"),
    "attention_kept": Case("5b", policy="attention_kept"),
    "long text": Case("5b", text_length=60),
    "compiled lora": Case("5b", lora_rank=4, is_compiled=True),
    "int8": _FROZEN(quantization="int8"),
    "int8 and offloaded mlp": _FROZEN(
        ("to_q", "ff.net.0.proj", "ff.net.2"),
        policy="pointwise",
        quantization="int8",
        num_offloaded=2,
    ),
    "offloaded": _FROZEN(num_offloaded=1),
    "compiled int8": _FROZEN(is_compiled=True, quantization="int8", num_offloaded=1),
}
# 156 tokens, or 108: four processes have 39, or 27, of which the second has text and video
CASES |= {
    f"rows {name}": replace(CASES[name], splits_rows=True, text_length=60)
    for name in (
        "2b",
        "5b",
        "1.5_5b_i2v",
        "lora",
        "frozen",
        "one target",
        "mlp",
        "frozen mlp",
        "norms without weights",
        "bf16",
        "compiled",
        "pointwise",
        "int8 and offloaded mlp",
    )
}


def case_inputs(name: str, number: int) -> dict[str, Tensor]:
    """Return the inputs of the group with this number."""
    given = inputs(CASES[name].family, seed=1 + number)
    generator = torch.Generator().manual_seed(number)
    given["text"] = torch.randn(2, CASES[name].text_length, 32, generator=generator)
    return given


def kept_bytes(transformer: DiffusionTransformer, given: dict[str, Tensor]) -> int:
    """Return the bytes that a forward pass keeps for backward, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in transformer.parameters()}
    storages = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = transformer(**given)
    del output
    return sum(n for pointer, n in storages.items() if pointer not in parameters)


def loss_and_gradients(transformer: DiffusionTransformer, given: dict[str, Tensor]) -> dict:
    """Return output, loss (its mean square) and {name: gradient}, those of latents and text
    included."""
    leaves = {name: given[name].clone().requires_grad_() for name in ("latents", "text")}
    output = transformer(**{**given, **leaves})
    loss = output.float().square().mean()
    loss.backward()
    parameters = {**dict(transformer.named_parameters()), **leaves}
    gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return {"output": output.detach(), "loss": loss.detach(), "gradients": gradients}


def materialize(transformer: DiffusionTransformer, seed: int) -> dict[str, Target]:
    """Allocate a transformer on the CPU and initialize it: each shard as in the whole model. Return
    the weights that are no parameters."""
    allocate(transformer, torch.device("cpu"))
    held = allocate_base(transformer, torch.device("cpu"))
    initialize(transformer, seed, find_shards(transformer), held=held)
    return held


def round_base(transformer: DiffusionTransformer) -> None:
    """Round the base's weights to 8 bits."""
    for _, linear in base_linears(transformer):
        linear.weight.data.copy_(
            dequantize_rows(*quantize_rows(linear.weight.detach(), torch.int8), torch.float32)
        )
