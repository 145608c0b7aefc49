"""Learning rates against SAT's scheduler and hand formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from cogfast.schema.arguments import TrainArguments
from cogfast.train.optimizer import build_learning_rate

CASES = [
    "finetune_linear_1000",
    "finetune_linear_50",
    "finetune_cosine_1000",
    "finetune_constant_300",
    "finetune_exponential_300",
    "pretrain_linear_300_from0",
    "finetune_linear_5000_warmup5pct",
]


# SAT warms up again after a resume. A run of cogfast resumes its schedule.
RESUMED = "pretrain_linear_1000_resume300"


def build(num_steps: int, **args: object) -> Callable[[int], float]:
    return build_learning_rate(TrainArguments(**args), num_steps)


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


@pytest.mark.parametrize("style", ["None", None, "constant", "Exponential"])
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_schedule": "cosin"}, r"args.lr_schedule='cosin' must be one of sat, constant"),
        ({"lr_decay_style": "square"}, r"args.lr_decay_style='square' must be one of linear"),
        ({"warmup": 10}, r"args.warmup=10 must be a share of the steps"),
        ({"warmup_steps": -1}, r"args.warmup_steps=-1 must be 0 or more"),
        (
            {"lr_schedule": "linear", "warmup_steps": 200},
            r"args.warmup_steps=200 must not exceed the run's 100 steps",
        ),
        ({"warmup_steps": 200}, r"args.warmup_steps=200 must not exceed the run's 100 steps"),
        (
            {"lr_schedule": "linear", "min_lr_ratio": 2},
            r"args.min_lr_ratio=2 must be a share of lr",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(100, lr=1.0, **options)
