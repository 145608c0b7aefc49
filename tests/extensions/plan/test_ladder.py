"""args.fit=auto and activation checkpointing `auto`: runs fit, at little cost, and train the same."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.steps.step_models import CONFIG_2B, CONFIG_5B
from cogfast.core.live_bytes import LiveBytes
from cogfast.extensions.plan import ladder, out_of_memory
from cogfast.extensions.plan.encoders import Encoders
from cogfast.extensions.plan.gpus import parse_gpu
from cogfast.extensions.plan.ladder import Fitted, climb, policies_that_fit
from cogfast.extensions.plan.memory import (
    GIB,
    MARGIN,
    Setup,
    plan_memory,
    setup_of,
    training_phase,
    usable,
)
from cogfast.extensions.plan.trace import Traces, scratch
from cogfast.extensions.plan.zero import ZeroRules, num_trained
from cogfast.model.transformer import assemble_transformer
from cogfast.train.activation_checkpointing import LADDER, Policy, apply_checkpointing
from cogfast.train.keys import TrainKeys
from cogfast.train.run import opened as opened_run
from cogfast.train.video_size import LatentSize
from tests.support.refusals import assert_refused
from tests.support.runs import Run, run_of
from tests.support.tiny_run import ROOT
from tests.support.tiny_transformers import tiny

FILES = [ROOT / "configs" / name for name in ("cogvideox_5b.yaml", "lora.yaml", "sft.yaml")]
STOCK = run_of(*FILES)
CACHED = "args.latent_cache=cache"
NONE = "args.activation_checkpointing=none"
BATCH = "args.batch_size=4"


def opened(*words: str, lora: bool) -> opened_run.Run:
    files = FILES if lora else [FILES[0], FILES[2]]
    return run_of(*files).config("args.train_data=[clips]", "args.fit=auto", *words).run


def fitted(
    gib: float, *words: str, lora: bool = True, ranks: int = 1, gpus: bool = False
) -> Fitted:
    run = opened(*words, lora=lora)
    change = partial(setup_of, run)
    return climb(plan_memory(change(ranks), int(gib * GIB)), change, has_gpus=gpus)


def test_a_run_that_fits_is_not_changed() -> None:
    found = fitted(141, CACHED, "args.activation_checkpointing=full")
    assert found.plan.fits and not found.changes


@pytest.mark.parametrize("lora", [pytest.param(True, marks=pytest.mark.soak), False])
def test_the_changed_configuration_takes_what_was_planned(lora: bool) -> None:
    """The plan of the changed configuration, made from nothing, equals the one that was compared."""
    seen = []
    for gib in (60, 40, 24, 12) if lora else (141, 100):
        found = fitted(gib, CACHED, BATCH, NONE, lora=lora)
        assert found.plan.fits and found.changes, gib
        changed = opened(CACHED, BATCH, NONE, lora=lora).with_values(found.values, "test")
        again = plan_memory(setup_of(changed, 1), found.plan.card)
        assert again.peak == found.plan.peak <= usable(int(gib * GIB))
        args = found.plan.setup.args
        assert args.batch_size * args.gradient_accumulation_steps == 4
        seen.append(found)
    assert [len(found.changes) for found in seen] == sorted(len(f.changes) for f in seen)


def test_no_change_is_made_in_vain() -> None:
    """Without any one of the changes the run does not fit."""
    words = [CACHED, BATCH, NONE]
    found = fitted(12, *words)
    assert len(found.changes) >= 3
    for change in found.changes:
        others = [word for each in found.changes if each != change for word in each.split()]
        config = STOCK.config("args.train_data=[clips]", *words[:1], NONE, BATCH, *others)
        plan = plan_memory(setup_of(config.run, 1), found.plan.card)
        assert not plan.fits, change


def test_more_gpus_come_last() -> None:
    """Only where the plan may name them, since a run cannot add them."""
    found = fitted(40, CACHED, lora=False, gpus=True)
    assert found.plan.fits and found.changes[-1].endswith(" GPUs")
    without = fitted(40, CACHED, lora=False)
    assert not without.plan.fits and not any("GPUs" in change for change in without.changes)


@pytest.mark.soak
def test_nothing_fits(answer) -> None:
    found = fitted(2, CACHED)
    assert not found.plan.fits
    words = ["--gpu", "2", "args.train_data=[clips]", "args.fit=auto", CACHED]
    text = answer(*STOCK.command(*words, name="plan"))
    assert "it does not fit" in text
    assert "No change that is tried makes it fit" in text and "args.fit=auto" not in text


def test_the_plan_names_the_changes(answer) -> None:
    words = ["--gpu", "40", "args.train_data=[clips]", CACHED, NONE]
    shown = answer(*STOCK.command(*words, name="plan"))
    assert "\n  args.activation_checkpointing=auto\n" in shown
    printed = answer(*STOCK.command(*words, "args.fit=auto", name="plan"))
    assert "it fits." in printed
    assert "args.fit=auto: args.activation_checkpointing=auto\n" in printed


def test_a_model_that_does_not_fit_has_a_way(answer) -> None:
    """Full training of 5B on one H100, clips encoded in each step."""
    words = ("--base", FILES[0], FILES[2], "--gpu", "h100-80", "args.train_data=[clips]")
    printed = answer("plan", *words)
    assert "it does not fit" in printed and "This makes it fit (" in printed
    assert parse_gpu("h100-80")[1] == int(79.1 * GIB)
    assert parse_gpu("24")[1] == 24 * GIB
    # A card without an entry must not become a card of 3090 GiB.
    line = "--gpu '3090' is not known; use <...> or its memory in GiB"
    assert_refused(lambda: parse_gpu("3090"), line)


def test_a_run_makes_the_changes_and_trains_as_before(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    run = run.with_args(train_iters=2)
    expected = run.into(tmp_path / "plain").train().losses
    plain = run.config()
    # A little less than the run may use.
    card = int((plan_memory(setup_of(plain.run, 1), None).peak - 2**12) / (1 - MARGIN))
    monkeypatch.setattr(ladder, "free_memory", lambda device: (card, card))
    fitted = run.into(tmp_path / "fitted").train("args.fit=auto")
    assert fitted.losses == pytest.approx(expected, rel=1e-5)
    lines = [r.getMessage() for r in log.records if "args.fit=auto" in r.getMessage()]
    assert len(lines) >= 2 and lines[-1].startswith("args.fit=auto: fits: ")
    # The run's folder has the changes, so that a resumed run begins with them.
    saved = run_of(fitted.path / "training_config.yaml").config()
    assert plan_memory(setup_of(saved.run, 1), card).fits


def test_a_run_that_cannot_fit_ends_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "free_memory", lambda device: (2**20, 2**20))
    line = "args.fit=auto: the run takes <...> use more GPUs, fewer"
    assert_refused(lambda: run.train("args.fit=auto"), line)


def test_the_plan_counts_what_waits_in_host_memory() -> None:
    words = ["args.train_data=[clips]", CACHED, "args.offload_blocks=42"]
    config = STOCK.config(*words)
    plan = plan_memory(setup_of(config.run, 1), None)
    m = 3072  # width; qkv, output, fc1, fc2 and the modulation of a block
    linears = m * 3 * m + m * m + 2 * m * 4 * m + 512 * 12 * m
    assert plan.setup.host_parts(plan.policies)["blocks"] == 42 * 2 * linears
    full = run_of(FILES[0], FILES[2]).config(*words[:2], "args.ema_device=cpu")
    plan = plan_memory(setup_of(full.run, 1), None)
    parts = plan.setup.host_parts(plan.policies)
    assert parts["EMA"] == 4 * num_trained(plan.setup.transformer) and parts["blocks"] == 0


def test_a_machine_with_too_little_memory_for_its_ranks_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = SimpleNamespace(total=64 * GIB)
    monkeypatch.setattr(out_of_memory.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    out_of_memory.warn_of_host_memory({"blocks": 5 * GIB, "EMA": 2 * GIB})
    assert not caplog.records
    out_of_memory.warn_of_host_memory({"blocks": 8 * GIB, "EMA": 2 * GIB})
    text = caplog.records[0].getMessage()
    assert "8 ranks" in text and "80.0 GiB" in text and "blocks 8.0, EMA 2.0" in text


# --- activation checkpointing `auto` ---


NUM_LAYERS = 5
KINDS = {"2b": {}, "lora": {"lora_rank": 128}}
# From the policies that recompute most to those that recompute least
CANDIDATES: list[tuple[Policy, ...]] = [("full",) * NUM_LAYERS] + [
    (below,) * (NUM_LAYERS - number) + (above,) * number
    for below, above in pairwise(LADDER)
    for number in range(1, NUM_LAYERS + 1)
]
AUTO = TrainKeys(activation_checkpointing="auto")


class OtherRanks:
    """Stands for the groups of a rank with a GPU; the other ranks have chosen `others`."""

    device = torch.device("cuda")

    def __init__(self, *others: tuple[Policy, ...]) -> None:
        self.others = others

    def gather(self, value: tuple[Policy, ...]) -> list[tuple[Policy, ...]]:
        return [value, *self.others]


def setup_of_steps(kind: str, sum_bytes: int = 0) -> Setup:
    """Return the setup of a few layers of a real model, without ZeRO: gradients stay where autograd put them.

    sum_bytes: of a gradient that `auto` leaves a gap for.
    """
    config = replace(CONFIG_2B if kind == "2b" else CONFIG_5B, num_layers=NUM_LAYERS, **KINDS[kind])
    with torch.device("meta"):
        transformer = assemble_transformer(config).to(torch.bfloat16).train()
    for name, p in transformer.named_parameters():
        p.requires_grad_(".matrix_" in name or kind != "lora" and "position_table" not in name)
    rules = {"stage": 1, "data_size": 1, "weight_bytes": 2, "is_fused": False, "bucket": 0}
    return Setup(
        args=AUTO,
        traces=Traces(transformer),
        rules=ZeroRules(**rules, sum_bytes=sum_bytes),
        size=LatentSize.of_model(config),
        batch_size=1,
        encoders=Encoders(shape=(0, 0, 0, 0)),
    )


def peak_of_step(setup: Setup) -> int:
    """Run a step on the meta device; return the most bytes of its tensors, beside what lasts."""
    transformer, size, meta = setup.transformer, setup.size, {"device": "meta"}
    config = transformer.config
    x0 = torch.empty(1, size.channels, size.frames, size.height, size.width, **meta)
    timesteps = torch.empty(1, dtype=torch.int64, **meta)
    text = torch.empty(
        1, config.text_length, config.text_hidden_size, dtype=transformer.dtype, **meta
    )
    ops = LiveBytes(512, scratch)
    ops.ignore([*transformer.parameters(), *transformer.buffers()])
    with ops:
        out = transformer(x0, timesteps, text)
        loss = (out.float() - x0).square().mean()
        del out
        loss.backward()
    transformer.zero_grad()
    return ops.peak


@pytest.mark.parametrize("kind", ["2b", pytest.param("lora", marks=pytest.mark.soak)])
def test_auto_keeps_the_most_that_fits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every possible choice is run, and the memory of its step counted."""
    setup, peaks = setup_of_steps(kind), []
    for policies in CANDIDATES:
        apply_checkpointing(setup.transformer, AUTO, OtherRanks.device, policies)
        peaks.append(peak_of_step(setup))
    assert peaks == sorted(peaks) and peaks[-1] > 2 * peaks[0]
    steps = [i for i, (one, more) in enumerate(pairwise(peaks)) if more > 1.005 * one]
    assert len(steps) >= 8
    held = 3 * GIB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held)
    groups: Any = OtherRanks()
    for i in steps[::3]:
        # The workspaces of the plan are not among the ops.
        free = (peaks[i] + peaks[i + 1]) // 2 + sum(setup.base_parts().values()) - held
        total = int((held + free) / (1 - MARGIN))
        memory = (total - held, total)
        monkeypatch.setattr(ladder, "free_memory", lambda device, memory=memory: memory)
        found = policies_that_fit(setup, groups)
        assert found == CANDIDATES[i], (i, steps)
        assert apply_checkpointing(setup.transformer, AUTO, groups.device, found) == found
        assert peak_of_step(setup) == peaks[i]
    everywhere: Any = OtherRanks(("full",) * NUM_LAYERS)
    assert policies_that_fit(setup, everywhere) == CANDIDATES[0]


