"""ZeroEngine: accumulation, skipped steps, weight decay, and no host-device syncs."""

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

from cogfast.config.yaml_files import to_dict
from cogfast.core.slot_random import SlotRandom
from cogfast.data.batches import to_device
from cogfast.distributed.fused_step import order_by_blocks
from cogfast.distributed.process_groups import start_processes, use_expandable_segments
from cogfast.distributed.zero_engine import ZeroEngine, deepspeed_config
from cogfast.kernels.fused_ema_adam import FusedEmaAdam
from cogfast.train.assembly import assemble_batches
from cogfast.train.optimizer import parameter_groups
from cogfast.train.trainer import Trainer
from tests.distributed.test_fused_step import LateGather
from tests.support.refusals import assert_refused
from tests.support.runs import Run, run_of
from tests.support.tiny_run import launch_ranks
from tests.support.tiny_transformers import inputs, tiny

MICRO, ACCUMULATION = (
    f"deepspeed.{key}" for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
)
STAGE = "deepspeed.zero_optimization.stage"
# Each skips steps in its own way.
BAD_LOSSES = {
    "ZeRO-2": (f"{STAGE}=2",),
    "ZeRO-3": (f"{STAGE}=3",),
    "DeepSpeed's step": (f"{STAGE}=2", "deepspeed.optimizer.type=AdamW"),
    "bf16": (f"{STAGE}=1", "deepspeed.bf16={enabled: true}"),
}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_optimizers_state_is_allocated_before_the_first_step(run: Run, stage: int) -> None:
    """Activations cut a GPU's memory into pieces that are smaller than the state."""
    engine = run.trainer(f"{STAGE}={stage}").engine
    for part, weights in enumerate(engine.parts):
        state = engine.state(part)
        assert torch.equal(state["shadow"], weights) and state["shadow"] is not weights
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert not state[kind].any() and state[kind].numel() in (weights.numel(), 1)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_setting_of_the_allocator_stays(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, "environ", {name: ""})
    monkeypatch.setattr(ctypes, "CDLL", pytest.fail)  # the driver is not asked
    use_expandable_segments(0)
    assert os.environ == {name: ""}


