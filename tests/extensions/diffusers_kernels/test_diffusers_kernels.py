"""apply_to_diffusers against diffusers' own modules and float64: outputs, gradients, adapters, refusals."""

import copy
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from cogfast import apply_to_diffusers, restore
from cogfast.extensions.diffusers_kernels.diffusers_kernels import _with_rotation
from tests.model.test_transformer_diffusers import diffusers_model, run_diffusers
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS
from tests.support.tiny_transformers import FAMILY, inputs

LORA = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def cast(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in given.items()}


def answer(name: str, model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the output and the gradients of its mean square in float64, by name."""
    torch.manual_seed(3)  # of dropout
    output = run_diffusers(name, model, given)
    output.double().square().mean().backward()
    found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"output": output.detach().double(), **found}


def without_meaning(name: str, key: str) -> bool:
    """A bias of all keys changes no softmax; without rotation its gradient is rounding noise."""
    return name == "2b" and key.endswith("norm_k.bias")


def assert_close(name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for key, x in theirs.items():
        error = (ours[key] - x).norm() / x.norm()
        assert error < 1e-5 or without_meaning(name, key), f"{key}: {error:.1e}"


def compare(name: str, model: nn.Module) -> None:
    """Compare a model without and with kernels, and restored."""
    given = inputs(name)
    theirs = answer(name, model, given)
    apply_to_diffusers(model)
    ours = answer(name, model, given)
    assert any(not torch.equal(ours[key], x) for key, x in theirs.items())
    assert_close(name, ours, theirs)
    restore(model)
    again = answer(name, model, given)
    assert all(torch.equal(again[key], x) for key, x in theirs.items())


class Calls(TorchDispatchMode):
    """Counts the calls of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FAMILY)
def test_outputs_and_gradients_are_those_of_diffusers(name: str) -> None:
    model = diffusers_model(name)
    names, types = list(model.state_dict()), [type(m) for m in model.modules()]
    compare(name, model.train())
    assert [type(m) for m in model.modules()] == types and list(model.state_dict()) == names


@NEEDS_CPU_KERNELS
def test_all_parts_run_the_kernels() -> None:
    model, given = diffusers_model("5b"), inputs("5b")
    apply_to_diffusers(model)
    apply_to_diffusers(model)  # changes nothing
    with Calls() as calls, torch.no_grad():
        run_diffusers("5b", model, given)
    # Three in each of two blocks; the two norms behind the blocks are PyTorch's.
    wanted = {"adaptive_layernorm": 6, "gelu": 2, "qk_norm_rope3d": 2, "native_layer_norm": 2}
    assert {op: calls.seen[op] for op in wanted} == wanted


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("2b", marks=pytest.mark.soak),
        "5b",
        pytest.param("1.5_5b", marks=pytest.mark.soak),
    ],
)
def test_bfloat16_is_as_close_to_float64_as_diffusers(name: str) -> None:
    """Tensor by tensor, in the mean over inputs: a tensor of 64 rounded numbers may be luckier in one."""
    model = diffusers_model(name).train().bfloat16()
    exact, squares = copy.deepcopy(model).double(), Counter()
    for seed in range(8):
        given = cast(inputs(name, seed), torch.bfloat16)
        truth = answer(name, exact, cast(given, torch.float64))
        for side, change in (("theirs", restore), ("ours", apply_to_diffusers)):
            change(model)
            for key, x in answer(name, model, given).items():
                squares[side, key] += ((x - truth[key]).norm() / truth[key].norm()).item() ** 2
    keys = [key for key in truth if not without_meaning(name, key)]
    ratios = [(squares["ours", key] / squares["theirs", key]) ** 0.5 for key in keys]
    # A ratio of such means is noisy; over 60 inputs the largest is 1.05.
    assert max(ratios) < 1.25 and sum(ratios) / len(ratios) < 0.97


