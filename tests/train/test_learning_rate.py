"""Learning rates against SAT's scheduler and hand formulas."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from diffusers.optimization import get_scheduler

from cogfast.train.keys import TrainKeys
from cogfast.train.optimizer import build_learning_rate, warn_of_rate
from tests.support.runs import Run
from tests.support.tiny_run import ROOT

CASES = ["finetune_linear_1000", "finetune_linear_50", "finetune_cosine_1000"]
CASES += ["finetune_constant_300", "finetune_exponential_300", "pretrain_linear_300_from0"]
CASES += ["finetune_linear_5000_warmup5pct"]


# SAT warms up again after a resume. A run of cogfast resumes its schedule.
RESUMED = "pretrain_linear_1000_resume300"


def build(num_steps: int, **args: object) -> Callable[[int], float]:
    return build_learning_rate(TrainKeys(**args), num_steps)


@pytest.mark.parametrize("case", CASES)
def test_sat_schedule_equals_upstream(golden, case):
    stored = json.loads((golden / "lr_schedule" / "lr.json").read_text())
    assert set(stored) == {*CASES, RESUMED}
    args = stored[case]["args"]
    assert args.pop("iteration") == 0
    rate = build(args["train_iters"], **args)
    for i, expected in enumerate(stored[case]["lr_used_at_step"]):
        # Past its end SAT's linear decay turns negative, that is, uphill: ours stays at 0.
        assert rate(i) == pytest.approx(max(expected, 0.0), rel=1e-12, abs=1e-22), i


def test_sat_schedule_decays_over_lr_decay_iters():
    rate = build(5000, lr=1.0, lr_decay_iters=1000, warmup=0.0)
    assert rate(499) == pytest.approx(0.5)
    assert rate(4999) == 0.0


@pytest.mark.parametrize("style", ["constant", "exponential"])
def test_sat_styles_without_decay(style):
    rate = build(300, lr=2.0, lr_decay_style=style)
    assert rate(99) == 0.1 and rate(100) == 2.0 and rate(299) == 2.0


def test_sat_warm_up_in_steps():
    rate = build(1000, lr=1.0, warmup_steps=400, lr_decay_style="constant")
    assert rate(9) == pytest.approx(10 / 400)  # below 0.05
    assert rate(99) == pytest.approx(0.05)
    assert rate(199) == pytest.approx(0.5)
    assert rate(400) == 1.0


@pytest.mark.parametrize("warmup", [{"warmup": 0.1}, {"warmup_steps": 10}], ids=["share", "steps"])
def test_constant(warmup):
    rate = build(100, lr=3.0, lr_schedule="constant", **warmup)
    assert [rate(i) for i in (0, 4, 9, 10, 99)] == pytest.approx([0.3, 1.5, 3.0, 3.0, 3.0])


def test_cosine():
    rate = build(110, lr=2.0, lr_schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    # A quarter, half and three quarters down from 2.0 to 0.2 along a cosine.
    expected = [0.2, 2.0, 1.1 + 0.9 * math.sqrt(0.5), 1.1, 1.1 - 0.9 * math.sqrt(0.5), 0.2, 0.2]
    assert [rate(i) for i in (0, 10, 35, 60, 85, 110, 500)] == pytest.approx(expected)
    assert all(rate(i) > rate(i + 1) for i in range(10, 110))


def test_linear():
    rate = build(110, lr=2.0, lr_schedule="linear", warmup_steps=10, min_lr_ratio=0.5)
    assert [rate(i) for i in (9, 10, 60, 110, 500)] == pytest.approx([2.0, 2.0, 1.5, 1.0, 1.0])


def test_no_warm_up_starts_at_the_full_rate():
    for schedule in ("constant", "cosine", "linear"):
        rate = build(10, lr=2.0, lr_schedule=schedule, warmup_steps=0)
        assert rate(0) == 2.0


SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
CYCLES = [("cosine_with_restarts", {"num_cycles": cycles}) for cycles in (1, 2, 3, 0.5, 2.5)]
POWERS = [("polynomial", {"power": power}) for power in (1.0, 2.0, 0.5, 3)]
DIFFUSERS = [(name, {}) for name in SCHEDULES] + CYCLES + POWERS


def diffusers_rates(name: str, lr: float, warmup_steps: int, num_steps: int, **options) -> list:
    """Return the rate of each step as a training loop with torch's optimizer uses it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=num_steps, **options
    )
    rates = [optimizer.param_groups[0]["lr"]]
    # One step less: after the last, "polynomial" divides by zero where all steps warm up.
    for _ in range(num_steps - 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(("name", "options"), DIFFUSERS, ids=str)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 100, 200, 1000])
