"""Steps that are not finite are named with rank, samples, timestep and module, and skipped or the end."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cogfast.core.slot_random import SlotRandom
from cogfast.data.global_order import GlobalOrder
from cogfast.distributed.step_clock import StepClock
from cogfast.train.keys import TrainKeys
from cogfast.train.trainer import Trainer
from cogfast.train.watchers.nonfinite import NonfiniteCheck
from tests.support.ranks.nonfinite_ranks import Overflows
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, read_run_weights, run_program
from tests.train.test_trainer import ENCODED

NUM_SAMPLES, SEED, BATCH = 32, 1234, 4
NUMEL = 2 * CHANNELS * 3 * 4 * 4  # of a micro-batch of two samples
BAD_STEP, BAD_SLOT = 4, 2  # the first place that reads the bad sample; steps count from 1
PAIRS = "deepspeed.train_micro_batch_size_per_gpu=2"
BAD = GlobalOrder(NUM_SAMPLES, SEED, BATCH).index(BAD_STEP - 1, BAD_SLOT)


def one_bad(bad: int = BAD) -> dict:
    return {"target": ENCODED, "params": {"bad_sample": bad, "num_samples": NUM_SAMPLES}}


@pytest.fixture
def run(run: Run) -> Run:
    return run.by(Trainer, "tests")


@pytest.fixture
def deep(run: Run) -> Run:
    """A run of micro-batches of 2 that has 6 layers."""
    run = run.with_args(dataset=one_bad(), train_iters=6, gradient_accumulation_steps=2)
    return run.with_words("model.network_config.params.num_layers=6", PAIRS)


def timestep(trainer: Trainer) -> int:
    rng = SlotRandom(SEED, BAD_STEP - 1, [BAD_SLOT], BATCH)
    return trainer.diffusion.loss.sigma_sampler.sample(rng).item()


def place(trainer: Trainer) -> str:
    return (
        f"step {BAD_STEP}, rank 0: samples: sample {BAD} at timestep {timestep(trainer)}; not finite: "
        f"the network's input latents (1 of {NUMEL} values)"
    )


def test_a_bad_sample_stops_the_run_and_is_named(deep: Run) -> None:
    trainer = deep.trainer("args.nonfinite=stop")
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    assert str(error.value) == (
        f"args.nonfinite=stop: {place(trainer)}; the checkpoint of step {BAD_STEP} is saved"
    )
    weights = read_run_weights(trainer.folder / "checkpoints" / f"{BAD_STEP:08d}")
    assert all(value.isfinite().all() for value in weights.values())
    # The losses of the second run are no training losses.
    assert not trainer.parts.bands.sums.any()


@pytest.mark.parametrize("policy", ["pointwise", "full"])
def test_a_log_line_names_a_step_before_it_and_training_continues(
    deep: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """A second pass changes neither weights nor draws: the run equals one that logs each step."""
    deep = deep.with_args(activation_checkpointing=policy)
    trainer = deep.into(tmp_path / "a").trainer("args.log_interval=3")
    modules = list(trainer.engine.transformer.modules())
    before = [len(module._forward_hooks) for module in modules]
    trainer.train()
    assert [len(module._forward_hooks) for module in modules] == before
    (text,) = [r.getMessage() for r in caplog.records if "not finite: " in r.getMessage()]
    assert text == f"{place(trainer)} (run again with the weights after step 6)"
    wanted = deep.into(tmp_path / "b").train().last
    for part, other in zip(trainer.engine.parts, wanted.engine.parts, strict=True):
        assert torch.equal(part, other)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_the_first_module_is_named_and_a_damaged_weight_is_not_saved(
    deep: Run, is_damaged: bool
) -> None:
    """A weight of block 3 is infinite, or all are finite and the product overflows."""
    trainer = deep.trainer("data.params.bad_sample=-1", "args.nonfinite=stop", "args.train_iters=1")
    weight = trainer.engine.transformer.blocks[3].fc1.weight
    with torch.no_grad():
        weight.normal_().sign_().mul_(3e38)
        if is_damaged:
            weight[5, 7] = trainer.engine.parts[0][0] = math.inf
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    assert "not finite: the output of blocks.3.fc1 (" in str(error.value)
    saved = "its state is not saved: resume from an earlier checkpoint"
    if not is_damaged:
        saved = "the checkpoint of step 1 is saved"
    assert str(error.value).endswith(saved)
    assert (trainer.folder / "checkpoints" / "latest").is_file() != is_damaged


def test_a_gradient_alone_is_reported(deep: Run) -> None:
    trainer = deep.trainer("data.params.bad_sample=-1", "args.nonfinite=stop", "args.train_iters=1")
    block = trainer.engine.transformer.blocks[2]
    block.register_forward_hook(lambda _, __, out: Overflows.apply(out))
    line = "step 1: a loss or gradient is not finite, but all out"
    assert_refused(trainer.train, line, RuntimeError)


@pytest.mark.parametrize("is_spent", [False, True])
@pytest.mark.parametrize("has_bad_loss", [False, True])
def test_fp16_reports_bad_losses_and_a_spent_scale(has_bad_loss: bool, is_spent: bool) -> None:
    """Step 5 overflows, and step 7 has a loss that is not finite; the log line is that of step 9."""
    numbers = {"num_skipped_in_a_row": torch.zeros(()), "is_loss_scale_spent": is_spent}
    engine = SimpleNamespace(**numbers, clock=StepClock())
    groups = SimpleNamespace(device=torch.device("cpu"), gather=lambda value: [value])
    args = TrainKeys(fp16=True, nonfinite="stop")
    check = NonfiniteCheck(
        args, groups, Path(), engine, [], GlobalOrder(8, 0, 2), lambda *_: None, lambda: True
    )
    reported = []
    check._report = lambda bad, step: reported.append(bad) or [f"step {bad}"]
    for step in range(1, 10):
        engine.num_skipped_in_a_row.fill_(step in (5, 7))
        check.after_backward(torch.tensor(math.nan if has_bad_loss and step == 7 else 0.5))
        check.after_step(step)
    line = {"step": 9, "skipped": 2, "skipped_in_a_row": 0, "nonfinite_losses": int(has_bad_loss)}
    if has_bad_loss or is_spent:
        with pytest.raises(RuntimeError, match="args.nonfinite=stop"):
            check.after_log(line)
    else:
        check.after_log(line)
    assert reported == ([7] if has_bad_loss else [9] if is_spent else [])


@pytest.mark.slow
def test_one_of_two_ranks_is_named(run: Run) -> None:
    command = run.with_args(dataset=one_bad(), train_iters=BAD_STEP).command(PAIRS)
    done = run_program(["-m", "cogfast", *command], 2)
    assert done.returncode == 0, done.stdout
    # Rank 1 has slots 2 and 3.
    (line,) = [line for line in done.stdout.splitlines() if "not finite: " in line]
    assert f"step {BAD_STEP}, rank 1: samples: sample {BAD} at timestep " in line


@pytest.mark.parametrize("first", [1, 2, 11, 20, 21, 35])
def test_twenty_skipped_steps_in_a_row_are_noticed_wherever_they_begin(first: int) -> None:
    """With few looks at the device: at most one in 20 good steps."""
    looks, ended = [], []
    engine = SimpleNamespace(num_skipped_in_a_row=0)
    check = NonfiniteCheck(
        TrainKeys(), SimpleNamespace(device="cpu"), Path(), engine, None, None, None, None
    )
    check._react = lambda step, number: ended.append((step, number))
    counts = {step: max(0, step - first + 1) for step in range(60)}

    class Engine:
        @property
        def num_skipped_in_a_row(self) -> int:
            looks.append(step)
            return counts[step]

    check.engine = Engine()
    for step in range(60):
        check.before_step(step)
        if ended:
            break
    assert ended == [(first + 19, 20)]
    assert len([step for step in looks if step < first]) <= first / 20
    assert len(looks) <= 3 + first / 20
