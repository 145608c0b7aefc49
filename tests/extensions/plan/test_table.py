"""The table of layouts: bytes of links by hand, rows as `cogfast plan` has them."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cogfast.cli.options import parse_plan
from cogfast.config import Config
from cogfast.extensions.plan.command import _KEYS, describe_plan, describe_table, find_layouts
from cogfast.extensions.plan.seconds import predict_step
from cogfast.extensions.plan.zero import num_trained
from tests.extensions.plan.test_memory import CACHED, config_of
from tests.extensions.plan.test_seconds import H100, plan_of
from tests.support.refusals import Refusal, assert_refused, refusals

BATCH = "deepspeed.train_batch_size=128"


@cache
def config(*words: str) -> Config:
    return config_of("_2b", *CACHED, BATCH, *words)[0]


def described(config: Config, gpu: str, worlds: tuple[int, ...]) -> str:
    run = config.run
    return describe_table(find_layouts(run, gpu, worlds), gpu)


@cache
def found() -> dict[int, Any]:
    layouts = find_layouts(config().run, "h100-80", (8, 16, 128))
    assert not any(isinstance(each, str) for each in layouts.values())
    return layouts


@pytest.mark.parametrize("world", [8, 16, 1024])
def test_bytes_of_links_are_those_of_rings(world: int) -> None:
    """An all-reduce sends 2 (n-1)/n, an all-gather (n-1)/n, and one of a machine's eight GPUs leaves it."""
    plan = plan_of("all weights", "none", data_size=world)
    step = predict_step(plan, H100)
    assert step is not None
    total = 4 * num_trained(plan.setup.transformer) * 3 * (world - 1) / world
    network = total / 8 if world > 8 else 0
    links = step.links
    assert (links.machine_bytes, links.network_bytes) == pytest.approx((total - network, network))
    assert links.machine_seconds == pytest.approx((total - network) / (0.8 * 450e9))
    assert links.network_seconds == pytest.approx(network / 45e9)
    assert links.exposed == links.seconds  # without overlap_comm


def test_tensor_parallel_rings_share_the_network_cards() -> None:
    """With two GPUs a copy, a machine has two rings, each with four of its GPUs."""
    plan = plan_of("all weights", "none", data_size=32)
    step = predict_step(
        replace(
            plan, setup=replace(plan.setup, args=plan.setup.args.changed(model_parallel_size=2))
        ),
        H100,
    )
    assert step is not None
    total = 4 * num_trained(plan.setup.transformer) * 3 * 31 / 32
    assert step.links.network_bytes == pytest.approx(total / 4)
    assert step.links.network_seconds == pytest.approx(total / 4 / 45e9)
    # Four cards of 45 GB/s are slower than NVLink.
    assert step.links.seconds == pytest.approx(total / 180e9)


def test_layouts_have_one_global_batch_and_are_those_of_the_plan() -> None:
    for world, layouts in found().items():
        times = [each.step.seconds for each in layouts]
        assert times == sorted(times)
        for each in layouts:
            data, context, tensor = each.mesh
            assert data * context * tensor == world and 30 % (context * tensor) == 0
            assert each.samples == 128 == data * each.plan.setup.rules.accumulation
            samples = each.step.samples_per_second * each.step.seconds
            assert samples == pytest.approx(128)
            waits = replace(each, step=replace(each.step, transfers=0.5))  # for the host
            assert sum(waits.parts) == pytest.approx(waits.step.seconds)
    layout = found()[16][-1]
    args = layout.plan.setup.args
    words = [f"{args.key(name)}={getattr(args, name)}" for name in _KEYS]
    text = describe_plan(config(*words).run, "h100-80", 16)
    dp, cp, tp = layout.mesh
    assert f"on: 16 GPUs (dp {dp} x cp {cp} x tp {tp})" in text
    assert f"\npeak: {layout.plan.peak / 2**30:.2f} GiB" in text
    assert f"\nstep: {layout.step.seconds:.2f} s (matmul {layout.step.matmul:.2f}" in text
    assert f"MFU {layout.step.mfu:.1%}" in text


def test_the_table_is_narrow_and_predicted() -> None:
    text = described(config(), "h100-80", (8, 16, 256))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120 and "All figures are predicted" in text
    first = next(line for line in lines if re.match(r" *8 +8 x 1 x 1 ", line))
    assert f"{found()[8][0].step.seconds:.3f}" in first
    # 256 GPUs share 128 samples.
    assert re.search(r"^ *256 +128 x 2 x 1 +1 +128 ", text, re.MULTILINE)


def test_the_predicted_scaling_is_near_a_published_one() -> None:
    """torchtitan, Llama 3.1 8B with FSDP, 16,384 tokens a GPU, H100s with 400 Gbit/s each: 6,667 tokens/s
    and GPU on 8, 6,514 on 128 (benchmarks/llama3_h100_202412_torchtitan.md). 5B has 17,776 a GPU."""
    zero3 = config_of("_5b", *CACHED, "args.zero_stage=3")[0]
    rates = []
    for world, layouts in find_layouts(zero3.run, "h100-80", (8, 128)).items():
        layout = next(
            each for each in layouts if not isinstance(each, str) and each.mesh[0] == world
        )
        rates.append(layout.step.samples_per_second / world)
    assert rates[1] / rates[0] == pytest.approx(6514 / 6667, abs=0.05)


@refusals(Path(__file__).with_name("refusals.txt"), "a table that cannot be made")
def test_a_table_that_cannot_be_made(refusal: Refusal) -> None:
    gpu, world, *words = refusal.words
    call = lambda: described(config(*words), gpu, (int(world),))
    assert_refused(call, refusal.line)


@refusals(Path(__file__).with_name("refusals.txt"), "options of the table")
def test_options_of_the_table(refusal: Refusal) -> None:
    words = ["--base", "cogvideox_2b.yaml", "sft.yaml", *refusal.words]
    assert_refused(lambda: parse_plan(words), refusal.line)


def test_hpz_is_refused() -> None:
    key = "deepspeed.zero_optimization.zero_hpz_partition_size"
    line = f"{key}=8: <...> is not supported; remove it"
    assert_refused(lambda: config_of("_2b", f"{key}=8"), line)
    config_of("_2b", f"{key}=1")