def test_auto_leaves_memory_for_gaps_between_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of_steps("2b", sum_bytes=2)
    gap, last = 2 * num_trained(setup.transformer), CANDIDATES[-2]
    usable = training_phase(setup, last).total + gap
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    groups: Any = OtherRanks()
    for less, expected in ((0, CANDIDATES[-2]), (2**20, CANDIDATES[-3])):
        total = int((usable - less) / (1 - MARGIN)) + 2
        monkeypatch.setattr(ladder, "free_memory", lambda device, total=total: (total, total))
        assert policies_that_fit(setup, groups) == expected


def test_without_a_plan_auto_is_full(caplog: pytest.LogCaptureFixture) -> None:
    assert apply_checkpointing(tiny("5b"), AUTO, torch.device("cpu")) == ("full",) * 2
    assert "full in all 2 layers, because the memory of the run cannot be predicted" in caplog.text


def test_a_run_has_the_same_losses_under_each_policy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, chosen = {}, ("attention_kept", "pointwise")
    with_memory = lambda n: monkeypatch.setattr(ladder, "free_memory", lambda device: (n, n))
    for choice in (*LADDER, "auto"):
        one = run.with_args(activation_checkpointing=choice).into(tmp_path / choice)
        if choice == "auto":  # memory for one layer's worth of a rung
            config = one.config()
            setup = setup_of(config.run, 1)
            lasting = sum(setup.base_parts().values())
            needed = training_phase(setup, chosen).total - lasting + setup.gap_bytes
            memory = int(needed / (1 - MARGIN)) + 2
            with_memory(memory)
        done = one.train(steps=3)
        expected = chosen if choice == "auto" else (choice,) * 2
        assert done.last.parts.policies == expected
        found[choice] = done.losses
    assert len(found["none"]) == 3
    assert all(numbers == found["none"] for numbers in found.values())
