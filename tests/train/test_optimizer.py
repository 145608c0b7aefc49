"""Parameter groups against SAT's, optimizers by name, FusedEmaAdam inside DeepSpeed's ZeRO."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.model.transformer import freeze
from cogfast.train.optimizer import build_optimizer, parameter_groups
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.tiny_run import launch_ranks
from tests.support.tiny_transformers import tiny

GROUPS = [{"params": [torch.zeros(2, requires_grad=True)]}]
SFT = {  # sft.yaml's section
    "type": "sat.ops.FusedEmaAdam",
    "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-4},
}


@pytest.mark.parametrize(
    ("case", "family", "lora_rank"),
    [("t2v_2b", "2b", None), ("t2v_5b", "5b", None), ("i2v_5b", "5b_i2v", None)]
    + [("t2v_2b_lora", "2b", 4)],
)
def test_groups_equal_upstream(golden, case, family, lora_rank):
    from cogfast.model.transformer import assemble_transformer, freeze
    from cogfast.model.weights.names import sat_name
    from tests.support.tiny_transformers import FAMILY

    config = replace(FAMILY[family], num_layers=3, lora_rank=lora_rank)
    transformer = assemble_transformer(config)
    freeze(transformer, ["all"] if lora_rank else [], is_lora_only=False)
    names = {id(p): sat_name(n) for n, p in transformer.named_parameters()}
    ours = [
        (group.get("weight_decay", "optimizer default"), {names[id(p)] for p in group["params"]})
        for group in parameter_groups(transformer)
    ]
    stored = json.loads((golden / "lr_schedule" / "param_groups.json").read_text())[case]
    expected = [
        (0.0 if g["weight_decay"] == "0" else g["weight_decay"], set(g["params"])) for g in stored
    ]
    assert ours == expected


def test_groups_go_by_module_not_by_name():
    """LayerNorms never decay, whatever their names; a matrix named "norm" does; each is in one group."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight_of_things = nn.LayerNorm(3)
            self.norm = nn.Linear(3, 3)
            self.tied = self.norm
            self.table = nn.Parameter(torch.zeros(2))
            self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    model = Odd()
    decayed, undecayed = parameter_groups(model)
    assert [id(p) for p in decayed["params"]] == [id(model.table), id(model.norm.weight)]
    assert undecayed["weight_decay"] == 0.0 and "weight_decay" not in decayed
    norm = model.weight_of_things
    expected = {id(norm.weight), id(norm.bias), id(model.norm.bias)}
    assert {id(p) for p in undecayed["params"]} == expected


def test_sft_section_builds_fused_ema_adam():
    optimizer = build_optimizer(SFT, GROUPS)
    assert type(optimizer) is FusedEmaAdam
    group = optimizer.param_groups[0]
    assert group["lr"] == 1e-5 and group["betas"] == (0.9, 0.95) and group["weight_decay"] == 1e-4


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, FusedEmaAdam),
        ({"params": {"use_num_upates": False}}, FusedEmaAdam),
        ({"type": "cogfast.kernels.fused_ema_adam.FusedEmaAdam"}, FusedEmaAdam),
        ({"type": "Adam", "params": {"torch_adam": True}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "AdamW", "params": {"betas": [0.9, 0.95]}}, torch.optim.AdamW),
        ({"type": "torch.optim.SGD", "params": {"momentum": 0.9}}, torch.optim.SGD),
    ],
    ids=["default", "sats-spelling", "ours", "deepspeed-adam", "plain-adam", "adamw", "torch"],
)
def test_optimizers_by_name(section, kind):
    assert type(build_optimizer(section, GROUPS)) is kind


@pytest.mark.parametrize(
    ("params", "is_fused"),
    [({}, True), ({"fused": False}, False), ({"foreach": True}, None), ({"foreach": False}, None)],
)
def test_torchs_adam_is_fused_unless_another_form_is_asked_for(params, is_fused):
    for kind in ("torch.optim.Adam", "torch.optim.AdamW", "AdamW"):
        optimizer = build_optimizer({"type": kind, "params": params}, GROUPS)
        assert optimizer.defaults["fused"] is is_fused
        assert optimizer.defaults["foreach"] is params.get("foreach")


def test_deepspeed_adam_takes_the_same_steps_as_fused_ema_adam():
    one, two = (torch.full((3,), 2.0, requires_grad=True) for _ in range(2))
    params = {"lr": 0.1, "weight_decay": 0.5}
    first = build_optimizer({"type": "Adam", "params": params}, [{"params": [one]}])
    second = build_optimizer({"params": params}, [{"params": [two]}])
    for optimizer, p in ((first, one), (second, two)):
        for _ in range(3):
            p.grad = p.detach() - 1
            optimizer.step()
    torch.testing.assert_close(one, two)


@refusals(Path(__file__).with_name("refusals_optimizers.txt"))
def test_bad_sections(refusal: Refusal):
    section = yaml.safe_load(" ".join(refusal.words))
    assert_refused(lambda: build_optimizer(section, GROUPS), refusal.line)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator) for _ in range(5)]


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_kernels_reach_our_own_optimizer(kernels: str) -> None:
    groups = lambda: [{"params": [torch.zeros(1, requires_grad=True)]}]
    assert build_optimizer({}, groups(), kernels).kernels == kernels
    build_optimizer({"type": "AdamW"}, groups(), kernels)


FAST = SFT | {"params": {**SFT["params"], "lr": 0.01}}


def _plain_run() -> tuple[nn.Module, FusedEmaAdam]:
    model = _network()
    optimizer = build_optimizer(FAST, parameter_groups(model))
    for x in _batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _zero2_run() -> None:
    """Check that ZeRO-2's flat partitions give the plain run's numbers. Runs in a new process."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_optimizer_state

    # Its build takes longer than the test; gloo does the work of it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = _network()
    optimizer = build_optimizer(FAST, parameter_groups(model))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 0.0,  # unsaid, DeepSpeed clips to a norm of 1
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for x in _batches():
        engine.backward(engine(x).square().mean())
        engine.step()
    # DeepSpeed links the state after the first group's step, when the second has none yet.
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected, plain = _plain_run()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        shadow = safe_get_full_optimizer_state(p, "shadow")
        torch.testing.assert_close(shadow, plain.state[q]["shadow"], rtol=1e-6, atol=1e-7)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
    assert len(optimizer.state) == 2  # one flat partition per group
    dist.barrier()
    dist.destroy_process_group()
    print("ZeRO-2 equals the plain run")


def test_zero2_equals_a_plain_loop():
    assert "ZeRO-2 equals the plain run" in launch_ranks(1, __file__)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    _zero2_run()


def test_muon_without_a_matrix_is_refused() -> None:
    transformer = tiny("5b")
    freeze(transformer, (), False, ["modulation"])
    assert_refused(
        lambda: parameter_groups(transformer, is_for_muon=True),
        "deepspeed.optimizer.type=Muon: the run trains none of the matrices that it orthogonalizes",
    )
