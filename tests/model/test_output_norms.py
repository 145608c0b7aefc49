"""The two norms after the blocks: their gradients in bf16 on a CPU, their kernels, and their nodes
under torch.compile."""

import copy

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from cogfast.core.shapes import TokenGrid
from cogfast.kernels.adaptive_layernorm import Backward, layernorm
from cogfast.kernels.gpu.adaptive_layernorm import launch_backward, launch_forward
from cogfast.model.transformer import DiffusionTransformer
from tests.kernels.test_adaptive_layernorm import (
    NAMES,
    VARIANTS,
    close,
    draw,
    expected,
    make_inputs,
    single,
)
from tests.support.tiny_transformers import tiny

NORMS = ("final_norm.weight", "final_norm.bias", "output_norm.weight", "output_norm.bias")


def gradients(
    transformer: DiffusionTransformer, dtype: torch.dtype, grid: TokenGrid
) -> dict[str, Tensor]:
    """Return the gradients of unembed, from the same bf16 numbers in every dtype."""
    model = copy.deepcopy(transformer).to(torch.bfloat16).to(dtype)
    width, height, columns = model.config.hidden_size, 2 * grid.h, 2 * grid.w
    rows, vector, cotangent = (
        draw(*shape, seed=i).bfloat16().to(dtype, copy=True)
        for i, shape in enumerate(
            [(2, grid.num_tokens, width), (2, 64), (2, 16, grid.t, height, columns)]
        )
    )
    inputs = {"hidden": rows.requires_grad_(), "conditioning": vector.requires_grad_()}
    model.unembed(rows, vector, grid).backward(cotangent)
    names = (*NORMS, "output_modulation.weight", "output_modulation.bias")
    return {k: v.grad for k, v in inputs.items()} | {n: model.get_parameter(n).grad for n in names}


def test_gradients_in_bf16_do_not_depend_on_the_number_of_rows() -> None:
    """Allow two roundings of bf16 (2^-8 each) against float64 at 3,072 rows.

    nn.LayerNorm's backward, which sums bf16 numbers in bf16 on a CPU, is 7e-2 to 9e-2 off here.
    """
    model, grid = tiny("5b"), TokenGrid(3, 32, 32)
    exact = gradients(model, torch.float64, grid)
    for name, got in gradients(model, torch.bfloat16, grid).items():
        error = (got.double() - exact[name]).norm() / exact[name].norm()
        assert error <= 2 * 2**-8, f"{name}: {error}"


@pytest.mark.parametrize("has_affine", [True, False], ids=["affine", "plain"])
def test_layernorm_is_that_of_pytorch_in_fp32(has_affine: bool) -> None:
    rows = draw(2, 13, 48, seed=0).float() * 3 + 1
    weight, bias = (draw(48, seed=i).float() if has_affine else None for i in (1, 2))
    got = layernorm(rows, weight, bias, 1e-5)
    want = F.layer_norm(rows, (48,), weight, bias, 1e-5)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_kernels_take_video_rows_alone_with_one_modulation() -> None:
    """Give the kernels what unembed gives them on a GPU: no text rows, and a modulation whose entry
    for text is the video's, by a stride of 0."""
    inputs = make_inputs((2, 0, 9, 48), VARIANTS["first"])
    of_video = {name: inputs[name][:, :1] for name in ("shift", "scale")}
    inputs |= {name: x.expand(-1, 2, -1) for name, x in of_video.items()}
    (_, n), want, (_, dn) = expected(inputs, 0, has_dout=False)
    given = {name: single(x) for name, x in inputs.items()}
    given |= {name: x.float().expand(-1, 2, -1) for name, x in of_video.items()}
    assert given["shift"].stride(1) == 0
    _, got_n, mean, rstd = launch_forward(*given.values(), 0, 1e-5)
    close(got_n, n, "n", 1e-5)
    norm = (given["hidden"], mean, rstd, given["weight"], given["bias"], given["scale"])
    nothing = (None, None, None)
    found = launch_backward(Backward(dn.float(), None, *norm, *nothing, 0, True, False))
    for name, got in zip(NAMES, found, strict=True):
        if name in of_video:
            close(got.sum(1), want[name].sum(1), name, 1e-5)
        elif inputs[name] is not None:
            close(got, want[name], name, 1e-5)


def test_compiled_unembed_has_one_node_for_each_norm() -> None:
    model, grid, counts = tiny("5b"), TokenGrid(2, 3, 4), []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        counts.append([str(node.target) for node in graph.graph.nodes])
        return graph

    rows, vector = draw(2, 24, 128, seed=0).float().requires_grad_(), draw(2, 64, seed=1).float()
    eager = model.unembed(rows, vector, grid)
    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    compiled = torch.compile(model.unembed, backend=backend, fullgraph=True)(rows, vector, grid)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    compiled.square().sum().backward()
    assert len(counts) == 2
    for nodes, op in zip(
        counts, ("adaptive_layernorm", "adaptive_layernorm_backward"), strict=True
    ):
        assert nodes.count(f"cogfast.{op}.default") == 2
        assert not any("native_layer_norm" in node for node in nodes)