def test_gradient_checkpointing_and_autocast() -> None:
    model, given = diffusers_model("5b").train(), inputs("5b")
    wanted = answer("5b", model, given)
    apply_to_diffusers(model)
    model.enable_gradient_checkpointing()
    assert_close("5b", answer("5b", model, given), wanted)
    errors = {}
    for side, change in (("theirs", restore), ("ours", apply_to_diffusers)):
        change(model)
        with torch.autocast("cpu", torch.bfloat16):
            found = answer("5b", model, given)
        errors[side] = sum(((found[k] - x).norm() / x.norm()).item() for k, x in wanted.items())
    assert errors["ours"] < 1.05 * errors["theirs"]


def adapter(dropout: float, targets: list[str] = LORA, rank: int = 4, alpha: int = 6):
    from peft import LoraConfig

    kept = {"init_lora_weights": False, "target_modules": targets}
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, **kept)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_adapters_of_peft(dropout: float) -> None:
    """Added before and after, of one and two ranks, scaled by a call, and disabled."""
    model = diffusers_model("5b").train().requires_grad_(False)
    apply_to_diffusers(model)
    model.add_adapter(adapter(dropout))
    restore(model)
    compare("5b", model.train())
    model.add_adapter(adapter(dropout, ["to_q", "norm1.linear"], rank=2), adapter_name="second")
    model.set_adapter(["default", "second"])
    compare("5b", model.train())
    given, results = inputs("5b"), []
    for change in (restore, apply_to_diffusers):
        change(model.eval())
        with torch.no_grad():
            model.set_adapter("second")
            results.append([run_diffusers("5b", model, given)])
            model.disable_adapters()
            results[-1].append(run_diffusers("5b", model, given))
            model.enable_adapters()
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() < 1e-5 * a.norm()
    assert not torch.equal(*results[0])


@NEEDS_CPU_KERNELS
def test_peft_model() -> None:
    from peft import get_peft_model

    model = get_peft_model(diffusers_model("2b"), adapter(0.0)).train()
    compare("2b", model)
    apply_to_diffusers(model)
    with Calls() as calls:
        run_diffusers("2b", model, inputs("2b"))
    # One call for q, k and v together
    assert calls.seen["add_low_rank"] == 2 * 4


def run_with(model: nn.Module, tables: object, **options: object) -> Tensor:
    given = inputs("5b")
    frames = given["latents"].transpose(1, 2)
    options |= {"image_rotary_emb": tables, "return_dict": False}
    return model(frames, given["text"], given["timesteps"], **options)[0]