def test_rates_with_first_step_0_equal_diffusers(name, options, warmup_steps):
    for lr in (2e-5, 0.3):
        expected = diffusers_rates(name, lr, warmup_steps, 200, **options)
        ours = {f"lr_{key}": value for key, value in options.items()}
        ours |= {"lr_schedule": name, "lr_first_step": 0, "warmup_steps": warmup_steps}
        rate = build(200, lr=lr, **ours)
        assert [rate(step) for step in range(200)] == expected


@pytest.mark.parametrize(("name", "options"), DIFFUSERS, ids=str)
def test_first_step_changes_the_warm_up_alone(name, options):
    options = {f"lr_{key}": value for key, value in options.items()} | {"lr_schedule": name}
    first, zeroth = (
        build(100, lr=2.0, warmup_steps=10, lr_first_step=n, **options) for n in (1, 0)
    )
    assert [first(step) for step in range(10)] == pytest.approx([0.2 * n for n in range(1, 11)])
    if name != "constant":
        assert [zeroth(step) for step in range(10)] == pytest.approx([0.2 * n for n in range(10)])
    decay = range(10, 110)
    assert list(map(first, decay)) == pytest.approx(list(map(zeroth, decay)), rel=1e-12, abs=1e-15)


def test_min_lr_ratio_of_the_new_schedules():
    given = {"lr": 2.0, "min_lr_ratio": 0.1, "warmup_steps": 0}
    restarts = build(100, lr_schedule="cosine_with_restarts", lr_num_cycles=2, **given)
    halfway = 1.1
    expected = [2.0, halfway, 2.0, halfway, 0.2, 0.2]
    assert [restarts(i) for i in (0, 25, 50, 75, 100, 500)] == pytest.approx(expected)
    power = build(100, lr_schedule="polynomial", lr_power=2, **given)
    assert [power(i) for i in (0, 50, 100, 500)] == pytest.approx([2.0, 0.65, 0.2, 0.2])


def test_warm_up_that_exceeds_the_run_is_reported(caplog):
    args = TrainKeys(lr_schedule="cosine", lr_first_step=0, warmup_steps=100)
    warn_of_rate(args, 100, {})
    assert not caplog.text
    warn_of_rate(args, 4, {})
    assert "args.warmup_steps=100 exceeds the run's 4 steps" in caplog.text
    assert "set args.warmup_steps to 4 or less" in caplog.text


def test_the_trial_run_of_the_recipes_has_a_warm_up_that_ends(run: Run) -> None:
    """docs/recipes.md ends with a run of a few steps, with the files of configs/."""
    text = (ROOT / "docs" / "recipes.md").read_text().rstrip().removesuffix("```").splitlines()[-1]
    words = [word for word in text.partition("#")[0].split() if "=" in word]
    files = [ROOT / "configs/cogvideox_5b.yaml", ROOT / "configs/sft.yaml"]
    config = run.of_files(*files).config(*words)
    args = config.run.args
    assert args.train_iters == 20
    rate = build_learning_rate(args, args.train_iters)
    assert max(map(rate, range(20))) == pytest.approx(args.lr)
