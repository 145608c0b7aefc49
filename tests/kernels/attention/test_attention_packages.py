"""Arguments that the GPU backends pass to their libraries, checked without a GPU: PyTorch's
operators on meta tensors, and stand-ins with the parameters of flash-attn 2.8.3, 3 and 4.0.0b36."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cogfast.kernels.attention import backends as attention_backends
from cogfast.kernels.attention.backends import BACKENDS, plain_backward, plain_forward

SHAPE = (2, 37, 3, 16)


def draw(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Draw dense q and k, v as a part of packed qkv, and a cotangent."""
    generator = torch.Generator().manual_seed(0)
    b, s, h, d = SHAPE
    rand = lambda *size: torch.randn(size, generator=generator).to(device, dtype)
    return [rand(b, s, h, d), rand(b, s, h, d), rand(b, s, 3, h, d)[:, :, 2], rand(b, s, h, d)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_torchs_operators_take_what_they_are_given(name: str, dtype: torch.dtype) -> None:
    q, k, v, dout = draw("meta", dtype)
    out, lse = BACKENDS[name].forward(q, k, v)
    assert out.shape == SHAPE and out.is_contiguous() and out.dtype == dtype
    assert lse.shape == (2, 3, 37) and lse.dtype == torch.float32
    gradients = BACKENDS[name].backward(dout, q, k, v, out, lse.contiguous())
    assert [x.shape for x in gradients] == [SHAPE] * 3
    assert all(x.is_contiguous() and x.dtype == dtype for x in gradients)


def test_efficients_backward_gets_whole_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel reads 32 rows of lse at a time; padded rows have the weight exp(-inf)."""
    given = {}

    def backward(*arguments):
        given["lse"] = arguments[6]
        return (*(x.transpose(1, 2) for x in draw()[:3]), None)

    aten = SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward)
    monkeypatch.setattr(attention_backends, "aten", aten)
    q, k, v, dout = draw()
    lse = torch.randn(2, 3, 37)
    BACKENDS["efficient"].backward(dout, q, k, v, q, lse)
    assert given["lse"].shape == (2, 3, 64)
    assert torch.equal(given["lse"][..., :37], lse) and (given["lse"][..., 37:] == torch.inf).all()


# The parameters, in their order, "=" before those with a default.
FORWARD = {
    "fa2": "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap "
    "alibi_slopes return_softmax",
    "fa3": "q k v =k_new =q_v =out =softmax_scale =is_causal =window_size_left =num_splits",
    "fa4": "q k v =qv =cu_seqlens_q =cu_seqlens_k =seqused_q =seqused_k =max_seqlen_q =max_seqlen_k "
    "=min_seqlen_k =page_table =softmax_scale =causal =softcap =window_size_left =window_size_right "
    "=learnable_sink =num_splits =return_lse =out =lse",
}
BACKWARD = {
    "fa2": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic =rng_state",
    "fa3": "dout q k v out softmax_lse =dq =dk =dv =cu_seqlens_q =softmax_scale =is_causal "
    "=deterministic",
    "fa4": "q k v out dout lse =softmax_scale =causal =softcap =window_size_left =window_size_right "
    "=deterministic =dq =dk =dv",
}
# The schemas that version 3 registers, without arguments that keep their default.
FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int num_splits = 0) -> (Tensor, Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, "
    "Tensor? cu_seqlens_q = None, float? softmax_scale = None, bool is_causal = False, "
    "bool deterministic = False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def bind(parameters: str, arguments: tuple, named: dict) -> dict[str, object]:
    """Bind arguments to parameters as Python does, and return them by name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        inspect.Parameter(p.lstrip("="), kind, default=None if "=" in p else inspect._empty)
        for p in parameters.split()
    )
    return dict(signature.bind(*arguments, **named).arguments)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict]]:
    """Install stand-ins that compute in plain arithmetic; yield the arguments of the last calls by
    name."""
    calls: dict[str, dict] = {}

    def forward(name: str, *arguments: Tensor, **named: object) -> tuple:
        x = calls["forward"] = bind(FORWARD[name], arguments, named)
        rest = [torch.empty(0) for _ in range({"fa2": 2, "fa3": 2, "fa4": 3}[name])]
        return (*plain_forward(x["q"], x["k"], x["v"]), *rest)

    def backward(name: str, *arguments: Tensor, **named: object) -> tuple:
        x = calls["backward"] = bind(BACKWARD[name], arguments, named)
        lse = x["lse" if name == "fa4" else "softmax_lse"]
        gradients = plain_backward(x["dout"], x["q"], x["k"], x["v"], x["out"], lse)
        if name == "fa4":
            return gradients
        for into, value in zip((x["dq"], x["dk"], x["dv"]), gradients, strict=True):
            into.copy_(value)
        return torch.empty(0) if name == "fa2" else tuple(torch.empty(0) for _ in range(5))

    modules = {
        module: SimpleNamespace(
            _flash_attn_forward=partial(forward, name),
            _flash_attn_backward=partial(backward, name),
            _flash_attn_fwd=partial(forward, name),
            _flash_attn_bwd=partial(backward, name),
        )
        for name, module in (
            ("fa2", "flash_attn.flash_attn_interface"),
            ("fa3", "flash_attn_interface"),
            ("fa4", "flash_attn.cute.interface"),
        )
    }
    monkeypatch.setattr(attention_backends, "_module", modules.__getitem__)
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FA3_FORWARD)
    library.define(FA3_BACKWARD)
    library.impl("fwd", partial(forward, "fa3"), "CPU")
    library.impl("bwd", partial(backward, "fa3"), "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_flash_attn_packages(given: dict, name: str, is_deterministic: bool) -> None:
    torch.use_deterministic_algorithms(is_deterministic)  # a fixture of all tests resets it
    q, k, v, dout = draw()
    out, lse = BACKENDS[name].forward(q, k, v)
    gradients = BACKENDS[name].backward(dout, q, k, v, out, lse)
    plain_out, plain_lse = plain_forward(q, k, v)
    assert torch.equal(out, plain_out) and torch.equal(lse, plain_lse)
    plain = plain_backward(dout, q, k, v, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    for way in ("forward", "backward"):
        assert given[way]["v"].data_ptr() == v.data_ptr()  # v was not copied
        assert given[way]["v"].stride() == v.stride()
        assert given[way]["softmax_scale"] == 16**-0.5
    # The dispatcher leaves out arguments that have their default value.
    assert given["backward"].get("deterministic", False) is is_deterministic
    assert not given["forward"].get("causal") and not given["forward"].get("is_causal")
    if name == "fa2":
        assert given["forward"]["window_size_left"] == -1 and given["forward"]["dropout_p"] == 0
    if name == "fa3":
        assert given["forward"]["num_splits"] == 1
    if name == "fa4":
        assert given["forward"]["return_lse"] is True