def tables_of(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return cos and sin [4 x 4 x 6 tokens, 64] of angles that are changed."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    cos, sin = get_3d_rotary_pos_embed(64, ((0, 0), (30, 45)), (4, 6), 4)
    angles = change(torch.atan2(sin, cos))
    return angles.cos(), angles.sin()


# {case: (change of a pipeline's angles [96, 64], whether the kernel can take the result)}
ANGLES = {
    "those of a pipeline": (lambda angles: angles, True),
    "stretched in time": (lambda angles: angles * (1 + (torch.arange(64) < 16)), True),
    "of another order of tokens": (lambda angles: angles.flip(0).roll(5, 0), False),
    "unlike in a pair": (lambda angles: angles + torch.arange(64) % 2, False),
}


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("kind", ANGLES)
def test_any_rotation_is_honoured(kind: str) -> None:
    change, is_taken = ANGLES[kind]
    model, tables = diffusers_model("5b"), tables_of(change)
    wanted = run_with(model, tables)
    apply_to_diffusers(model)
    with Calls() as calls, torch.no_grad():
        output = run_with(model, tables)
    assert (output - wanted).norm() < 1e-5 * wanted.norm()
    assert calls.seen["qk_norm_rope3d"] == 2 * is_taken
    # torch.compile cannot look at values: what is no rotation of axes is not rotated wrongly.
    taken = torch.compile(_with_rotation, backend="eager")(tables, (4, 4, 6), 64, tables[0].device)
    assert taken[2].table.isnan().all() != is_taken


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("has_adapters", [False, True])
def test_torch_compile(has_adapters: bool) -> None:
    """A block is one graph of the same kernels."""
    model = diffusers_model("5b").train()
    if has_adapters:
        model.add_adapter(adapter(0.0))
        model.requires_grad_(True)
    wanted = answer("5b", model, inputs("5b"))
    apply_to_diffusers(model)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _):
        graphs.append(Counter(str(n.target) for n in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model.transformer_blocks[0].compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    assert_close("5b", answer("5b", model, inputs("5b")), wanted)
    torch._dynamo.reset()
    forward, backward = graphs
    counts = {"adaptive_layernorm": 3, "gelu": 1, "qk_norm_rope3d": 1}
    if has_adapters:
        counts["add_low_rank"] = 4
    for op, count in counts.items():
        assert forward[f"cogfast.{op}.default"] == count
        assert backward[f"cogfast.{op}_backward.default"] == (count if op != "add_low_rank" else 0)


def test_what_users_exchange_stays_theirs() -> None:
    """A processor, hooks, a forward of the instance, options of attention: all run as without kernels."""
    from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0

    class Processor(CogVideoXAttnProcessor2_0):
        def __call__(self, *arguments, **named):
            seen.append("processor")
            return super().__call__(*arguments, **named)

    seen: list[str] = []
    model, tables = diffusers_model("5b"), tables_of(lambda angles: angles)
    apply_to_diffusers(model)
    first, second = model.transformer_blocks
    first.attn1.set_processor(Processor())
    second.norm2.norm.register_forward_hook(lambda *_: seen.append("norm"))
    first.ff.net[2].register_forward_pre_hook(lambda *_: seen.append("fc2"))
    wrapped = second.attn1.to_k.forward
    second.attn1.to_k.forward = lambda x: seen.append("to_k") or wrapped(x)
    mask = torch.zeros(2, 1, 106)
    mask[..., :3] = -1e4
    options = ({}, {"attention_kwargs": {"attention_mask": mask}})
    ours = [run_with(model, tables, **each) for each in options]
    assert Counter(seen) == {"processor": 2, "norm": 4, "fc2": 2, "to_k": 2}
    restore(model)
    for output, each in zip(ours, options, strict=True):
        wanted = run_with(model, tables, **each)
        assert (output - wanted).norm() < 1e-5 * wanted.norm()
    assert (ours[0] - ours[1]).norm() > 1e-3 * ours[0].norm()


def test_a_copy_computes_with_its_own_weights() -> None:
    model, given = diffusers_model("2b"), inputs("2b")
    apply_to_diffusers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        assert run_diffusers("2b", model, given).count_nonzero() == 0
        assert run_diffusers("2b", other, given).count_nonzero() > 0
    assert type(other).__name__ == "CogVideoXTransformer3DModel"
    assert type(other.transformer_blocks[0]).__name__ == "CogVideoXBlock"


def test_other_classes_are_refused() -> None:
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

    class Derived(CogVideoXTransformer3DModel):
        pass

    model = diffusers_model("2b")
    derived, sharded = copy.deepcopy(model), copy.deepcopy(model)
    derived.__class__ = Derived
    # FSDP2 gives modules a subclass, FSDP and DDP a parent.
    sharded.transformer_blocks[1].__class__ = type("FSDPCogVideoXBlock", (CogVideoXBlock,), {})
    wrapped = copy.deepcopy(model)
    wrapped.transformer_blocks[0] = nn.Sequential(wrapped.transformer_blocks[0])
    refused = {
        "Sequential is not diffusers' CogVideoXTransformer3DModel": nn.Sequential(model),
        "OptimizedModule is not": torch.compile(model),
        "Derived is not": derived,
        "FSDPCogVideoXBlock is not diffusers' CogVideoXBlock": sharded,
        "Sequential is not diffusers' CogVideoXBlock": wrapped,
    }
    for message, given in refused.items():
        types = [type(m) for m in given.modules()]
        for function in (apply_to_diffusers, restore):
            with pytest.raises(ValueError, match=f"{function.__name__}: {re.escape(message)}") as e:
                function(given)
            assert "\n" not in str(e.value) and "before DDP, FSDP" in str(e.value)
        assert [type(m) for m in given.modules()] == types  # nothing was changed halfway
