"""args.activation_checkpointing=auto chooses by memory; a run gives the same losses under each policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.steps.step_models import CONFIG_2B, CONFIG_5B
from cogfast.config import load_config
from cogfast.core.live_bytes import LiveBytes
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer
from cogfast.plan import auto
from cogfast.plan.auto import ActivationCheckpointing
from cogfast.plan.encoders import Encoders
from cogfast.plan.memory import (
    MARGIN,
    Setup,
    base_parts,
    gap_bytes,
    training_phase,
)
from cogfast.plan.trace import Traces, scratch
from cogfast.plan.zero import ZeroRules
from cogfast.train.memory.activation_checkpointing import LADDER, Policy, apply_policies
from cogfast.train.trainer import Trainer
from cogfast.train.video_size import LatentSize
from tests.support.tiny_run import losses, run_folder, write_clips, write_config
from tests.support.tiny_transformers import inputs, tiny

GIB = 2**30


class Gpu:
    """Stands for a GPU, whose allocator holds `held` bytes and what ops on the meta device make, and for
    the other ranks, which chose `others`."""

    device = torch.device("cuda")

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, total: int, others: Sequence[tuple[Policy, ...]] = ()
    ) -> None:
        self.total, self.others, self.held = total, others, 0
        self.ops = LiveBytes(512, scratch)
        for name, value in (
            ("memory_allocated", lambda device: self.held + self.ops.live),
            ("memory_reserved", lambda device: self.held + self.ops.live),
            ("max_memory_allocated", lambda device: self.held + self.ops.peak),
            ("reset_peak_memory_stats", lambda device: setattr(self.ops, "peak", self.ops.live)),
            ("mem_get_info", lambda device: (total - self.held - self.ops.live, total)),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    def gather(self, value: tuple[Policy, ...]) -> list[tuple[Policy, ...]]:
        return [value, *self.others]


NUM_LAYERS = 5
BIG = {
    "5b": replace(CONFIG_5B, num_layers=NUM_LAYERS),
    "2b": replace(CONFIG_2B, num_layers=NUM_LAYERS),
    "lora": replace(CONFIG_5B, num_layers=NUM_LAYERS, lora_rank=128),
}
# From the policies that recompute most to those that recompute least
CANDIDATES: list[tuple[Policy, ...]] = [("full",) * NUM_LAYERS] + [
    (below,) * (NUM_LAYERS - number) + (above,) * number
    for below, above in pairwise(LADDER)
    for number in range(1, NUM_LAYERS + 1)
]


def big(kind: str) -> DiffusionTransformer:
    """Return a few layers of a real model, on the meta device."""
    with torch.device("meta"):
        transformer = assemble_transformer(BIG[kind]).to(torch.bfloat16).train()
    for name, p in transformer.named_parameters():
        p.requires_grad_(".matrix_" in name or kind != "lora" and "position_table" not in name)
    return transformer


def setup_of(transformer: DiffusionTransformer, batch_size: int) -> Setup:
    """Return the setup of steps without ZeRO, whose gradients stay where autograd put them."""
    return Setup(
        traces=Traces(transformer),
        rules=ZeroRules(
            stage=1, data_size=1, weight_bytes=2, sum_bytes=0, is_fused=False, bucket=0
        ),
        size=LatentSize.of_model(transformer.config),
        batch_size=batch_size,
        choice="auto",
        encoders=Encoders(shape=(0, 0, 0, 0)),
    )


def run_step(
    transformer: DiffusionTransformer,
    ops: LiveBytes,
    batch_size: int,
    num_unknown: int = 0,
    after_backward: Callable[[Tensor], None] = lambda loss: None,
) -> int:
    """Run a step on the meta device; return the peak of its ops. num_unknown: bytes that no plan has."""
    ops.ignore([*transformer.parameters(), *transformer.buffers()])
    size = LatentSize.of_model(transformer.config)
    config, meta = transformer.config, {"device": "meta"}
    x0 = torch.empty(batch_size, size.channels, size.frames, size.height, size.width, **meta)
    timesteps = torch.empty(batch_size, dtype=torch.int64, **meta)
    shape = (batch_size, config.text_length, config.text_hidden_size)
    text = torch.empty(shape, dtype=transformer.dtype, **meta)
    ops.peak = ops.live
    with ops:
        unknown = torch.empty(num_unknown, dtype=torch.uint8, device="meta")
        out = transformer(x0, timesteps, text)
        loss = (out.float() - x0).square().mean()
        del out
        loss.backward()
        after_backward(loss)
    peak = ops.peak
    del unknown, loss
    transformer.zero_grad()
    return peak


def peaks_of(kind: str, batch_size: int, num_unknown: int = 0) -> list[int]:
    """Return the peak of a step under each of CANDIDATES."""
    transformer, found = big(kind), []
    for policies in CANDIDATES:
        apply_policies(transformer, policies)
        found.append(run_step(transformer, LiveBytes(512, scratch), batch_size, num_unknown))
    return found


@pytest.mark.parametrize(
    ("kind", "num_unknown", "largest", "others"),
    [
        ("5b", 0, 1, []),
        ("2b", 0, 1, []),
        ("lora", 0, 1, []),
        ("lora", 2 * GIB, 1, []),
        ("2b", 0, 3, []),
        ("lora", 0, 1, [("full",) * NUM_LAYERS]),
    ],
    ids=["5b", "2b", "lora", "beside memory not in the plan", "buckets", "beside a full rank"],
)
def test_auto_chooses_the_most_that_fits(
    monkeypatch, kind: str, num_unknown: int, largest: int, others: list[tuple[Policy, ...]]
) -> None:
    """Every possible choice was run, and the memory counted. The plan has another optimizer."""
    peaks = peaks_of(kind, largest, num_unknown)
    assert peaks == sorted(peaks) and peaks[-1] > 2 * peaks[0]
    held, state = 3 * GIB, 5 * GIB
    steps = [i for i, (one, more) in enumerate(pairwise(peaks)) if more > 1.005 * one]
    assert len(steps) >= 8
    for i in steps[::3]:
        # Between two choices, though one layer's rung apart
        usable = held + state + (peaks[i] + peaks[i + 1]) // 2
        gpu, transformer = Gpu(monkeypatch, int(usable / (1 - MARGIN)), others), big(kind)
        gpu.held = held
        checkpointing = ActivationCheckpointing(
            transformer, "auto", gpu, setup_of(transformer, largest), has_buckets=largest > 1
        )
        for number in range(2):
            assert set(checkpointing.policies) == {"full"}
            # The first step is larger: nothing follows from it.
            run_step(
                transformer,
                gpu.ops,
                1,
                num_unknown + (1 - number) * GIB,
                checkpointing.after_backward,
            )
            gpu.held = held + state  # the optimizer's
            checkpointing.after_step(1)
        assert checkpointing.policies == (others[0] if others else CANDIDATES[i]), (i, steps)


def test_auto_counts_the_largest_of_a_steps_micro_batches(monkeypatch) -> None:
    """Two micro-batches, of which the first one has other memory, too."""
    transformer, extra = big("lora"), 4 * GIB
    peaks = peaks_of("lora", 1, extra)
    gpu = Gpu(monkeypatch, int((peaks[9] + peaks[10]) / 2 / (1 - MARGIN)))
    checkpointing = ActivationCheckpointing(transformer, "auto", gpu, setup_of(transformer, 1))
    for _ in range(2):
        for unknown in (extra, 0):
            run_step(transformer, gpu.ops, 1, unknown, checkpointing.after_backward)
        checkpointing.after_step(1)
    assert checkpointing.policies == CANDIDATES[9]


def test_auto_leaves_memory_for_gaps_between_gradients(monkeypatch) -> None:
    peaks, transformer = peaks_of("2b", 1), big("2b")
    gap = sum(2 * p.numel() for p in transformer.parameters() if p.requires_grad)
    setup = setup_of(transformer, 1)
    setup = replace(setup, rules=replace(setup.rules, sum_bytes=2))
    usable = (peaks[-3] + peaks[-2]) // 2 + gap
    assert peaks[-2] < usable  # it would fit without gaps
    gpu = Gpu(monkeypatch, int(usable / (1 - MARGIN)))
    checkpointing = ActivationCheckpointing(transformer, "auto", gpu, setup)
    for _ in range(2):
        run_step(transformer, gpu.ops, 1, after_backward=checkpointing.after_backward)
        checkpointing.after_step(1)
    assert checkpointing.policies == CANDIDATES[-3]


def test_without_a_plan_auto_stays_at_full(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("cogfast"), "propagate", True)
    transformer = tiny("5b").train()
    alone = ProcessGroups(0, 1, 0, torch.device("cpu"), control=None, is_owner=False)
    checkpointing = ActivationCheckpointing(transformer, "auto", alone, None)
    for _ in range(3):
        transformer(**inputs("5b")).float().square().mean().backward()
        checkpointing.after_backward(torch.zeros(()))
        checkpointing.after_step(1)
    assert checkpointing.policies == ("full",) * 2 and checkpointing.is_settled
    assert "full in all 2 layers, because the memory of the run cannot be predicted" in caplog.text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("data"))


def start(folder: Path, data: Path, choice: str) -> Trainer:
    base = write_config(folder / "base.yaml", data, train_iters=3, activation_checkpointing=choice)
    return Trainer(load_config([base], []))


TINY_RUN = (4, 20)  # samples; 8 text tokens and 3 x 2 x 2 video tokens


def with_memory_for(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, *policies: Policy) -> None:
    """Give the machine as much memory as a step of the tiny run takes."""
    setup = trainer.parts.checkpointing.setup
    assert setup is not None and setup.planned_shape == TINY_RUN
    # Weights and optimizer state are in memory already.
    base = sum(base_parts(setup).values())
    needed = training_phase(setup, policies).total - base + gap_bytes(setup)
    memory = int(needed / (1 - MARGIN)) + 2
    monkeypatch.setattr(auto, "free_memory", lambda device: (memory, memory))


def test_a_run_gives_the_same_losses_under_each_policy(
    tmp_path: Path, data: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(logging.getLogger("cogfast"), "propagate", True)
    caplog.set_level(logging.INFO, "cogfast")
    found = {}
    for choice in (*LADDER, "auto"):
        trainer = start(tmp_path / choice, data, choice)
        assert trainer.parts.checkpointing.policies == ("full" if choice == "auto" else choice,) * 2
        if choice == "auto":  # room for one layer's worth of a rung
            with_memory_for(monkeypatch, trainer, "attention_kept", "pointwise")
        trainer.train()
        found[choice] = losses(run_folder(tmp_path / choice / "runs"))
    assert len(found["none"]) == 3
    assert all(numbers == found["none"] for numbers in found.values())
    assert trainer.parts.checkpointing.largest == TINY_RUN
    assert trainer.parts.checkpointing.policies == ("attention_kept", "pointwise")
    # a set: pytest listens at a logger that did not propagate, too
    (line,) = {r.message for r in caplog.records if "activation checkpointing" in r.message}
    assert "attention_kept in layers 0-0, pointwise in layers 1-1; predicted peak 0.0 of" in line


def test_auto_keeps_all_where_memory_is_plenty(tmp_path: Path, data: Path) -> None:
    trainer = start(tmp_path, data, "auto")
    trainer.train()
    assert trainer.parts.checkpointing.policies == ("none", "none")
