"""The predicted memory of a run: a block against the ops that it runs, ZeRO's state against its rules,
encoders against diffusers and transformers, and the changes that make a run fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cogfast.__main__ import main
from cogfast.config import Config, load_config
from cogfast.diagnostics.plan import describe_plan
from cogfast.schema.arguments import TrainArguments
from cogfast.train.assembly import DTYPES
from cogfast.train.distributed.parallelize import parallelize
from cogfast.train.distributed.tensor_parallel import ParallelGroup
from cogfast.train.plan.activations import LADDER, LayerShape
from cogfast.train.plan.encoders import T5_XXL, t5_numel
from cogfast.train.plan.fixes import find_fixes
from cogfast.train.plan.gpus import parse_gpu
from cogfast.train.plan.memory import (
    GIB,
    MemoryPlan,
    choose_policies,
    meta_transformer,
    plan_memory,
    setup_of,
    training_phase,
    usable,
)
from cogfast.train.video_size import largest_size
from tests.support.tiny_run import ROOT
from tests.train.plan.step_trace import trace_step

CONFIGS = ROOT / "configs"
H100 = parse_gpu("h100-80")[1]
CACHED = ("args.latent_cache=cache", "args.activation_checkpointing=full")
MLP = "model.network_config.params.modules.lora_config.params.target_modules=[to_q,to_k,to_v,ff.net.0.proj,ff.net.2]"


def config_of(name: str, *words: str, lora: bool = False) -> tuple[Config, TrainArguments]:
    files = [CONFIGS / f"cogvideox{name}.yaml", CONFIGS / "sft.yaml"]
    files[1:1] = [CONFIGS / "lora.yaml"] if lora else []
    config = load_config(files, ["args.train_data=[clips]", *words])
    return config, TrainArguments.from_config(config)


def plan_of(name: str, *words: str, lora: bool = False, card: int | None = None, gpus: int = 1):
    config, args = config_of(name, *words, lora=lora)
    return plan_memory(setup_of(config, args, gpus), card)


class Group:
    """Stands for a process group: on the meta device, collectives only need a name."""

    group_name = "0"


@pytest.mark.parametrize(
    ("name", "lora", "words", "size"),
    [
        ("_5b", False, (), 1),
        ("_2b", False, (), 2),
        ("1.5_5b", True, (), 1),
        ("_5b", True, (MLP,), 1),
        ("_5b", True, (), 2),
        ("_5b", True, ("args.quantize_base=int8",), 1),
        ("_5b", True, ("args.quantize_base=fp8",), 1),
    ],
    ids=[
        "5b",
        "2b in two parts",
        "1.5 lora",
        "lora of the mlp",
        "lora in two parts",
        "lora in int8",
        "lora in fp8",
    ],
)
def test_a_block_takes_what_its_ops_take(
    name: str, lora: bool, words: tuple[str, ...], size: int
) -> None:
    """Every storage of a forward and backward pass is counted, on the meta device."""
    config, args = config_of(name, f"args.model_parallel_size={size}", *words, lora=lora)
    with torch.device("meta"):
        transformer = meta_transformer(config, config_of(name, *words, lora=lora)[1])
    if size > 1:
        group: Any = Group()
        parallelize(transformer, ParallelGroup(0, size, group))
    video = largest_size(config, transformer.config)
    layer = LayerShape.of(
        transformer, video.num_tokens(transformer.config), DTYPES[args.precision].itemsize
    )
    for policy in LADDER:
        block = trace_step(transformer, video, 1, policy).block
        assert block.kept == pytest.approx(layer.kept(policy), rel=0.03), policy
        peak = max(event.peak for event in block.backward)
        # LoRA blocks that keep everything do not hold their input for a recomputation.
        is_less = lora and policy == "none"
        assert peak <= layer.live * 1.03, policy
        assert peak >= layer.live * (0.7 if is_less else 0.96), policy


def test_state_of_the_optimizer_by_stage_and_ranks() -> None:
    """Counted by hand: 2 + 2 bytes of weights and gradients, 16 of float32 state, for 2B in fp16."""
    numel = 1_693_775_960
    plan = plan_of("_2b", *CACHED)
    parts = dict(plan.phases[0].parts)
    assert plan.setup.model.num_trained == pytest.approx(numel, rel=0.001)
    trained = plan.setup.model.num_trained
    assert parts["master weights"] == parts["EMA"] == 4 * trained
    assert parts["moments"] == 8 * trained
    step = next(phase for phase in plan.phases if phase.name == "optimizer step")
    assert step.parts["gradients"] == 2 * trained
    eight = plan_of("_2b", *CACHED, gpus=8).phases[0].parts
    assert eight["moments"] == pytest.approx(parts["moments"] / 8, rel=1e-6)
    assert eight["weights"] == parts["weights"]
    whole = plan_of("_2b", *CACHED, "deepspeed.zero_optimization.stage=3", gpus=8).phases[0].parts
    assert whole["weights"] < parts["weights"] / 7
    adam = "deepspeed.optimizer.type=AdamW"
    assert plan_of("_2b", *CACHED, adam).phases[0].parts["EMA"] == 0


@pytest.mark.parametrize("words", [(), ("args.model_parallel_size=2",)], ids=["whole", "parts"])
def test_a_larger_policy_takes_more(words: tuple[str, ...]) -> None:
    config, args = config_of("_5b", "args.latent_cache=cache", *words)
    setup = setup_of(config, args, 2)
    totals = [training_phase(setup, (policy,) * 42).total for policy in LADDER]
    assert totals == sorted(totals) and totals[0] < totals[-1]


def test_auto_takes_what_fits_and_no_more() -> None:
    config, args = config_of("_5b", "args.latent_cache=cache", lora=True)
    setup = setup_of(config, args, 1)
    for gib in (20, 30, 60, 79, 139):
        policies = choose_policies(setup, gib * GIB)
        total = training_phase(setup, policies).total
        if set(policies) != {"full"}:
            assert total <= gib * GIB
        # One more layer on the next rung would not fit.
        if set(policies) != {"none"}:
            rung = LADDER[LADDER.index(policies[0]) + 1]
            at = max(i for i, policy in enumerate(policies) if policy == policies[0])
            more = (*policies[:at], rung, *policies[at + 1 :])
            assert training_phase(setup, more).total > gib * GIB
    assert set(choose_policies(setup, None)) == {"none"}


def test_encoders_count_where_they_are_used() -> None:
    parts = lambda *words, **kind: dict(plan_of("_5b", *words, **kind).phases[0].parts)
    t5, vae = 2 * t5_numel(T5_XXL)[0], 2 * 215_583_907
    assert parts("args.activation_checkpointing=full")["encoders"] == t5 + vae
    assert parts(*CACHED)["encoders"] == 0
    # Image-to-video encodes the noised first frame in every step.
    image = plan_of("_5b_i2v", *CACHED)
    assert image.phases[0].parts["encoders"] == vae
    names = [
        phase.name
        for phase in plan_of("_5b", *CACHED, "args.eval_interval=5", "args.eval_prompts=[a]").phases
    ]
    assert names == ["training", "optimizer step", "evaluation", "decoding"]


def test_numbers_of_t5() -> None:
    """4,762,310,656 is what transformers counts for T5EncoderModel of t5-v1_1-xxl."""
    assert t5_numel(T5_XXL) == (4_762_310_656, 24 * 10240 * 4096)


def test_upstream_files_plan_without_error(sat_configs: Path) -> None:
    models = sorted(sat_configs.glob("cogvideox*.yaml"))
    assert len(models) == 8
    training = [[model, sat_configs / "sft.yaml"] for model in models]
    for files in (*training, models[:1], [models[0], sat_configs / "inference.yaml"]):
        text = describe_plan(load_config(files), "h100-80", 1)
        assert "peak: " in text and max(map(len, text.splitlines())) <= 120


def fixes_of(
    *words: str, gpus: int = 1, lora: bool = False
) -> tuple[MemoryPlan, dict[str, MemoryPlan]]:
    config, args = config_of("_5b", *words, lora=lora)
    plan = plan_memory(setup_of(config, args, gpus), H100)
    return plan, {fix.words: fix.plan for fix in find_fixes(config, args, plan)}


def test_fixes_fit_and_their_words_are_true() -> None:
    """A fix in the words of the command line gives the peak that was named."""
    plan, fixes = fixes_of("args.activation_checkpointing=none", "args.latent_cache=cache", gpus=8)
    assert not plan.fits and 1 <= len(fixes) <= 3
    for words, fixed in fixes.items():
        assert fixed.peak <= usable(H100)
        given = [word for word in words.split() if word.startswith(("args.", "deepspeed."))]
        again = plan_of(
            "_5b",
            "args.latent_cache=cache",
            "args.activation_checkpointing=none",
            *given,
            gpus=8,
            card=H100,
            lora="lora.yaml" in words,
        )
        assert again.peak == pytest.approx(fixed.peak, rel=0.001), words


def test_more_gpus_and_adapters_are_named_for_a_model_that_does_not_fit() -> None:
    plan, fixes = fixes_of()
    assert not plan.fits and len(fixes) == 3
    assert any("GPUs" in words for words in fixes) and any("lora.yaml" in words for words in fixes)
    fitting, none = fixes_of("args.latent_cache=cache", lora=True)
    assert fitting.fits and not none


def plan_command(*words: str) -> int:
    return main(
        ["plan", "--base", str(CONFIGS / "cogvideox_5b.yaml"), str(CONFIGS / "sft.yaml"), *words]
    )


def test_the_command_prints_json(capsys: pytest.CaptureFixture) -> None:
    assert plan_command("--gpu", "h200", "--gpus", "8", "--tp", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 8 and found["model_parallel_size"] == 2 and found["fits"] is True
    assert found["peak"] == max(sum(parts.values()) for parts in found["phases"].values())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--gpu", "h1000"),
            "--gpu 'h1000' is not known; did you mean h100",
        ),
        (
            ("--gpu", "h100"),
            "--gpu 'h100' is not known; did you mean h100-pcie or h100-nvl or h100-80?",
        ),
        (
            ("--gpu", "mine"),
            "--gpu 'mine' is not known; use b200, h200, .* 4090, or its memory in GiB",
        ),
        (("--gpus", "3", "--tp", "2"), "model_parallel_size=2 must divide the number of ranks, 3"),
        (("--tp", "5"), "args.model_parallel_size=5 must divide num_attention_heads=48"),
        (("--gpus", "0"), "'0' must be a whole number from 1"),
    ],
    ids=["almost a gpu", "a part of its name", "gpu", "ranks", "heads", "none"],
)
def test_wrong_words(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture) -> None:
    assert plan_command(*words) == 2
    assert re.search(text, capsys.readouterr().err)


def test_a_tight_card_is_named(capsys: pytest.CaptureFixture) -> None:
    """5B keeps a bf16 gradient of each of its 5,570.3 M trained numbers: 10.4 GiB."""
    step = plan_of("_5b", *CACHED).step_peak / GIB
    shown = {}
    for free in (1, 9, 12):  # GiB beside the peak
        assert plan_command("--gpu", str((step + free) / 0.96), *CACHED) == 0
        shown[free] = "It is tight: gaps" in (text := capsys.readouterr().out)
        assert not shown[free] or "up to 10.4 GiB more" in text
    assert shown == {1: True, 9: True, 12: False}


def test_without_a_gpu_the_peak_stands_alone(capsys: pytest.CaptureFixture) -> None:
    assert plan_command() == 0
    assert "There is no GPU here to compare with; --gpu NAME" in capsys.readouterr().out