@pytest.mark.parametrize("has_them", [True, False])
def test_expandable_segments_are_the_default_where_the_driver_has_them(
    monkeypatch: pytest.MonkeyPatch, has_them: bool
) -> None:
    def attribute(found: Any, number: int, handle: object) -> None:
        assert number == 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        found._obj.value = int(has_them)

    calls = {"cuInit": lambda _: 0, "cuDeviceGet": lambda *_: 0, "cuDeviceGetAttribute": attribute}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**calls))
    monkeypatch.setattr(os, "environ", {})
    use_expandable_segments(0)
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if has_them else {}
    assert os.environ == wanted


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ((f"{ACCUMULATION}=5",), "fp32"),
        ((f"{ACCUMULATION}=5", "deepspeed.data_types={grad_accum_dtype: null}"), "fp32"),
        ((f"{ACCUMULATION}=5", "deepspeed.data_types={grad_accum_dtype: bf16}"), "bf16"),
        ((f"{ACCUMULATION}=4",), None),
        ((f"{ACCUMULATION}=5", f"{STAGE}=3"), "fp32"),
        ((f"{ACCUMULATION}=5", "deepspeed.bf16.enabled=false"), None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_long_sums_of_bf16_gradients_are_in_float32(
    run: Run, arguments: tuple[str, ...], dtype: str | None, log
) -> None:
    config = run.config("deepspeed.bf16={enabled: true}", *arguments)
    section = deepspeed_config(to_dict(config.deepspeed), config.run.args)
    found = section.get("data_types") or {}
    assert found.get("grad_accum_dtype") == dtype
    assert ("accumulated in float32" in log.text) == (dtype == "fp32")


def test_long_sums_of_bf16_gradients_are_those_of_stage_2(run: Run, tmp_path: Path, caplog) -> None:
    """DeepSpeed's own optimizers of the stages 0 and 1 add 8 micro-batches up in bf16."""
    run = run.with_words("deepspeed.bf16={enabled: true}", f"{MICRO}=1", f"{ACCUMULATION}=8")
    found = {}
    for stage in range(4):
        done = run.into(tmp_path / str(stage)).train(f"{STAGE}={stage}", steps=1)
        found[stage] = (done.last.engine.grad_norm.item(), done.losses)
        is_logged = f"ZeRO stage {stage} runs as stage 2: the same update" in caplog.text
        assert is_logged == (stage < 2)
    assert found[0] == found[1] == found[2]
    assert found[3][0] == pytest.approx(found[2][0], rel=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_skipped_steps_count_updates_not_micro_batches(run: Run, stage: int) -> None:
    params = {"bad_sample": 0, "num_bad": 8}  # all
    dataset = {"target": "tests.train.test_trainer.EncodedSamples", "params": params}
    run = run.by(Trainer, "tests").with_args(dataset=dataset, train_iters=3)
    trainer = run.trainer(f"{STAGE}={stage}", f"{MICRO}=1", f"{ACCUMULATION}=4")
    line = "trained nothing: all 3 steps had non-finite gradients"
    assert_refused(trainer.train, line, RuntimeError)
    assert trainer.engine.num_skipped.item() == 3
    assert trainer.engine.num_skipped_in_a_row.item() == 3


class OneBadLoss(Trainer):
    """The loss of one micro-batch, the second of step 2, is not finite, and its gradient is."""

    bad, num_losses = float("inf"), 0

    def compute_loss(self, batch: dict) -> Tensor:
        # Not of the second pass after a bad step
        self.num_losses += self.engine.transformer.training
        loss = super().compute_loss(batch)
        is_bad = self.num_losses == 4 and self.engine.transformer.training
        return loss + self.bad if is_bad else loss


@pytest.mark.parametrize("words", BAD_LOSSES.values(), ids=BAD_LOSSES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_step_with_a_loss_that_is_not_finite_is_skipped(
    run: Run, words: tuple[str, ...], bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneBadLoss, "bad", bad)
    run = run.by(OneBadLoss, "tests").with_args(train_iters=3, log_interval=1)
    run = run.train(f"{MICRO}=1", f"{ACCUMULATION}=2", *words)
    assert [line["skipped"] for line in run.lines] == [0, 1, 1]
    assert [line["nonfinite_losses"] for line in run.lines] == [0, 1, 0]
    assert all(part.isfinite().all() for part in run.last.engine.parts)


def test_grad_norm_is_that_before_clipping(run: Run, tmp_path: Path) -> None:
    trainer = run.trainer("deepspeed.gradient_clipping=0.01")
    batches = assemble_batches(trainer.datasets.train, trainer.args, trainer.groups, tmp_path, 0)
    with batches:
        batch = to_device(next(batches), "cpu")
    transformer, rng = trainer.engine.transformer, SlotRandom(1234, 0, range(4), 4)
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    latents, conditioning = trainer.encoder(batch, rng)
    noised = trainer.add_noise(batch, latents, rng)
    given = noised.latents, noised.alpha_sqrt, conditioning, noised.timesteps
    estimate = trainer.diffusion.denoiser.denoise(transformer, *given)
    loss = trainer.loss.of(estimate, noised).mean()
    plain = torch.autograd.grad(loss, parameters)
    wanted = torch.stack([g.square().sum() for g in plain]).sum().sqrt()
    trainer.engine.backward(trainer.compute_loss(batch))
    trainer.engine.step(1e-3)
    torch.testing.assert_close(trainer.engine.grad_norm, wanted, rtol=1e-5, atol=0)


def test_gradients_are_not_clipped_if_no_key_says_so() -> None:
    config = run_of("cogvideox_2b.yaml").config()
    assert "gradient_clipping" not in config.deepspeed
    section = deepspeed_config(to_dict(config.deepspeed), config.run.args)
    # DeepSpeed has another default than SAT if the key is missing.
    assert section["gradient_clipping"] == 0


def test_weight_decay_of_args_counts_where_the_optimizer_has_none(run: Run) -> None:
    base = OmegaConf.load(run.with_args(weight_decay=0.25).base)
    del base.deepspeed.optimizer.params.weight_decay
    OmegaConf.save(base, run.folder / "without.yaml")
    run = run.of_files(run.folder / "without.yaml")
    for arguments, wanted in (([], 0.25), (["deepspeed.optimizer.params.weight_decay=0.5"], 0.5)):
        trainer = run.trainer(*arguments)
        decayed, undecayed = trainer.engine.optimizer.param_groups
        assert decayed["weight_decay"] == wanted
        assert undecayed["weight_decay"] == 0
    assert "weight_decay" not in parameter_groups(trainer.engine.transformer)[0]


class Waits:
    """Counts, per caller, the ops that would make the host wait for a GPU."""

    METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
    # A GPU run does not pass there, or the tensor lies on the CPU in any case.
    EXCLUDED = ("fused_ema_adam.py", "batches.py", "/torch/")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name in self.METHODS:
            monkeypatch.setattr(Tensor, name, self.counted(name, getattr(Tensor, name)))

    def counted(self, name: str, method):
        def call(tensor: Tensor, *args: object, **named: object) -> object:
            code = sys._getframe(1).f_code
            if not any(part in code.co_filename for part in self.EXCLUDED):
                self.seen.append(f"{name} in {Path(code.co_filename).name} {code.co_name}")
            return method(tensor, *args, **named)

        return call


@pytest.mark.parametrize("family", ["5b", "1.5_5b_i2v"])
def test_steps_between_logging_never_wait_for_the_device(
    run: Run, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Neither cogfast nor DeepSpeed reads a tensor's value in a step or waits for the device, except
    code for the CPU (readers, FusedEmaAdam's CPU branch); a log line reads once."""
    import deepspeed

    run = run.of(family).with_args(train_iters=6, log_interval=1000)
    words = ("deepspeed.bf16={enabled: true}", f"{MICRO}=2", f"{ACCUMULATION}=2")
    trainer = run.trainer(*words)
    _ = trainer.encoder.first_stage  # its file is read before the steps
    waits = Waits(monkeypatch)
    accelerator = deepspeed.accelerator.get_accelerator()
    monkeypatch.setattr(accelerator, "synchronize", lambda *_: waits.seen.append("synchronize"))
    trainer.train()
    first = "__float__ in video_size.py note"  # the frame rate of the first batch
    last = "__int__ in trainer.py _train"  # whether all steps were skipped
    assert (waits.seen.count(first), waits.seen.count(last)) == (1, 1)
    seen = [where for where in waits.seen if where not in (first, last)]
    lines = [where for where in seen if where == "tolist in metrics.py _log"]
    assert len(lines) == 1  # of step 6, the last
    saving = ("checkpoint", "in snapshot", "safetensors", "tensor_files", "tensorboard", "trackers")
    assert [w for w in seen if w not in lines and not any(s in w for s in saving)] == []


LAYERS, STEPS = 3, 3
SMALL, LARGE = 20_000, 10**9  # elements in a group: below those of a block, and all
EVENTS: list[str] = []


class NamedGather(LateGather):
    """A gather that notes its number in its step."""

    def __init__(self, *given: Any) -> None:
        self.number = sum(event.startswith("gather") for event in EVENTS)
        super().__init__(*given)
        EVENTS.append(f"gather {self.number}")

    def wait(self) -> None:
        EVENTS.append(f"wait {self.number}")
        super().wait()


def block_by_block(out: Path) -> None:
    """Save the events between a step and the next, and losses and weights, with small and with one group."""
    groups = start_processes()
    gather = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda whole, part, group=None, async_op=False: (
        NamedGather(whole, part, group) if async_op else gather(whole, part, group=group)
    )
    found = {}
    for bucket in (SMALL, LARGE):
        transformer = tiny("5b", num_layers=LAYERS)
        zero = {"stage": 2, "allgather_bucket_size": bucket}
        made = order_by_blocks(parameter_groups(transformer, 0.1), transformer, zero, 2)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.05,
            "steps_per_print": 2**31,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {**zero, "reduce_bucket_size": 30_000},
        }
        engine = ZeroEngine(transformer, FusedEmaAdam(made, lr=1e-2), config)
        note = lambda name: lambda *_: EVENTS.append(name)
        transformer.patch_embedding.register_forward_pre_hook(note("embed"))
        for number, block in enumerate(transformer.blocks):
            block.register_forward_pre_hook(note(f"block {number}"))
        losses = []
        for step in range(STEPS):
            loss = engine(**inputs("5b", seed=2 * step + groups.rank)).square().mean()
            found[bucket, "events"], losses = EVENTS.copy(), [*losses, loss.detach()]
            engine.backward(loss)
            EVENTS.clear()
            engine.step(1e-2)
        assert engine.grad_norm > 0.05
        with engine.weights("shadow"), torch.no_grad():
            losses.append(engine(**inputs("5b")).square().mean())
        engine.wait_for_weights()
        weights = [p.detach().clone() for p in transformer.parameters()]
        found[bucket, "numbers"] = losses + weights
    torch.save(found, out / f"{groups.rank}.pt")
    groups.close()


def test_a_block_waits_for_its_own_weights(tmp_path: Path) -> None:
    """Gathers start in the order of the blocks. Weights that come late are not read before, and groups of
    one block train as one group, bit for bit."""
    launch_ranks(2, "-m", "tests.distributed.test_zero_engine", str(tmp_path))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        # Weights outside of the blocks, biases and norms, and a group for each block
        starts = [f"gather {number}" for number in range(2 + LAYERS)]
        blocks = [event for i in range(LAYERS) for event in (f"wait {2 + i}", f"block {i}")]
        assert found[SMALL, "events"] == [*starts, "wait 0", "wait 1", "embed", *blocks]
        assert len(found[SMALL, "numbers"]) > STEPS + 1
        for one, other in zip(found[SMALL, "numbers"], found[LARGE, "numbers"], strict=True):
            assert torch.equal(one, other)


if __name__ == "__main__":
    block_by_block(Path(sys.argv[1]))
